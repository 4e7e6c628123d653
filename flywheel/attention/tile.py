"""The maths of one tile: pure functions of arrays, without refs, grids or memory spaces.

Shapes: F keys of one fragment on sublanes, C queries on lanes, D = head_dim, E = v_dim, S = 8 sublanes.  In this
orientation the scores are K Q^T and the output is V^T P^T: what belongs to a query (anchor, denominator, maximum) is a
row vector, so that no step of the softmax crosses lanes, and a head of 128 fills the matrix unit in one of the two
products instead of neither.  Scores are in log2 units; a query's denominator is kept as S partial sums, one per
sublane. The bound that these steps obey together is derived in docs/attention-contract.md of the source tree.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

from flywheel.attention.budget import BIAS, FP32_MAX, HALF_BF16_MAX, LANE_LIMIT, LANES, SUM_FLOOR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Array
    from jaxtyping import BFloat16, Bool, Float32, Int32

SUBLANES = 8
LN2 = math.log(2.0)
LOG2_E = math.log2(math.e)
_FP32_EXPONENT_BIAS = 127
_FP32_MANTISSA_BITS = 23

UNSET = -FP32_MAX
"""Anchor of a query that has seen no key yet, and score of a key that a query does not see."""


@dataclasses.dataclass(frozen=True)
class ScoreRule:
    """How a dot product becomes a score in log2 units.

    Attributes:
        scale: factor of the logits, nats.
        softcap: bound of the logits in nats, or None.
    """

    scale: float
    softcap: float | None = None

    @property
    def anchor(self) -> float | None:
        """An anchor for every row, bias included, where the cap is so low that there is one; None: rows choose theirs.

        The largest integer that is not positive and against which no score, the lowest included, has a weight below
        what an anchor of the row's own leaves (lemma `floor_is_reached`); a single weight of the highest still passes
        the check.  0 need not even be subtracted.
        """
        if self.softcap is None:
            return None
        largest = math.ceil(self.softcap * LOG2_E)
        anchor = min(BIAS + 1 - largest, 0)
        return float(anchor) if largest - anchor <= math.log2(LANE_LIMIT) else None

    def __call__(self, dot: Float32[Array, "F C"]) -> Float32[Array, "F C"]:
        """Scores.  The scale is applied to the FP32 sum: in BF16 it would put an error of 2**-9 |s| into each."""
        if self.softcap is None:
            return dot * jnp.float32(self.scale * LOG2_E)
        return jnp.tanh(dot * jnp.float32(self.scale / self.softcap)) * jnp.float32(self.softcap * LOG2_E)


def dot_products(k: BFloat16[Array, "F D"], q: BFloat16[Array, "C D"]) -> Float32[Array, "F C"]:
    """K Q^T: BF16 products are exact in FP32."""
    return lax.dot_general(k, q, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def weighted_values(v: BFloat16[Array, "F E"], p: BFloat16[Array, "F C"]) -> Float32[Array, "E C"]:
    """V^T P^T with exact products and FP32 sums."""
    return lax.dot_general(v, p, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def turned_values(vt: BFloat16[Array, "E F"], p: BFloat16[Array, "F C"]) -> Float32[Array, "E C"]:
    """The same product where V has been turned: worth while for several products with the same values."""
    return lax.dot_general(vt, p, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def hide(s: Float32[Array, "F C"], visible: Bool[Array, "F C"] | None) -> Float32[Array, "F C"]:
    """Scores with UNSET for keys that a query does not see."""
    return s if visible is None else jnp.where(visible, s, UNSET)


def choose_anchor(s: Float32[Array, "F C"], visible: Bool[Array, "F C"] | None) -> Float32[Array, "1 C"]:
    """The static anchor, bias included: the ceiling of the largest visible score, plus BIAS.

    A query without a visible key gets about UNSET, which nothing reads.
    """
    return jnp.ceil(jnp.max(hide(s, visible), axis=0, keepdims=True)) + BIAS


def adopt_anchor(
    anchor: Float32[Array, "S C"], s: Float32[Array, "F C"], visible: Bool[Array, "F C"] | None
) -> Float32[Array, "S C"]:
    """Anchors after these keys: queries that had none take one from the first keys that they see."""
    largest = jnp.max(hide(s, visible), axis=0, keepdims=True)
    # NaN is adopted too: it makes the query's sums NaN, which the check refuses.
    some = jnp.logical_not(largest <= UNSET)
    return jnp.where((anchor == UNSET) & some, jnp.ceil(largest) + BIAS, anchor)


def weights(
    s: Float32[Array, "F C"],
    anchor: Float32[Array, "S C"] | Float32[Array, "1 C"] | float,
    visible: Bool[Array, "F C"] | None,
) -> Float32[Array, "F C"]:
    """Weights against a fixed anchor, of each query or (a number) of all.

    They are masked after exp2: a hidden score may be NaN (it came from memory beyond the last key) and must not be
    multiplied away but replaced.
    """
    if isinstance(anchor, float | int):
        p = jnp.exp2(s - anchor if anchor else s)
    else:
        p = jnp.exp2(_by_tiles(s) - anchor[None]).reshape(s.shape)
    return p if visible is None else jnp.where(visible, p, 0.0)


def partial_sums(p: Float32[Array, "F C"]) -> Float32[Array, "S C"]:
    """What a fragment's weights add to each partial sum."""
    return jnp.sum(_by_tiles(p), axis=0)


def partial_maxima(s: Float32[Array, "F C"]) -> Float32[Array, "S C"]:
    """The largest score of each sublane."""
    return jnp.max(_by_tiles(s), axis=0)


def maxima_with_nan(maxima: Float32[Array, "S C"], s: Float32[Array, "F C"]) -> Float32[Array, "S C"]:
    """The larger of running maxima and those of each sublane; a NaN in either stays."""
    nan = partial_sums(jnp.where(s != s, 1.0, 0.0)) > 0.0  # noqa: PLR0124  true exactly for NaN
    larger = jnp.maximum(maxima, partial_maxima(s))
    return jnp.where(nan | (maxima != maxima), jnp.nan, larger)  # noqa: PLR0124


def largest_or_nan(x: Float32[Array, "*shape"], axis: int) -> Float32[Array, "*reduced"]:
    """The maximum along an axis, NaN if there is one: a maximum alone may lose it, on a TPU and in XLA."""
    nan = jnp.max(jnp.where(x != x, 1.0, 0.0), axis=axis, keepdims=True) > 0.0  # noqa: PLR0124  true exactly for NaN
    return jnp.where(nan, jnp.nan, jnp.max(x, axis=axis, keepdims=True))


def _by_tiles(x: Float32[Array, "F C"]) -> Float32[Array, "F/S S C"]:
    return x.reshape(x.shape[0] // SUBLANES, SUBLANES, x.shape[1])


def exceeds_limit(sums: Float32[Array, "S C"]) -> Float32[Array, "S C"]:
    """The check: 1 unless the partial sum is at most LANE_LIMIT; written so that NaN fails it."""
    return jnp.where(sums <= LANE_LIMIT, 0.0, 1.0)


def denominator_unsound(l: Float32[Array, "1 C"]) -> Float32[Array, "1 C"]:  # noqa: E741  the field's name
    """1 unless the denominator is one that the bound covers.

    Below the floor the anchor was no score of the row's own; above the limit, which a last block or a sink may pass,
    the division would not be a normal number.
    """
    return jnp.where((l >= SUM_FLOOR) & (l <= LANES * LANE_LIMIT), 0.0, 1.0)


def overflow_marks(o: Float32[Array, "E C"]) -> Float32[Array, "1 C"]:
    """0 for a query whose o is finite in every lane, 1 otherwise.

    The check of the sums bounds l only.  o overflows when a large |v| meets a large weight; once it is not finite it
    stays so, which is why looking at it once is enough.  o - o is 0 for a finite o and NaN else, and sums keep a NaN
    where maxima may lose it.
    """
    kept = jnp.sum(_by_tiles(o - o), axis=0)
    return jnp.where(jnp.sum(kept, axis=0, keepdims=True) == 0.0, 0.0, 1.0)


def denominator(sums: Float32[Array, "S C"]) -> Float32[Array, "1 C"]:
    """A query's denominator from its partial sums."""
    return jnp.sum(sums, axis=0, keepdims=True)


def sink_weight(sink: Float32[Array, ""], shift: Float32[Array, "1 C"], *, late_bias: bool) -> Float32[Array, "1 C"]:
    """What a sink (a logit in nats) adds to a denominator of weights exp2(s - shift)."""
    exponent = sink * LOG2_E - shift
    return jnp.exp2(exponent - BIAS if late_bias else exponent)


def normalise(
    o: Float32[Array, "E C"],
    l: Float32[Array, "1 C"],  # noqa: E741
) -> Float32[Array, "E C"]:
    """o / l, finite results limited to the largest BF16 (see HALF_BF16_MAX).

    A NaN may come out as the limit where the device's minimum and maximum lose it: `keep_nan`.
    """
    half = jnp.minimum(jnp.maximum(o * (0.5 / l), -HALF_BF16_MAX), HALF_BF16_MAX)
    return half + half


def keep_nan(out: Float32[Array, "E C"], o: Float32[Array, "E C"]) -> Float32[Array, "E C"]:
    """NaN where o is."""
    return jnp.where(o != o, jnp.nan, out)  # noqa: PLR0124  true exactly for NaN


def log_sum_exp(
    shift: Float32[Array, "1 C"],
    l: Float32[Array, "1 C"],  # noqa: E741
) -> Float32[Array, "1 C"]:
    """LSE in nats from the shift of the exponents (log2 units, bias included) and the denominator.

    A denominator of 0 in a row that sees keys means that all its scores are -inf: NaN.
    """
    return jnp.where(l > 0.0, shift * LN2 + jnp.log(l), jnp.nan)


def power_of_two(n: Float32[Array, "1 C"]) -> Float32[Array, "1 C"]:
    """2**n for integer-valued n <= 0, exactly, from the exponent field; 0 below the normal range."""
    field = jnp.maximum(n, -float(_FP32_EXPONENT_BIAS)).astype(jnp.int32) + _FP32_EXPONENT_BIAS
    return lax.bitcast_convert_type(field << _FP32_MANTISSA_BITS, jnp.float32)


def online_weights(
    s: Float32[Array, "F C"], shift: Float32[Array, "1 C"], visible: Bool[Array, "F C"] | None, *, late_bias: bool
) -> tuple[Float32[Array, "F C"], Float32[Array, "1 C"], Float32[Array, "1 C"]]:
    """One step of the rescaling softmax: weights, the new shift, and the factor of what was summed before."""
    new_shift, factor = moved_shift([(s, visible)], shift, late_bias=late_bias)
    exponent = hide(s, visible) - new_shift
    p = jnp.exp2(exponent - BIAS if late_bias else exponent)
    return p if visible is None else jnp.where(visible, p, 0.0), new_shift, factor


def moved_shift(
    pieces: Sequence[tuple[Float32[Array, "F C"], Bool[Array, "F C"] | None]],
    shift: Float32[Array, "1 C"],
    *,
    late_bias: bool,
) -> tuple[Float32[Array, "1 C"], Float32[Array, "1 C"]]:
    """The shift after some more keys, in several pieces each with its mask, and the factor of what was summed before.

    The shift is the running maximum, rounded up to an integer so that the factor is a power of two: rescaling is exact
    and the result obeys the same bound as one against a static anchor.  BIAS is part of the shift; with `late_bias` it
    is subtracted afterwards instead, at the price of an operation per score: added to a huge maximum it is rounded
    away, and with it the room for any finite value.
    """
    new_shift = shift
    if pieces:
        maxima = functools.reduce(jnp.maximum, [partial_maxima(hide(s, visible)) for s, visible in pieces])
        largest = jnp.ceil(jnp.max(maxima, axis=0, keepdims=True))
        new_shift = jnp.maximum(shift, largest if late_bias else largest + BIAS)
    return new_shift, power_of_two(shift - new_shift)


def finite_values(v: BFloat16[Array, "F E"], is_key: Bool[Array, "F E"] | None) -> BFloat16[Array, "F E"]:
    """V with zeros for what is not finite or no key: 0 * inf would be NaN in rows that never see it."""
    wide = v.astype(jnp.float32)
    keep = jnp.abs(wide) <= FP32_MAX
    return jnp.where(keep if is_key is None else keep & is_key, wide, 0.0).astype(jnp.bfloat16)


def nonfinite_marks(
    s: Float32[Array, "F C"], visible: Bool[Array, "F C"], v: BFloat16[Array, "F E"], is_key: Bool[Array, "F E"]
) -> Int32[Array, "E C"]:
    """Which results a non-finite value reaches: 1 for +inf, 2 for -inf, 3 for both (NaN counts as both).

    A value reaches every row that sees its key with a score above -inf, however small the weight: an exact weight is
    never zero.
    """
    seen = jnp.where(visible & (s > -jnp.inf), 1.0, 0.0).astype(jnp.bfloat16)
    wide = v.astype(jnp.float32)
    marks = []
    for bound in (wide < jnp.inf, wide > -jnp.inf):
        offending = jnp.where(is_key & jnp.logical_not(bound), 1.0, 0.0).astype(jnp.bfloat16)
        marks.append(weighted_values(offending, seen) > 0.0)
    return jnp.where(marks[0], 1, 0) + jnp.where(marks[1], 2, 0)


def restore_nonfinite(out: Float32[Array, "E C"], marks: Int32[Array, "E C"]) -> Float32[Array, "E C"]:
    """Put back the infinities and NaN of `nonfinite_marks`; a row that is NaN already (by its scores) stays NaN."""
    special = jnp.where(marks == 1, jnp.inf, jnp.where(marks == 2, -jnp.inf, jnp.nan))
    return jnp.where((marks == 0) | (out != out), out, special)  # noqa: PLR0124  true exactly for NaN

"""The maths of one tile: pure functions of arrays, without refs, grids or memory spaces.

Shapes: R rows of queries, F keys of one fragment, D = head_dim, L = 128 lanes.  Scores are in log2 units; a row's
denominator is kept as L partial sums, one per lane, because adding lanes costs a pass through the cross-lane unit.
The bound that these steps obey together is derived in docs/attention-contract.md of the source tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

from flywheel.attention.budget import BIAS, FP32_MAX, HALF_BF16_MAX, LANE_LIMIT, LANES, SUM_FLOOR

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import BFloat16, Bool, Float32, Int32

LN2 = 0.6931471805599453
_FP32_EXPONENT_BIAS = 127
_FP32_MANTISSA_BITS = 23


def scores(q: BFloat16[Array, "R D"], k: BFloat16[Array, "F D"], log2_scale: float) -> Float32[Array, "R F"]:
    """Scores in log2 units.

    BF16 products are exact in FP32.  The scale is applied to the FP32 sum: folding it into q in BF16 would put an error
    of 2**-9 |s| into every score.
    """
    dot = lax.dot_general(q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return dot * jnp.float32(log2_scale)


def choose_anchor(s: Float32[Array, "R F"], visible: Bool[Array, "R F"] | None) -> Float32[Array, "R 1"]:
    """The static anchor, bias included: the ceiling of the largest visible score, plus BIAS.

    A row without a visible key gets about -FP32_MAX, which nothing reads.
    """
    if visible is not None:
        s = jnp.where(visible, s, -FP32_MAX)
    return jnp.ceil(jnp.max(s, axis=1, keepdims=True)) + BIAS


def fast_step(
    s: Float32[Array, "R F"], anchor: Float32[Array, "R L"], visible: Bool[Array, "M F"] | None
) -> tuple[BFloat16[Array, "R F"], Float32[Array, "R L"]]:
    """Weights against a fixed anchor, and what they add to each lane's partial sum.

    `visible` concerns the first M rows; the others see every key.  P is masked after exp2: a masked score may be NaN
    (it came from memory beyond the last key) and must not be multiplied away but replaced.
    """
    weights: list[Array] = []
    lane_sums = None
    for start in range(0, s.shape[1], LANES):
        lanes = slice(start, start + LANES)
        p = jnp.exp2(s[:, lanes] - anchor)
        if visible is not None:
            masked = visible.shape[0]
            head = jnp.where(visible[:, lanes], p[:masked], 0.0)
            p = head if masked == s.shape[0] else jnp.concatenate([head, p[masked:]], axis=0)
        lane_sums = p if lane_sums is None else lane_sums + p
        weights.append(p.astype(jnp.bfloat16))
    assert lane_sums is not None  # noqa: S101  a fragment has at least one lane group (tiling.py)
    return jnp.concatenate(weights, axis=1), lane_sums


def weighted_values(p: BFloat16[Array, "R F"], v: BFloat16[Array, "F D"]) -> Float32[Array, "R D"]:
    """P V with exact products and FP32 sums."""
    return jnp.dot(p, v, preferred_element_type=jnp.float32)


def sums_exceed(lane_sums: Float32[Array, "R L"], counted: Bool[Array, "R L"] | None) -> Bool[Array, ""]:
    """The check: True unless every counted partial sum is at most LANE_LIMIT.

    Written as `not (l <= limit)`, so that NaN fails it; the maximum is taken over the outcomes, since a maximum over
    the sums themselves may lose a NaN.
    """
    bad = jnp.where(lane_sums <= LANE_LIMIT, 0.0, 1.0)
    if counted is not None:
        bad = jnp.where(counted, bad, 0.0)
    return jnp.max(bad) > 0.0


def denominator(lane_sums: Float32[Array, "R L"]) -> Float32[Array, "R 1"]:
    """A row's denominator from its partial sums."""
    return jnp.sum(lane_sums, axis=1, keepdims=True)


def result_unsound(
    l: Float32[Array, "R 1"],  # noqa: E741  the field's name of the denominator
    o: Float32[Array, "R D"],
    counted: Bool[Array, "R 1"] | None,
) -> Bool[Array, ""]:
    """The final check of a query block: True unless every counted row has l above the floor and a finite o.

    The check of the sums bounds l only.  o overflows when a large |v| meets a large weight; once it is not finite it
    stays so, which is why looking at it once is enough.  l below the floor: the anchor was no score of this row.
    """
    low = jnp.where(l >= SUM_FLOOR, 0.0, 1.0)
    overflowed = jnp.where(jnp.abs(o) <= FP32_MAX, 0.0, 1.0)
    if counted is not None:
        low = jnp.where(counted, low, 0.0)
        overflowed = overflowed * jnp.where(counted, 1.0, 0.0)
    # One maximum over the block each: a maximum per row would cost a pass through the cross-lane unit.
    return jnp.maximum(jnp.max(low), jnp.max(overflowed)) > 0.0


def normalise(
    o: Float32[Array, "R D"],
    l: Float32[Array, "R 1"],  # noqa: E741
) -> Float32[Array, "R D"]:
    """o / l, finite results limited to the largest BF16 (see HALF_BF16_MAX); NaN stays NaN."""
    half = o * (0.5 / l)
    half = jnp.where(half > HALF_BF16_MAX, HALF_BF16_MAX, half)
    half = jnp.where(half < -HALF_BF16_MAX, -HALF_BF16_MAX, half)
    return half + half


def log_sum_exp(
    anchor: Float32[Array, "R 1"],
    l: Float32[Array, "R 1"],  # noqa: E741
) -> Float32[Array, "R 1"]:
    """The row's LSE in nats from its anchor (log2 units, bias included) and denominator.

    A denominator of 0 in a row that sees keys means that all its scores are -inf: NaN.
    """
    return jnp.where(l > 0.0, anchor * LN2 + jnp.log(l), jnp.nan)


def power_of_two(n: Float32[Array, "R 1"]) -> Float32[Array, "R 1"]:
    """2**n for integer-valued n <= 0, exactly, from the exponent field; 0 below the normal range."""
    field = jnp.maximum(n, -float(_FP32_EXPONENT_BIAS)).astype(jnp.int32) + _FP32_EXPONENT_BIAS
    return lax.bitcast_convert_type(field << _FP32_MANTISSA_BITS, jnp.float32)


def replay_weights(
    s: Float32[Array, "R F"], visible: Bool[Array, "R F"], running_max: Float32[Array, "R 1"]
) -> tuple[Float32[Array, "R F"], Float32[Array, "R 1"], Float32[Array, "R 1"]]:
    """One step of the rescaling softmax: weights, the new running maximum, and the factor of what was summed before.

    The running maximum is an integer (the ceiling of a score), so that the factor is a power of two: rescaling is exact
    and a replayed row obeys the same bound as a fast one.  BIAS is subtracted last: added to a huge maximum it would be
    rounded away, and with it the room for any finite value.
    """
    s = jnp.where(visible, s, -FP32_MAX)
    new_max = jnp.maximum(running_max, jnp.ceil(jnp.max(s, axis=1, keepdims=True)))
    factor = power_of_two(running_max - new_max)
    p = jnp.where(visible, jnp.exp2((s - new_max) - BIAS), 0.0)
    return p, new_max, factor


def add_lanes(p: Float32[Array, "R F"]) -> Float32[Array, "R L"]:
    """What a fragment's weights add to each lane's partial sum."""
    groups = [p[:, start : start + LANES] for start in range(0, p.shape[1], LANES)]
    total = groups[0]
    for group in groups[1:]:
        total = total + group
    return total


def finite_values(v: BFloat16[Array, "F D"], is_key: Bool[Array, "F D"]) -> BFloat16[Array, "F D"]:
    """V with zeros for what is not finite or no key: 0 * inf would be NaN in rows that never see it."""
    wide = v.astype(jnp.float32)
    return jnp.where(is_key & (jnp.abs(wide) <= FP32_MAX), wide, 0.0).astype(jnp.bfloat16)


def nonfinite_marks(
    s: Float32[Array, "R F"], visible: Bool[Array, "R F"], v: BFloat16[Array, "F D"], is_key: Bool[Array, "F D"]
) -> Int32[Array, "R D"]:
    """Which results a non-finite value reaches: 1 for +inf, 2 for -inf, 3 for both (NaN counts as both).

    A value reaches every row that sees its key with a score above -inf, however small the weight: an exact weight is
    never zero.
    """
    seen = jnp.where(visible & (s > -jnp.inf), 1.0, 0.0).astype(jnp.bfloat16)
    wide = v.astype(jnp.float32)
    marks = []
    for bound in (wide < jnp.inf, wide > -jnp.inf):
        offending = jnp.where(is_key & jnp.logical_not(bound), 1.0, 0.0).astype(jnp.bfloat16)
        marks.append(weighted_values(seen, offending) > 0.0)
    return jnp.where(marks[0], 1, 0) + jnp.where(marks[1], 2, 0)


def restore_nonfinite(out: Float32[Array, "R D"], marks: Int32[Array, "R D"]) -> Float32[Array, "R D"]:
    """Put back the infinities and NaN of `nonfinite_marks`; a row that is NaN already (by its scores) stays NaN."""
    special = jnp.where(marks == 1, jnp.inf, jnp.where(marks == 2, -jnp.inf, jnp.nan))
    return jnp.where((marks == 0) | (out != out), out, special)  # noqa: PLR0124  true exactly for NaN

"""Rotary position embedding of q: tables from positions, and the rotation of a block in FP32."""

from __future__ import annotations

import dataclasses
import decimal
import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import BFloat16, Float32, Int32

Layout = Literal["half", "interleaved"]
LAYOUTS = ("half", "interleaved")
MAX_POSITION = 2**30
"""Largest position; concrete ones beyond it, or below 0, are refused (`check_positions`)."""

_WORD = 32
_HALF_WORD = 16
_DIGITS = 50
_TWO_PI = decimal.Decimal("6.2831853071795864769252867665590057683943387987502")


class RotaryTables(NamedTuple):
    """Cosines and sines of each token's phases.

    Attributes:
        cos: of pair i = 0 .. head_dim / 2 - 1; a table without a batch axis serves the whole batch.
        sin: likewise.
    """

    cos: Float32[Array, "*batch q_len head_dim/2"]
    sin: Float32[Array, "*batch q_len head_dim/2"]


@dataclasses.dataclass(frozen=True, eq=False)
class Rotary:
    """Rotary embedding of the queries inside the kernel (the keys come rotated).

    Give `positions` and `base`, or `tables`.  Pair i of a token at position p turns by p * base**(-2 i / head_dim)
    radians (Su et al., *RoFormer*, arXiv:2104.09864).

    Attributes:
        positions: INT32 `[q_len]` or `[batch, q_len]`, each in 0 .. 2**30; traced ones cannot be checked, and a
            negative one counts as what it is modulo 2**32.
        base: of the frequencies ("theta" in model configurations), at least 1.
        tables: cosines and sines instead of positions.
        layout: pair i is lanes (i, i + head_dim / 2) in "half" (Llama), (2 i, 2 i + 1) in "interleaved" (GPT-J).
    """

    positions: Int32[Array, "*batch q_len"] | None = None
    base: float | None = None
    tables: RotaryTables | None = None
    layout: Layout = "half"


def check_positions(positions: Any) -> None:  # noqa: ANN401  what a caller gave
    """Refuse concrete positions that are out of range.

    Raises:
        ValueError: names the first of them and the rule.
    """
    if isinstance(positions, Tracer | jax.ShapeDtypeStruct):
        return
    values = np.asarray(positions)
    wrong = values[(values < 0) | (values > MAX_POSITION)]
    if wrong.size:
        message = f"rotary.positions must be in 0 .. {MAX_POSITION}, got {wrong[0]}"
        raise ValueError(message)


def rotary_tables(positions: Int32[Array, "*batch q_len"], head_dim: int, base: float) -> RotaryTables:
    """Cosines and sines of position * base**(-2 i / head_dim), for i = 0 .. head_dim / 2 - 1.

    The phase is formed in turns, modulo one, in integers: positions are exact, and a frequency is a fraction of 2**64,
    so that the phase errs by at most 2**-30 turns at any position.  In FP32 the phase would be off by a position times
    2**-24 radians: 0.06 at position 2**20.

    Raises:
        ValueError: head_dim is odd, base is below 1, or a concrete position is out of range.
    """
    check_positions(positions)
    if head_dim % 2 or head_dim <= 0:
        message = f"head_dim must be positive and even, got {head_dim}"
        raise ValueError(message)
    if not (math.isfinite(base) and base >= 1):
        message = f"base must be a finite number of at least 1, got {base}"
        raise ValueError(message)
    high, low = _frequencies(head_dim, base)
    position = positions.astype(jnp.uint32)[..., None]
    # Modulo 2**32 the product with the high word is the phase modulo one turn; the low word adds its carry.
    turns = position * jnp.asarray(high) + _high_product(position, jnp.asarray(low))
    signed = lax.bitcast_convert_type(turns, jnp.int32).astype(jnp.float32)
    phase = signed * jnp.float32(2.0 * math.pi / 2.0**_WORD)
    return RotaryTables(jnp.cos(phase), jnp.sin(phase))


def _frequencies(head_dim: int, base: float) -> tuple[np.ndarray, np.ndarray]:
    """Turns per token as fractions of 2**64, rounded, in two words."""
    with decimal.localcontext(prec=_DIGITS):
        exact = decimal.Decimal(base)
        turns = [exact ** (decimal.Decimal(-2 * i) / head_dim) / _TWO_PI for i in range(head_dim // 2)]
        words = np.asarray([int((turn * 2 ** (2 * _WORD)).to_integral_value()) for turn in turns], np.uint64)
    return (words >> _WORD).astype(np.uint32), (words & (2**_WORD - 1)).astype(np.uint32)


def _high_product(a: Array, b: Array) -> Array:
    """The upper 32 bits of a * b, at most 3 too small: what the parts below 2**32 carry is left out."""
    a1, a0 = a >> _HALF_WORD, a & (2**_HALF_WORD - 1)
    b1, b0 = b >> _HALF_WORD, b & (2**_HALF_WORD - 1)
    return a1 * b1 + (a1 * b0 >> _HALF_WORD) + (a0 * b1 >> _HALF_WORD)


def expand_tables(tables: RotaryTables, layout: Layout) -> tuple[Array, Array]:
    """Tables as `rotate` reads them: one entry per lane, the sine's sign folded in, a batch axis in front."""
    cos, sin = (x if x.ndim == 3 else x[None] for x in tables)
    if layout == "half":
        return jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)
    shape = (*cos.shape[:-1], 2 * cos.shape[-1])
    return jnp.stack([cos, cos], axis=-1).reshape(shape), jnp.stack([-sin, sin], axis=-1).reshape(shape)


def rotate(
    q: BFloat16[Array, "R D"], cos: Float32[Array, "R D"], sin: Float32[Array, "R D"], layout: str
) -> BFloat16[Array, "R D"]:
    """A block of queries, rotated in FP32 and rounded to BF16 once."""
    wide = q.astype(jnp.float32)
    return (wide * cos + _partners(wide, layout) * sin).astype(q.dtype)


def _partners(x: Array, layout: str) -> Array:
    """The other lane of each pair."""
    width = x.shape[1]
    if layout == "half":
        return _rolled(x, width // 2)
    even = lax.broadcasted_iota(jnp.int32, x.shape, 1) % 2 == 0
    return jnp.where(even, _rolled(x, width - 1), _rolled(x, 1))


def _rolled(x: Array, by: int) -> Any:  # noqa: ANN401
    """Lane d takes what lane d - by held."""
    return jnp.concatenate([x[:, -by:], x[:, :-by]], axis=1)

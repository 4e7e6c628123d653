"""(I + L)^-1 of 64 x 64 strictly lower triangular L in eight matrix products, bottom-up 4 -> 16 -> 64.

At each level T = D + E, D the block diagonal of the level below and E what the level adds; N = E D^-1 has N^4 = 0, so

    level 4:   P = L4 L4                  D^-1 = (I - L4) + (I - L4) P                            2 products
    merge:     N = E D^-1                 [Y; Q] = [D^-1; N] N       A = D^-1 - Y
               T^-1 = A + A Q             twice                                                   3 products each

(Flywheel Attention, section 3.2; the sum of each last product is FP32.)  Bottom-up every intermediate is bounded like
the inverse, where the powers of the whole chunk's L reach 10^17.  The diagonal is exactly 1 and the upper triangle
exactly 0: each product is strictly lower triangular, a sum of exact zeros elsewhere.

Two matrices lie side by side on lanes where it pays: `[64, 128]`, with the weights of each product block-diagonal.  A
non-finite entry of one then spoils the other too, so that callers bring finite pairs or single matrices.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flywheel.gdn.products import dot, halves, lockstep, parts, stack

if TYPE_CHECKING:
    from collections.abc import Generator

    from jax import Array
    from jaxtyping import Bool, Float32, Int32, Shaped

    from flywheel.gdn.products import Parts, Precision

CHUNK = 64
"""Tokens of a chunk, and the order of the matrices."""

LEVELS = (4, 16, CHUNK)
"""Sizes of the diagonal blocks, bottom-up."""

SUBLANES = 8
"""Rows of a register tile of FP32."""

ONE, SIGN = 0x3F80, 0x8000
"""Bits of 1 and of a minus sign in BF16."""

PER_STEP = 8
"""Matrices that one grid step inverts in lockstep: what fills the latency of a product."""

PRODUCTS = 8
"""Matrix products per matrix."""


def places(width: int) -> tuple[Int32[Array, "64 width"], Int32[Array, "64 width"]]:
    """Row and column of each entry of `width // 64` matrices side by side."""
    row = lax.broadcasted_iota(jnp.int32, (CHUNK, width), 0)
    column = lax.broadcasted_iota(jnp.int32, (CHUNK, width), 1)
    return row, column & (CHUNK - 1)


def _level(row: Array, column: Array, size: int) -> Bool[Array, "64 width"]:
    """What a level adds to the one below: the strict lower triangle of its blocks, off the smaller blocks."""
    here = (row > column) & (row // size == column // size)
    return here if size == 4 else here & (row // (size // 4) != column // (size // 4))


def block_diagonal(x: Shaped[Array, "64 width"]) -> Shaped[Array, "width width"]:
    """Matrices side by side as one: weights by which each is multiplied from the right, or rows of both."""
    if x.shape[1] == CHUNK:
        return x
    first = lax.broadcasted_iota(jnp.int32, x.shape, 1) < CHUNK
    zero = jnp.zeros_like(x)
    return jnp.concatenate([jnp.where(first, x, zero), jnp.where(first, zero, x)], axis=0)


class Cut(NamedTuple):
    """L cut into what each level adds: three matrices whose sum is the strict lower triangle.

    Attributes:
        base: within the smallest blocks, FP32.
        small: the same as an operand.
        added: what the levels 16 and 64 add, as operands.
    """

    base: Float32[Array, "64 width"]
    small: Parts
    added: tuple[Parts, ...]


def cut(lower: Float32[Array, "64 width"], precision: Precision) -> Cut:
    """Entries on and above the diagonals are not read.

    One number is cut by a choice in FP32; pairs are split once, and cut as words.
    """
    row, column = places(lower.shape[1])
    zero = jnp.zeros_like(lower)
    base, *rest = (jnp.where(_level(row, column, size), lower, zero) for size in LEVELS)
    if precision == "bf16":
        return Cut(base, parts(base, precision), tuple(parts(part, precision) for part in rest))
    words = [pltpu.bitcast(part, jnp.int32) for part in parts(lower, precision)]
    even, odd, place = _pairs(lower.shape[1])
    small, *added = (
        tuple(pltpu.bitcast(word & mask, jnp.bfloat16) for word in words)
        for mask in (
            _bits(*(jnp.where(_level(row, place, size), jnp.int32(0xFFFF), 0) for row in (even, odd)))
            for size in LEVELS
        )
    )
    return Cut(base, small, tuple(added))


def _pairs(width: int) -> tuple[Int32[Array, "32 width"], ...]:
    """Even row, odd row and column of each word of BF16 rows in pairs."""
    row = 2 * lax.broadcasted_iota(jnp.int32, (CHUNK // 2, width), 0)
    column = lax.broadcasted_iota(jnp.int32, (CHUNK // 2, width), 1)
    return row, row + 1, column & (CHUNK - 1)


def _bits(low: Int32[Array, "32 width"], high: Int32[Array, "32 width"]) -> Int32[Array, "32 width"]:
    """Words of BF16 rows in pairs, from the 16 bits of each row of a pair."""
    return low | lax.shift_left(high, jnp.int32(16))


def _one_minus(small: Parts) -> Parts:
    """Parts of I - L from those of a strictly lower triangular L: signs turned, ones for diagonal zeros."""
    even, odd, column = _pairs(small[0].shape[1])
    flips = (
        _bits(*(jnp.where(row == column, jnp.int32(one), jnp.int32(SIGN)) for row in (even, odd))) for one in (ONE, 0)
    )
    words = (pltpu.bitcast(part, jnp.int32) ^ flip for part, flip in zip(small, flips, strict=True))
    return tuple(pltpu.bitcast(word, jnp.bfloat16) for word in words)


def _from_block(size: int, block: int) -> list[int]:
    """Register tiles, of 8 rows, that reach the block rows `block` .. 3 of a level."""
    return [t for t in range(CHUNK // SUBLANES) if (SUBLANES * (t + 1) - 1) % size >= block * size // 4]


def _tile(x: Array, n: int, size: int = SUBLANES) -> Array:
    return x[size * n : size * (n + 1)]


def _chosen(x: Array, held: list[int], wanted: list[int], size: int = SUBLANES) -> Array:
    """Of rows in tiles `held` those in tiles `wanted`; zeros where there are none."""
    if held == wanted:
        return x
    zero = jnp.zeros((size, x.shape[1]), x.dtype)
    return jnp.concatenate([_tile(x, held.index(t), size) if t in held else zero for t in wanted], axis=0)


class _Packed:
    """Rows of a matrix, given in some register tiles, as parts in other tiles: split once."""

    def __init__(self, x: Array, held: list[int], precision: Precision) -> None:
        self.held, self.packed, self.halves = held, parts(x, precision), halves(x, precision)

    def rows(self, wanted: list[int]) -> Parts:
        """Zeros where no row is held.  Tiles of BF16 have twice the rows: halves of them are packed anew."""
        if all(_in_pairs(tiles) for tiles in (self.held, wanted)):
            return tuple(_chosen(part, self.held[::2], wanted[::2], 2 * SUBLANES) for part in self.packed)
        return tuple(_chosen(half, self.held, wanted).astype(jnp.bfloat16) for half in self.halves)


def _in_pairs(tiles: list[int]) -> bool:
    return all(t % 2 == n % 2 for n, t in enumerate(tiles)) and [t + 1 for t in tiles[::2]] == tiles[1::2]


def inverse_chain(lower: Cut, precision: Precision) -> Generator[None, None, Float32[Array, "64 width"]]:
    """The inverse of one (width 64) or two (width 128) matrices I + L.

    Yields after each of the eight products, so that `lockstep` can emit others in between.  N has no rows in the first
    of a level's four blocks and N^2 none in the first two: register tiles of zeros are neither multiplied nor added.
    """
    row, column = places(lower.base.shape[1])
    start = (row == column).astype(jnp.float32) - lower.base
    whole = list(range(CHUNK // SUBLANES))

    def product(left: Parts, right: Parts) -> Array:
        return dot(left, tuple(block_diagonal(part) for part in right))

    power = product(lower.small, lower.small)
    yield
    of_start = parts(start, precision) if precision == "bf16" else _one_minus(lower.small)
    x = start + product(of_start, parts(power, precision))
    yield
    for size, part in zip(LEVELS[1:], lower.added, strict=True):
        of_n, of_square = _from_block(size, 1), _from_block(size, 2)
        entering = _Packed(x, whole, precision)
        n = product(tuple(each[SUBLANES * of_n[0] :] for each in part), entering.rows(whole))
        yield
        nilpotent = _Packed(n, of_n, precision)
        left = stack(entering.rows(of_n), nilpotent.rows(of_square), axis=0)
        stacked = product(left, nilpotent.rows(whole))
        yield
        count = SUBLANES * len(of_n)
        a = _chosen(x, whole, of_n) - stacked[:count]
        square = _Packed(stacked[count:], of_square, precision).rows(whole)
        kept = _chosen(a, of_n, of_square)
        last = kept + product(parts(kept, precision), square)
        yield
        x = _merged([(x, whole), (a, of_n), (last, of_square)])
    return x


def _merged(rows: list[tuple[Array, list[int]]]) -> Array:
    """A matrix from rows in register tiles, the later before the earlier."""
    found = {t: _tile(x, held.index(t)) for x, held in rows for t in held}
    return jnp.concatenate([found[t] for t in sorted(found)], axis=0)


def chain_of(
    lower: Float32[Array, "64 width"], precision: Precision
) -> Generator[None, None, Float32[Array, "64 width"]]:
    """`inverse_chain` of matrices that are not cut yet; entries on and above the diagonals are not read."""
    return inverse_chain(cut(lower, precision), precision)


def _kernel(precision: Precision, lower: Any, out: Any) -> None:  # noqa: ANN401  refs
    chains = [chain_of(lower[n], precision) for n in range(lower.shape[0])]
    for n, found in enumerate(lockstep(chains)):
        out[n] = found


@functools.partial(jax.jit, static_argnums=(1, 2))
def invert_batch(
    lower: Float32[Array, "n 64 64"],
    precision: Precision,
    interpret: Any,  # noqa: ANN401  bool or InterpretParams
) -> Float32[Array, "n 64 64"]:
    """The inverses of a batch, a few in lockstep at each grid step."""
    count = lower.shape[0]
    per_step = min(PER_STEP, count)
    padded = jnp.pad(lower, ((0, -count % per_step), (0, 0), (0, 0)))
    block = pl.BlockSpec((per_step, CHUNK, CHUNK), lambda n: (n, 0, 0))
    found = pl.pallas_call(
        functools.partial(_kernel, precision),
        grid=(padded.shape[0] // per_step,),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(padded.shape, jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="flywheel_triangular_inverse",
    )(padded)
    return found[:count]

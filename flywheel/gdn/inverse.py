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
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flywheel.gdn.products import dot, lockstep, parts, stack

if TYPE_CHECKING:
    from collections.abc import Generator

    from jax import Array
    from jaxtyping import Bool, Float32, Int32, Shaped

    from flywheel.gdn.products import Parts, Precision

CHUNK = 64
"""Tokens of a chunk, and the order of the matrices."""

LEVELS = (4, 16, CHUNK)
"""Sizes of the diagonal blocks, bottom-up."""

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


def level_parts(lower: Float32[Array, "64 width"]) -> tuple[Float32[Array, "64 width"], ...]:
    """L cut into what each level adds, 4, 16 and 64: three arrays whose sum is the strict lower triangle."""
    row, column = places(lower.shape[1])
    zero = jnp.zeros_like(lower)
    return tuple(jnp.where(_level(row, column, size), lower, zero) for size in LEVELS)


def inverse_chain(
    base: Float32[Array, "64 width"], added: tuple[Parts, ...], precision: Precision
) -> Generator[None, None, Float32[Array, "64 width"]]:
    """The inverse of one (width 64) or two (width 128) matrices I + L.

    Yields after each of the eight products, so that `lockstep` can emit others in between.

    Args:
        base: L within the smallest blocks (`level_parts`).
        added: what each further level adds.
        precision: of the products.
    """
    row, column = places(base.shape[1])
    identity = (row == column).astype(jnp.float32)

    def product(left: Parts, right: Parts) -> Array:
        return dot(left, tuple(block_diagonal(part) for part in right))

    blocks = parts(base, precision)
    power = product(blocks, blocks)
    yield
    start = identity - base
    x = start + product(parts(start, precision), parts(power, precision))
    yield
    for part in added:
        whole = parts(x, precision)
        nilpotent = parts(product(part, whole), precision)
        yield
        stacked = product(stack(whole, nilpotent, axis=0), nilpotent)
        yield
        left = x - stacked[:CHUNK]
        x = left + product(parts(left, precision), parts(stacked[CHUNK:], precision))
        yield
    return x


def chain_of(
    lower: Float32[Array, "64 width"], precision: Precision
) -> Generator[None, None, Float32[Array, "64 width"]]:
    """`inverse_chain` of matrices that are not cut yet; entries on and above the diagonals are not read."""
    base, *added = level_parts(lower)
    return inverse_chain(base, tuple(parts(part, precision) for part in added), precision)


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

"""Matrix products of FP32 numbers on a matrix unit that takes BF16: rounded, or as hi/lo pairs.

`bf16` rounds each operand once.  `bf16x3` takes x = hi + lo, both BF16, and all partial products in one:

    [C_hi C_lo] = [A_hi A_lo] [B_hi B_lo; B_hi B_lo]        A B = C_hi + C_lo

Heads of 128 fill a matrix unit of 256 x 256 with it, in two thirds of the time of [A_hi A_lo A_hi] [B_hi; B_hi; B_lo],
which leaves lo x lo out.  Products of BF16 numbers are exact in FP32, sums are FP32.  Making hi and lo is work of the
vector unit: a matrix is split once and kept as `Parts`, also in memory, until products take it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence  # noqa: TC003  a NamedTuple's annotations
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import BFloat16, Float, Float32

Precision = Literal["bf16", "bf16x3"]

PARTS: dict[Precision, int] = {"bf16": 1, "bf16x3": 2}
"""BF16 numbers that stand for one number."""

type Parts = tuple[Array, ...]
"""A matrix as BF16 matrices of its shape: (rounded,) or (hi, lo)."""


def split(x: Float32[Array, "*shape"]) -> tuple[BFloat16[Array, "*shape"], BFloat16[Array, "*shape"]]:
    """(hi, lo) with hi = bf16(x) and lo = bf16(x - hi): x to 16 bits at least."""
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def halves(x: Float32[Array, "*shape"], precision: Precision) -> tuple[Float32[Array, "*shape"], ...]:
    """FP32 numbers whose roundings to BF16 are `parts`: for a choice of rows before they are packed."""
    if precision == "bf16":
        return (x,)
    high = x.astype(jnp.bfloat16).astype(jnp.float32)
    return high, x - high


def parts(x: Float[Array, "*shape"], precision: Precision) -> Parts:
    """The BF16 numbers that stand for x in products: rounded, or hi and lo."""
    return (x.astype(jnp.bfloat16),) if precision == "bf16" else split(x)


def beside(x: Parts) -> BFloat16[Array, "m n_parts_k"]:
    """Parts side by side on lanes, as they stream through the matrix unit."""
    return jnp.concatenate(x, axis=1)


def keep(ref: Any, x: Parts) -> None:  # noqa: ANN401
    """Store parts in a ref of BF16, or of 32-bit words that hold two rows each, a part per first index.

    Parts made by operations on such words fill whole register tiles; BF16 memory would take them in halves.
    """
    for n, part in enumerate(x):
        ref[n] = part if ref.dtype == part.dtype else pltpu.bitcast(part, ref.dtype)


def kept(ref: Any) -> Parts:  # noqa: ANN401
    """What `keep` stored."""
    found = (ref[n] for n in range(ref.shape[0]))
    return tuple(x if x.dtype == jnp.bfloat16 else pltpu.bitcast(x, jnp.bfloat16) for x in found)


def stack(x: Parts, y: Parts, axis: int) -> Parts:
    """Two matrices joined, part by part."""
    return tuple(jnp.concatenate(both, axis=axis) for both in zip(x, y, strict=True))


def multiply(left: BFloat16[Array, "m k"], right: BFloat16[Array, "k n"]) -> Float32[Array, "m n"]:
    """One product of operands that are BF16 already."""
    return lax.dot_general(left, right, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


FEW = 48
"""Rows up to which a left is stacked on rows: on v6e a push of 16 rows of weights takes as long as a product of 8 rows,
so that few rows wait for weights."""


def dot(left: Parts, right: Parts) -> Float32[Array, "m n"]:
    """The product of matrices as their parts stand for them.

    Of a split left with few rows [A_hi; A_lo] [B_hi B_lo] is taken: half the weights, twice the rows, no lo x lo.
    """
    if len(left) == 1:
        return multiply(left[0], right[0])
    rows, pushed = left[0].shape[0], beside(right)
    if rows <= FEW:
        high, low = jnp.split(multiply(jnp.concatenate(left, axis=0), pushed), 2, axis=1)
        return high[:rows] + (low[:rows] + high[rows:])
    found = multiply(beside(left), jnp.concatenate([pushed, pushed], axis=0))
    of_high, of_low = jnp.split(found, 2, axis=1)
    return of_high + of_low


def dot_short(left: BFloat16[Array, "m 128"], right: Parts) -> Float32[Array, "m n"]:
    """The product over 64 terms of split matrices, `left` as [hi lo] or [lo hi] on 128 lanes."""
    pushed = beside(right)
    of_high, of_low = jnp.split(multiply(left, jnp.concatenate([pushed, pushed], axis=0)), 2, axis=1)
    return of_high + of_low


def dot_shared(left: BFloat16[Array, "m 128"], rights: Sequence[Parts]) -> list[Float32[Array, "m 128"]]:
    """`dot_short` with several rights.

    Two of them fill a matrix unit, [A_hi A_lo A_hi A_lo] [B_hi C_hi; B_hi C_hi; B_lo C_lo; B_lo C_lo]: nothing is left
    to be added.
    """
    found, wide = [], jnp.concatenate([left, left], axis=1)
    for n in range(0, len(rights) - 1, 2):
        high, low = (jnp.concatenate(both, axis=1) for both in zip(*rights[n : n + 2], strict=True))
        found += jnp.split(multiply(wide, jnp.concatenate([high, high, low, low], axis=0)), 2, axis=1)
    return found if len(rights) % 2 == 0 else [*found, dot_short(left, rights[-1])]


class Track(NamedTuple):
    """Chains that are advanced together, and over which rounds.

    Attributes:
        chains: generators; one advance of the track advances each by one piece.
        pieces: how many advances there are to spread.
        first, last: rounds over which they are spread evenly.
    """

    chains: Sequence[Generator[None, None, Any]]
    pieces: int
    first: int
    last: int

    def share(self, at: int) -> int:
        """Advances in a round."""
        if not self.first <= at <= self.last:
            return 0
        rounds, done = self.last - self.first + 1, at - self.first
        return -(-self.pieces * (done + 1) // rounds) - -(-self.pieces * done // rounds)


def interleave(tracks: Sequence[Track]) -> None:
    """Emit the pieces of several tracks round by round, in the order of the tracks, and all that is left at the end."""
    rounds = 1 + max(track.last for track in tracks)
    for at in range(rounds):
        for track in tracks:
            for _ in range(track.share(at)):
                for chain in track.chains:
                    next(chain, None)
    for track in tracks:
        lockstep(track.chains)


def lockstep(chains: Sequence[Generator[None, None, Any]]) -> list[Any]:
    """Emit independent chains in turn, a product of each at a time, and return their results.

    A product's result comes some 190 cycles after it is issued on v6e, and the compiler keeps the order in which
    products are emitted: chains in lockstep fill each other's waits, one after another they do not.
    """
    results: list[Any] = [None] * len(chains)
    live = list(range(len(chains)))
    while live:
        still = []
        for index in live:
            try:
                next(chains[index])
                still.append(index)
            except StopIteration as end:
                results[index] = end.value
        live = still
    return results

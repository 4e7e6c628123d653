"""Matrix products of FP32 numbers on a matrix unit that takes BF16: rounded, or as hi/lo pairs.

`bf16` rounds each operand once.  `bf16x3` takes x = hi + lo, both BF16, and leaves lo x lo out:

    A B = [A_hi A_lo A_hi] [B_hi; B_hi; B_lo]

one contraction of three times the length.  Products of BF16 numbers are exact in FP32, sums are FP32.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence  # noqa: TC003  a NamedTuple's annotations
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import BFloat16, Float, Float32

Precision = Literal["bf16", "bf16x3"]


def split(x: Float32[Array, "*shape"]) -> tuple[BFloat16[Array, "*shape"], BFloat16[Array, "*shape"]]:
    """(hi, lo) with hi = bf16(x) and lo = bf16(x - hi): x to 16 bits at least."""
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def left_operand(x: Float[Array, "m k"], precision: Precision) -> BFloat16[Array, "m kk"]:
    """What streams through the matrix unit: x, or [hi lo hi]."""
    if precision == "bf16":
        return x.astype(jnp.bfloat16)
    high, low = split(x)
    return jnp.concatenate([high, low, high], axis=1)


def right_operand(x: Float[Array, "k n"], precision: Precision) -> BFloat16[Array, "kk n"]:
    """What is pushed into the matrix unit: x, or [hi; hi; lo]."""
    if precision == "bf16":
        return x.astype(jnp.bfloat16)
    high, low = split(x)
    return jnp.concatenate([high, high, low], axis=0)


def multiply(left: BFloat16[Array, "m k"], right: BFloat16[Array, "k n"]) -> Float32[Array, "m n"]:
    """One product of operands that are BF16 already."""
    return lax.dot_general(left, right, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def dot(left: Float32[Array, "m k"], right: Float32[Array, "k n"], precision: Precision) -> Float32[Array, "m n"]:
    """The product of FP32 matrices in a precision."""
    return multiply(left_operand(left, precision), right_operand(right, precision))


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

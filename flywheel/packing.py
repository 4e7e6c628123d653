"""Packed sequences on the 8-row grid: which rows a block of a sequence moves, and which of them are its own.

Sequences of any lengths lie one after another along the tokens, and copies between HBM and VMEM start and end on groups
of GROUP rows.  A block's window is therefore its own rows, extended to whole groups.  At its top up to 7 rows belong to
earlier sequences (several, if they are short) or to the block before; they are *carried*: before the window is written
they are taken from the group that the block before it wrote last, which is the same group.  What follows its last own
row in the last group belongs to the next block, which carries this block's rows in turn.  So blocks that are written
one after another, each once the one before has arrived, leave every row with its final value:

    tail = zeros                                                   (one group of rows)
    for each block:
        window[:carried] = tail[:carried]
        write window[: GROUP * groups] to the rows from GROUP * group on
        tail = window[GROUP * (groups - 1) : GROUP * groups]

Windows end with the group of their last own row, so that they never reach beyond an array whose token axis is a
multiple of GROUP (`padded_tokens`).  Their sizes are traced; `pieces` moves any number of groups in copies of static
sizes.

Everything here is a map of int32 on `cu_seqlens`, which is traced: one compiled kernel serves all lengths.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Int32

GROUP = 8
"""Rows that a copy moves at least: XLA stores BF16 and FP32 arrays in tiles of 8 rows."""

MAX_TOKENS = 2**30
"""Longest token axis: sums of two positions stay below 2**31."""


class Blocks(NamedTuple):
    """The blocks of all sequences, in the order of their rows; entries from `total` on are all zeros.

    Attributes:
        total: blocks in use.
        group: the window's first row, divided by GROUP.
        groups: groups in the window, at least 1.
        carried: rows of the window before the block's first own row, 0 .. 7.
        stop: one past the block's last own row, counted from the window's first row.
        sequence: whose rows these are; `sequences` for tokens outside of all sequences (`Packing.padding`).
        number: of the block in its sequence.
        is_first: whether it is the first block of its sequence.
        is_last: whether it is the last.
    """

    total: Int32[Array, ""]
    group: Int32[Array, " blocks"]
    groups: Int32[Array, " blocks"]
    carried: Int32[Array, " blocks"]
    stop: Int32[Array, " blocks"]
    sequence: Int32[Array, " blocks"]
    number: Int32[Array, " blocks"]
    is_first: Bool[Array, " blocks"]
    is_last: Bool[Array, " blocks"]


@dataclasses.dataclass(frozen=True)
class Packing:
    """How a packed token axis is cut into blocks; all that is static about it.

    Attributes:
        tokens: length of the token axis, sequences and padding.
        sequences: how many sequences, some perhaps empty.
        block: rows from one window's start to the next one's in a sequence, a multiple of GROUP.
        own_origin: whether a sequence's blocks count from its own first token, so that block b holds its tokens
            b * block .. (b + 1) * block - 1 wherever it lies; else they count from that token's group, and only
            the first block may begin inside a group.
        padding: whether tokens outside of all sequences form blocks too (of sequence number `sequences`): whoever
            writes them gives every row of the array a value.
    """

    tokens: int
    sequences: int
    block: int
    own_origin: bool = False
    padding: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.tokens <= MAX_TOKENS:
            message = f"tokens must be within 0 .. 2**30, got {self.tokens}"
            raise ValueError(message)
        if self.sequences < 0:
            message = f"sequences must not be negative, got {self.sequences}"
            raise ValueError(message)
        if self.block <= 0 or self.block % GROUP:
            message = f"block must be a positive multiple of {GROUP}, got {self.block}"
            raise ValueError(message)

    @property
    def window(self) -> int:
        """Most rows of a window."""
        return self.block + GROUP if self.own_origin else self.block

    @property
    def max_blocks(self) -> int:
        """Most blocks that any lengths make.

        A block after the first of its sequence begins at least `block` rows after such a block before it, all of them
        within the tokens; and every stretch, the two of padding included, has one first block.
        """
        stretches = self.sequences + 2 * self.padding
        return max(-(-self.tokens // self.block) - 1, 0) + stretches if self.tokens else 0

    def blocks(self, cu_seqlens: Int32[Array, " sequences_plus_1"]) -> Blocks:
        """Every block, for lengths as `clean` makes them."""
        bounds = clean(cu_seqlens, self.tokens)
        begins, ends = bounds[:-1], bounds[1:]
        names = jnp.asarray(np.arange(self.sequences, dtype=np.int32))
        if self.padding:
            zero, all_tokens, outside = (jnp.full((1,), n, jnp.int32) for n in (0, self.tokens, self.sequences))
            begins = jnp.concatenate([zero, begins, bounds[-1:]])
            ends = jnp.concatenate([bounds[:1], ends, all_tokens])
            names = jnp.concatenate([outside, names, outside])
        return self._blocks(begins, ends, names)

    def _blocks(self, begins: Array, ends: Array, names: Array) -> Blocks:
        size = self.max_blocks
        if not size or not len(names):
            none, never = jnp.zeros((size,), jnp.int32), jnp.zeros((size,), jnp.bool_)
            return Blocks(jnp.int32(0), none, none, none, none, none, none, never, never)
        origins = begins if self.own_origin else snap(begins)
        counts = jnp.where(ends > begins, _cdiv(ends - origins, self.block), 0)
        totals = jnp.cumsum(counts, dtype=jnp.int32)
        place = jnp.asarray(np.arange(size, dtype=np.int32))
        at = jnp.minimum(jnp.searchsorted(totals, place, side="right", method="compare_all"), len(names) - 1)
        index = place - (totals - counts)[at]
        begin, end = begins[at], ends[at]
        window = snap(begin) + index * self.block
        first = origins[at] + index * self.block
        stop = jnp.minimum(first + self.block, end)
        first = jnp.maximum(first, begin)
        used = place < totals[-1]
        return Blocks(
            total=totals[-1],
            group=_where(used, lax.div(window, jnp.int32(GROUP))),
            groups=_where(used, _cdiv(stop - window, GROUP)),
            carried=_where(used, first - window),
            stop=_where(used, stop - window),
            sequence=_where(used, names[at]),
            number=_where(used, index),
            is_first=used & (index == 0),
            is_last=used & (index == counts[at] - 1),
        )


def clean(cu_seqlens: Int32[Array, " sequences_plus_1"], tokens: int) -> Int32[Array, " sequences_plus_1"]:
    """Cumulative lengths that never fall and stay within 0 .. tokens, whatever comes in.

    Valid ones stay as they are.  A bound outside of the tokens moves to the nearest one, and one below an earlier bound
    to the largest of these: a sequence of negative length is empty, and of sequences that overlap the earlier keeps the
    rows.  Rows before the first bound belong to no sequence.
    """
    return lax.cummax(jnp.clip(cu_seqlens.astype(jnp.int32), 0, tokens))


def snap(row: Any) -> Any:  # noqa: ANN401  int32, maybe traced
    """The first row of a row's group."""
    return row & -GROUP


def padded_tokens(tokens: int) -> int:
    """The token axis that windows need: the next multiple of GROUP.  A caller whose axis is one spares a copy."""
    return -(-tokens // GROUP) * GROUP


class Piece(NamedTuple):
    """Some groups of a window, moved by one copy of static size.

    Attributes:
        present: whether this window has the piece.
        start: its first group, counted from the window's first.
        groups: its size.
    """

    present: Any
    start: Any
    groups: int


def pieces(groups: Any, most: int) -> tuple[Piece, ...]:  # noqa: ANN401  int32, maybe traced
    """A window of `groups` <= `most` groups as copies of static sizes, powers of two in falling order.

    Those present cover the window once; a window of a power of two is a single copy.
    """
    sizes = [1 << bit for bit in reversed(range(most.bit_length()))]
    return tuple(Piece((groups & size) != 0, groups & -(2 * size), size) for size in sizes)


def _cdiv(a: Array, b: int) -> Array:
    """ceil(a / b) of int32 a >= 0.  The lowering of `//` asks for the device; this does not."""
    return lax.div(a + jnp.int32(b - 1), jnp.int32(b))


def _where(used: Array, x: Array) -> Array:
    return jnp.where(used, x, 0).astype(jnp.int32)

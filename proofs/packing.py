"""The 8-row grid of packed sequences: what the blocks of `flywheel.packing` write."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import jax
import numpy as np

from flywheel.packing import GROUP, Blocks, Packing, padded_tokens, pieces
from proofs.lemma import Assumption, Method, lemma, require

if TYPE_CHECKING:
    from collections.abc import Iterator

_OFFSETS = range(GROUP)
_LENGTHS = (range(2 * GROUP + 2), range(2 * GROUP + 2), (0, 1, GROUP + 1))
_TOKENS = _OFFSETS[-1] + sum(max(lengths) for lengths in _LENGTHS)
_BLOCKS = (GROUP, 2 * GROUP)
_MOST_GROUPS = 4096
_UNWRITTEN, _NOT_OWN = -1, -2


@lemma(
    statement="blocks written one after another leave every packed row with its own value from the moment that its "
    "block is written, and touch no group of rows in which no block has a row",
    rests_on=(),
    methods=(Method.EXHAUSTIVE,),
    assumptions=(
        Assumption(
            "a block is written after the one before it has arrived",
            "verify/tests/kernels/ragged/test_ragged.py::test_without_races_in_poisoned_memory",
        ),
    ),
)
def packed_rows_written_once() -> str:
    """On the index maps that the kernels run, for every start offset and three neighbouring sequences.

    All offsets of the first sequence in its group, all pairs of lengths up to two groups and two rows, and a third
    sequence from a few lengths around one group; empty ones, and several in one group, are among them.  For each, the
    copies of `flywheel.packing` are carried out on row numbers: a row of the window that is neither the block's own nor
    carried is marked as wrong, so that it must be overwritten before it counts.  After *every* block, all rows of the
    blocks so far must hold their own numbers, and what is written must lie within the padded token axis.  Every row of
    a sequence belongs to exactly one block, and with `padding` every row of the array does.

    A window moves as copies of static sizes (`pieces`): for each number of groups up to 4096 those present cover it
    exactly once.
    """
    starts = np.array(list(_cumulative()), np.int32)
    written = 0
    for block, own_origin, padding in itertools.product(_BLOCKS, (False, True), (False, True)):
        packing = Packing(_TOKENS, starts.shape[1] - 1, block, own_origin=own_origin, padding=padding)
        blocks = jax.tree.map(np.asarray, jax.jit(jax.vmap(packing.blocks))(starts))
        written += _written(packing, blocks, starts)
    _pieces_cover()
    return (
        f"{8 * len(starts)} packings with {written} rows; pieces of windows of up to {_MOST_GROUPS} groups; "
        f"groups of {GROUP} rows"
    )


def _cumulative() -> Iterator[tuple[int, ...]]:
    for offset, *lengths in itertools.product(_OFFSETS, *_LENGTHS):
        yield tuple(itertools.accumulate((offset, *lengths)))


def _written(packing: Packing, blocks: Blocks, starts: np.ndarray) -> int:
    """Carry out the copies of all packings at once, block by block; how many rows ended with their value."""
    cases = np.arange(len(starts))[:, None]
    rows = np.full((len(starts), padded_tokens(packing.tokens)), _UNWRITTEN)
    tail = np.full((len(starts), GROUP), _NOT_OWN)
    owned = np.zeros(rows.shape, np.int8)
    place, in_group = np.arange(packing.window)[None], np.arange(GROUP)[None]
    for n in range(packing.max_blocks):
        group, groups, carried, stop = (
            getattr(blocks, name)[:, n, None] for name in ("group", "groups", "carried", "stop")
        )
        used = n < blocks.total[:, None]
        at = group * GROUP + place
        moved = used & (place < groups * GROUP)
        own = moved & (place >= carried) & (place < stop)
        require(bool((at[moved] < rows.shape[1]).all()), f"{packing}: block {n} writes beyond the array")
        require(bool((used <= own.any(axis=1, keepdims=True)).all()), f"{packing}: block {n} has no row of its own")
        content = np.where(own, at, _NOT_OWN)
        content[:, :GROUP] = np.where(in_group < carried, tail, content[:, :GROUP])
        kept = np.where(moved, at, 0)
        rows[np.broadcast_to(cases, kept.shape)[moved], kept[moved]] = content[moved]
        owned[np.broadcast_to(cases, kept.shape)[own], kept[own]] += 1
        last = np.where(used, (groups - 1) * GROUP, 0) + in_group
        tail = np.where(used, np.take_along_axis(content, last, axis=1), tail)
        right = rows == np.arange(rows.shape[1])
        require(bool(right[owned > 0].all()), f"{packing}: after block {n} a row does not hold its value")
    token = np.arange(rows.shape[1])[None]
    of_sequence = (token >= starts[:, :1]) & (token < starts[:, -1:])
    expected = np.broadcast_to(token < packing.tokens, rows.shape) if packing.padding else of_sequence
    require(bool((owned == expected).all()), f"{packing}: a row belongs to no block, or to two")
    beside = expected.reshape(len(rows), -1, GROUP).any(axis=2).repeat(GROUP, axis=1)
    require(bool((rows[~beside] == _UNWRITTEN).all()), f"{packing}: a group without a row of any block was written")
    return int(owned.sum())


def _pieces_cover() -> None:
    for groups in range(_MOST_GROUPS + 1):
        end = 0
        for piece in pieces(groups, _MOST_GROUPS):
            if piece.present:
                require(piece.start == end, f"pieces of {groups} groups leave a gap or overlap at group {end}")
                end += piece.groups
        require(end == groups, f"pieces of {groups} groups cover {end}")

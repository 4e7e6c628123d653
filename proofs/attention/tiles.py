"""Tile-skipping: what the dense kernel's schedule leaves out."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import z3

from flywheel.attention import schedule as schedule_module
from flywheel.attention.schedule import LANE_GRID, ROW_GRID, Band, BlockKind, Cell, Schedule
from flywheel.attention.tiling import REPLAY_TILE
from proofs.lemma import Assumption, Method, lemma, require
from proofs.smt import Path, Symbol, expression, paths, require_always

if TYPE_CHECKING:
    from collections.abc import Iterator

_TOKENS = ((1, 300), (100, 17), (129, 129), (300, 129), (260, 513))
_BOUNDS = (None, -300, -129, -128, -16, -1, 0, 1, 127, 130, 600)
_BLOCKS = ((128, 256, 128), (256, 128, 128), (384, 512, 256))
_OVERLAPPING_TOKENS = ((512, 768), (512, 1024), (1024, 512))
_OVERLAPPING_BLOCKS = ((128, 512, 128), (256, 512, 128))
"""Lengths, and blocks of queries and of keys with the strides of the latter."""
_WIDTH = 256


@lemma(
    statement="every visible (query, key) pair is computed exactly once, under a mask unless its whole piece is "
    "visible; "
    "what the schedule skips is invisible",
    rests_on=(),
    methods=(Method.EXHAUSTIVE, Method.SMT),
    assumptions=(Assumption("blocks and fragments are multiples of LANE_GRID", "flywheel.attention.tiling:resolve"),),
)
def tile_skipping() -> str:
    """On the index maps that the kernel is unrolled from.

    Exhaustive: for every combination of lengths, bands and block sizes of a grid around the edges of tiles, each pair
    (query, key) is looked up in `Schedule.steps`, `cells` and `pieces`, with key blocks that overlap where a band
    allows it.  A visible pair lies in exactly one cell of the query block's steps, in a piece that is computed; pairs
    computed without a mask are all visible; and the mask of a block (`BlockKind.sees`) is what the band says.

    In general: `Schedule.visited`, `kind`, `BlockKind.within`, which masks the pieces of a fragment, and the ranges
    of queries of a fragment are run on symbols, once for each way in which their comparisons can come out, and an SMT
    solver shows for lengths, bands, blocks and positions of any size that every visible key lies in a visited block,
    that a block without a kind has no visible pair, that of blocks that overlap and are long enough the one visited
    holds every visible key, that a query sees no key outside of what its cells have (`_seen`) and one of those that
    anchors are taken from (`_shared`), that a kind sees what the band sees, that what a part of a block
    sees within it is what the block sees there, and nothing where it says so, that queries outside [first, stop) see
    no key of the fragment, that queries in [clear_first, clear_stop) see all of them, and that a query before
    `adopting` that sees one of them sees the key before the fragment too, so that it has an anchor.
    """
    schedules = pairs = 0
    for schedule in _schedules():
        pairs += _covered(schedule)
        schedules += 1
    ways = _overlapping_blocks_hold_all() + _cells_are_right()
    ways += _visits_are_complete() + _kinds_are_right() + _masks_are_right() + _fragments_are_right()
    return f"{schedules} schedules with {pairs} pairs; {ways} paths through the code, for integers of any size"


def _schedules() -> Iterator[Schedule]:
    for (q_len, kv_len), (block_q, block_kv, fragment) in itertools.product(_TOKENS, _BLOCKS):
        for lower, upper in itertools.product(_BOUNDS, _BOUNDS):
            if lower is None or upper is None or lower <= upper:
                yield Schedule(q_len, kv_len, Band(lower, upper), block_q, block_kv, fragment)
    for (q_len, kv_len), (block_q, block_kv, stride) in itertools.product(_OVERLAPPING_TOKENS, _OVERLAPPING_BLOCKS):
        for lower, upper in itertools.product(_BOUNDS, _BOUNDS):
            if lower is not None and upper is not None and 0 <= upper - lower < block_kv - block_q - lower % stride:
                yield Schedule(q_len, kv_len, Band(lower, upper), block_q, block_kv, stride, block_kv - stride)


def _covered(schedule: Schedule) -> int:
    """Count how often each pair is computed, and what is computed without a mask."""
    rows = schedule.q_blocks * schedule.block_q
    columns = (schedule.kv_blocks - 1) * schedule.stride + schedule.block_kv + schedule.fragment
    computed, bare = np.zeros((rows, columns), np.int8), np.zeros((rows, columns), bool)
    masked = np.zeros((rows, columns), bool)
    for step in schedule.steps:
        body = schedule.bodies[step.body]
        row0, column0 = step.i * schedule.block_q, step.j * schedule.stride
        for cell, first in itertools.chain.from_iterable(map(_strips, schedule.cells(body, _WIDTH))):
            for piece in schedule.pieces(body.kind, cell, first, LANE_GRID):
                start = column0 + cell.start + piece.start
                pairs = np.s_[row0 + first : row0 + first + LANE_GRID, start : start + piece.size]
                computed[pairs] += not piece.hidden
                bare[pairs] = piece.clear
        block = np.s_[row0 : row0 + schedule.block_q, column0 : column0 + schedule.block_kv]
        masked[block] = _seen(body.kind, schedule.block_q, schedule.block_kv)
    visible = _visible(schedule, rows, columns)
    inside = np.arange(rows)[:, None] < schedule.q_len
    require(bool((computed[visible & inside] == 1).all()), f"{schedule}: a visible pair is not computed exactly once")
    require(bool((computed <= 1).all()), f"{schedule}: a pair is computed twice")
    require(bool((visible | ~bare).all()), f"{schedule}: an invisible pair is computed without a mask")
    require(bool((masked == visible)[computed > 0].all()), f"{schedule}: a mask is not what the band says")
    return int((visible & inside).sum())


def _strips(cell: Cell) -> Iterator[tuple[Cell, int]]:
    """A cell with the first query of each strip of its queries."""
    for first in range(cell.first, cell.first + cell.width, LANE_GRID):
        yield cell, first


def _seen(kind: BlockKind, rows: int, columns: int) -> np.ndarray:
    row, column = np.arange(rows)[:, None], np.arange(columns)[None, :]
    return (column < kind.keys) & _within(kind.band, row, column)


def _visible(schedule: Schedule, rows: int, columns: int) -> np.ndarray:
    row, column = np.arange(rows)[:, None], np.arange(columns)[None, :]
    return (column < schedule.kv_len) & _within(schedule.band, row, column)


def _within(band: Band, row: np.ndarray, column: np.ndarray) -> np.ndarray:
    """The definition: row + lower <= column <= row + upper."""
    above = np.ones((1, 1), bool) if band.lower is None else column >= row + band.lower
    below = np.ones((1, 1), bool) if band.upper is None else column <= row + band.upper
    return above & below


def _bands() -> Iterator[tuple[Any, Any]]:
    """A lower and an upper bound, each a variable or None."""
    yield from itertools.product((z3.Int("lower"), None), (z3.Int("upper"), None))


def _symbols(path: Path, *expressions: Any) -> list[Any]:  # noqa: ANN401
    return [None if each is None else Symbol(each, path) for each in expressions]


def _sees(lower: Any, upper: Any, row: Any, column: Any) -> Any:  # noqa: ANN401
    """The definition, as a formula."""
    clauses = [True]
    clauses += [] if lower is None else [column >= row + lower]
    clauses += [] if upper is None else [column <= row + upper]
    return z3.And(*clauses)


class _Span:
    """Stands for `range` while code is run on symbols; `tuple` of it holds the span itself."""

    def __init__(self, start: Any, stop: Any) -> None:  # noqa: ANN401
        self.start, self.stop = expression(start), expression(stop)

    def __iter__(self) -> Iterator[_Span]:
        yield self


def _visits_are_complete() -> int:
    """A query block visits every key block that holds a key which one of its queries sees."""
    count = 0
    q_len, kv_len, block_q, block_kv, i, j, r, c = z3.Ints("q_len kv_len block_q block_kv i j r c")
    given = [q_len > 0, kv_len > 0, block_q > 0, block_kv > 0, i >= 0]
    inside = z3.And(r >= 0, r < block_q, j >= 0, c >= 0, c < block_kv)
    row, column = i * block_q + r, j * block_kv + c
    for lower, upper in _bands():
        visible = z3.And(column < kv_len, _sees(lower, upper, row, column))

        def run(path: Path, lower: Any = lower, upper: Any = upper) -> Any:  # noqa: ANN401
            rows, keys, tall, wide, block = _symbols(path, q_len, kv_len, block_q, block_kv, i)
            return Schedule(rows, keys, Band(*_symbols(path, lower, upper)), tall, wide, LANE_GRID).visited(block)

        with mock.patch.object(schedule_module, "range", _Span, create=True):
            for condition, visited in paths(given, run):
                (found,) = visited
                where = z3.And(*condition, inside, visible)
                if isinstance(found, _Span):
                    covered = z3.And(found.start <= j, j < found.stop)
                    require_always(covered, "a visible key lies in a block that is not visited", given=where)
                else:
                    require_always(z3.BoolVal(val=False), "a query block that sees a key visits none", given=where)
                count += 1
    return count


def _kinds_are_right() -> int:
    count = 0
    q_len, kv_len, block_q, block_kv, i, j, r, c = z3.Ints("q_len kv_len block_q block_kv i j r c")
    given = [q_len > 0, kv_len > 0, block_q > 0, block_kv > 0, i >= 0, j >= 0, j * block_kv < kv_len]
    inside = z3.And(r >= 0, r < block_q, c >= 0, c < block_kv)
    row, column = i * block_q + r, j * block_kv + c
    for lower, upper in _bands():
        visible = z3.And(column < kv_len, _sees(lower, upper, row, column))

        def run(path: Path, lower: Any = lower, upper: Any = upper) -> BlockKind | None:  # noqa: ANN401
            rows, keys, tall, wide, block_i, block_j = _symbols(path, q_len, kv_len, block_q, block_kv, i, j)
            schedule = Schedule(rows, keys, Band(*_symbols(path, lower, upper)), tall, wide, LANE_GRID)
            return schedule.kind(block_i, block_j)

        for condition, kind in paths(given, run):
            where = z3.And(*condition, inside)
            if kind is None:
                require_always(z3.Not(visible), "a block without a kind holds a visible pair", given=where)
            else:
                low, high = (expression(bound) for bound in kind.band)
                seen = z3.And(c < expression(kind.keys), _sees(low, high, r, c))
                require_always(seen == visible, "a kind does not see what the band sees", given=where)
            count += 1
    return count


def _masks_are_right() -> int:
    """`within`, which says of the pieces of a fragment which masks they need."""
    count = 0
    total, key, keys, first, queries, r, c = z3.Ints("total key keys first queries r c")
    given = [total > 0, key >= 0, keys > 0, first >= 0, queries > 0]
    inside = z3.And(r >= 0, r < queries, c >= 0, c < keys)
    for lower, upper in _bands():
        visible = z3.And(key + c < total, _sees(lower, upper, first + r, key + c))

        def run(path: Path, lower: Any = lower, upper: Any = upper) -> BlockKind | None:  # noqa: ANN401
            of_block, *where = _symbols(path, total, key, keys, first, queries)
            return BlockKind(Band(*_symbols(path, lower, upper)), of_block).within(*where)

        for condition, mask in paths(given, run):
            where = z3.And(*condition, inside)
            if mask is None:
                require_always(z3.Not(visible), "a part that is left out holds a visible pair", given=where)
            else:
                low, high = (expression(bound) for bound in mask.band)
                seen = z3.And(c < expression(mask.keys), _sees(low, high, r, c))
                require_always(seen == visible, "a mask is not what the block sees", given=where)
            count += 1
    return count


def _fragments_are_right() -> int:
    """`_fragment`, which is what `fragments` asks for each strip of keys."""
    count = 0
    tiles, keys, start, size, r, c = z3.Ints("tiles keys start size r c")
    block = tiles * LANE_GRID
    given = [tiles > 0, keys > 0, start >= 0, start < keys, size > 0, size % ROW_GRID == 0]
    pair = z3.And(r >= 0, r < block, c >= start, c < start + size)
    for lower, upper in _bands():
        seen = z3.And(c < keys, _sees(lower, upper, r, c))

        def run(path: Path, lower: Any = lower, upper: Any = upper) -> Any:  # noqa: ANN401
            (block_q,) = _symbols(path, block)
            schedule = Schedule(1, 1, Band(None, None), block_q, LANE_GRID, LANE_GRID)
            (number_of_keys, at, count_of_keys) = _symbols(path, keys, start, size)
            kind = BlockKind(Band(*_symbols(path, lower, upper)), number_of_keys)
            # The code itself, not a copy of it.
            return schedule._fragment(kind, at, count_of_keys)  # noqa: SLF001

        for condition, found in paths(given, run):
            first, stop, clear_first, clear_stop, adopting = (expression(x) for x in found[2:])
            where = z3.And(*condition, pair)
            require_always(
                z3.Implies(seen, z3.And(first <= r, r < stop)), "a fragment leaves out a visible query", given=where
            )
            require_always(
                z3.Implies(z3.And(clear_first <= r, r < clear_stop), seen),
                "a fragment's unmasked queries do not see all of its keys",
                given=where,
            )
            adopted = z3.And(start > 0, _sees(lower, upper, r, start - 1))
            require_always(
                z3.Implies(z3.And(seen, r < adopting), adopted),
                "a query that does not adopt an anchor sees its first key here",
                given=where,
            )
            in_order = z3.And(
                first >= 0, first <= clear_first, clear_first <= clear_stop, clear_stop <= stop, stop <= block
            )
            require_always(
                z3.Or(in_order, first >= stop),
                "a fragment's ranges of queries are out of order",
                given=z3.And(*condition),
            )
            count += 1
    return count


def _overlapping_blocks_hold_all() -> int:
    """`visited` where blocks overlap, are long enough for what a query block sees, and the last ends with the keys.

    On the grid that `tiling.resolve` lets them begin on, for the query block whose first row is `row0`.
    """
    count = 0
    stride = REPLAY_TILE
    blocks, more, tall, q_len, row0, r, c, lower, upper = z3.Ints("blocks more tall q_len row0 r c lower upper")
    block_kv: Any = more * stride
    kv_len: Any = blocks * stride
    first_key: Any = row0 + lower
    given = [more > 1, blocks >= more, tall > 0, q_len > 0, row0 >= 0, lower <= upper]
    given += [tall + upper - lower + first_key % stride <= block_kv]
    where_visible = z3.And(r >= 0, r < tall, c >= 0, c < kv_len, _sees(lower, upper, row0 + r, c))

    def run(path: Path) -> Any:  # noqa: ANN401
        rows, keys, height, wide, shared = _symbols(path, q_len, kv_len, tall, block_kv, block_kv - stride)
        # Block 0 of a call whose rows begin at row0.
        band = Band(*_symbols(path, first_key, upper + row0))
        return Schedule(rows, keys, band, height, wide, LANE_GRID, shared).visited(0)

    with mock.patch.object(schedule_module, "range", _Span, create=True):
        for condition, (found,) in paths(given, run):
            begin = expression(found) * stride
            held = z3.And(begin <= c, c < begin + block_kv)
            require_always(
                z3.And(held, begin >= 0, begin + block_kv <= kv_len),
                "a block that overlaps others does not hold all that its query block sees, or ends beyond the keys",
                given=z3.And(*condition, where_visible),
            )
            count += 1
    return count


def _cells_are_right() -> int:
    """`_seen` and `_shared`, of which the cells of a body that goes by queries are made."""
    count = 0
    tiles, keys, first, width, r, c = z3.Ints("tiles keys first width r c")
    given = [tiles > 0, keys > 0, first >= 0, width > 0]
    for lower, upper in _bands():
        seen = z3.And(c >= 0, c < keys, _sees(lower, upper, r, c))
        of_cell = z3.And(r >= first, r < first + width)

        def run(path: Path, lower: Any = lower, upper: Any = upper) -> Any:  # noqa: ANN401
            schedule = Schedule(1, 1, Band(None, None), LANE_GRID, LANE_GRID, LANE_GRID)
            (number_of_keys, at, count_of_queries) = _symbols(path, keys, first, width)
            kind = BlockKind(Band(*_symbols(path, lower, upper)), number_of_keys)
            place = kind, at, count_of_queries
            return schedule._seen(*place), schedule._shared(*place)  # noqa: SLF001  the code itself, not a copy of it

        for condition, ((begin, end), shared) in paths(given, run):
            where = z3.And(*condition, of_cell)
            inside = z3.And(expression(begin) <= c, c < expression(end))
            require_always(z3.Implies(seen, inside), "cells leave out a visible key", given=where)
            if shared is not None:
                of_anchor = expression(shared)
                low: list[Any] = [of_anchor, 0, *([] if lower is None else [r + lower])]
                high: list[Any] = [of_anchor + ROW_GRID - 1, keys - 1, *([] if upper is None else [r + upper])]
                met = z3.And(*(a <= b for a in low for b in high))
                require_always(met, "a query sees none of the keys that its anchor is taken from", given=where)
                on_grid = z3.And(of_anchor % ROW_GRID == 0, of_anchor >= expression(begin))
                require_always(on_grid, "anchors are taken from keys off the grid or off the cells", given=where)
            count += 1
    return count

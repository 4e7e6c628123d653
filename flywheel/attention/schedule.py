"""Which tile when: the geometry of the (query block, key block) grid, in plain integers.

In positions of the sequence, row r sees key c iff r + lower <= c <= r + upper and c < kv_len (`Band`); causal masks and
windows are bands.  Per query block the kernel visits the key blocks of which it sees something, one grid step each; the
list of these steps is known when the kernel is traced (`Schedule.steps`) and reaches it as scalars.  The few distinct
ways in which a query block sees a key block (`BlockKind`) each become one fully unrolled body, in which only visible
fragments and queries are emitted.

Under a narrow band key blocks may overlap (`Schedule.stride`), so that one of them holds all that a query block sees.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import NamedTuple

LANE_GRID = 128
"""Queries lie on lanes: slices of them start on this grid."""

ROW_GRID = 16
"""Keys lie on sublanes, and a BF16 register tile holds 16 of them."""

INDEX_BITS = 12
"""Of the number of a block in a packed step."""

EDGE_FRAGMENT = 256
"""Keys per softmax step where a mask cuts the block: the matrix unit's width, so that little of it works in vain."""


def cdiv(a: int, b: int) -> int:
    """ceil(a / b)."""
    return -(-a // b)


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is at least n."""
    return cdiv(n, multiple) * multiple


class Band(NamedTuple):
    """Row r sees column c iff r + lower <= c <= r + upper; None is unbounded."""

    lower: int | None
    upper: int | None

    def sees(self, row: int, column: int) -> bool:
        """Whether the row sees the column."""
        return (self.lower is None or column >= row + self.lower) and (self.upper is None or column <= row + self.upper)

    @property
    def keys(self) -> int | None:
        """Most columns that a row sees; None: as many as there are."""
        return None if self.lower is None or self.upper is None else self.upper - self.lower + 1

    def moved(self, by: int) -> Band:
        """The same band when the columns are counted from -by on."""
        lower, upper = (None if bound is None else bound + by for bound in self)
        return Band(lower, upper)


class BlockKind(NamedTuple):
    """How much of a key block the rows of a query block see, in coordinates of the two blocks.

    Attributes:
        band: bounds that hide nothing inside the block are None.
        keys: how many of the block's columns are keys; the others lie beyond kv_len and hold garbage.
    """

    band: Band
    keys: int

    def sees(self, row: int, column: int) -> bool:
        """Whether the row of the query block sees the column of the key block."""
        return column < self.keys and self.band.sees(row, column)

    def within(self, key: int, keys: int, first: int, queries: int) -> BlockKind | None:
        """What keys key .. key + keys - 1 and queries first .. first + queries - 1 see of each other; None: nothing.

        In their own coordinates, bounds that hide nothing None.
        """
        keys = min(keys, self.keys - key)
        lower, upper = self.band.moved(first - key)
        if keys <= 0 or (upper is not None and upper + queries - 1 < 0) or (lower is not None and lower > keys - 1):
            return None
        if upper is not None and upper >= keys - 1:
            upper = None
        if lower is not None and lower + queries - 1 <= 0:
            lower = None
        return BlockKind(Band(lower, upper), keys)


class Piece(NamedTuple):
    """Consecutive keys of a fragment that some queries see alike.

    Attributes:
        start: first key, counted in the fragment.
        size: keys.
        mask: what the queries see of them; None: nothing.
    """

    start: int
    size: int
    mask: BlockKind | None

    @property
    def hidden(self) -> bool:
        """Whether no query sees any key."""
        return self.mask is None

    @property
    def clear(self) -> bool:
        """Whether every query sees every key."""
        return self.mask == BlockKind(Band(None, None), self.size)

    def extended(self, by: int) -> Piece:
        """The same with more keys that are seen as these, all or none of them."""
        size = self.size + by
        return Piece(self.start, size, None if self.mask is None else self.mask._replace(keys=size))


class Body(NamedTuple):
    """One unrolled body of the kernel.

    Attributes:
        kind: what it computes.
        last: whether the query block ends with it.
        begin: the first query that it finishes: those before are finished already.
        end: one past the last; begin, if it finishes none.
    """

    kind: BlockKind
    last: bool
    begin: int
    end: int


class Step(NamedTuple):
    """One grid step of a head.

    Attributes:
        i: query block.
        j: key block.
        body: index into `Schedule.bodies`.
        moved: whether the key block is another than the step before read; before a head's first step stands its last.
        first: whether the query block begins here.
        last: whether it ends here.
    """

    i: int
    j: int
    body: int
    moved: bool
    first: bool
    last: bool


class Fragment(NamedTuple):
    """Some keys of a block, and the queries that they concern; all in coordinates of the blocks.

    Attributes:
        start: first key.
        size: keys.
        first: the first query that sees one of them, rounded down to LANE_GRID.
        stop: one past the last, rounded up.
        clear_first: from here to clear_stop every query sees every key; the others need a mask.
        clear_stop: one past the last such query, at least clear_first.
        adopting: from here to stop queries may see the first of all their keys here; the others saw it before.
    """

    start: int
    size: int
    first: int
    stop: int
    clear_first: int
    clear_stop: int
    adopting: int


class Cell(NamedTuple):
    """Some keys against as many queries as one product takes; all in coordinates of the blocks.

    Attributes:
        start: first key.
        size: keys.
        first: first query.
        width: queries.
        fresh: nothing was added to the queries before.
        adopting: from here on queries may see the first of all their keys here, and have no anchor yet.
        shared: ROW_GRID keys from here on are such that every query sees one of them; None: not known.
        done: the queries [first, stop) that are finished once these keys have been added.
    """

    start: int
    size: int
    first: int
    width: int
    fresh: bool
    adopting: int
    shared: int | None
    done: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The grid of one head; all lengths in tokens.

    Attributes:
        q_len: queries.
        kv_len: keys.
        band: what row r of the call sees of the sequence of keys.
        block_q: queries per block.
        block_kv: keys per block.
        fragment: keys per softmax step in a block that no mask cuts.
        overlap: keys that a key block shares with the next one.  If there are any, every query block sees keys of no
            more than one block's length, and that block begins on the grid of `stride`.
    """

    q_len: int
    kv_len: int
    band: Band
    block_q: int
    block_kv: int
    fragment: int
    overlap: int = 0

    @property
    def stride(self) -> int:
        """Keys from the start of a key block to the start of the next."""
        return self.block_kv - self.overlap

    @property
    def q_blocks(self) -> int:
        """Query blocks; the last may be ragged."""
        return cdiv(self.q_len, self.block_q)

    @property
    def kv_blocks(self) -> int:
        """Key blocks; the last may be ragged."""
        return cdiv(self.kv_len - self.overlap, self.stride)

    @property
    def ragged_rows(self) -> bool:
        """Whether the last query block has rows beyond q_len (they hold garbage and are never written)."""
        return self.q_len % self.block_q != 0

    @property
    def has_empty_rows(self) -> bool:
        """Whether some rows of the call see no key at all."""
        lower, upper = self.band
        above = upper is not None and upper < 0
        below = lower is not None and self.q_len - 1 + lower > self.kv_len - 1
        return above or below

    @property
    def sees_key_0(self) -> bool:
        """Whether every row that sees a key sees the first one."""
        return self.band.lower is None or self.q_len - 1 + self.band.lower <= 0

    @functools.cached_property
    def opening(self) -> frozenset[Body]:
        """Bodies that begin a query block and start its sums; empty, if those have to be cleared beforehand.

        They have to be where some first body's first fragment does not concern all queries, or the same body also
        stands elsewhere.
        """
        first = frozenset(self.bodies[step.body] for step in self.steps if step.first)
        others = {self.bodies[step.body] for step in self.steps if not step.first}
        openings = [self.fragments(body.kind)[:1] for body in first]
        reached = all(found and (found[0].first, found[0].stop) == (0, self.block_q) for found in openings)
        return first if reached and not first & others else frozenset()

    def kind(self, i: int, j: int) -> BlockKind | None:
        """What query block i sees of key block j; None: nothing."""
        whole = BlockKind(self.band, self.kv_len)
        return whole.within(j * self.stride, self.block_kv, i * self.block_q, self.block_q)

    def visited(self, i: int) -> tuple[int, ...]:
        """The key blocks of which query block i sees something, ascending and consecutive; block 0 if there is none.

        Where blocks overlap, the last one that begins before all of it.
        """
        lower, upper = self.band.moved(i * self.block_q)
        end = self.kv_len - 1 if upper is None else min(upper + self.block_q - 1, self.kv_len - 1)
        begin = 0 if lower is None else max(lower, 0)
        if end < begin:
            return (0,)
        if self.overlap > 0:
            return (min(begin // self.stride, self.kv_blocks - 1),)
        return tuple(range(begin // self.block_kv, end // self.block_kv + 1))

    @property
    def step_count(self) -> int:
        """The number of `steps`, without making them."""
        return sum(len(self.visited(i)) for i in range(self.q_blocks))

    @functools.cached_property
    def steps(self) -> tuple[Step, ...]:
        """Every grid step of a head, query block by query block."""
        numbers = {body: n for n, body in enumerate(self.bodies)}
        visits = [(i, j, visited) for i in range(self.q_blocks) for visited in (self.visited(i),) for j in visited]
        before = [j for _, j, _ in visits[-1:] + visits[:-1]]
        return tuple(
            Step(
                i,
                j,
                numbers[self._body(i, j)],
                moved=j != previous,
                first=j == visited[0],
                last=j == visited[-1],
            )
            for (i, j, visited), previous in zip(visits, before, strict=True)
        )

    @functools.cached_property
    def bodies(self) -> tuple[Body, ...]:
        """The distinct bodies of all steps."""
        found: dict[Body, None] = {}
        for i in range(self.q_blocks):
            for j in self.visited(i):
                found[self._body(i, j)] = None
        return tuple(found)

    def _body(self, i: int, j: int) -> Body:
        visited = self.visited(i)
        first, last = j == visited[0], j == visited[-1]
        begin = 0 if first else self._done_before(i, j)
        end = self.block_q if last else max(self._done_before(i, j + 1), begin)
        return Body(self.kind(i, j) or _NOTHING, last, begin, end)

    def _done_before(self, i: int, j: int) -> int:
        """Queries of block i, from the first on, that see no key of block j or beyond; rounded down to LANE_GRID."""
        if self.band.upper is None:
            return 0
        return min(max(_down(j * self.block_kv - i * self.block_q - self.band.upper), 0), self.block_q)

    def fragments(self, kind: BlockKind) -> tuple[Fragment, ...]:
        """The fragments of a block of this kind that some row sees."""
        cut = kind.band != Band(None, None)
        size = min(self.fragment, EDGE_FRAGMENT) if cut else self.fragment
        found = []
        for start in range(0, kind.keys, size):
            # The last keys of a ragged sequence, rounded up to whole register tiles.
            rows = min(size, round_up(kind.keys - start, ROW_GRID))
            fragment = self._fragment(kind, start, rows)
            if fragment.first < fragment.stop:
                found.append(fragment)
        return tuple(found)

    @functools.cached_property
    def by_queries(self) -> bool:
        """Whether bodies go through all keys of some queries before those of the next ones.

        Under a window, where every query block has but one step: what belongs to a query then need not be kept between
        steps, nor between cells that stand far from each other.
        """
        return self.band.lower is not None and self.step_count == self.q_blocks

    def cells(self, body: Body, width: int) -> tuple[Cell, ...]:
        """All that a body computes, in order; `width`: most queries of a cell."""
        if self.by_queries:
            parts = ((first, min(width, self.block_q - first)) for first in range(0, self.block_q, width))
            return tuple(itertools.chain.from_iterable(self._cells_of(body.kind, *part) for part in parts))
        fragments = self.fragments(body.kind)
        found: list[Cell] = []
        for fragment, done in zip(fragments, self.finished(body), strict=bool(fragments)):
            fresh = body in self.opening and fragment == fragments[0]
            for first in range(fragment.first, fragment.stop, width):
                count = min(width, fragment.stop - first)
                ended = done if first + count == fragment.stop else (done[0], done[0])
                place = (fragment.start, fragment.size, first, count)
                found.append(Cell(*place, fresh, fragment.adopting, shared=None, done=ended))
        return tuple(found)

    def _cells_of(self, kind: BlockKind, first: int, width: int) -> list[Cell]:
        """Cells of queries first .. first + width - 1 of a query block that sees nothing else."""
        stop = first + width
        begin, end = self._seen(kind, first, width)
        shared = self._shared(kind, first, width)
        places: list[tuple[int, int]] = []
        for start in range(begin, end, EDGE_FRAGMENT):
            size = min(EDGE_FRAGMENT, round_up(end - start, LANE_GRID), round_up(kind.keys - start, ROW_GRID))
            places.append((start, size))
        if shared is not None:
            # Queries choose their anchors before anything else.
            places.sort(key=lambda place: not place[0] <= shared < sum(place))
        adopting = first if shared is None else stop
        found = [
            Cell(*place, first, width, fresh=False, adopting=adopting, shared=None, done=(first, first))
            for place in places
        ]
        if found:
            found[0] = found[0]._replace(fresh=True, shared=shared)
            found[-1] = found[-1]._replace(done=(first, stop))
        return found

    def _seen(self, kind: BlockKind, first: int, width: int) -> tuple[int, int]:
        """Where the keys begin that some queries see, rounded down to LANE_GRID, and where they end."""
        lower, upper = kind.band
        begin = 0 if lower is None else _down(max(first + lower, 0))
        return begin, kind.keys if upper is None else min(first + width + upper, kind.keys)

    def _shared(self, kind: BlockKind, first: int, width: int) -> int | None:
        """Where ROW_GRID keys begin of which each of some queries sees one, if possible all; None if there are none."""
        lower, upper = kind.band
        begin = 0 if lower is None else max(first + width - 1 + lower, 0)
        end = kind.keys if upper is None else min(first + upper + 1, kind.keys)
        whole = round_up(begin, ROW_GRID)
        if whole + ROW_GRID <= end:
            return whole
        return begin // ROW_GRID * ROW_GRID if begin < end else None

    def pieces(self, kind: BlockKind, fragment: Fragment | Cell, first: int, queries: int) -> tuple[Piece, ...]:
        """A fragment's keys as queries first .. first + queries - 1 see them, alike ones together."""
        found: list[Piece] = []
        for start in range(0, fragment.size, LANE_GRID):
            size = min(LANE_GRID, fragment.size - start)
            piece = Piece(start, size, kind.within(fragment.start + start, size, first, queries))
            if found and ((piece.hidden and found[-1].hidden) or (piece.clear and found[-1].clear)):
                piece = found.pop().extended(size)
            found.append(piece)
        return tuple(found)

    def _fragment(self, kind: BlockKind, start: int, size: int) -> Fragment:
        lower, upper = kind.band
        end, block = start + size - 1, self.block_q
        first = 0 if upper is None else start - upper
        stop = block if lower is None else min(end, kind.keys - 1) - lower + 1
        first, stop = _down(max(first, 0)), _up(min(max(stop, 0), block))
        clear_first = first if upper is None else _up(max(end - upper, 0))
        clear_stop = stop if lower is None else _down(max(start - lower + 1, 0))
        if start + size > kind.keys:
            clear_stop = clear_first  # garbage among the keys: every query needs the mask
        clear_first = min(max(clear_first, first), stop)
        clear_stop = min(max(clear_stop, clear_first), stop)
        return Fragment(start, size, first, stop, clear_first, clear_stop, self._adopting(lower, start, first, stop))

    def _adopting(self, lower: int | None, start: int, first: int, stop: int) -> int:
        """A query that sees the key before `start` adopted its anchor there, or further up."""
        if start == 0:
            return first
        if lower is None:
            return stop
        return min(max(_down(max(start - lower, 0)), first), stop)

    def finished(self, body: Body) -> tuple[tuple[int, int], ...]:
        """For each fragment of a block, the queries [first, stop) that are finished once it has been added.

        Both ends of the fragments' ranges of queries ascend, so that a query is done with the last fragment that begins
        at or before it.  The first fragment also takes the queries that see nothing.
        """
        fragments = self.fragments(body.kind)
        begins = [0, *(fragment.first for fragment in fragments[1:]), self.block_q]
        begins = [min(max(query, body.begin), body.end) for query in begins]
        return tuple(itertools.pairwise(begins)) if fragments else ((body.begin, body.end),)


_NOTHING = BlockKind(Band(None, None), 0)


def _down(n: int) -> int:
    return n // LANE_GRID * LANE_GRID


def _up(n: int) -> int:
    return round_up(n, LANE_GRID)

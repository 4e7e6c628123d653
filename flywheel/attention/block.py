"""One unrolled body: a key block against a query block, the softmax of one cell beside the products of its neighbours.

A cell (`schedule.Cell`) is some keys against as many queries as a matrix unit is wide.  Within one straight piece of
code the compiler overlaps what is independent, but it does not look far: only what is emitted close together.  So the
scores of the next cell and the values of the cell before are emitted around each cell's softmax, and the matrix unit,
the vector unit and the transcendental unit are busy at the same time.  A body also divides the queries that see no
later key, query by query as they are done, behind the products that remain.

Where all keys of a query follow each other (`Schedule.by_queries`), what is summed for it stays a value from cell to
cell (`Registers`); elsewhere it is kept in VMEM.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flywheel.attention import tile
from flywheel.attention.budget import LANES
from flywheel.attention.finish import any_mark, finish_queries
from flywheel.attention.schedule import EDGE_FRAGMENT, Band, Piece
from flywheel.attention.spec import (
    ANCHOR_KEYS,
    FLAG,
    Site,
    band_mask,
    both,
    key_ids_on_sublanes,
    lane_slice,
    on_sublanes,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Array
    from jaxtyping import BFloat16, Bool, Float32

    from flywheel.attention.schedule import Body, Cell

_DIVIDED_AT_ONCE = 256
"""Queries whose o is divided and transposed at a time: a tile that stays in registers."""

MOST_BEHIND = 4
"""Cells whose values may wait to be added while the softmax of others goes on."""

_FEW_CELLS = 6
"""Of a fragment: cells of the same queries follow each other so soon that more of others have to stand between."""


class Registers:
    """Stands for a ref of the state, `[rows, block_q]`, in one straight piece of code: what is written stays a value.

    What does not fit into registers is spilled, but nothing is stored that nothing reads.
    """

    def __init__(self, rows: int, initial: float) -> None:
        self._initial = jnp.full((rows, LANES), initial, jnp.float32)
        self._strips: dict[int, Array] = {}

    def __getitem__(self, at: tuple[slice, Any]) -> Float32[Array, "rows C"]:
        rows, queries = at
        starts = range(queries.start, queries.start + queries.size, LANES)
        return jnp.concatenate([self._strips.get(start, self._initial)[rows] for start in starts], axis=1)

    def __setitem__(self, at: tuple[slice, Any], values: Float32[Array, "rows C"]) -> None:
        _, queries = at
        for start in range(0, queries.size, LANES):
            self._strips[queries.start + start] = values[:, start : start + LANES]


class _Stretch(NamedTuple):
    """Queries of a cell, first .. first + width - 1 of the block, that see its keys alike.

    Attributes:
        cell: the cell.
        first: first query.
        width: queries.
        pieces: the keys in order, and what the queries see of them.
        adopting: some of the queries may see their first key here, and adopt an anchor.
    """

    cell: Cell
    first: int
    width: int
    pieces: tuple[Piece, ...]
    adopting: bool

    @property
    def queries(self) -> Any:  # noqa: ANN401
        return lane_slice(self.first, self.width)


class _Scores(NamedTuple):
    """Scores of a piece, and which of them count; None: all."""

    s: Array
    visible: Array | None


class _Seen(NamedTuple):
    """What is known of a stretch before its weights are formed.

    Attributes:
        stretch: which keys and queries.
        scores: those of its pieces that are not hidden.
        shift: what their exponents are measured against, `[S, C]`, `[1, C]` or a number.
        factor: of what was summed before (None: 1).
    """

    stretch: _Stretch
    scores: dict[Piece, _Scores]
    shift: Array | float
    factor: Array | None


class _Weights(NamedTuple):
    """P of a cell as it enters the product, and the factor of what o was before (None: 1)."""

    cell: Cell
    p: Array
    factor: Array | None


@dataclasses.dataclass(frozen=True)
class _Block:
    """A body being emitted; see `emit`."""

    site: Site
    body: Body
    failures: list[Array] = dataclasses.field(default_factory=list)
    turned: dict[tuple[int, int], Array] = dataclasses.field(default_factory=dict)

    def stretches(self, cell: Cell) -> list[_Stretch]:
        """A cell's queries, cut where masks and the search for anchors begin and end."""
        spec, kind = self.site.spec, self.body.kind
        adopting = self.adopting(cell)
        if spec.segments:
            # Ids mask everything, and are compared at once.
            whole = Piece(0, cell.size, kind.within(cell.start, cell.size, cell.first, cell.width))
            return [_Stretch(cell, cell.first, cell.width, (whole,), adopting=adopting < cell.first + cell.width)]
        found: list[_Stretch] = []
        for first in range(cell.first, cell.first + cell.width, LANES):
            pieces = self.site.schedule.pieces(kind, cell, first, LANES)
            stretch = _Stretch(cell, first, LANES, pieces, adopting=first >= adopting)
            last = found[-1] if found else stretch
            alike = (last.pieces, last.adopting) == (pieces, stretch.adopting)
            if found and alike and all(piece.mask is None or piece.mask.band == Band(None, None) for piece in pieces):
                stretch = found.pop()._replace(width=last.width + LANES)
            found.append(stretch)
        return found

    def adopting(self, cell: Cell) -> int:
        """From where on queries may see their first key in a cell, where anchors are adopted at all."""
        spec = self.site.spec
        if spec.online or not spec.late_anchors:
            return cell.first + cell.width
        return cell.first if spec.segments else cell.adopting

    def visible(self, stretch: _Stretch, piece: Piece) -> Bool[Array, "F C"] | None:
        """Which of the queries see which of the keys; None: all."""
        assert piece.mask is not None  # noqa: S101  nothing is computed of a hidden piece
        shape = (piece.size, stretch.width)
        keys, rows = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        visible = band_mask(piece.mask.band, keys, rows)
        if piece.mask.keys < piece.size:
            visible = both(visible, keys < piece.mask.keys)
        if self.site.spec.segments:
            visible = both(visible, self.same_segment(stretch))
        return visible

    def same_segment(self, stretch: _Stretch) -> Bool[Array, "F C"]:
        """Keys' ids come on lanes and are needed on sublanes: one transpose per cell."""
        refs, cell = self.site.refs, stretch.cell
        ids = key_ids_on_sublanes(refs.k_ids[0, :, pl.ds(cell.start, cell.size)], stretch.width)
        return ids == refs.q_ids[0, :, stretch.queries]

    def score(self, cell: Cell) -> list[_Seen]:
        """Scores of a cell's stretches, and what their exponents are measured against."""
        refs, spec = self.site.refs, self.site.spec
        keys = refs.k[pl.ds(cell.start, cell.size), :]
        s = spec.rule(tile.dot_products(keys, refs.q[lane_slice(cell.first, cell.width), :]))
        found = []
        for stretch in self.stretches(cell):
            lanes = slice(stretch.first - cell.first, stretch.first - cell.first + stretch.width)
            found.append(self.measure(stretch, s[:, lanes]))
        return found

    def measure(self, stretch: _Stretch, s: Float32[Array, "F C"]) -> _Seen:
        """Cut a stretch's scores into pieces, and look at them."""
        refs, spec, queries = self.site.refs, self.site.spec, stretch.queries
        seen = {
            piece: _Scores(s[piece.start : piece.start + piece.size], self.visible(stretch, piece))
            for piece in stretch.pieces
            if not piece.hidden
        }
        if spec.return_max_logit:
            for scores in seen.values():
                refs.maxima[:, queries] = jnp.maximum(refs.maxima[:, queries], tile.partial_maxima(tile.hide(*scores)))
        if spec.segments:
            for _, visible in seen.values():
                assert visible is not None  # noqa: S101  segments mask everything
                refs.seen[:, queries] += tile.partial_sums(jnp.where(visible, 1.0, 0.0))
        if spec.online:
            shift, factor = tile.moved_shift(list(seen.values()), refs.anchor[:1, queries], late_bias=False)
            refs.anchor[:, queries] = on_sublanes(shift)
            return _Seen(stretch, seen, shift, None if stretch.cell.fresh else factor)
        return _Seen(stretch, seen, self.anchors(stretch, s, list(seen.values())), None)

    def softmax(self, cell: Cell, found: Sequence[_Seen]) -> _Weights:
        """Weights of a cell; adds them to the sums."""
        p = jnp.concatenate([self.weights(seen) for seen in found], axis=1)
        factors = [seen.factor for seen in found if seen.factor is not None]
        return _Weights(cell, p, jnp.concatenate(factors, axis=1) if factors else None)

    def weights(self, seen: _Seen) -> BFloat16[Array, "F C"]:
        """Weights of a stretch; adds them to the sums."""
        sums, stretch = self.site.refs.sums, seen.stretch
        weights = {piece: tile.weights(s, seen.shift, visible) for piece, (s, visible) in seen.scores.items()}
        added = [tile.partial_sums(p) for p in weights.values()]
        if not stretch.cell.fresh:
            before = sums[:, stretch.queries]
            added.insert(0, before if seen.factor is None else before * seen.factor)
        total = sum(added[1:], added[0]) if added else jnp.zeros((tile.SUBLANES, stretch.width), jnp.float32)
        sums[:, stretch.queries] = total
        pieces = [weights.get(piece, jnp.zeros((piece.size, stretch.width), jnp.float32)) for piece in stretch.pieces]
        return jnp.concatenate(pieces).astype(jnp.bfloat16)

    def anchors(
        self, stretch: _Stretch, s: Float32[Array, "F C"], seen: Sequence[_Scores]
    ) -> Float32[Array, "S C"] | float:
        """The queries' anchors, chosen or adopted here if they have none yet; a number, if all queries share it."""
        if self.site.spec.anchor is not None:
            return self.site.spec.anchor
        anchor = self.site.refs.anchor
        if stretch.adopting:
            adopted = anchor[:, stretch.queries]
            for scores in seen:
                adopted = tile.adopt_anchor(adopted, *scores)
            anchor[:, stretch.queries] = adopted
        elif stretch.cell.shared is not None and not self.site.spec.segments:
            anchor[:, stretch.queries] = on_sublanes(self.chosen(stretch, s, stretch.cell.shared))
        elif stretch.cell.fresh and not self.site.spec.late_anchors:
            # Every query that sees a key sees the first.
            chosen = jnp.full((1, stretch.width), tile.UNSET, jnp.float32)
            if seen:
                s, visible = seen[0]
                chosen = tile.choose_anchor(s[:ANCHOR_KEYS], None if visible is None else visible[:ANCHOR_KEYS])
            anchor[:, stretch.queries] = on_sublanes(chosen)
        return anchor[:, stretch.queries]

    def chosen(self, stretch: _Stretch, s: Float32[Array, "F C"], first: int) -> Float32[Array, "1 C"]:
        """Anchors from ANCHOR_KEYS keys of which every query sees one."""
        mask = self.body.kind.within(first, ANCHOR_KEYS, stretch.first, stretch.width)
        at = first - stretch.cell.start
        return tile.choose_anchor(s[at : at + ANCHOR_KEYS], self.visible(stretch, Piece(at, ANCHOR_KEYS, mask)))

    def values(self, cell: Cell) -> BFloat16[Array, "E F"]:
        """V^T of a cell's keys, turned once for all cells that have them."""
        place = cell.start, cell.size
        if place not in self.turned:
            v = self.site.refs.v[pl.ds(*place), :]
            keys_left = self.body.kind.keys - cell.start
            if keys_left < cell.size:
                # Memory beyond the last key may hold NaN, and 0 * NaN is NaN.
                is_key = lax.broadcasted_iota(jnp.int32, v.shape, 0) < keys_left
                v = jnp.where(is_key, v.astype(jnp.float32), 0.0).astype(jnp.bfloat16)
            self.turned[place] = v.T
        return self.turned[place]

    def add_values(self, weights: _Weights) -> None:
        """o += V^T P^T for one cell, and the end of the queries that are done with it."""
        acc, cell = self.site.refs.acc, weights.cell
        queries = lane_slice(cell.first, cell.width)
        product = tile.turned_values(self.values(cell), weights.p)
        if not cell.fresh:
            before = acc[:, queries]
            product += before if weights.factor is None else before * weights.factor
        acc[:, queries] = product
        self.finish(*cell.done)

    def finish(self, first: int, stop: int) -> None:
        """Divide and write queries first .. stop - 1, and keep where the final check fails."""
        for at in range(first, stop, _DIVIDED_AT_ONCE):
            self.failures.append(finish_queries(self.site, at, min(_DIVIDED_AT_ONCE, stop - at)))

    def finish_blind(self, cells: Sequence[Cell]) -> None:
        """Finish the queries that no cell has finished: none of their keys is in this body."""
        at = self.body.begin
        for first, stop in [*sorted(cell.done for cell in cells), (self.body.end, self.body.end)]:
            self.finish(at, first)
            at = max(at, stop)

    def check_sums(self) -> None:
        """The check between blocks."""
        exceeding = tile.exceeds_limit(self.site.refs.sums[...])
        inside = self.site.inside(0, self.site.schedule.block_q)
        self.failures.append(exceeding if inside is None else jnp.where(inside, exceeding, 0.0))

    def raise_flag(self) -> None:
        """Tell the steps that follow whether a check has failed."""
        if self.failures:
            self.site.refs.control[FLAG] = any_mark(*self.failures)
            self.failures.clear()


class _Depth(NamedTuple):
    """How many cells ahead of the weights scores are formed, and how many behind them values are added.

    A product can be used some 200 cycles after it was issued, and a cell of 256 x 256 takes the matrix units of a v6e
    128 cycles, 96 where heads are not wide.  More than is needed costs registers, the more the longer a softmax takes
    and the more keys a cell has.
    """

    ahead: int
    behind: int


def _depth(site: Site, cells: Sequence[Cell]) -> _Depth:
    """As modelled: docs/reading-a-schedule.md of the source tree."""
    wide = max(site.refs.q.shape[-1], site.refs.v.shape[-1]) > LANES
    if wide and site.spec.online:
        return _Depth(1, 2)
    by_queries = site.schedule.by_queries
    if wide and (by_queries or site.spec.rule.softcap is not None):
        return _Depth(1, 1)
    if by_queries:
        return _Depth(2, 3)
    few = max(Counter(cell.start for cell in cells).values(), default=0) <= _FEW_CELLS
    if any(cell.size > EDGE_FRAGMENT for cell in cells):
        return _Depth(2, 2) if few else _Depth(1, 1)
    return _Depth(2, MOST_BEHIND if few else 2)


def _with_registers(site: Site) -> Site:
    """The same where a query's state is kept as values."""
    acc = Registers(site.refs.v.shape[-1], 0.0)
    sums, anchor = Registers(tile.SUBLANES, 0.0), Registers(tile.SUBLANES, tile.UNSET)
    return dataclasses.replace(site, refs=site.refs._replace(acc=acc, sums=sums, anchor=anchor))


def emit(site: Site, body: Body) -> None:
    """One body."""
    cells = site.schedule.cells(body, site.spec.tiling.width)
    depth = _depth(site, cells)
    block = _Block(_with_registers(site) if site.schedule.by_queries else site, body)
    scored: deque[list[_Seen]] = deque()
    pending: deque[_Weights] = deque()
    for n, cell in enumerate(cells):
        scored.extend(block.score(each) for each in cells[n + len(scored) : n + 1 + depth.ahead])
        pending.append(block.softmax(cell, scored.popleft()))
        if len(pending) > depth.behind:
            block.add_values(pending.popleft())
    if not body.last and not site.spec.online:
        block.check_sums()
    if body.begin == body.end:
        block.raise_flag()  # the products that it need not wait for come after it
    while pending:
        block.add_values(pending.popleft())
    block.finish_blind(cells)
    block.raise_flag()

"""One unrolled body: a key block against a query block, softmax of fragment n beside the products of fragment n - 1.

The compiler keeps the order in which operations are emitted, and within one straight piece of code it overlaps what is
independent: the matrix unit works on V^T P^T of one fragment while the vector unit turns the scores of the next into
weights.  A body also divides the queries that see no later key, query by query as they are done, behind the products
that remain.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flywheel.attention import tile
from flywheel.attention.budget import LANES
from flywheel.attention.finish import any_mark, finish_queries
from flywheel.attention.schedule import Band, Piece
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
    from jaxtyping import Bool, Float32

    from flywheel.attention.schedule import Body, Fragment

_DIVIDED_AT_ONCE = 256
"""Queries whose o is divided and transposed at a time: a tile that stays in registers."""


_ENOUGH = 8 * 256 * 256
"""Scores: what follows a product can use its result some 200 cycles later, and 256 x 256 scores take the matrix units
64 to 128 cycles."""


class _Cell(NamedTuple):
    """Keys of one fragment against queries first .. first + width - 1: one product for scores, one for values."""

    fragment: Fragment
    first: int
    width: int

    @property
    def queries(self) -> Any:  # noqa: ANN401
        return lane_slice(self.first, self.width)


class _Stretch(NamedTuple):
    """Queries of a cell, first .. first + width - 1 of the block, that see the fragment's keys alike.

    Attributes:
        fragment: the keys.
        first: first query.
        width: queries.
        pieces: the keys in order, and what the queries see of them.
        adopting: some of the queries may see their first key here, and adopt an anchor.
    """

    fragment: Fragment
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


class _Weights(NamedTuple):
    """P of a cell as it enters the product, and the factor of what o was before (None: 1)."""

    cell: _Cell
    p: Array
    factor: Array | None


class _Group(NamedTuple):
    """Fragments that are emitted together, and their weights with whether each is the first of its queries."""

    numbers: Sequence[int]
    weights: list[tuple[_Weights, bool]]


@dataclasses.dataclass(frozen=True)
class _Block:
    """A body being emitted; see `emit`."""

    site: Site
    body: Body
    opening: bool
    fragments: tuple[Fragment, ...]
    failures: list[Array] = dataclasses.field(default_factory=list)

    def cells(self, fragment: Fragment) -> list[_Cell]:
        """The fragment's queries, no more at a time than the tiling says; a long stretch without a mask is on its own.

        Products are emitted one for each cell: where there is enough to do, more of them weave better.
        """
        width = self.site.spec.tiling.width
        cuts = [fragment.first, fragment.stop]
        if fragment.size * (fragment.clear_stop - fragment.clear_first) >= _ENOUGH:
            cuts += [fragment.clear_first, fragment.clear_stop]
        return [
            _Cell(fragment, first, min(width, stop - first))
            for begin, stop in itertools.pairwise(sorted(set(cuts)))
            for first in range(begin, stop, width)
        ]

    def stretches(self, cell: _Cell) -> list[_Stretch]:
        """A cell's queries, cut where masks and the search for anchors begin and end."""
        spec, fragment, kind = self.site.spec, cell.fragment, self.body.kind
        adopting = self.body_adopting(fragment)
        if spec.segments:
            # Ids mask everything, and are compared at once.
            whole = Piece(0, fragment.size, kind.within(fragment.start, fragment.size, cell.first, cell.width))
            return [_Stretch(fragment, cell.first, cell.width, (whole,), adopting=adopting < cell.first + cell.width)]
        found: list[_Stretch] = []
        for first in range(cell.first, cell.first + cell.width, LANES):
            pieces = self.site.schedule.pieces(kind, fragment, first, LANES)
            stretch = _Stretch(fragment, first, LANES, pieces, adopting=first >= adopting)
            last = found[-1] if found else stretch
            alike = (last.pieces, last.adopting) == (pieces, stretch.adopting)
            if found and alike and all(piece.mask is None or piece.mask.band == Band(None, None) for piece in pieces):
                stretch = found.pop()._replace(width=last.width + LANES)
            found.append(stretch)
        return found

    def body_adopting(self, fragment: Fragment) -> int:
        """From where on queries may see their first key in a fragment, where anchors are adopted at all."""
        spec = self.site.spec
        if spec.online or not spec.late_anchors:
            return fragment.stop
        return fragment.first if spec.segments else fragment.adopting

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
        """Keys' ids come on lanes and are needed on sublanes: one transpose per fragment."""
        refs, fragment = self.site.refs, stretch.fragment
        ids = key_ids_on_sublanes(refs.k_ids[0, :, pl.ds(fragment.start, fragment.size)], stretch.width)
        return ids == refs.q_ids[0, :, stretch.queries]

    def softmax(self, cell: _Cell, *, fresh: bool) -> _Weights:
        """Weights of a cell; adds them to the sums.  `fresh`: nothing was added to these queries before."""
        refs, spec = self.site.refs, self.site.spec
        keys = refs.k[pl.ds(cell.fragment.start, cell.fragment.size), :]
        s = spec.rule(tile.dot_products(keys, refs.q[cell.queries, :]))
        weights, factors = [], []
        for stretch in self.stretches(cell):
            lanes = slice(stretch.first - cell.first, stretch.first - cell.first + stretch.width)
            p, factor = self.stretch_weights(stretch, s[:, lanes], fresh=fresh)
            weights.append(p.astype(jnp.bfloat16))
            factors.append(factor)
        factor = None if fresh or not spec.online else jnp.concatenate(factors, axis=1)
        return _Weights(cell, jnp.concatenate(weights, axis=1), factor)

    def stretch_weights(
        self, stretch: _Stretch, s: Float32[Array, "F C"], *, fresh: bool
    ) -> tuple[Float32[Array, "F C"], Float32[Array, "1 C"] | None]:
        """Weights from scores, and the factor of what was summed before (None: 1)."""
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
        factor = None
        if spec.online:
            weights, factor = self.online(stretch, list(seen.values()))
        else:
            anchor = self.anchors(stretch, list(seen.values()), fresh=fresh)
            weights = [tile.weights(scores.s, anchor, scores.visible) for scores in seen.values()]
        sums = [tile.partial_sums(p) for p in weights]
        if not fresh:
            before = refs.sums[:, queries]
            sums.insert(0, before if factor is None else before * factor)
        refs.sums[:, queries] = sum(sums[1:], sums[0]) if sums else jnp.zeros_like(refs.sums[:, queries])
        computed = dict(zip(seen, weights, strict=True))
        blank = [computed.get(piece, jnp.zeros((piece.size, stretch.width), jnp.float32)) for piece in stretch.pieces]
        return jnp.concatenate(blank), factor

    def anchors(self, stretch: _Stretch, seen: Sequence[_Scores], *, fresh: bool) -> Float32[Array, "S C"]:
        """The queries' anchors, chosen or adopted here if they have none yet."""
        anchor = self.site.refs.anchor
        if stretch.adopting:
            adopted = anchor[:, stretch.queries]
            for scores in seen:
                adopted = tile.adopt_anchor(adopted, *scores)
            anchor[:, stretch.queries] = adopted
        elif fresh and not self.site.spec.late_anchors:
            # Every query that sees a key sees the first.
            chosen = jnp.full((1, stretch.width), tile.UNSET, jnp.float32)
            if seen:
                s, visible = seen[0]
                chosen = tile.choose_anchor(s[:ANCHOR_KEYS], None if visible is None else visible[:ANCHOR_KEYS])
            anchor[:, stretch.queries] = on_sublanes(chosen)
        return anchor[:, stretch.queries]

    def online(self, stretch: _Stretch, seen: Sequence[_Scores]) -> tuple[list[Array], Float32[Array, "1 C"]]:
        """Weights against the running maximum, which moves first, and the factor of what was summed before."""
        anchor = self.site.refs.anchor
        weights, shift, factor = tile.online_pieces(seen, anchor[:1, stretch.queries], late_bias=False)
        anchor[:, stretch.queries] = on_sublanes(shift)
        return weights, factor

    def add_values(self, weights: _Weights, fresh: bool) -> None:  # noqa: FBT001  a pair that was kept
        """o += V^T P^T for one cell."""
        refs, cell = self.site.refs, weights.cell
        v = refs.v[pl.ds(cell.fragment.start, cell.fragment.size), :]
        keys_left = self.body.kind.keys - cell.fragment.start
        if keys_left < cell.fragment.size:
            # Memory beyond the last key may hold NaN, and 0 * NaN is NaN.
            is_key = lax.broadcasted_iota(jnp.int32, v.shape, 0) < keys_left
            v = jnp.where(is_key, v.astype(jnp.float32), 0.0).astype(jnp.bfloat16)
        product = tile.weighted_values(v, weights.p)
        if not fresh:
            before = refs.acc[:, cell.queries]
            product += before if weights.factor is None else before * weights.factor
        refs.acc[:, cell.queries] = product

    def cells_of(self, numbers: Sequence[int]) -> list[tuple[_Cell, bool]]:
        """Cells of some fragments, and whether nothing was added to their queries before."""
        return [(cell, self.opening and n == 0) for n in numbers for cell in self.cells(self.fragments[n])]

    def step(self, group: _Group, pending: _Group | None) -> None:
        """Weights of a group's cells, woven with the products of the group before."""
        products = [] if pending is None else list(pending.weights)
        for cell, fresh in self.cells_of(group.numbers):
            group.weights.append((self.softmax(cell, fresh=fresh), fresh))
            if products:
                self.add_values(*products.pop(0))
        for each in products:
            self.add_values(*each)
        if pending is not None:
            self.conclude(pending)

    def conclude(self, group: _Group) -> None:
        """The end of the queries that are done with a group."""
        done = self.site.schedule.finished(self.body)
        for n in group.numbers:
            self.finish(*done[n])

    def drain(self, group: _Group) -> None:
        """The products of the last group."""
        for each in group.weights:
            self.add_values(*each)
        self.conclude(group)

    def finish(self, first: int, stop: int) -> None:
        """Divide and write queries first .. stop - 1, and keep where the final check fails."""
        for at in range(first, stop, _DIVIDED_AT_ONCE):
            self.failures.append(finish_queries(self.site, at, min(_DIVIDED_AT_ONCE, stop - at)))

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


def emit(site: Site, body: Body) -> None:
    """One body."""
    schedule = site.schedule
    block = _Block(site, body, body in schedule.opening, schedule.fragments(body.kind))
    pending: _Group | None = None
    for numbers in _groups(block.fragments):
        group = _Group(numbers, [])
        block.step(group, pending)
        pending = group
    if not body.last and not site.spec.online:
        block.check_sums()
    if body.begin == body.end:
        block.raise_flag()  # the products that it need not wait for come after it
    if pending is not None:
        block.drain(pending)
    else:
        block.finish(body.begin, body.end)
    block.raise_flag()


def _groups(fragments: Sequence[Fragment]) -> list[list[int]]:
    """Consecutive fragments that are emitted together, each group with enough products to hide another's latency."""
    groups: list[list[int]] = []
    work = _ENOUGH
    for n, fragment in enumerate(fragments):
        if work >= _ENOUGH:
            groups.append([])
            work = 0
        groups[-1].append(n)
        work += fragment.size * (fragment.stop - fragment.first)
    return groups

"""One unrolled body: a key block against a query block, softmax of fragment n beside the products of fragment n - 1.

The compiler keeps the order in which operations are emitted, and within one straight piece of code it overlaps what is
independent: the matrix unit works on V^T P^T of one fragment while the vector unit turns the scores of the next into
weights.  The last body of a query block also divides, query by query as they are done, behind the products that remain.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flywheel.attention import tile
from flywheel.attention.finish import any_mark, finish_queries
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
    """Queries of a cell, first .. first + width - 1 of the block, that are treated alike.

    Attributes:
        fragment: the keys.
        first: first query.
        width: queries.
        masked: some of them do not see some of the keys.
        adopting: some of them may see their first key here, and adopt an anchor.
    """

    fragment: Fragment
    first: int
    width: int
    masked: bool
    adopting: bool

    @property
    def queries(self) -> Any:  # noqa: ANN401
        return lane_slice(self.first, self.width)


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
    alone: bool
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
        spec, fragment = self.site.spec, cell.fragment
        end = cell.first + cell.width
        adopting = end
        if spec.late_anchors and not spec.online:
            adopting = cell.first if spec.segments else fragment.adopting
        inner = {n for n in (fragment.clear_first, fragment.clear_stop, adopting) if cell.first < n < end}
        return [
            _Stretch(
                fragment,
                first,
                stop - first,
                masked=spec.segments or not fragment.clear_first <= first < stop <= fragment.clear_stop,
                adopting=first >= adopting,
            )
            for first, stop in itertools.pairwise(sorted({cell.first, end} | inner))
        ]

    def visible(self, stretch: _Stretch) -> Bool[Array, "F C"] | None:
        """Which of the queries see which of the keys; None: all."""
        if not stretch.masked:
            return None
        start, size = stretch.fragment.start, stretch.fragment.size
        kind = self.body.kind
        keys = lax.broadcasted_iota(jnp.int32, (size, stretch.width), 0) + start
        rows = lax.broadcasted_iota(jnp.int32, (size, stretch.width), 1) + stretch.first
        visible = band_mask(kind.band, keys, rows)
        if start + size > kind.keys:
            visible = both(visible, keys < kind.keys)
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
        visible = self.visible(stretch)
        if spec.return_max_logit:
            refs.maxima[:, queries] = jnp.maximum(refs.maxima[:, queries], tile.partial_maxima(tile.hide(s, visible)))
        if spec.segments:
            assert visible is not None  # noqa: S101  segments mask every stretch
            refs.seen[:, queries] += tile.partial_sums(jnp.where(visible, 1.0, 0.0))
        factor = None
        if spec.online:
            p, factor = self.online(s, stretch, visible)
        else:
            if stretch.adopting:
                refs.anchor[:, queries] = tile.adopt_anchor(refs.anchor[:, queries], s, visible)
            elif fresh and not spec.late_anchors:
                few = slice(0, ANCHOR_KEYS)
                refs.anchor[:, queries] = on_sublanes(
                    tile.choose_anchor(s[few], None if visible is None else visible[few])
                )
            p = tile.weights(s, refs.anchor[:, queries], visible)
        sums = tile.partial_sums(p)
        if not fresh:
            before = refs.sums[:, queries]
            sums += before if factor is None else before * factor
        refs.sums[:, queries] = sums
        return p, factor

    def online(
        self, s: Float32[Array, "F C"], stretch: _Stretch, visible: Bool[Array, "F C"] | None
    ) -> tuple[Float32[Array, "F C"], Float32[Array, "1 C"]]:
        """Weights against the running maximum, which moves first."""
        anchor = self.site.refs.anchor
        p, shift, factor = tile.online_weights(s, anchor[:1, stretch.queries], visible, late_bias=False)
        anchor[:, stretch.queries] = on_sublanes(shift)
        return p, factor

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
        return [(cell, self.alone and n == 0) for n in numbers for cell in self.cells(self.fragments[n])]

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
        """The end of the queries that are done with a group, in a last body."""
        if self.body.last:
            done = self.site.schedule.finished(self.body.kind)
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
        """The check between blocks; the products that it need not wait for come after it."""
        exceeding = tile.exceeds_limit(self.site.refs.sums[...])
        inside = self.site.inside(0, self.site.schedule.block_q)
        marks = exceeding if inside is None else jnp.where(inside, exceeding, 0.0)
        self.site.refs.control[FLAG] = any_mark(marks)


def emit(site: Site, body: Body, *, alone: bool) -> None:
    """One body.  `alone`: all query blocks consist of one such body, and its first fragment concerns every query."""
    block = _Block(site, body, alone, site.schedule.fragments(body.kind))
    pending: _Group | None = None
    for numbers in _groups(block.fragments):
        group = _Group(numbers, [])
        block.step(group, pending)
        pending = group
    if not body.last and not site.spec.online:
        block.check_sums()
    if pending is not None:
        block.drain(pending)
    elif body.last:
        block.finish(0, site.schedule.block_q)
    if body.last:
        site.refs.control[FLAG] = any_mark(*block.failures)


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

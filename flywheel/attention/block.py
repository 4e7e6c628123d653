"""One unrolled body: a key block against a query block, softmax of fragment n beside the products of fragment n - 1.

The compiler keeps the order in which operations are emitted, and within one straight piece of code it overlaps what is
independent: the matrix unit works on V^T P^T of one fragment while the vector unit turns the scores of the next into
weights.  The last body of a query block also divides, query by query as they are done, behind the products that remain.
"""

from __future__ import annotations

import dataclasses
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
    """Keys of one fragment against queries first .. first + width - 1."""

    fragment: Fragment
    first: int
    width: int
    masked: bool

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
        """The fragment's queries in stretches with and without a mask, none wider than the tiling says."""
        width = self.site.spec.tiling.width
        stretches = (
            (fragment.first, fragment.clear_first, True),
            (fragment.clear_first, fragment.clear_stop, self.site.spec.segments),
            (fragment.clear_stop, fragment.stop, True),
        )
        return [
            _Cell(fragment, first, min(width, stop - first), masked)
            for begin, stop, masked in stretches
            for first in range(begin, stop, width)
        ]

    def visible(self, cell: _Cell) -> Bool[Array, "F C"] | None:
        """Which of the cell's queries see which of its keys; None: all."""
        if not cell.masked:
            return None
        start, size = cell.fragment.start, cell.fragment.size
        kind = self.body.kind
        keys = lax.broadcasted_iota(jnp.int32, (size, cell.width), 0) + start
        rows = lax.broadcasted_iota(jnp.int32, (size, cell.width), 1) + cell.first
        visible = band_mask(kind.band, keys, rows)
        if start + size > kind.keys:
            visible = both(visible, keys < kind.keys)
        if self.site.spec.segments:
            visible = both(visible, self.same_segment(cell))
        return visible

    def same_segment(self, cell: _Cell) -> Bool[Array, "F C"]:
        """Keys' ids come on lanes and are needed on sublanes: one transpose per fragment."""
        refs, fragment = self.site.refs, cell.fragment
        ids = key_ids_on_sublanes(refs.k_ids[0, :, pl.ds(fragment.start, fragment.size)], cell.width)
        return ids == refs.q_ids[0, :, cell.queries]

    def softmax(self, cell: _Cell, *, fresh: bool) -> _Weights:
        """Weights of a cell; adds them to the sums.  `fresh`: nothing was added to these queries before."""
        site, refs = self.site, self.site.refs
        spec, queries = site.spec, cell.queries
        keys = refs.k[0, 0, pl.ds(cell.fragment.start, cell.fragment.size), :]
        s = spec.rule(tile.dot_products(keys, refs.q[queries, :]))
        visible = self.visible(cell)
        if spec.return_max_logit:
            refs.maxima[:, queries] = jnp.maximum(refs.maxima[:, queries], tile.partial_maxima(tile.hide(s, visible)))
        if spec.segments:
            assert visible is not None  # noqa: S101  segments mask every cell
            refs.seen[:, queries] += tile.partial_sums(jnp.where(visible, 1.0, 0.0))
        factor = None
        if spec.online:
            p, factor = self.online(s, cell, visible)
        else:
            if spec.late_anchors:
                refs.anchor[:, queries] = tile.adopt_anchor(refs.anchor[:, queries], s, visible)
            elif fresh:
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
        return _Weights(cell, p.astype(jnp.bfloat16), None if fresh else factor)

    def online(
        self, s: Float32[Array, "F C"], cell: _Cell, visible: Bool[Array, "F C"] | None
    ) -> tuple[Float32[Array, "F C"], Float32[Array, "1 C"]]:
        """Weights against the running maximum, which moves first."""
        anchor = self.site.refs.anchor
        p, shift, factor = tile.online_weights(s, anchor[:1, cell.queries], visible, late_bias=False)
        anchor[:, cell.queries] = on_sublanes(shift)
        return p, factor

    def add_values(self, weights: _Weights, fresh: bool) -> None:  # noqa: FBT001  a pair that was kept
        """o += V^T P^T for one cell."""
        refs, cell = self.site.refs, weights.cell
        v = refs.v[0, 0, pl.ds(cell.fragment.start, cell.fragment.size), :]
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

"""The kernel: which body a step runs, and the order of things around the bodies.

The grid goes over units of heads.  Within one, a loop goes through the steps of a list that is as long as the lengths
demand (`walk.Walk`):

    for each block of queries:                        (`geometry.Record`, from scalar memory)
        a short sequence: one step for all heads of the unit
        else: for each head, for each window of keys, up to the diagonal: one step

Every step starts the copies of the next one, waits for its own, and runs the body that fits.  After the last window of
a block its rows are divided and sent to their places (`results.Writer`).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flywheel.attention import rotary
from flywheel.attention.budget import LANES
from flywheel.attention.finish import any_mark
from flywheel.ragged import loops
from flywheel.ragged.body import emit
from flywheel.ragged.results import Writer
from flywheel.ragged.spec import FLAG, RaggedSpec, Refs, Results, Site
from flywheel.ragged.walk import Walk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flywheel.ragged.geometry import Record
    from flywheel.ragged.walk import Place


class _Unit:
    """One unit of heads."""

    def __init__(self, spec: RaggedSpec, refs: Refs) -> None:
        self.spec, self.refs = spec, refs
        self.steps = Walk(spec, refs)
        self.results = Writer(spec, refs, self.steps.first_head)

    def short_site(self, at: Place, head: Any) -> Site:  # noqa: ANN401
        """A head of a short sequence."""
        refs, tiling = self.refs, self.spec.tiling
        lane = head * tiling.short if isinstance(head, int) else pl.multiple_of(head * tiling.short, tiling.short)
        group = min(self.spec.group, tiling.unit)
        kv = head // group if isinstance(head, int) else lax.div(head, jnp.int32(group))
        out = Results(refs.out_short.at[at.q_slot, head], lane)
        rotated = None if self.spec.rotary is None else refs.q_rotated.at[pl.ds(lane, tiling.short)]
        return Site(
            self.spec,
            refs._replace(out=out),
            at.record,
            self.steps.first_head + head,
            self.steps.first_kv + kv,
            refs.q_short.at[at.q_slot, head] if rotated is None else rotated,
            refs.k_short.at[at.kv_slot, kv],
            refs.v_short.at[at.kv_slot, kv],
            lane,
            fresh=True,
        )

    def long_site(self, at: Place) -> Site:
        """A head's block of a long sequence."""
        refs, record = self.refs, at.record
        return Site(
            self.spec,
            refs._replace(out=Results(refs.out_long.at[at.q_slot], 0)),
            record,
            self.steps.first_head + at.head,
            self.steps.first_kv + self.steps.kv_of(at.head),
            refs.q_long.at[at.q_slot] if self.spec.rotary is None else refs.q_rotated,
            refs.k_long.at[at.kv_slot],
            refs.v_long.at[at.kv_slot],
            0,
            at.window == record.begin,
        )

    def run(self, at: Place) -> None:
        """One step, its operands being there."""
        record = at.record
        pl.when(record.short == 1)(lambda: self.run_short(at, record))
        pl.when(record.short == 0)(lambda: self.run_long(at, record))

    def run_short(self, at: Place, record: Record) -> None:
        """All heads of the unit against the only window of a short sequence."""
        refs, spec, tiling = self.refs, self.spec, self.spec.tiling
        step = at.step
        sites = [self.short_site(at, n) for n in range(tiling.unit)]
        shape = "square" if spec.geometry.right is None else "diagonal"
        for site in sites:
            self.rotate(site, refs.q_short.at[at.q_slot, site.lane // tiling.short], at)
        for size, chosen in _classes(tiling.short_classes, jnp.maximum(record.stop, step.hi)):

            @pl.when(chosen)
            def _(size: int = size) -> None:
                for n in range(tiling.kv_unit):
                    loops.scrub(refs.v_short.at[at.kv_slot, n], step.lo, step.hi, size)
                alike = [dataclasses.replace(site, all_see=shape == "diagonal") for site in sites]
                emit(alike, step, shape, size)

        pl.when(refs.control[FLAG] != 0)(lambda: self.repair_short(at))
        self.results.write(at, record, sites, tiling.short)

    def repair_short(self, at: Place) -> None:
        """Replay the heads of a short sequence of which a check failed."""
        refs, tiling = self.refs, self.spec.tiling

        def one(n: Any, carry: Any) -> Any:  # noqa: ANN401
            site = self.short_site(at, n)
            marks = refs.failing[:, pl.ds(site.lane, tiling.short)]
            refs.control[FLAG] = any_mark(jnp.where(site.inside(site.lane, tiling.short), marks, 0.0))
            self.repair(site, at, n)
            return carry

        lax.fori_loop(0, tiling.unit, one, 0)

    def run_long(self, at: Place, record: Record) -> None:
        """One head against one window."""
        refs, tiling = self.refs, self.spec.tiling
        site = self.long_site(at)
        last, empty = at.window == record.end, record.first_key == record.stop_key
        diagonal = (record.diagonal == 1) & (at.window == 0)

        @pl.when(site.fresh)
        def _() -> None:
            refs.control[FLAG] = 0
            self.rotate(site, refs.q_long.at[at.q_slot], at)

        self.add(site, at, diagonal=diagonal, empty=empty)

        @pl.when(last)
        def _() -> None:
            pl.when(~diagonal & (refs.control[FLAG] == 0))(lambda: loops.finish(site))
            self.repair(site, at, at.head)
            self.results.write(at, record, [site], tiling.block)

    def add(self, site: Site, at: Place, *, diagonal: Any, empty: Any) -> None:  # noqa: ANN401
        """One window of keys, by the body that fits, unless a check has failed before."""
        refs, spec, tiling = self.refs, self.spec, self.spec.tiling
        record, step = at.record, at.step
        sound = refs.control[FLAG] == 0
        if spec.geometry.right is not None:
            for size, chosen in _classes(tiling.classes, record.stop):
                for fresh in (True, False):

                    @pl.when(sound & diagonal & chosen & (site.fresh == fresh))
                    def _(size: int = size, fresh: bool = fresh) -> None:  # noqa: FBT001
                        loops.scrub(site.v, step.lo, step.hi, size)
                        emit([dataclasses.replace(site, fresh=fresh, all_see=True)], step, "diagonal", size)

        for size, chosen in _classes(tiling.full_classes, record.stop):

            @pl.when(sound & (step.whole == 1) & ~diagonal & chosen)
            def _(size: int = size) -> None:
                loops.scrub(site.v, step.lo, step.hi, tiling.block)
                emit([site], step, "whole", size)

        @pl.when(sound & (step.whole == 0) & ~diagonal)
        def _() -> None:
            pl.when(site.fresh)(lambda: loops.clear(site))

            @pl.when(~empty)
            def _() -> None:
                tiles = lax.div(step.hi + jnp.int32(tiling.loop_tile - 1), jnp.int32(tiling.loop_tile))
                loops.scrub(site.v, step.lo, step.hi, tiles * tiling.loop_tile)
                loops.edge(site, step)

    def rotate(self, site: Site, q: Any, at: Place) -> None:  # noqa: ANN401
        """Rotated queries of one head, if the call asks for them."""
        refs, spec = self.refs, self.spec
        if spec.rotary is None:
            return
        count = LANES

        def one(n: Any, carry: Any) -> Any:  # noqa: ANN401
            rows = pl.multiple_of(n * count, count)
            table = pl.ds(rows, count)
            slot = at.block % 2
            site.q[table, :] = rotary.rotate(
                q[table, :],
                refs.cos_buffer[slot, table, :],
                refs.sin_buffer[slot, table, :],
                spec.rotary,  # type: ignore[arg-type]  not None here
            )
            return carry

        lax.fori_loop(0, lax.div(site.record.stop + jnp.int32(count - 1), jnp.int32(count)), one, 0)

    def repair(self, site: Site, at: Place, head: Any) -> None:  # noqa: ANN401
        """Replay a head's block whose flag is set, and report it."""
        refs = self.refs
        pl.when(refs.control[FLAG] != 0)(lambda: loops.replay(site))
        if self.spec.return_diagnostics:
            refs.replays[0, head, at.block] = refs.control[FLAG]

    def run_all(self) -> None:
        """All steps."""
        refs, steps = self.refs, self.steps
        count = refs.totals[0]
        self.results.begin()
        if self.spec.return_diagnostics:
            self.no_replays()
        place = steps.start()
        steps.fetch(place, "start")

        def one(n: Any, at: Place) -> Place:  # noqa: ANN401
            following = steps.following(at)
            steps.fetch(following, "start", n + 1 < count)
            steps.fetch(at, "wait")
            self.run(at)
            return following

        lax.fori_loop(0, count, one, place)
        self.results.move("wait")

    def no_replays(self) -> None:
        """Short sequences report replays only."""
        replays = self.refs.replays

        def one(block: Any, carry: Any) -> Any:  # noqa: ANN401
            for head in range(self.spec.tiling.unit):
                replays[0, head, block] = 0
            return carry

        lax.fori_loop(0, replays.shape[2], one, 0)


def _classes(sizes: Sequence[int], rows: Any) -> list[tuple[int, Any]]:  # noqa: ANN401
    """Each size with whether it is the smallest that holds the rows."""
    found, below = [], 0
    for size in sizes:
        found.append((size, (rows > below) & (rows <= size)))
        below = size
    return found


def kernel(spec: RaggedSpec, names: tuple[str, ...], *refs_in_order: Any) -> None:  # noqa: ANN401
    """The body of the call: the refs in order, with their names."""
    given = dict(zip(names, refs_in_order, strict=True))
    refs = Refs(**{name: given.get(name) for name in Refs._fields})
    _Unit(spec, refs).run_all()

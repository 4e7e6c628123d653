"""The kernel: memory spaces, the walk over blocks, and the order of things around the bodies.

The grid goes over units of heads.  Within one, a loop walks through a list that is as long as the lengths demand:

    for each block of queries:                        (`geometry.Record`, from scalar memory)
        a short sequence: one step for all heads of the unit
        else: for each head, for each window of keys, up to the diagonal: one step

Every step starts the copies of the next one, waits for its own, and runs the body that fits.  After the last window of
a block its rows are divided, the rows of earlier sequences in its first group are put back from the last group of the
block before (`flywheel.packing`), and its copy to the packed output starts when the one before has arrived.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flywheel.attention import rotary, tile
from flywheel.attention.budget import LANES
from flywheel.attention.finish import any_mark
from flywheel.attention.schedule import ROW_GRID
from flywheel.packing import GROUP
from flywheel.ragged import loops
from flywheel.ragged.body import emit
from flywheel.ragged.copies import Action, Transfer, Window
from flywheel.ragged.spec import (
    FLAG,
    KEYS,
    QUERIES,
    RESULTS,
    TABLES,
    RaggedSpec,
    Refs,
    Results,
    Site,
    read_record,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flywheel.ragged.geometry import Record, Step


_SLOTS = 2
"""Of every buffer: one is computed from while the other is filled."""

_ARRIVING = {"block": 1, "head": 2, "slot": 3}
"""Scalars of `Refs.control`: the block whose copy to the packed output was started last; its number is -1 before."""


class _Place(NamedTuple):
    """A place in the walk.

    Attributes:
        block: query block.
        head: head in the unit; 0 for short sequences.
        window: key window.
        q_slot: slot of the queries.
        kv_slot: slot of the keys.
        new_q: 1 if its queries are fetched for it.
        new_kv: 1 if its keys are.
        record: the block.
        step: the window.
    """

    block: Any
    head: Any
    window: Any
    q_slot: Any
    kv_slot: Any
    new_q: Any
    new_kv: Any
    record: Record
    step: Step


class _Fetches(NamedTuple):
    """The copies into VMEM of a step of a long sequence, or of a short one."""

    long: list[Transfer]
    short: list[Transfer]


class _Walk:
    """One unit of heads."""

    def __init__(self, spec: RaggedSpec, refs: Refs) -> None:
        self.spec, self.refs = spec, refs
        tiling = spec.tiling
        self.first_head = pl.program_id(0) * tiling.unit
        self.first_kv = lax.div(self.first_head, jnp.int32(spec.group))

    def record(self, block: Any) -> Record:  # noqa: ANN401
        return read_record(self.refs.records, block)

    def kv_of(self, head: Any) -> Any:  # noqa: ANN401
        """KV head in the unit of a query head in the unit."""
        return lax.div(self.first_head + head, jnp.int32(self.spec.group)) - self.first_kv

    def following(self, at: _Place) -> _Place:
        """The next step's place."""
        here = at.record
        same_head = (here.short == 0) & (at.window > here.end)
        same_block = (here.short == 0) & (same_head | (at.head < self.spec.tiling.unit - 1))
        block = jnp.where(same_block, at.block, at.block + 1)
        head = jnp.where(same_head, at.head, jnp.where(same_block, at.head + 1, 0))
        record = self.record(block)
        window = jnp.where(same_head, at.window - 1, record.begin)
        # Heads that share keys find the one window of a block, or its two in the two slots, where the first left them.
        windows = record.begin - record.end + 1
        first_of_kv = (head == 0) | (self.kv_of(head) != self.kv_of(head - 1))
        new_q, new_kv = ~same_head, ~same_block | first_of_kv | (windows > _SLOTS)
        return _Place(
            block,
            head,
            window,
            jnp.where(new_q, 1 - at.q_slot, at.q_slot),
            jnp.where(new_kv | (windows == _SLOTS), 1 - at.kv_slot, at.kv_slot),
            new_q.astype(jnp.int32),
            new_kv.astype(jnp.int32),
            record,
            self.spec.geometry.step(record, window),
        )

    def fetches(self, at: _Place, needed: Any = None) -> _Fetches:  # noqa: ANN401
        """The copies into VMEM that a step needs."""
        refs, tiling = self.refs, self.spec.tiling
        record, step = at.record, at.step
        new_q, new_kv = at.new_q == 1, at.new_kv == 1
        if needed is not None:
            new_q, new_kv = new_q & needed, new_kv & needed
        key_groups, first_key = (lax.div(n, jnp.int32(GROUP)) for n in (step.hi + (GROUP - 1), step.start))
        kv_head = self.first_kv + self.kv_of(at.head)
        sems = refs.sems

        def queries(source: Any, target: Any) -> list[Window]:  # noqa: ANN401
            return [Window(source, record.group, target.at[at.q_slot], 0)]

        def keys(k: Any, v: Any, heads: Any) -> list[Window]:  # noqa: ANN401
            pairs = ((refs.k_hbm, k), (refs.v_hbm, v))
            return [Window(hbm.at[heads], first_key, buffer.at[at.kv_slot], 0) for hbm, buffer in pairs]

        heads, kv_heads = pl.ds(self.first_head, tiling.unit), pl.ds(self.first_kv, tiling.kv_unit)
        q_sem, kv_sem = sems.at[QUERIES + at.q_slot], sems.at[KEYS + at.kv_slot]
        head = self.first_head + at.head
        long = [
            Transfer(queries(refs.q_hbm.at[head], refs.q_long), record.groups, q_sem, new_q),
            Transfer(keys(refs.k_long, refs.v_long, kv_head), key_groups, kv_sem, new_kv),
        ]
        short = [
            Transfer(queries(refs.q_hbm.at[heads], refs.q_short), record.groups, q_sem, new_q),
            Transfer(keys(refs.k_short, refs.v_short, kv_heads), key_groups, kv_sem, new_kv),
        ]
        if self.spec.rotary is not None:
            pairs = ((refs.cos_hbm, refs.cos_buffer), (refs.sin_hbm, refs.sin_buffer))
            tables = [Window(hbm, record.group, buffer.at[at.block % 2], 0) for hbm, buffer in pairs]
            copies = Transfer(tables, record.groups, sems.at[TABLES + at.block % 2], new_q & (at.head == 0))
            long.append(copies)
            short.append(copies)
        return _Fetches(long, short)

    def fetch(self, at: _Place, action: Action, needed: Any = None) -> None:  # noqa: ANN401
        """Start, or wait for, the copies of a step."""
        found = self.fetches(at, needed)
        whole = self.spec.whole_copies

        # One branch around copies of either kind: predicated one by one, those that are not made cost as much.
        @pl.when(at.record.short == 0)
        def _() -> None:
            for each in found.long:
                each.run(action, whole=whole)

        @pl.when(at.record.short == 1)
        def _() -> None:
            for each in found.short:
                each.run(action, whole=whole)

    def short_site(self, at: _Place, head: Any) -> Site:  # noqa: ANN401
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
            self.first_head + head,
            self.first_kv + kv,
            refs.q_short.at[at.q_slot, head] if rotated is None else rotated,
            refs.k_short.at[at.kv_slot, kv],
            refs.v_short.at[at.kv_slot, kv],
            lane,
            fresh=True,
        )

    def long_site(self, at: _Place) -> Site:
        """A head's block of a long sequence."""
        refs, record = self.refs, at.record
        return Site(
            self.spec,
            refs._replace(out=Results(refs.out_long.at[at.q_slot], 0)),
            record,
            self.first_head + at.head,
            self.first_kv + self.kv_of(at.head),
            refs.q_long.at[at.q_slot] if self.spec.rotary is None else refs.q_rotated,
            refs.k_long.at[at.kv_slot],
            refs.v_long.at[at.kv_slot],
            0,
            at.window == record.begin,
        )

    def run(self, at: _Place) -> None:
        """One step, its operands being there."""
        record = at.record
        pl.when(record.short == 1)(lambda: self.run_short(at, record))
        pl.when(record.short == 0)(lambda: self.run_long(at, record))

    def run_short(self, at: _Place, record: Record) -> None:
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
        self.write(at, record, sites, tiling.short)

    def repair_short(self, at: _Place) -> None:
        """Replay the heads of a short sequence of which a check failed."""
        refs, tiling = self.refs, self.spec.tiling

        def one(n: Any, carry: Any) -> Any:  # noqa: ANN401
            site = self.short_site(at, n)
            marks = refs.failing[:, pl.ds(site.lane, tiling.short)]
            refs.control[FLAG] = any_mark(jnp.where(site.inside(site.lane, tiling.short), marks, 0.0))
            self.repair(site, at, n)
            return carry

        lax.fori_loop(0, tiling.unit, one, 0)

    def run_long(self, at: _Place, record: Record) -> None:
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
            self.write(at, record, [site], tiling.block)

    def add(self, site: Site, at: _Place, *, diagonal: Any, empty: Any) -> None:  # noqa: ANN401
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

    def rotate(self, site: Site, q: Any, at: _Place) -> None:  # noqa: ANN401
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

    def repair(self, site: Site, at: _Place, head: Any) -> None:  # noqa: ANN401
        """Replay a head's block whose flag is set, and report it."""
        refs = self.refs
        pl.when(refs.control[FLAG] != 0)(lambda: loops.replay(site))
        if self.spec.return_diagnostics:
            refs.replays[0, head, at.block] = refs.control[FLAG]

    def write(self, at: _Place, record: Record, sites: Sequence[Site], most: int) -> None:
        """Put back the carried rows, keep the last group, and start the copy to the packed output."""
        refs = self.refs
        for site in sites:
            self.carry(record, site)
        for name in self.spec.row_values:
            for site in sites:
                self.place(record, site, name, most)
        self.move_results("wait")
        for name, value in (("block", at.block), ("head", at.head), ("slot", at.q_slot)):
            refs.control[_ARRIVING[name]] = value
        self.move_results("start")

    def move_results(self, action: Action) -> None:
        """Start the copy of a finished block to the packed output, or wait for it; there may have been none yet."""
        refs, tiling = self.refs, self.spec.tiling
        block, head, slot = (refs.control[_ARRIVING[name]] for name in ("block", "head", "slot"))
        record = self.record(jnp.maximum(block, 0))
        there, short = block >= 0, record.short == 1
        heads = pl.ds(self.first_head, tiling.unit)
        to_long = Window(refs.out_long.at[slot], 0, refs.out_hbm.at[self.first_head + head], record.group)
        to_short = Window(refs.out_short.at[slot], 0, refs.out_hbm.at[heads], record.group)
        semaphore = refs.sems.at[RESULTS]
        for window, needed in ((to_long, there & ~short), (to_short, there & short)):
            Transfer([window], record.groups, semaphore, needed).run(action, whole=self.spec.whole_copies)

    def carry(self, record: Record, site: Site) -> None:
        """Rows of the first group that are not the block's own, from the block before; and this block's last group."""
        refs = self.refs
        rows = site.refs.out.rows
        n = site.h - self.first_head
        top = pl.ds(0, ROW_GRID)
        mine = rows[top, :].astype(jnp.float32)
        before = refs.tails[n]
        row = lax.broadcasted_iota(jnp.int32, mine.shape, 0)
        kept = jnp.concatenate([before, before], axis=0)
        rows[top, :] = jnp.where(row < record.carried, kept, mine).astype(rows.dtype)
        end = record.groups - 1
        pair = lax.div(end, jnp.int32(2)) * ROW_GRID
        wide = rows[pl.ds(pl.multiple_of(pair, ROW_GRID), ROW_GRID), :].astype(jnp.float32)
        refs.tails[n] = jnp.where(lax.bitwise_and(end, jnp.int32(1)) == 1, wide[GROUP:], wide[:GROUP])

    def place(self, record: Record, site: Site, name: str, most: int) -> None:
        """A value per row, which lies on lanes, to its tokens: moved there by a rotation, and merged."""
        refs = self.refs
        values, rows = getattr(refs, name), getattr(refs, f"{name}_rows")
        first = record.group * GROUP
        base = pl.multiple_of(lax.div(first, jnp.int32(LANES)) * LANES, LANES)
        span = most + LANES
        block = values[0, 0, :, pl.ds(site.lane, most)]
        wide = jnp.concatenate([block, jnp.zeros((1, LANES), jnp.float32)], axis=1)
        moved = pltpu.roll(jnp.broadcast_to(wide, (tile.SUBLANES, span)), first - base, 1)[:1]
        lane = lax.broadcasted_iota(jnp.int32, (1, span), 1) - (first - base)
        own = (lane >= record.carried) & (lane < record.stop)
        n = site.h - self.first_head
        there = rows[0, n, :, pl.ds(base, span)]
        rows[0, n, :, pl.ds(base, span)] = jnp.where(own, moved, there)

    def walk(self) -> None:
        """All steps."""
        refs = self.refs
        refs.control[_ARRIVING["block"]] = -1
        steps = refs.totals[0]
        record = self.record(jnp.int32(0))
        first = self.spec.geometry.step(record, record.begin)
        zero, yes = jnp.int32(0), jnp.int32(1)
        place = _Place(zero, zero, record.begin, zero, zero, yes, yes, record, first)
        refs.tails[...] = jnp.zeros_like(refs.tails)
        if self.spec.return_diagnostics:
            self.no_replays()
        self.fetch(place, "start")

        def one(n: Any, at: _Place) -> _Place:  # noqa: ANN401
            following = self.following(at)
            more = n + 1 < steps
            self.fetch(following, "start", more)
            self.fetch(at, "wait")
            self.run(at)
            return following

        lax.fori_loop(0, steps, one, place)
        self.move_results("wait")

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
    _Walk(spec, refs).walk()

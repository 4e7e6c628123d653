"""From a block's results to their final places: the packed output in HBM, and the values per row in VMEM.

A block writes whole groups of 8 rows.  The rows of its first group that are not its own come from the last group of the
block before, which is the same group (`flywheel.packing`); so its copy to the packed output puts every row in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flywheel.attention import tile
from flywheel.attention.budget import LANES
from flywheel.attention.schedule import ROW_GRID
from flywheel.packing import GROUP
from flywheel.ragged.copies import Action, Transfer, Window
from flywheel.ragged.spec import RESULTS, RaggedSpec, Refs, Site, read_record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flywheel.ragged.geometry import Record
    from flywheel.ragged.walk import Place

_ARRIVING = {"block": 1, "head": 2, "slot": 3}
"""Scalars of `Refs.control`: the block whose copy to the packed output was started last; its number is -1 before."""


class Writer:
    """The results of one unit of heads."""

    def __init__(self, spec: RaggedSpec, refs: Refs, first_head: Any) -> None:  # noqa: ANN401
        self.spec, self.refs, self.first_head = spec, refs, first_head

    def begin(self) -> None:
        """Nothing has been written, and no group is carried."""
        self.refs.control[_ARRIVING["block"]] = -1
        self.refs.tails[...] = jnp.zeros_like(self.refs.tails)

    def write(self, at: Place, record: Record, sites: Sequence[Site], most: int) -> None:
        """Put back the carried rows, keep the last group, and start the copy to the packed output."""
        refs = self.refs
        for site in sites:
            self.carry(record, site)
        for name in self.spec.row_values:
            for site in sites:
                self.place(record, site, name, most)
        self.move("wait")
        for name, value in (("block", at.block), ("head", at.head), ("slot", at.q_slot)):
            refs.control[_ARRIVING[name]] = value
        self.move("start")

    def move(self, action: Action) -> None:
        """Start the copy of a finished block to the packed output, or wait for it; there may have been none yet."""
        refs, tiling = self.refs, self.spec.tiling
        block, head, slot = (refs.control[_ARRIVING[name]] for name in ("block", "head", "slot"))
        record = read_record(self.refs.records, jnp.maximum(block, 0))
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

"""First and last tiles of sequences: states in and out, rows that are not the sequence's own, rows shared by several.

All of it stands in branches that the tiles in a sequence's middle do not take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flywheel.gdn import moves
from flywheel.gdn.moves import PACKED
from flywheel.gdn.spec import HISTORY, LANES
from flywheel.gdn.tile import TILE
from flywheel.packing import GROUP

if TYPE_CHECKING:
    from flywheel.gdn.schedule import Plan
    from flywheel.gdn.spec import GdnSpec, Place, Refs


def own_stop(plan: Plan, block: Any) -> Any:  # noqa: ANN401  traced
    """One past the last row that belongs to a sequence: padding has none."""
    return jnp.where(plan.is_padding(block), 0, plan.field(block, "stop"))


def prepare_state(spec: GdnSpec, refs: Refs, plan: Plan, coming: Place, last: Place) -> None:
    """Have the states that the last stage begins with, a turn ahead where the buffer is free by then.

    With three groups or more, a group's buffer is neither in use by the stage nor being copied out when its next tile
    is a turn ahead of the last stage, `coming`; with two it may be copied out, with one it is in use.
    """
    if spec.groups <= 2:
        moves.settle(spec, refs, moves.STATE_OUT)
    ahead = spec.groups >= 2
    early = coming if ahead else last
    slot = plan.block_read_slot(early.block)

    @pl.when(early.live & (plan.field(early.block, "is_first") == 1) & (slot >= 0))
    def _() -> None:
        moves.state_in(spec, refs, slot, early).start()

    @pl.when(last.live & (plan.field(last.block, "is_first") == 1))
    def _() -> None:
        slot = plan.block_read_slot(last.block)

        @pl.when(slot >= 0)
        def _() -> None:
            moves.state_in(spec, refs, slot, last).wait()

        @pl.when(slot < 0)
        def _() -> None:
            refs.s[last.g] = jnp.zeros(refs.s.shape[1:], jnp.float32)


def prepare_rows(spec: GdnSpec, refs: Refs, plan: Plan, place: Place) -> None:
    """Zero a step's rows that are not the sequence's own, and put its convolution state before its first row."""
    stop, parity = own_stop(plan, place.block), place.block & 1
    groups = plan.field(place.block, "groups")

    @pl.when(stop < TILE)
    def _() -> None:
        for column, size, _at in spec.columns(place.g):
            lanes = moves.lanes(column, size)
            join_last(refs.x.at[parity, :, lanes], refs.x_last.at[parity, :, lanes], groups)
            for first in range(0, TILE, PACKED):

                @pl.when(stop < first + PACKED)
                def _(first: int = first, lanes: Any = lanes) -> None:  # noqa: ANN401
                    here = refs.x[parity, first : first + PACKED, lanes].astype(jnp.float32)
                    row = lax.broadcasted_iota(jnp.int32, here.shape, 0) + first
                    refs.x[parity, first : first + PACKED, lanes] = jnp.where(row < stop, here, 0.0).astype(
                        jnp.bfloat16
                    )

    @pl.when(plan.field(place.block, "is_first") == 1)
    def _() -> None:
        _begin_rows(spec, refs, plan, place)


def join_last(window: Any, last: Any, groups: Any) -> None:  # noqa: ANN401  refs, a traced int32
    """Put a window's single last group behind its pairs."""

    @pl.when((groups & 1) == 1)
    def _() -> None:
        here = last[...].astype(jnp.float32)
        tile = jnp.concatenate([here, jnp.zeros_like(here)], axis=0).astype(window.dtype)
        window[pl.ds(pl.multiple_of((groups >> 1) * PACKED, PACKED), PACKED), :] = tile


def _begin_rows(spec: GdnSpec, refs: Refs, plan: Plan, place: Place) -> None:
    """In FP32 rows, history before window: zeros up to the sequence's first row, the convolution state just before it.

    All channels in one branch each: a branch per channel would wait for its few loads.
    """
    carried, parity = plan.field(place.block, "carried"), place.block & 1
    slot = plan.block_read_slot(place.block)
    before = spec.width - 1
    channels = [(refs.rows.at[n], moves.lanes(c, LANES)) for n, c in enumerate(spec.channel_columns(place.g))]
    window = slice(HISTORY, HISTORY + PACKED)
    for rows, _ in channels:
        rows[:HISTORY] = jnp.zeros((HISTORY, LANES), jnp.float32)

    @pl.when(carried > 0)
    def _() -> None:
        for rows, lanes in channels:
            here = refs.x[parity, :PACKED, lanes].astype(jnp.float32)
            row = lax.broadcasted_iota(jnp.int32, here.shape, 0)
            rows[window] = jnp.where(row < carried, 0.0, here)

    @pl.when(slot >= 0)
    def _() -> None:
        for rows, lanes in channels:
            rows[pl.ds(HISTORY + carried - before, before), :] = refs.conv_in[parity, :, lanes].astype(jnp.float32)

    for n, (rows, _) in enumerate(channels):
        refs.history[place.g, :, n * LANES : (n + 1) * LANES] = rows[:HISTORY].astype(refs.history.dtype)

    @pl.when(carried > 0)
    def _() -> None:
        for rows, lanes in channels:
            refs.x[parity, :PACKED, lanes] = rows[window].astype(refs.x.dtype)


def keep_rows(spec: GdnSpec, refs: Refs, plan: Plan, place: Place) -> None:
    """Copy out the convolution state of a sequence that ends here: its last rows, state and tokens together."""
    slot = plan.block_write_slot(place.block)

    @pl.when((plan.field(place.block, "is_last") == 1) & (slot >= 0))
    def _() -> None:
        @pl.when(place.g == 0)
        def _() -> None:
            moves.settle(spec, refs, moves.CONV_OUT)

        before, stop = spec.width - 1, plan.field(place.block, "stop")
        for column, size, at in spec.columns(place.g):
            channels = range(at // LANES, (at + size) // LANES)
            last = [refs.rows[n, pl.ds(HISTORY + stop - before, before), :] for n in channels]
            kept = jnp.concatenate(last, axis=1).astype(refs.conv_out.dtype)
            refs.conv_out[:, moves.lanes(column, size)] = kept

        @pl.when(place.g == spec.groups - 1)
        def _() -> None:
            moves.conv_out(refs, slot).start()
            refs.flags[moves.CONV_OUT] = 1


def finish(spec: GdnSpec, refs: Refs, plan: Plan, place: Place) -> None:
    """Copy a tile's outputs to their rows once all heads have them, and final states to their slot, step by step."""

    @pl.when(place.g == spec.groups - 1)
    def _() -> None:
        _finish_rows(spec, refs, plan, place.block)

    moves.settle(spec, refs, moves.STATE_OUT)
    slot = plan.block_write_slot(place.block)

    @pl.when((plan.field(place.block, "is_last") == 1) & (slot >= 0))
    def _() -> None:
        moves.state_out(spec, refs, slot, place.g, place.g).start()
        refs.flags[moves.STATE_OUT] = 1


def _finish_rows(spec: GdnSpec, refs: Refs, plan: Plan, block: Any) -> None:  # noqa: ANN401
    """Take the window's first rows from what was written last, write it, and keep its last group for the next tile."""
    parity, groups, carried = block & 1, plan.field(block, "groups"), plan.field(block, "carried")
    o = refs.o.at[parity]

    @pl.when(plan.is_padding(block))
    def _() -> None:
        o[...] = jnp.zeros(o.shape, o.dtype)

    @pl.when(carried > 0)
    def _() -> None:
        here = o[:PACKED].astype(jnp.float32)
        earlier = jnp.concatenate([refs.tail[...]] * 2, axis=0)
        row = lax.broadcasted_iota(jnp.int32, here.shape, 0)
        o[:PACKED] = jnp.where(row < carried, earlier, here).astype(o.dtype)

    @pl.when((plan.field(block, "is_last") == 1) | ((groups & 1) == 1))
    def _() -> None:
        last = groups - 1
        tile = o[pl.ds(pl.multiple_of((last >> 1) * PACKED, PACKED), PACKED), :].astype(jnp.float32)
        refs.tail[...] = jnp.where((last & 1) == 1, tile[GROUP:], tile[:GROUP])
        refs.o_last[parity] = tile[:GROUP].astype(o.dtype)

    # Copies arrive in the order of blocks: neighbours write the group that they share.
    moves.settle(spec, refs, moves.OUT)
    moves.out(spec, refs, plan.row_group(block) * GROUP, groups, parity, start=True)
    refs.flags[moves.OUT] = groups

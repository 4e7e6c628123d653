"""Copies between HBM and VMEM: windows of qkv and gate logits ahead of their step, outputs and states behind it.

A window has whole 8-row groups (`flywheel.packing`).  A full one is a single copy; others are copies of power-of-two
sizes of pairs of groups, and one of a single group, which has a buffer of its own: a BF16 buffer in VMEM has tiles of
16 rows and is cut at these alone.  A copy is waited for by a descriptor of the same size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flywheel.gdn.spec import LANES
from flywheel.packing import GROUP, pieces

if TYPE_CHECKING:
    from collections.abc import Callable

    from flywheel.gdn.schedule import Plan
    from flywheel.gdn.spec import GdnSpec, Place, Refs

PACKED = 2 * GROUP
"""Rows of a register tile of BF16."""

OUT, CONV_OUT, STATE_OUT = 0, 1, 2
"""Flags: copies under way; of the outputs, how many groups."""


def window(groups: Any, most: int, copy: Callable[[Any, int], None], last: Callable[[Any], None]) -> None:  # noqa: ANN401
    """The pieces of a window: `copy(first row, rows)` for pairs of groups, `last(first row)` for a single one."""
    pairs, most_pairs = groups >> 1, most >> 1
    if most_pairs:

        @pl.when(pairs == most_pairs)
        def _() -> None:
            copy(0, most_pairs * PACKED)

        @pl.when(pairs < most_pairs)
        def _() -> None:
            for piece in pieces(pairs, most_pairs - 1):

                @pl.when(piece.present)
                def _(piece: Any = piece) -> None:  # noqa: ANN401
                    copy(pl.multiple_of(piece.start * PACKED, PACKED), piece.groups * PACKED)

    @pl.when((groups & 1) == 1)
    def _() -> None:
        last(pl.multiple_of((groups - 1) * GROUP, GROUP))


def rows(first: Any, count: int) -> Any:  # noqa: ANN401
    """Rows from a multiple of GROUP on."""
    return pl.ds(first if isinstance(first, int) else pl.multiple_of(first, GROUP), count)


def lanes(first: Any, count: int) -> Any:  # noqa: ANN401
    """Lanes from a multiple of LANES on."""
    return pl.ds(first if isinstance(first, int) else pl.multiple_of(first, LANES), count)


def _do(copy: Any, *, start: bool) -> None:  # noqa: ANN401
    if start:
        copy.start()
    else:
        copy.wait()


def fetch(spec: GdnSpec, refs: Refs, plan: Plan, block: Any, *, start: bool) -> None:  # noqa: ANN401
    """Start, or wait for, what a tile reads: all heads at once, few copies for the scalar unit to issue."""
    row, parity = plan.row_group(block) * GROUP, block & 1
    arrays = ((refs.qkv, refs.x, refs.x_last), (refs.b, refs.b_in, refs.b_last), (refs.a, refs.a_in, refs.a_last))

    def copy(first: Any, count: int) -> None:  # noqa: ANN401
        for whole, here, _ in arrays:
            source, target = whole.at[rows(row + first, count)], here.at[parity, rows(first, count)]
            _do(pltpu.make_async_copy(source, target, refs.x_sem.at[parity]), start=start)

    def last(first: Any) -> None:  # noqa: ANN401
        for whole, _, here in arrays:
            source = whole.at[rows(row + first, GROUP)]
            _do(pltpu.make_async_copy(source, here.at[parity], refs.x_sem.at[parity]), start=start)

    window(plan.field(block, "groups"), spec.window_groups, copy, last)
    slot = plan.block_read_slot(block)

    @pl.when((plan.field(block, "is_first") == 1) & (slot >= 0))
    def _() -> None:
        _do(pltpu.make_async_copy(refs.conv.at[slot], refs.conv_in.at[parity], refs.conv_sem.at[parity]), start=start)


def state_in(spec: GdnSpec, refs: Refs, slot: Any, place: Place) -> Any:  # noqa: ANN401
    """The copy of a group's initial states."""
    source = refs.state.at[slot, pl.ds(place.g * spec.values, spec.values)]
    return pltpu.make_async_copy(source, refs.s.at[place.g], refs.state_sem.at[place.parity])


def state_out(spec: GdnSpec, refs: Refs, slot: Any, g: Any, from_group: Any) -> Any:  # noqa: ANN401
    """The copy of a group's final states."""
    target = refs.state.at[slot, pl.ds(g * spec.values, spec.values)]
    return pltpu.make_async_copy(refs.s.at[from_group], target, refs.state_out_sem)


def conv_out(refs: Refs, slot: Any) -> Any:  # noqa: ANN401
    """The copy of a sequence's final convolution state."""
    return pltpu.make_async_copy(refs.conv_out, refs.conv.at[slot], refs.conv_out_sem)


def out(spec: GdnSpec, refs: Refs, row: Any, groups: Any, parity: Any, *, start: bool) -> None:  # noqa: ANN401
    """Start, or wait for, the copy of a tile's outputs."""

    def copy(first: Any, count: int) -> None:  # noqa: ANN401
        source = refs.o.at[parity, rows(first, count)]
        _do(pltpu.make_async_copy(source, refs.out.at[rows(row + first, count)], refs.out_sem), start=start)

    def last(first: Any) -> None:  # noqa: ANN401
        source = refs.o_last.at[parity]
        _do(pltpu.make_async_copy(source, refs.out.at[rows(row + first, GROUP)], refs.out_sem), start=start)

    window(groups, spec.window_groups, copy, last)


def settle(spec: GdnSpec, refs: Refs, flag: int) -> None:
    """Wait for what may be under way; slots and places do not matter, sizes do."""
    pending = refs.flags[flag]

    @pl.when(pending > 0)
    def _() -> None:
        if flag == CONV_OUT:
            conv_out(refs, 0).wait()
        elif flag == STATE_OUT:
            state_out(spec, refs, 0, 0, 0).wait()
        else:
            out(spec, refs, 0, pending, 0, start=False)

        refs.flags[flag] = 0


def begin(spec: GdnSpec, refs: Refs, plan: Plan) -> None:
    """Clear the flags, and hand on the states of sequences without tokens."""
    for flag in (OUT, CONV_OUT, STATE_OUT):
        refs.flags[flag] = 0

    def hand_on(condition: Any, source: Any, target: Any) -> None:  # noqa: ANN401
        @pl.when(condition)
        def _() -> None:
            _hand_on(spec, refs, source, target)

    plan.each_empty(hand_on)


def _hand_on(spec: GdnSpec, refs: Refs, source: Any, target: Any) -> None:  # noqa: ANN401
    @pl.when(source < 0)
    def _() -> None:
        refs.s[spec.groups] = jnp.zeros(refs.s.shape[1:], jnp.float32)
        refs.conv_out[...] = jnp.zeros(refs.conv_out.shape, refs.conv_out.dtype)

    @pl.when(source >= 0)
    def _() -> None:
        _there_and_back(pltpu.make_async_copy(refs.conv.at[source], refs.conv_out, refs.conv_sem.at[0]))

    _there_and_back(conv_out(refs, target))

    def group(g: Any, carry: Any) -> Any:  # noqa: ANN401
        @pl.when(source >= 0)
        def _() -> None:
            heads = refs.state.at[source, pl.ds(g * spec.values, spec.values)]
            _there_and_back(pltpu.make_async_copy(heads, refs.s.at[spec.groups], refs.state_sem.at[0]))

        _there_and_back(state_out(spec, refs, target, g, spec.groups))
        return carry

    lax.fori_loop(0, spec.groups, group, 0)


def _there_and_back(copy: Any) -> None:  # noqa: ANN401
    copy.start()
    copy.wait()


def end(spec: GdnSpec, refs: Refs) -> None:
    """Wait for everything that is under way."""
    for flag in (OUT, CONV_OUT, STATE_OUT):
        settle(spec, refs, flag)

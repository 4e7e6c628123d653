"""The order of steps in a unit of heads, and the copies into VMEM that each needs.

The steps come from the list of blocks in scalar memory (`geometry.Record`), so that their number is what the lengths
demand.  A step's copies start while the one before it computes; what is in a slot already is not copied again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flywheel.packing import GROUP
from flywheel.ragged.copies import Action, Transfer, Window
from flywheel.ragged.spec import KEYS, QUERIES, TABLES, RaggedSpec, Refs, read_record

if TYPE_CHECKING:
    from flywheel.ragged.geometry import Record, Step

_SLOTS = 2
"""Of every buffer: one is computed from while the other is filled."""


class Place(NamedTuple):
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


class Walk:
    """The steps of one unit of heads.

    Attributes:
        first_head: the unit's first query head.
        first_kv: the KV head that it reads.
    """

    def __init__(self, spec: RaggedSpec, refs: Refs) -> None:
        self.spec, self.refs = spec, refs
        self.first_head = pl.program_id(0) * spec.tiling.unit
        self.first_kv = lax.div(self.first_head, jnp.int32(spec.group))

    def start(self) -> Place:
        """The first step's place; its operands are not fetched yet."""
        record = self.record(jnp.int32(0))
        zero, yes = jnp.int32(0), jnp.int32(1)
        step = self.spec.geometry.step(record, record.begin)
        return Place(zero, zero, record.begin, zero, zero, yes, yes, record, step)

    def record(self, block: Any) -> Record:  # noqa: ANN401
        """A block of queries, from scalar memory."""
        return read_record(self.refs.records, block)

    def kv_of(self, head: Any) -> Any:  # noqa: ANN401
        """KV head in the unit of a query head in the unit."""
        return lax.div(self.first_head + head, jnp.int32(self.spec.group)) - self.first_kv

    def following(self, at: Place) -> Place:
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
        return Place(
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

    def fetches(self, at: Place, needed: Any = None) -> _Fetches:  # noqa: ANN401
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

    def fetch(self, at: Place, action: Action, needed: Any = None) -> None:  # noqa: ANN401
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

"""Blocks of q, k and v, fetched by the kernel itself more than one grid step ahead.

Pallas' own pipeline asks for the next step's blocks when a step begins and waits for them when it ends.  Where a step
is shorter than the copies of the next, as for a head of 1024 tokens or in a window, every step then waits out the
latency of the memory with nothing else on the way.  Here the blocks of the step after the next are asked for as well,
so that one copy follows another.  What is fetched, and the results, are the same.

Copies of a kind go round `lookahead` + 1 slots: those of a step and of the steps ahead of it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flywheel.attention.spec import KV_HERE, KV_NEXT, Q_HERE, Q_NEXT, CallSpec, Refs

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax import Array
    from jaxtyping import Bool


class Place(NamedTuple):
    """A grid step."""

    b: Any
    h: Any
    n: Any


@dataclasses.dataclass(frozen=True)
class Fetcher:
    """The copies of one call.

    Attributes:
        spec: the static call.
        batch: batch entries.
        heads: query heads.
        q_index: which block of q a step reads, as in a BlockSpec.
        kv_index: which block of k and v.
        field: a field of a packed step.
    """

    spec: CallSpec
    batch: int
    heads: int
    q_index: Callable[..., tuple[Any, ...]]
    kv_index: Callable[..., tuple[Any, ...]]
    field: Callable[[Any, str], Any]

    @property
    def slots(self) -> int:
        """Buffers of each kind."""
        return self.spec.tiling.lookahead + 1

    def arrive(self, refs: Refs, here: Place) -> Refs:
        """Ask for what a later step needs, wait for what this one needs; the refs with its blocks."""
        first = (here.b == 0) & (here.h == 0) & (here.n == 0)

        @pl.when(first)
        def _() -> None:
            for counter in (Q_NEXT, Q_HERE, KV_NEXT, KV_HERE):
                refs.control[counter] = self.slots - 1

        far = here
        for _step in range(self.spec.tiling.lookahead):
            far = self._after(far)
        # The first step asks for its own blocks too, and for those of the steps between.
        begin = Place(*(jnp.where(first, near, later) for near, later in zip(here, far, strict=True)))
        lax.fori_loop(0, jnp.where(first, self.slots, 1), lambda _, place: self._start(refs, place), begin)

        @pl.when(self._new_queries(refs, here))
        def _() -> None:
            self._q_copy(refs, here, self._advance(refs, Q_HERE)).wait()

        @pl.when(self._new_keys(refs, here))
        def _() -> None:
            for copy in self._kv_copies(refs, here, self._advance(refs, KV_HERE)):
                copy.wait()

        q_slot, kv_slot = refs.control[Q_HERE], refs.control[KV_HERE]
        return refs._replace(
            q_in=refs.q_slots.at[q_slot],
            k=refs.k_slots.at[kv_slot],
            v=refs.v_slots.at[kv_slot],
        )

    def _start(self, refs: Refs, place: Place) -> Place:
        """Ask for the blocks of a step, if there is such a step; the step after it."""

        @pl.when((place.b < self.batch) & self._new_queries(refs, place))
        def _() -> None:
            self._q_copy(refs, place, self._advance(refs, Q_NEXT)).start()

        @pl.when((place.b < self.batch) & self._new_keys(refs, place))
        def _() -> None:
            for copy in self._kv_copies(refs, place, self._advance(refs, KV_NEXT)):
                copy.start()

        return self._after(place)

    def _after(self, place: Place) -> Place:
        """The next grid step; the first beyond the last has b == batch."""
        n = place.n + 1
        head_ended = n == len(self.spec.schedule.steps)
        h = jnp.where(head_ended, place.h + 1, place.h)
        entry_ended = h == self.heads
        return Place(
            jnp.where(entry_ended, place.b + 1, place.b),
            jnp.where(entry_ended, 0, h),
            jnp.where(head_ended, 0, n),
        )

    def _new_queries(self, refs: Refs, place: Place) -> Bool[Array, ""]:
        return self.field(refs.steps[place.n], "first") == 1

    def _new_keys(self, refs: Refs, place: Place) -> Bool[Array, ""]:
        """Whether the step reads another key block than the step before: heads of a group may share theirs."""
        moved = self.field(refs.steps[place.n], "moved") == 1
        return moved | ((place.n == 0) & (lax.rem(place.h, jnp.int32(self.spec.group)) == 0))

    def _advance(self, refs: Refs, counter: int) -> Any:  # noqa: ANN401  an int32
        """The next slot of a kind."""
        slot = refs.control[counter] + 1
        slot = jnp.where(slot == self.slots, 0, slot)
        refs.control[counter] = slot
        return slot

    def _q_copy(self, refs: Refs, place: Place, slot: Any) -> Any:  # noqa: ANN401
        index = self.q_index(*place, refs.steps)
        return _copy(refs.q_hbm, index, self.spec.schedule.block_q, refs.q_slots, slot, refs.fetch_sems.at[0, slot])

    def _kv_copies(self, refs: Refs, place: Place, slot: Any) -> list[Any]:  # noqa: ANN401
        index = self.kv_index(*place, refs.steps)
        pairs = ((refs.k_hbm, refs.k_slots), (refs.v_hbm, refs.v_slots))
        stride = self.spec.schedule.stride
        return [
            _copy(hbm, index, stride, slots, slot, refs.fetch_sems.at[n, slot])
            for n, (hbm, slots) in enumerate(pairs, 1)
        ]


def _copy(hbm: Any, index: tuple[Any, ...], stride: int, slots: Any, slot: Any, sem: Any) -> Any:  # noqa: ANN401
    """Blocks may overlap: one begins every `stride` tokens."""
    b, h, block, _ = index
    tokens = pl.ds(pl.multiple_of(block * stride, stride), slots.shape[1])
    return pltpu.make_async_copy(hbm.at[b, h, tokens, :], slots.at[slot], sem)

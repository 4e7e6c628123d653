"""The list of tiles: made and read by the kernel's scalar unit, from the caller's bounds and slots.

A call's tiles are the blocks of `flywheel.packing`, padding included, each of which goes through all groups of heads
before the next: step n is block n // groups, group n % groups.  XLA would take a dozen small operations for the list,
some ten microseconds; the scalar unit takes some fifty cycles per block.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from flywheel.packing import GROUP, snap

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax import Array
    from jaxtyping import Bool, Int32

    from flywheel.packing import Packing

NOWHERE = -1
"""Slot of a sequence that starts from zeros, or whose state is not kept."""

MOST_TOKENS = 2**21
"""Tokens of one call: their blocks take 320 KiB of the MiB of scalar memory."""

_WORDS = 5
_FIELDS = {"carried": 3, "stop": 8, "groups": 5, "is_first": 1, "is_last": 1}
"""Bits of a block's packed word."""


def sequences_operand(
    starts: Int32[Array, " sequences_plus_1"],
    read_slots: Int32[Array, " sequences"],
    write_slots: Int32[Array, " sequences"],
    has_initial: Bool[Array, " sequences"],
) -> Int32[Array, " words"]:
    """What the kernel is told of the sequences, in one array: one copy to scalar memory."""
    return jnp.concatenate([starts, read_slots, write_slots, has_initial.astype(jnp.int32)])


def words(packing: Packing) -> int:
    """Scalar memory of the list."""
    return 1 + _WORDS * max(packing.max_blocks, 1)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Makes and reads the list.

    Attributes:
        packing: static sizes.
        tokens: of the caller, without what was filled up to a multiple of 8.
        slots: of the caches.
        given: `sequences_operand`, in SMEM.
        ref: the list, in SMEM: the number of blocks, then five words for each.
    """

    packing: Packing
    tokens: int
    slots: int
    given: Any
    ref: Any

    def fill(self) -> None:
        """Make the list."""
        count = self.packing.sequences

        def sequence(number: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:  # noqa: ANN401
            at, begin = carry
            end = self._bound(number + 1, begin)
            return self._stretch(at, begin, end, number), end

        first = self._bound(0, 0)
        at = self._stretch(jnp.int32(0), jnp.int32(0), first, jnp.int32(count))
        at, end = lax.fori_loop(0, count, sequence, (at, first))
        self.ref[0] = self._stretch(at, end, jnp.int32(self.packing.tokens), jnp.int32(count))

    def _bound(self, number: Any, least: Any) -> Any:  # noqa: ANN401
        """As `packing.clean`: bounds never fall and stay within the tokens."""
        return jnp.maximum(jnp.minimum(self.given[number], self.tokens), least)

    def _stretch(self, at: Any, begin: Any, end: Any, sequence: Any) -> Any:  # noqa: ANN401
        """Append the blocks of rows begin .. end - 1; returns where the next ones go."""
        size = self.packing.block
        origin = snap(begin)
        blocks = jnp.where(end > begin, lax.div(end - origin + (size - 1), jnp.int32(size)), 0)
        read, write = self.read_slot(sequence), self.write_slot(sequence)

        def one(index: Any, carry: Any) -> Any:  # noqa: ANN401
            window = origin + index * size
            stop = jnp.minimum(window + size, end) - window
            fields = {
                "carried": jnp.where(index == 0, begin - origin, 0),
                "stop": stop,
                "groups": lax.shift_right_logical(stop + (GROUP - 1), 3),
                "is_first": jnp.where(index == 0, 1, 0),
                "is_last": jnp.where(index == blocks - 1, 1, 0),
            }
            word, shift = jnp.int32(0), 0
            for name, bits in _FIELDS.items():
                word, shift = word | (fields[name] << shift), shift + bits
            base = 1 + _WORDS * (at + index)
            for n, value in enumerate((lax.shift_right_logical(window, 3), word, sequence, read, write)):
                self.ref[base + n] = value
            return carry

        lax.fori_loop(0, blocks, one, 0)
        return at + blocks

    @property
    def count(self) -> Any:  # noqa: ANN401  a traced int32
        """Blocks in use."""
        return self.ref[0]

    def _word(self, block: Any, which: int) -> Any:  # noqa: ANN401
        return self.ref[1 + _WORDS * block + which]

    def row_group(self, block: Any) -> Any:  # noqa: ANN401
        """First 8-row group of a block's window."""
        return self._word(block, 0)

    def field(self, block: Any, name: str) -> Any:  # noqa: ANN401
        """`carried`, `stop`, `groups`, `is_first` or `is_last` of a block (`packing.Blocks`)."""
        word, shift = self._word(block, 1), 0
        for each, bits in _FIELDS.items():
            if each == name:
                return lax.shift_right_logical(word, jnp.int32(shift)) & jnp.int32(2**bits - 1)
            shift += bits
        raise KeyError(name)

    def is_padding(self, block: Any) -> Any:  # noqa: ANN401
        """Whether a block's rows belong to no sequence."""
        return self._word(block, 2) == self.packing.sequences

    def block_read_slot(self, block: Any) -> Any:  # noqa: ANN401
        """Slot of the initial state of a block's sequence; NOWHERE: zeros."""
        return self._word(block, 3)

    def block_write_slot(self, block: Any) -> Any:  # noqa: ANN401
        """Slot of the final state of a block's sequence; NOWHERE: it is not kept."""
        return self._word(block, 4)

    def read_slot(self, sequence: Any) -> Any:  # noqa: ANN401
        """Slot of a sequence's initial state; NOWHERE: zeros."""
        flag = self._of(sequence, 2 * self.packing.sequences)
        return jnp.where(flag > 0, self._slot(sequence, 0), NOWHERE)

    def write_slot(self, sequence: Any) -> Any:  # noqa: ANN401
        """Slot of a sequence's final state; NOWHERE: it is not kept."""
        return self._slot(sequence, self.packing.sequences)

    def _slot(self, sequence: Any, offset: int) -> Any:  # noqa: ANN401
        slot = self._of(sequence, offset)
        return jnp.where((slot >= 0) & (slot < self.slots), slot, NOWHERE)

    def _of(self, sequence: Any, offset: int) -> Any:  # noqa: ANN401
        """An entry of a sequence; NOWHERE for padding, which is none."""
        count = self.packing.sequences
        inside = jnp.minimum(sequence, count - 1) if count else 0
        return jnp.where(sequence < count, self.given[count + 1 + offset + inside], NOWHERE) if count else NOWHERE

    def each_empty(self, act: Callable[[Any, Any, Any], None]) -> None:
        """`act(condition, read slot, write slot)` on sequences; the condition holds for those that hand a state on."""

        def sequence(number: Any, begin: Any) -> Any:  # noqa: ANN401
            end = self._bound(number + 1, begin)
            read, write = self.read_slot(number), self.write_slot(number)
            act((end == begin) & (write >= 0) & (write != read), read, write)
            return end

        lax.fori_loop(0, self.packing.sequences, sequence, self._bound(0, 0))

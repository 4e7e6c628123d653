"""What an execution of a scalar program is told, and what it gives."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verify.compiled.dma import DmaEngine


class Assume(enum.Enum):
    """What the vector unit tells the scalar unit: a maximum, a flag, whatever a kernel decides on at run time."""

    NOTHING = "unknown"
    """It is not known: a branch on it stops the run."""
    ZERO = "zero"
    """Zero, or false: no check of the kernel finds anything, the usual path of a kernel with a rare repair."""
    ONE = "one"
    """One, or true: every check finds something, the other extreme."""


class UnknownBranchError(Exception):
    """A branch depends on a value that is not known here."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What one execution did.

    Attributes:
        visits: how often each block was executed, by the address of its first bundle.
        issue_cycles: bundles issued: cycles without DMA waits. None if the run stopped.
        dma: the copies, and the waits for them.
        skipped: how often an instruction was issued with a predicate that failed, by address and opcode: compilers move
            instructions of a conditional region into the delay slots of the branch around it.
        assumed: how often a value from the vector unit was assumed, by address of the instruction that brings it.
        stopped: why the run did not reach the end, or None.
        unmodelled: opcodes without a meaning here, and how many instructions had them; their results were unknown.
    """

    visits: Mapping[int, int]
    issue_cycles: int | None
    dma: DmaEngine
    skipped: Mapping[tuple[int, str], int]
    assumed: Mapping[int, int]
    stopped: str | None
    unmodelled: Mapping[str, int]

    @property
    def cycles(self) -> float | None:
        """Issue cycles and DMA waits; None if the run stopped."""
        return None if self.issue_cycles is None else self.issue_cycles + self.dma.stall_cycles

"""One thing to judge: a case of some operation, a kernel that is asked, and the command that asks it again."""

from __future__ import annotations

import dataclasses
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fuzz.case import Inputs

ATTENTION, LAYER, INVERSE = "attention", "gated_delta_net", "triangular_inverse"
"""What a record's `operation` says."""

FLYWHEEL = "flywheel.attention"
"""As in `verify.subjects.registry`, which imports JAX: the process that plans does not need it."""


@dataclasses.dataclass(frozen=True)
class Item:
    """One thing to judge.

    Attributes:
        family: see `verify.records`.
        name: the case's name, or that of the trace's problem or of the open case.
        interpret: which interpret mode of Pallas, "fast" or "tpu".
        case: what to build; None for a problem of the committed trace and for an open case, which are built by name.
        group: items of one group share their compiled kernel.
        subject: name of the kernel that is asked.
        operation: what it computes.
        weight: what the group's compilation costs, in those of the attention kernel.
    """

    family: str
    name: str
    interpret: str
    case: Inputs | None
    group: str
    subject: str = FLYWHEEL
    operation: str = ATTENTION
    weight: float = 1.0

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Names the item in a plan and in its record."""
        return (self.subject, self.family, self.name, self.interpret)

    @property
    def reproduce(self) -> str:
        """The command that judges it again."""
        mode = "" if self.interpret == "fast" else f"--interpret {self.interpret} "
        subject = "" if self.subject == FLYWHEEL else f"--subject {shlex.quote(self.subject)} "
        end_of_options = "-- " if self.name.startswith("-") else ""
        return f"uv run python -m reports case {mode}{subject}{end_of_options}{shlex.quote(self.name)}"

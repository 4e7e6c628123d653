"""What a tool said about a lemma's formal counterpart."""

from __future__ import annotations

import dataclasses
import enum


class Tool(enum.StrEnum):
    """A tool that may be missing on a machine; what a lemma claims never depends on which are there."""

    COQ = "coq"
    GAPPA = "gappa"


class Outcome(enum.StrEnum):
    """A tool's word on one counterpart.  That it was not there to be asked is neither of the others."""

    CHECKED = "checked"
    FAILED = "failed"
    NOT_CHECKED = "not checked here"


@dataclasses.dataclass(frozen=True)
class Report:
    """One counterpart, as one tool found it.

    Attributes:
        tool: who was asked.
        outcome: what it said.
        finding: what was established, or the first thing that went wrong, one line.
        seconds: how long the tool took; 0 where an earlier result stands.
        axioms: what the theorems rest on beyond Coq's logic, by their full names.
        earlier: whether the result comes from the cache.
    """

    tool: Tool
    outcome: Outcome
    finding: str
    seconds: float = 0.0
    axioms: tuple[str, ...] = ()
    earlier: bool = False

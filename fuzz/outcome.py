"""What judging one case has shown, as far as the search needs it."""

from __future__ import annotations

import dataclasses
from typing import Any

from verify.records import decode_number
from verify.verdict import Verdict

BAD = (Verdict.FAIL.value, Verdict.BACKEND_UNSOUND.value)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The part of a record that steers a hunt.

    Attributes:
        root: what failed and where, such as `out-nan-fast`; None if nothing did.  One minimal case is kept per root.
        reason: the verdict in words.
        scores: finite numbers for Hypothesis to maximise (log2 units).
        goal: the one that local search maximises.
        places: index of the worst element of each compared array.
    """

    root: str | None
    reason: str
    scores: dict[str, float]
    goal: float = -float("inf")
    places: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(record: dict[str, Any]) -> Outcome:
        """From a record that a hunt has written."""
        return Outcome(
            record["root"],
            record["reason"] if record["root"] else "",
            record["scores"],
            goal_of(record),
            {
                part: tuple(measures["share"]["index"])
                for part, measures in record["measures"].items()
                if measures.get("share") is not None and "index" in measures["share"]
            },
        )


def goal_of(record: dict[str, Any]) -> float:
    """What a search maximises: the record's own goal (log2 units), or the largest share of a bound."""
    if "goal" in record:
        return float(record["goal"])
    return max((severity(share) for share in shares(record).values()), default=-float("inf"))


def severity(share: float | None) -> float:
    """Shares in order: a NaN is worse than an infinity, which is worse than any number."""
    if share is None:
        return -1.0
    return float("inf") if share != share else min(share, 1e300)  # noqa: PLR0124  NaN


def shares(record: dict[str, Any]) -> dict[str, float]:
    """Largest share of the bound per compared array."""
    found: dict[str, float] = {}
    for part, measures in record["measures"].items():
        worst = measures.get("share")
        value = None if worst is None else decode_number(worst["value"])
        if value is not None:
            found[part] = value
    return found

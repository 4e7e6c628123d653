"""What the records of this folder's operations have in common."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from verify.attention.examine import environment, measures_json
from verify.records import FORMAT

if TYPE_CHECKING:
    from fuzz.case import Case
    from verify.verdict import Judgement

WORST = 1e300
"""What stands in a record for an error that no number says: JSON has neither infinities nor NaN."""


def in_json(error: float) -> float:
    """An error as a record holds it."""
    return error if math.isfinite(error) else WORST


def record_of(
    case: Case, judgement: Judgement, *, name: str, reproduce: str, shape: dict[str, Any], features: dict[str, Any]
) -> dict[str, Any]:
    """A record (`verify.records`) of one judged case, without what its hunt makes of it."""
    return {
        "format": FORMAT,
        "subject": name,
        "hunt": case.hunt,
        "case": case.name,
        "family": "fuzz",
        "sha256": case.sha256,
        "shape": shape,
        "features": features,
        "verdict": judgement.verdict.value,
        "reason": judgement.reason,
        "notes": list(judgement.notes),
        "measures": {part: measures_json(measures) for part, measures in judgement.measures.items()},
        "replays": None,
        "query_blocks": None,
        "replay_map": None,
        "environment": environment("fast"),
        "reproduce": reproduce,
        "case_spec": case.to_json(),
        "root": None,
    }

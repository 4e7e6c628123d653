"""What judging one case has shown, as far as the search needs it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING, Any

from verify.records import decode_number
from verify.verdict import Verdict

if TYPE_CHECKING:
    from verify.attention.cases import AttentionCase

BAD = (Verdict.FAIL.value, Verdict.BACKEND_UNSOUND.value)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The part of a record that steers a hunt.

    Attributes:
        root: what failed and where, such as `out-nan-fast`; None if nothing did.  One minimal case is kept per root.
        reason: the verdict in words.
        scores: finite numbers for Hypothesis to maximise (log2 units).
    """

    root: str | None
    reason: str
    scores: dict[str, float]

    @staticmethod
    def of(record: dict[str, Any]) -> Outcome:
        """From a record that a hunt has written."""
        return Outcome(record["root"], record["reason"] if record["root"] else "", record["scores"])


def case_key(body: dict[str, Any]) -> bytes:
    """Identity of a case whatever it is called; `body` is its JSON."""
    content = {key: value for key, value in body.items() if key not in ("name", "provenance", "sha256")}
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).digest()


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


def with_provenance(case: AttentionCase, provenance: str) -> AttentionCase:
    """The case with another provenance."""
    return dataclasses.replace(case, provenance=provenance)

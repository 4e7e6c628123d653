"""What a comparison concludes, in words from which a kernel author sees the mistake."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

import numpy as np

from verify.measures import ComparisonError, Errors, Measures, Worst, compared_bound, errors, measure, shares

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxtyping import Bool, Float64, Shaped

# Covers the rounding of |got - want| and of its sum with the reference error (each at most 2^-53 relative).
OUTWARD = 1.0 + 2.0**-50


class Verdict(enum.StrEnum):
    """Conclusion about one case.

    PASS is certified: |got - f| <= bound for every judged element.  FAIL is certified too: some element is beyond its
    bound, or differs in class.  NO_POWER: nothing is certainly beyond its bound, but a trivial
    answer passes as well, or the exact result is not known closely enough.
    """

    PASS = "pass"
    FAIL = "fail"
    NO_POWER = "no power"
    OUTSIDE_DOMAIN = "outside the domain"
    BACKEND_UNSOUND = "backend unsound"
    SKIPPED = "skipped"


@dataclasses.dataclass(frozen=True)
class Escalation:
    """Rows that float64 could not decide, which ball arithmetic computed, out of all rows of the compared arrays."""

    rows: int
    of: int

    @property
    def share(self) -> float:
        """Their share."""
        return self.rows / self.of if self.of else 0.0

    def __str__(self) -> str:
        return f"{self.rows} of {self.of} rows ({self.share:.2%}) computed by ball arithmetic"


@dataclasses.dataclass(frozen=True)
class Judgement:
    """A verdict with its grounds.

    Attributes:
        verdict: the conclusion.
        reason: the conclusion in words; a failure names the worst element, both values, their bits and the bound.
        measures: error measures by name of the compared array ("out", "lse"); empty if nothing could be compared.
        notes: remarks that do not change the verdict (rows left out, elements decided by ball arithmetic ...).
        escalation: how many rows ball arithmetic had to compute; None if nothing was compared.
    """

    verdict: Verdict
    reason: str
    measures: Mapping[str, Measures] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    escalation: Escalation | None = None

    @property
    def passed(self) -> bool:
        """Whether the verdict is PASS."""
        return self.verdict is Verdict.PASS


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """Which of the compared elements are certainly beyond their bound, and which the reference is too weak to decide.

    Attributes:
        limit: the bound, flat as the elements of `errors`.
        wrong: certainly beyond: |got - want| - want_error > bound, or another class.
        open: neither that nor certainly within: |got - want| + want_error > bound.
    """

    limit: Float64[np.ndarray, " n"]
    wrong: Bool[np.ndarray, " n"]
    open: Bool[np.ndarray, " n"]


def decide(
    found: Errors, bound: Float64[np.ndarray, "*shape"], want_error: Float64[np.ndarray, "*shape"] | float = 0.0
) -> Decision:
    """Compare elementwise errors with their bound, taking the reference's own error into account.

    Raises:
        ComparisonError: bound or want_error has another shape.
        ValueError: one of them is negative or NaN.
    """
    limit = compared_bound(found, bound)
    if np.isscalar(want_error):
        want_error = np.full(found.shape, want_error)
    doubt = compared_bound(found, want_error)
    most = found.absolute + doubt
    most *= OUTWARD
    within = most <= limit
    if within.all() and not found.odd.size:
        nothing = np.zeros(found.got.size, dtype=bool)
        return Decision(limit, nothing, nothing)
    with np.errstate(invalid="ignore"):
        wrong = found.absolute / OUTWARD - doubt > limit
    wrong[found.odd] = found.mismatch
    within[found.odd] = ~found.mismatch
    unsure = np.flatnonzero(~within & ~wrong & (doubt == 0.0))
    if unsure.size:
        within[unsure] = _exactly_within(found.wide[unsure], found.want[unsure], limit[unsure])
        wrong[unsure] = ~within[unsure]
    return Decision(limit, wrong, ~within & ~wrong)


def _exactly_within(got: np.ndarray, want: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Whether |got - want| <= limit, without rounding: the difference is s + r exactly (Knuth's two-sum).

    |r| is at most half an ulp of s, so r decides only if |s| equals the limit.
    """
    s = got - want
    t = s - got
    r = (got - (s - t)) + (-want - t)
    return (np.abs(s) < limit) | ((np.abs(s) == limit) & (np.sign(s) * r <= 0.0))


def compare(
    got: Shaped[np.ndarray, "*shape"],
    want: Float64[np.ndarray, "*shape"],
    bound: Float64[np.ndarray, "*shape"] | float,
    *,
    want_error: Float64[np.ndarray, "*shape"] | float = 0.0,
    nan_matches: bool = False,
    name: str = "out",
) -> Judgement:
    """Judge an array on its own: pass only if |got - want| + want_error <= bound for every element, and classes match.

    Args:
        got: BF16 or FP32 result.
        want: reference values.
        bound: elementwise bound, or one for all.
        want_error: proved error of `want`.
        nan_matches: the contract says NaN wherever `want` is NaN; otherwise a NaN is a failure on either side.
        name: what the array is called in the reason.
    """
    want = np.asarray(want, dtype=np.float64)
    try:
        found = errors(got, want, nan_matches=nan_matches)
    except ComparisonError as error:
        return Judgement(Verdict.FAIL, f"{name}: {error}")
    bound = np.full(want.shape, bound) if np.isscalar(bound) else np.asarray(bound)
    decision = decide(found, bound, want_error)
    measures = {name: measure(found, bound)}
    if decision.wrong.any():
        return Judgement(Verdict.FAIL, describe(name, found, decision), measures)
    if decision.open.any():
        worst = found.at(int(decision.open.argmax()), found.absolute)
        reason = f"{name}: not certified, the reference's own error is too large to decide {name}{worst}"
        return Judgement(Verdict.FAIL, reason, measures)
    return Judgement(Verdict.PASS, within_bound(name, measures[name]), measures)


def within_bound(name: str, measures: Measures) -> str:
    """How much of the bound a passing array has used."""
    if measures.share is None:
        return f"{name}: {measures.count} elements compared"
    return f"{name}: {measures.count} elements within their bound, {measures.share.value:.3g} of it used at most"


def describe(name: str, found: Errors, decision: Decision) -> str:
    """The failure in words: how many, the worst element with both values, bits and bound, and where the others lie."""
    worst, limit = worst_wrong(found, decision)
    count = int(np.count_nonzero(decision.wrong))
    if np.isfinite(worst.got) and np.isfinite(worst.want):
        error = abs(worst.got - worst.want)
        size = f"|got - want| = {error:.6g} exceeds the bound {limit:.6g} ({worst.value:.4g} times)"
    else:
        size = f"{_kind(worst.got)} where {_kind(worst.want)} is due (no bound excuses that)"
    parts = [f"{count} of {found.got.size} elements of {name} are wrong; worst {name}{worst}: {size}"]
    parts.extend(_places(name, found, decision.wrong))
    return "; ".join(parts)


def worst_wrong(found: Errors, decision: Decision) -> tuple[Worst, float]:
    """The wrong element farthest beyond its bound, relatively (a mismatch of class before any other), and its bound."""
    share = np.where(decision.wrong, shares(found, decision.limit), -1.0)
    position = int(share.argmax())
    return found.at(position, share), float(decision.limit[position])


def _kind(x: float) -> str:
    if np.isnan(x):
        return "NaN"
    return f"{x}" if np.isinf(x) else "a finite number"


def _places(name: str, found: Errors, wrong: np.ndarray) -> list[str]:
    """Where along each axis the wrong elements lie, if not everywhere: a pattern that often gives the cause away."""
    positions = np.flatnonzero(wrong) if found.where is None else found.where[wrong]
    axes = AXES.get((name, len(found.shape)), tuple(f"axis {n}" for n in range(len(found.shape))))
    places = []
    for axis, size, indices in zip(axes, found.shape, np.unravel_index(positions, found.shape), strict=True):
        hit = np.unique(indices)
        if len(hit) < size:
            places.append(f"{axis} {_ranges(hit)} of {size}")
    return ["only in " + ", ".join(places)] if places else []


AXES = {
    ("out", 4): ("batch", "head", "row", "lane"),
    ("lse", 3): ("batch", "head", "row"),
    ("max_logit", 3): ("batch", "head", "row"),
    ("max_logit", 2): ("batch", "head"),
    ("dq", 4): ("batch", "head", "row", "lane"),
    ("dk", 4): ("batch", "KV head", "key", "lane"),
    ("dv", 4): ("batch", "KV head", "key", "lane"),
    ("dsinks", 1): ("head",),
    ("out", 3): ("token", "head", "lane"),
    ("state", 4): ("slot", "head", "key lane", "value lane"),
    ("inverse", 2): ("row", "column"),
}
MOST_RANGES = 4


def _ranges(sorted_indices: np.ndarray) -> str:
    """Indices as "0-3, 8, 12-15", cut after a few ranges."""
    breaks = np.flatnonzero(np.diff(sorted_indices) > 1)
    firsts = sorted_indices[np.concatenate([[0], breaks + 1])]
    lasts = sorted_indices[np.concatenate([breaks, [len(sorted_indices) - 1]])]
    texts = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(firsts[:MOST_RANGES], lasts[:MOST_RANGES], strict=True)]
    more = len(firsts) - MOST_RANGES
    return ", ".join(texts) + (f" and {more} more ranges" if more > 0 else "")

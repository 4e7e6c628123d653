"""The verdict on one attention result, against the exact function and a componentwise bound."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Protocol

import numpy as np

from verify.attention import oracle_float64
from verify.attention.explain import explain
from verify.attention.power import powerless
from verify.attention.settle import settle
from verify.attention.symptoms import lse_symptoms, output_symptoms
from verify.measures import ComparisonError, Errors, errors, measure, widen
from verify.verdict import Decision, Escalation, Judgement, Verdict, decide, describe, within_bound, worst_wrong

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float64

    from verify.attention.problem import AttentionProblem
    from verify.attention.reference import Reference
    from verify.measures import Measures


TOKEN_AXIS = 2

BARELY_WRONG = 4.0
"""Largest bounds of a row: errors up to this are explained by the row's own numbers first (a hint, not a verdict)."""


class Bound(Protocol):
    """What a contract promises, componentwise (`verify.attention.contract.ContractBound`)."""

    @property
    def out(self) -> Float64[np.ndarray, "batch heads q_len head_dim"]:
        """Bound of |out - f_out|."""
        ...

    @property
    def lse(self) -> Float64[np.ndarray, "batch heads q_len"]:
        """Bound of |lse - f_lse| (nats)."""
        ...

    @property
    def inside_domain(self) -> Bool[np.ndarray, "batch heads q_len"]:
        """Rows for which the bounds are promised."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class _Claim:
    """One array to compare: what the kernel gave, what is due, and how far apart they may be."""

    name: str
    got: np.ndarray
    want: np.ndarray
    want_error: np.ndarray
    limit: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class _Rows:
    """Which rows are judged by value (`inside`), and which at all (`kept`)."""

    inside: Bool[np.ndarray, "batch heads q_len"]
    kept: Bool[np.ndarray, "batch heads q_len"]


@dataclasses.dataclass(frozen=True, eq=False)
class _Part:
    """One compared array, decided."""

    name: str
    found: Errors
    decision: Decision
    measures: Measures
    notes: tuple[str, ...]
    escalation: Escalation


def judge(
    problem: AttentionProblem,
    got_out: Float[np.ndarray, "batch heads q_len head_dim"],
    got_lse: Float[np.ndarray, "batch heads q_len"] | None,
    bound: Bound,
    *,
    reference: Reference | None = None,
    left_out: Bool[np.ndarray, "batch heads q_len"] | None = None,
    got_max_logit: Float[np.ndarray, "batch heads *q_len"] | None = None,
    power: bool = False,
    trends: bool = True,
) -> Judgement:
    """Judge a kernel's output (BF16 or FP32) and log-sum-exp (FP32, natural log) of one problem.

    An element passes if |got - want| + want_error <= bound, fails if |got - want| - want_error > bound, and is decided
    by ball arithmetic in between.  Rows outside the domain are judged by class alone, and only where f is not finite.

    Args:
        problem: the inputs.
        got_out: the kernel's output.
        got_lse: the kernel's log-sum-exp; None if the kernel gives none.
        bound: the contract's bounds and domain.
        reference: what an oracle has computed before; None computes it in float64.
        got_max_logit: the kernel's largest logits (FP32, natural log), per row `[batch, heads, q_len]` or per head
            `[batch, heads]`; None if it gives none.  The bound then needs a `max_logit`, as a `ContractBound` has it.
        left_out: rows for which the kernel promises nothing at all; not even their class is compared.
        power: also ask whether trivial answers would pass (costs up to eight more references).
        trends: also measure bias and growth, on which no verdict depends.

    Raises:
        TypeError: an array is neither BF16 nor FP32.
        ValueError: a bound is negative or NaN inside the domain, or has the wrong shape.
    """
    if reference is None:
        reference = oracle_float64.attention(problem)
    _check_shapes(bound, reference)
    kept = np.ones(reference.lse.shape, dtype=bool) if left_out is None else ~left_out
    rows = _Rows(np.asarray(bound.inside_domain) & kept, kept)
    got_out = np.asarray(got_out)
    claims = [_Claim("out", got_out, reference.out, reference.out_error, bound.out)]
    if got_lse is not None:
        claims.append(_Claim("lse", np.asarray(got_lse), reference.lse, reference.lse_error, bound.lse))
    if got_max_logit is not None:
        claims.append(_max_logit_claim(np.asarray(got_max_logit), reference, bound))
    parts: list[_Part] = []
    for claim in claims:
        try:
            part = _decided(problem, claim, rows, reference, trends=trends)
        except ComparisonError as error:
            return Judgement(Verdict.FAIL, f"{claim.name}: {error}")
        if part is not None:
            parts.append(part)
    return _conclude(problem, got_out, bound, reference, parts, rows, power=power)


def _max_logit_claim(got: np.ndarray, reference: Reference, bound: Bound) -> _Claim:
    """Maxima of rows, or of heads: a maximum moves by no more than its arguments do."""
    limit = getattr(bound, "max_logit", None)
    if limit is None or reference.max_logit is None or reference.max_logit_error is None:
        message = "got_max_logit needs a bound and a reference with max_logit, got one without"
        raise ValueError(message)
    if got.ndim == reference.max_logit.ndim:
        return _Claim("max_logit", got, reference.max_logit, reference.max_logit_error, limit)
    of_heads = np.max(limit, axis=-1, initial=0.0)
    return _Claim("max_logit", got, reference.head_max_logit, reference.head_max_logit_error, of_heads)


def _check_shapes(bound: Bound, reference: Reference) -> None:
    shapes = {"out": reference.out.shape, "lse": reference.lse.shape, "inside_domain": reference.lse.shape}
    for name, shape in shapes.items():
        found = np.shape(getattr(bound, name))
        if found != shape:
            message = f"bound.{name} must have shape {shape}, got {found}"
            raise ValueError(message)


def _decided(
    problem: AttentionProblem, claim: _Claim, rows: _Rows, reference: Reference, *, trends: bool
) -> _Part | None:
    """Compare one array; None if all of it lies outside the domain and has no class to judge."""
    name, want, limit, where = claim.name, claim.want, claim.limit, None
    if want.ndim < rows.inside.ndim:
        rows = _of_heads(rows, want, reference)
    if not rows.inside.all():
        promised, kept = (
            np.broadcast_to(x.reshape(x.shape + (1,) * (want.ndim - x.ndim)), want.shape)
            for x in (rows.inside, rows.kept)
        )
        where = promised | (kept & ~np.isfinite(want))
        limit = np.where(promised, limit, 0.0)
        if claim.got.shape == want.shape and not where.any():
            return None
    found = errors(claim.got, want, nan_matches=True, where=where)
    decision = decide(found, limit, claim.want_error)
    notes: list[str] = []
    escalation = Escalation(0, math.prod(want.shape[:3]))
    if decision.open.any():
        decision, settled, ties = settle(problem, found, decision, name, reference)
        escalation = dataclasses.replace(escalation, rows=settled)
        notes.append(f"{name}: {escalation}")
        if ties:
            notes.append(
                f"{name}: {ties} elements equal their bound as far as ball arithmetic can tell; they count as within"
            )
    tokens = TOKEN_AXIS if want.ndim > TOKEN_AXIS else None
    measures = measure(found, limit, lanes=name == "out", tokens=tokens, trends=trends)
    return _Part(name, found, decision, measures, tuple(notes), escalation)


def _of_heads(rows: _Rows, want: np.ndarray, reference: Reference) -> _Rows:
    """The same for one number per head: by value where all its rows are.

    By class where the kernel owes that of every row: a row outside the domain, where f is finite, may come back as
    anything, and a NaN among a head's rows is its maximum.  Beside a NaN that f has that changes nothing.
    """
    assert reference.max_logit is not None  # noqa: S101  asked before
    owed = rows.inside | ~np.isfinite(reference.max_logit)
    return _Rows(rows.inside.all(axis=-1), rows.kept.all(axis=-1) & (owed.all(axis=-1) | np.isnan(want)))


def _conclude(
    problem: AttentionProblem,
    got_out: np.ndarray,
    bound: Bound,
    reference: Reference,
    parts: list[_Part],
    rows: _Rows,
    *,
    power: bool,
) -> Judgement:
    measures = {part.name: part.measures for part in parts}
    escalation = Escalation(sum(p.escalation.rows for p in parts), sum(p.escalation.of for p in parts))
    notes = tuple(note for part in parts for note in part.notes)
    outside = int(np.count_nonzero(rows.kept & ~rows.inside))
    if outside:
        size = rows.inside.size
        notes += (f"{outside} of {size} rows lie outside the domain: judged only where f is NaN or infinite",)
    if not rows.kept.all():
        notes += (f"{np.count_nonzero(~rows.kept)} of {rows.kept.size} rows: nothing promised, not judged",)
    wrong = [part for part in parts if part.decision.wrong.any()]
    if wrong:
        reasons = [describe(part.name, part.found, part.decision) for part in wrong]
        reasons += [text for part in wrong for text in _likely_cause(problem, got_out, bound, reference, part)]
        return Judgement(Verdict.FAIL, "; ".join(reasons), measures, notes, escalation)
    if not parts:
        which = f"all {outside}" if rows.kept.all() else f"the {outside} judged"
        reason = f"{which} rows lie outside the domain, and f is finite there: nothing to judge"
        return Judgement(Verdict.OUTSIDE_DOMAIN, reason, measures, notes)
    weak = powerless(problem, reference, np.asarray(bound.out), rows.inside) if power else []
    if weak:
        return Judgement(
            Verdict.NO_POWER, f"the bound also accepts: {', '.join(map(str, weak))}", measures, notes, escalation
        )
    words = "; ".join(within_bound(part.name, part.measures) for part in parts)
    return Judgement(Verdict.PASS, words, measures, notes, escalation)


def _likely_cause(
    problem: AttentionProblem, got_out: np.ndarray, bound: Bound, reference: Reference, part: _Part
) -> list[str]:
    worst, _ = worst_wrong(part.found, part.decision)
    if part.name == "max_logit":
        return []  # no known mistake has a signature in one number per head
    batch, head, row = index = worst.index[:3]
    if not bound.inside_domain[index]:
        return []
    if part.name == "lse":
        names = lse_symptoms(problem, worst.got, worst.want, float(bound.lse[index]), (batch, head, row))
        return [f"lse[{batch}, {head}, {row}] agrees with: {' / '.join(names)}"] if names else []
    got, limit = widen(got_out[index]), bound.out[index]
    ways = (
        lambda: explain(problem, got, limit, (batch, head, row)),
        lambda: output_symptoms(problem, got, reference, limit, (batch, head, row)),
    )
    # So near to the right row, other masks' and heads' rows are near as well and say nothing.
    near = bool((np.abs(got - reference.out[index]) <= BARELY_WRONG * limit.max(initial=0.0)).all())
    names = next((found for way in (ways[::-1] if near else ways) if (found := way())), [])
    return [f"row out[{batch}, {head}, {row}] agrees with: {' / '.join(names)}"] if names else []

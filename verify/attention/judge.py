"""The verdict on one attention result, against the exact function and a componentwise bound."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

import numpy as np

from verify.attention import oracle_float64
from verify.attention.explain import explain
from verify.attention.power import powerless
from verify.attention.settle import settle
from verify.measures import ComparisonError, Errors, errors, measure, widen
from verify.verdict import Decision, Judgement, Verdict, decide, describe, within_bound, worst_wrong

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float64

    from verify.attention.problem import AttentionProblem
    from verify.attention.reference import Reference
    from verify.measures import Measures


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
class _Part:
    """One compared array, decided."""

    name: str
    found: Errors
    decision: Decision
    measures: Measures
    notes: tuple[str, ...]


def judge(
    problem: AttentionProblem,
    got_out: Float[np.ndarray, "batch heads q_len head_dim"],
    got_lse: Float[np.ndarray, "batch heads q_len"] | None,
    bound: Bound,
    *,
    reference: Reference | None = None,
    power: bool = False,
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
        power: also ask whether trivial answers would pass (costs up to eight more references).

    Raises:
        TypeError: an array is neither BF16 nor FP32.
        ValueError: a bound is negative or NaN inside the domain, or has the wrong shape.
    """
    if reference is None:
        reference = oracle_float64.attention(problem)
    inside = np.asarray(bound.inside_domain)
    _check_shapes(bound, reference)
    got_out = np.asarray(got_out)
    claims = [_Claim("out", got_out, reference.out, reference.out_error, bound.out)]
    if got_lse is not None:
        claims.append(_Claim("lse", np.asarray(got_lse), reference.lse, reference.lse_error, bound.lse))
    parts: list[_Part] = []
    for claim in claims:
        try:
            part = _decided(problem, claim, inside)
        except ComparisonError as error:
            return Judgement(Verdict.FAIL, f"{claim.name}: {error}")
        if part is not None:
            parts.append(part)
    return _conclude(problem, got_out, bound, reference, parts, power=power)


def _check_shapes(bound: Bound, reference: Reference) -> None:
    shapes = {"out": reference.out.shape, "lse": reference.lse.shape, "inside_domain": reference.lse.shape}
    for name, shape in shapes.items():
        found = np.shape(getattr(bound, name))
        if found != shape:
            message = f"bound.{name} must have shape {shape}, got {found}"
            raise ValueError(message)


def _decided(problem: AttentionProblem, claim: _Claim, inside: np.ndarray) -> _Part | None:
    """Compare one array; None if all of it lies outside the domain and has no class to judge."""
    name, want, limit, where = claim.name, claim.want, claim.limit, None
    if not inside.all():
        promised = np.broadcast_to(inside.reshape(inside.shape + (1,) * (want.ndim - inside.ndim)), want.shape)
        where = promised | ~np.isfinite(want)
        limit = np.where(promised, limit, 0.0)
        if claim.got.shape == want.shape and not where.any():
            return None
    found = errors(claim.got, want, nan_matches=True, where=where)
    decision = decide(found, limit, claim.want_error)
    notes: list[str] = []
    if decision.open.any():
        decision, rows, ties = settle(problem, found, decision)
        notes.append(f"{name}: {rows} rows decided by ball arithmetic")
        if ties:
            notes.append(
                f"{name}: {ties} elements equal their bound as far as ball arithmetic can tell; they count as within"
            )
    return _Part(name, found, decision, measure(found, limit, lanes=name == "out"), tuple(notes))


def _conclude(
    problem: AttentionProblem,
    got_out: np.ndarray,
    bound: Bound,
    reference: Reference,
    parts: list[_Part],
    *,
    power: bool,
) -> Judgement:
    measures = {part.name: part.measures for part in parts}
    notes = tuple(note for part in parts for note in part.notes)
    outside = int(np.count_nonzero(~np.asarray(bound.inside_domain)))
    if outside:
        rows = bound.inside_domain.size
        notes += (f"{outside} of {rows} rows lie outside the domain: judged only where f is NaN or infinite",)
    wrong = [part for part in parts if part.decision.wrong.any()]
    if wrong:
        reasons = [describe(part.name, part.found, part.decision) for part in wrong]
        reasons += _likely_cause(problem, got_out, bound, wrong[0])
        return Judgement(Verdict.FAIL, "; ".join(reasons), measures, notes)
    if not parts:
        reason = f"all {outside} rows lie outside the domain, and f is finite there: nothing to judge"
        return Judgement(Verdict.OUTSIDE_DOMAIN, reason, measures, notes)
    weak = powerless(problem, reference, np.asarray(bound.out), np.asarray(bound.inside_domain)) if power else []
    if weak:
        return Judgement(Verdict.NO_POWER, f"the bound also accepts: {', '.join(weak)}", measures, notes)
    return Judgement(Verdict.PASS, "; ".join(within_bound(p.name, p.measures) for p in parts), measures, notes)


def _likely_cause(problem: AttentionProblem, got_out: np.ndarray, bound: Bound, part: _Part) -> list[str]:
    if part.name != "out":
        return []
    worst, _ = worst_wrong(part.found, part.decision)
    batch, head, row = worst.index[:3]
    if not bound.inside_domain[batch, head, row]:
        return []
    names = explain(problem, widen(got_out[batch, head, row]), bound.out[batch, head, row], (batch, head, row))
    return [f"row out[{batch}, {head}, {row}] agrees with: {' / '.join(names)}"] if names else []

"""The verdict on one attention result, against the exact function and a componentwise bound."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

import numpy as np

from verify.attention import oracle_float64
from verify.attention.decide_exactly import settle
from verify.attention.explain import explain
from verify.attention.power import powerless
from verify.measures import ComparisonError, Errors, errors, measure
from verify.verdict import Decision, Judgement, Verdict, decide, describe, within_bound

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float64

    from verify.attention.problem import AttentionProblem
    from verify.attention.reference import Reference
    from verify.measures import Measures


class Bound(Protocol):
    """What a contract promises (`verify.attention.contract.ContractBound`)."""

    @property
    def out(self) -> Float64[np.ndarray, "batch heads q_len head_dim"]: ...
    @property
    def lse(self) -> Float64[np.ndarray, "batch heads q_len"]: ...
    @property
    def inside_domain(self) -> Bool[np.ndarray, "batch heads q_len"]: ...


@dataclasses.dataclass(frozen=True, eq=False)
class _Part:
    """One compared array."""

    name: str
    found: Errors
    decision: Decision
    measures: Measures


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
        bound: the contract's bound and domain, componentwise.
        reference: what an oracle has computed before; None computes it in float64.
        power: also ask whether trivial answers would pass (costs several more references).

    Raises:
        TypeError: an array is neither BF16 nor FP32.
        ValueError: the bound is negative or NaN somewhere inside the domain, or has the wrong shape.
    """
    if reference is None:
        reference = oracle_float64.attention(problem)
    inside = np.asarray(bound.inside_domain)
    if inside.shape != reference.lse.shape:
        message = f"inside_domain must have shape {reference.lse.shape}, got {inside.shape}"
        raise ValueError(message)
    compared = [("out", got_out, reference.out, reference.out_error, bound.out, inside[..., None])]
    if got_lse is not None:
        compared.append(("lse", got_lse, reference.lse, reference.lse_error, bound.lse, inside))
    try:
        parts = [part for arrays in compared if (part := _part(problem, *arrays)) is not None]
    except ComparisonError as error:
        return Judgement(Verdict.FAIL, str(error))
    measures = {part.name: part.measures for part in parts}
    notes = _notes(inside)
    wrong = [part for part in parts if part.decision.wrong.any()]
    if wrong:
        reasons = [describe(part.name, part.found, part.decision) for part in wrong]
        reasons += explain(problem, np.asarray(got_out), bound, wrong[0])
        return Judgement(Verdict.FAIL, "; ".join(reasons), measures, notes)
    if not parts:
        return Judgement(Verdict.OUTSIDE_DOMAIN, "every row lies outside the domain, where f has no class to judge")
    if power and (weak := powerless(problem, reference, bound)):
        reason = f"the bound also accepts {', '.join(weak)}"
        return Judgement(Verdict.NO_POWER, reason, measures, notes)
    reason = "; ".join(within_bound(part.name, part.measures) for part in parts)
    return Judgement(Verdict.PASS, reason, measures, notes)

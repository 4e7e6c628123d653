"""The verdict on the gradients of one attention problem, against exact derivatives and a componentwise bound."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from verify.attention.cases import base_values
from verify.attention.gradients import oracle_arb, oracle_float64
from verify.attention.gradients.problem import GradientProblem
from verify.measures import ComparisonError, Errors, errors, measure
from verify.verdict import Decision, Escalation, Judgement, Verdict, decide, describe, within_bound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Float64

    from verify.attention.gradients.contract import GradientBound
    from verify.attention.gradients.reference import Bounded, Gradients
    from verify.attention.problem import AttentionProblem
    from verify.measures import Measures

COTANGENT_STREAM = 7919
"""Of `base_values`: a stream that no input of a case uses."""

BLOCK = 128
TOKEN_AXIS = 2

MOST_BALLS = 1 << 16
"""Pairs of a query and a key up to which ball arithmetic settles what float64 leaves open (a second or two)."""


@dataclasses.dataclass(frozen=True, eq=False)
class GradientResult:
    """What a backward kernel returned: BF16 or FP32, shapes of q, k, v and the sinks.

    Attributes:
        dq: `[batch, heads, q_len, head_dim]`.
        dk: `[batch, kv_heads, kv_len, head_dim]`.
        dv: `[batch, kv_heads, kv_len, v_dim]`.
        dsinks: `[heads]`, or None.
        replays: none; a forward result has them.
    """

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dsinks: np.ndarray | None = None
    replays: None = None


def cotangent(problem: AttentionProblem) -> np.ndarray:
    """The BF16 cotangent of the output that goes with a forward problem: bell-shaped, the same on every machine."""
    return base_values((*problem.q.shape[:3], problem.v_dim), COTANGENT_STREAM, 0)


@dataclasses.dataclass(frozen=True, eq=False)
class _Part:
    """One compared array, decided."""

    name: str
    got: np.ndarray
    want: Bounded
    limit: Float64[np.ndarray, "*shape"]
    where: np.ndarray
    found: Errors
    decision: Decision
    measures: Measures


def judge_gradients(
    problem: AttentionProblem,
    d_out: np.ndarray,
    got: GradientResult,
    bound: GradientBound,
    *,
    reference: Gradients | None = None,
    power: bool = False,
) -> Judgement:
    """Judge dq, dk, dv and the sinks' derivative of one problem.

    Elements with an infinite bound, and those that something not finite reaches, are not judged.

    Args:
        problem: the inputs of the forward pass.
        d_out: cotangent of the output.
        got: the kernel's derivatives.
        bound: the contract's bounds.
        reference: what an oracle has computed before; None computes it in float64.
        power: also ask whether trivial answers would pass.

    Raises:
        TypeError: an array is neither BF16 nor FP32.
    """
    backward = GradientProblem.of(problem, d_out)
    reference = oracle_float64.gradients(backward) if reference is None else reference
    wanted = dict(reference.parts())
    parts: list[_Part] = []
    for name, limit in bound.parts():
        try:
            part = _decided(name, np.asarray(getattr(got, name)), wanted[name], limit)
        except ComparisonError as error:
            return Judgement(Verdict.FAIL, f"{name}: {error}")
        if part is not None:
            parts.append(part)
    parts, settled = _settled(backward, parts)
    rows = backward.batch * backward.heads * backward.q_len
    escalation = Escalation(rows if settled else reference.escalated, rows)
    notes = (str(escalation),) if escalation.rows else ()
    notes += tuple(_outside(part) for part in parts if not part.where.all())
    judgement = _concluded(problem, d_out, backward, parts, notes, power=power)
    return dataclasses.replace(judgement, escalation=escalation)


def _concluded(
    problem: AttentionProblem,
    d_out: np.ndarray,
    backward: GradientProblem,
    parts: list[_Part],
    notes: tuple[str, ...],
    *,
    power: bool,
) -> Judgement:
    measures = {part.name: part.measures for part in parts}
    wrong = [part for part in parts if part.decision.wrong.any()]
    if wrong:
        reasons = [describe(part.name, part.found, part.decision) for part in wrong]
        reasons += _likely_cause(problem, d_out, backward, wrong[0])
        return Judgement(Verdict.FAIL, "; ".join(reasons), measures, notes)
    if undecided := [part for part in parts if part.decision.open.any()]:
        names = ", ".join(part.name for part in undecided)
        reason = f"{names}: not certified, the reference's own error is too large to decide"
        return Judgement(Verdict.FAIL, reason, measures, notes)
    if not parts:
        return Judgement(Verdict.OUTSIDE_DOMAIN, "nothing is promised for any element: nothing to judge", {}, notes)
    weak = _powerless(backward, parts) if power else []
    if weak:
        return Judgement(Verdict.NO_POWER, f"the bound also accepts: {', '.join(weak)}", measures, notes)
    return Judgement(Verdict.PASS, "; ".join(within_bound(p.name, p.measures) for p in parts), measures, notes)


def _outside(part: _Part) -> str:
    missing = part.where.size - int(np.count_nonzero(part.where))
    return f"{missing} of {part.where.size} elements of {part.name}: nothing promised, not judged"


def _decided(name: str, got: np.ndarray, want: Bounded, limit: np.ndarray) -> _Part | None:
    """Compare one array; None if nothing of it is promised."""
    where = np.isfinite(limit) & np.isfinite(want.value)
    if got.shape == want.value.shape and where.size and not where.any():
        return None
    limit = np.where(where, limit, 0.0)
    found = errors(got, want.value, where=where)
    decision = decide(found, limit, np.where(where, want.error, 0.0))
    tokens = TOKEN_AXIS if want.value.ndim > TOKEN_AXIS else None
    return _Part(
        name, got, want, limit, where, found, decision, measure(found, limit, lanes=tokens is not None, tokens=tokens)
    )


def _settled(backward: GradientProblem, parts: list[_Part]) -> tuple[list[_Part], bool]:
    """What float64 leaves open, decided by ball arithmetic if the problem is small enough."""
    pairs = backward.batch * backward.heads * backward.q_len * backward.kv_len
    if pairs > MOST_BALLS or not any(part.decision.open.any() for part in parts):
        return parts, False
    exact = dict(oracle_arb.gradients(backward).parts())
    again = (
        _decided(part.name, part.got, exact[part.name], np.where(part.where, part.limit, np.inf)) for part in parts
    )
    return [part for part in again if part is not None], True


Candidates = dict[str, np.ndarray]


def _powerless(backward: GradientProblem, parts: list[_Part]) -> list[str]:
    """Wrong answers that every compared array takes, and that are not the right answer itself."""
    weak = []
    for name, candidates in _wrong_answers(backward, parts):
        accepted = equal = True
        for part in parts:
            distance = np.abs(candidates[part.name] - part.want.value)[part.where]
            accepted &= bool((distance <= part.limit[part.where]).all())
            equal &= bool((distance <= 2.0 * part.want.error[part.where]).all())
        if accepted and not equal:
            weak.append(name)
    return weak


def _wrong_answers(backward: GradientProblem, parts: list[_Part]) -> Iterator[tuple[str, Candidates]]:
    values = {part.name: np.where(np.isfinite(part.want.value), part.want.value, 0.0) for part in parts}
    yield "zeros", {name: np.zeros_like(value) for name, value in values.items()}
    yield "a constant (the mean of each array)", {name: np.full_like(x, x.mean()) for name, x in values.items()}
    if backward.heads > 1:
        axes = {name: 0 if name == "dsinks" else 1 for name in values}
        yield "the gradients of the next head", {name: np.roll(x, -1, axis=axes[name]) for name, x in values.items()}
    hidden = max(min(BLOCK, backward.kv_len // 2), 1)

    def mask(batch: int, rows: slice) -> np.ndarray:
        seen = backward.mask(batch, rows).copy()
        seen[:, :hidden] = False
        return seen

    yield "the gradients with the first keys hidden", _values(dataclasses.replace(backward, mask=mask))


def _values(backward: GradientProblem) -> Candidates:
    return {name: part.value for name, part in oracle_float64.gradients(backward).parts()}


def _likely_cause(problem: AttentionProblem, d_out: np.ndarray, backward: GradientProblem, part: _Part) -> list[str]:
    """Well-known mistakes whose derivatives lie near the whole array; a hint for the reader, no verdict."""
    got = part.got.astype(np.float64)
    names = []
    for name, value in _mistakes(problem, d_out, backward, part):
        if value.shape != got.shape:
            continue
        size, wrong = (float(np.max(np.abs(x[part.where]), initial=0.0)) for x in (part.want.value, value))
        room = part.limit * max(1.0, wrong / size if size > 0.0 else 1.0)
        with np.errstate(invalid="ignore"):
            if (np.abs(got - value) <= room)[part.where].all():
                names.append(name)
    return [f"{part.name} agrees with: {' / '.join(names)}"] if names else []


def _mistakes(
    problem: AttentionProblem, d_out: np.ndarray, backward: GradientProblem, part: _Part
) -> Iterator[tuple[str, np.ndarray]]:
    want, name = np.where(np.isfinite(part.want.value), part.want.value, 0.0), part.name

    def of(other: GradientProblem) -> np.ndarray:
        return _values(other)[name]

    yield "zeros", np.zeros_like(want)
    yield "the opposite sign", -want
    if name in {"dq", "dk"} and problem.scale not in {0.0, 1.0}:
        yield "no factor scale", want / problem.scale
        yield "the factor scale twice", want * problem.scale
    yield "delta left out", of(dataclasses.replace(backward, d_lse=_delta(backward)))
    group = problem.heads // problem.kv_heads
    if name in {"dk", "dv"} and group > 1:
        first: dict[str, Any] = {x: getattr(backward, x)[:, ::group] for x in ("q", "d_out")}
        sinks = None if backward.sinks is None else backward.sinks[::group]
        yield (
            "the first query head of each group alone",
            of(dataclasses.replace(backward, **first, sinks=sinks)),
        )
    if group > 1 and problem.kv_heads > 1:
        order = np.argsort(np.arange(problem.heads) % problem.kv_heads, kind="stable")
        tiled = dataclasses.replace(backward, q=backward.q[:, order], d_out=backward.d_out[:, order])
        value = of(tiled)
        yield "heads tiled, not repeated", value[:, np.argsort(order)] if name == "dq" else value
    if problem.causal and problem.q_len != problem.kv_len and problem.q_positions is None:
        aligned = np.broadcast_to(np.arange(problem.q_len), (problem.batch, problem.q_len))
        top = dataclasses.replace(problem, q_positions=aligned)
        yield "causal mask aligned top-left instead of bottom-right", of(GradientProblem.of(top, d_out))
    if problem.softcap is not None:
        yield "no soft cap", of(dataclasses.replace(backward, softcap=None))


def _delta(backward: GradientProblem) -> np.ndarray:
    """sum_k P_k dP_k of every row: as a cotangent of the LSE it takes delta away."""
    delta = np.zeros(backward.q.shape[:3])
    for batch, head in np.ndindex(*delta.shape[:2]):
        inputs = backward.head(batch, head)
        weights = oracle_float64.largest_weights(inputs, slice(0, backward.q_len)).weights
        delta[batch, head] = (weights * (inputs.d_out @ inputs.v.T)).sum(axis=1)
    return delta.astype(np.float32)

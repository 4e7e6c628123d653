"""The verdict on one Gated DeltaNet result, against the exact function and a componentwise bound."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

import numpy as np

from verify.gdn import oracle_arb, oracle_float64
from verify.gdn.power import powerless
from verify.gdn.problem import BF16, SMALLEST_NORMAL, GdnProblem, final_conv_state, shapes, value_lanes
from verify.gdn.reference import OracleUnsound
from verify.measures import ComparisonError, errors, measure
from verify.verdict import Judgement, Verdict, decide, describe, within_bound

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float32, Float64

    from verify.gdn.problem import Problem
    from verify.gdn.reference import GdnReference
    from verify.measures import Errors, Measures
    from verify.verdict import Decision

MOST_BALLS = 200_000
"""Tokens times state entries of value lanes that ball arithmetic decides where a float64 reference leaves them open."""
FINER = 2.0**-4
"""Radius of a ball against the smallest bound that it decides: beside it, an element is open in one place of eight."""


class Bound(Protocol):
    """What a contract promises, componentwise (`verify.gdn.contract.GdnBound`)."""

    @property
    def out(self) -> Float64[np.ndarray, "tokens n_v d_v"]:
        """Bound of |out - f_out|."""
        ...

    @property
    def state(self) -> Float64[np.ndarray, "slots n_v d_k d_v"]:
        """Bound of |state - f_state|."""
        ...

    @property
    def inside_out(self) -> Bool[np.ndarray, "tokens n_v"]:
        """Tokens and heads for which `out` is promised."""
        ...

    @property
    def inside_state(self) -> Bool[np.ndarray, "slots n_v"]:
        """Slots and heads for which `state` is promised."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class GdnResult:
    """What a kernel returned.

    Attributes:
        out: BF16 or FP32; None if it was not kept.
        state: FP32, all slots after the call.
        conv_state: all slots after the call, in the input's dtype; None for a kernel of the delta rule alone.
    """

    out: Float[np.ndarray, "tokens n_v d_v"] | None
    state: Float32[np.ndarray, "slots n_v d_k d_v"]
    conv_state: Float[np.ndarray, "slots width_minus_1 dim"] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class _Part:
    """One compared array, decided."""

    name: str
    found: Errors
    decision: Decision
    measures: Measures


def judge(
    problem: Problem,
    result: GdnResult,
    bound: Bound,
    *,
    reference: GdnReference | None = None,
    power: bool = False,
) -> Judgement:
    """Judge a kernel's outputs, final states and convolution states.

    Outputs and written states pass if |got - want| + want_error <= bound, and fail if |got - want| - want_error is
    beyond it; between the two, ball arithmetic decides, and where it would take too long the verdict is NO_POWER.
    Slots that no sequence writes must hold the words that they held, and convolution states the words that are due:
    there is no arithmetic in them.  Tokens of no sequence, and what a non-finite input may have touched, are not
    judged.

    Args:
        problem: the inputs.
        result: what came back.
        bound: the contract's bounds and domain.
        reference: what an oracle has computed before; None computes it in float64.
        power: also ask whether trivial answers would pass.

    Raises:
        TypeError: an array is neither BF16 nor FP32.
        ValueError: a bound has the wrong shape, or is negative or NaN inside the domain.
    """
    if reference is None:
        reference = oracle_float64.gdn_chunked(problem)
    _check_shapes(bound, reference)
    copied = _copies(problem, result)
    parts: list[_Part] = []
    for name, got in (("out", result.out), ("state", result.state)):
        if got is None:
            continue
        try:
            part = _decided(problem, name, np.asarray(got), reference, bound)
        except ComparisonError as error:
            return Judgement(Verdict.FAIL, f"{name}: {error}")
        if part is not None:
            parts.append(part)
    measures = {part.name: part.measures for part in parts}
    notes = _notes(problem, bound)
    wrong = [describe(part.name, part.found, part.decision) for part in parts if part.decision.wrong.any()]
    if wrong or copied:
        return Judgement(Verdict.FAIL, "; ".join([*wrong, *copied]), measures, notes)
    if not parts:
        return Judgement(Verdict.OUTSIDE_DOMAIN, "nothing lies inside the domain: nothing to judge", measures, notes)
    unsure = [
        f"{np.count_nonzero(part.decision.open)} elements of {part.name}" for part in parts if part.decision.open.any()
    ]
    if unsure:
        reason = f"ill-conditioned: {', '.join(unsure)} are as near to their bound as the exact result is known here"
        return Judgement(Verdict.NO_POWER, reason, measures, notes)
    weak = powerless(problem, reference, bound) if power else []
    if weak:
        reason = f"ill-conditioned: the bound, up to {_largest(bound):.3g}, also accepts: {', '.join(weak)}"
        return Judgement(Verdict.NO_POWER, reason, measures, notes)
    return Judgement(Verdict.PASS, "; ".join(within_bound(p.name, p.measures) for p in parts), measures, notes)


def _largest(bound: Bound) -> float:
    finite = bound.out[np.isfinite(bound.out)]
    return float(finite.max(initial=0.0)) if finite.size == bound.out.size else float("inf")


def _check_shapes(bound: Bound, reference: GdnReference) -> None:
    shapes = {
        "out": reference.out.shape,
        "state": reference.state.shape,
        "inside_out": reference.out.shape[:2],
        "inside_state": reference.state.shape[:2],
    }
    for name, shape in shapes.items():
        found = np.shape(getattr(bound, name))
        if found != shape:
            message = f"bound.{name} must have shape {shape}, got {found}"
            raise ValueError(message)


def judged_entries(problem: Problem, name: str, reference: GdnReference, bound: Bound) -> np.ndarray:
    """Which entries of `out` or `state` are judged by value."""
    want = getattr(reference, name)
    where = np.isfinite(want)
    if name == "out":
        where[int(problem.sequences.boundaries[-1]) :] = False
        return where & np.asarray(bound.inside_out)[:, :, None]
    written = np.zeros(len(want), dtype=bool)
    written[[slot for _, slot in problem.sequences.written()]] = True
    return where & written[:, None, None, None] & np.asarray(bound.inside_state)[:, :, None, None]


def _decided(problem: Problem, name: str, got: np.ndarray, reference: GdnReference, bound: Bound) -> _Part | None:
    """Compare one array; None if there is nothing in it to judge."""
    want, error = getattr(reference, name), getattr(reference, f"{name}_error")
    where = judged_entries(problem, name, reference, bound)
    limit = np.where(where, getattr(bound, name), 0.0)
    if got.shape == want.shape and not where.any():
        return None
    found = errors(got, want, where=None if where.all() else where)
    decision = decide(found, limit, error)
    if decision.open.any():
        decision = _settled(problem, name, got, where, limit, found, decision)
    return _Part(name, found, decision, measure(found, limit, tokens=0 if name == "out" else None))


def _settled(
    problem: Problem,
    name: str,
    got: np.ndarray,
    where: np.ndarray,
    limit: np.ndarray,
    found: Errors,
    decision: Decision,
) -> Decision:
    """Decide the value lanes that are open by ball arithmetic, those farthest off first, as many as are quick.

    What is left stays open.

    A lane's balls are made as narrow as its smallest bound asks: where keys or values have zeros, entries of a state
    are exactly 0, with a bound near 0, beside others of any size.
    """
    unsettled = np.zeros(got.shape, dtype=bool)
    unsettled[where] = decision.open
    tokens, (_, n_v, d_k, d_v) = problem.tokens, shapes(problem)
    distance = np.full(got.shape, -1.0)
    distance[where] = np.where(decision.open, found.absolute, -1.0)
    farthest = distance.reshape(-1, d_v).max(axis=0)
    count = min(np.count_nonzero(farthest >= 0.0), MOST_BALLS // max(tokens * n_v * d_k, 1))
    lanes = np.sort(np.argsort(-farthest, kind="stable")[:count])
    mine = unsettled[..., lanes]
    if not mine.any():
        return decision
    least = limit[..., lanes][mine].min(initial=np.inf, where=limit[..., lanes][mine] > 0.0)
    relative = min(oracle_arb.RELATIVE, FINER * least / max(np.abs(found.want).max(), SMALLEST_NORMAL))
    try:
        balls = oracle_arb.gdn(value_lanes(problem, lanes), relative=relative)
    except OracleUnsound:
        return decision
    again = errors(got[..., lanes], getattr(balls, name), where=mine)
    settled = decide(again, limit[..., lanes], getattr(balls, f"{name}_error"))
    wrong = np.zeros_like(unsettled)
    wrong[where] = decision.wrong
    for flags, decided in ((wrong, settled.wrong), (unsettled, settled.open)):
        chosen = flags[..., lanes]
        chosen[mine] = decided
        flags[..., lanes] = chosen
    return dataclasses.replace(decision, wrong=wrong[where], open=unsettled[where])


def _words(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint16 if x.dtype == BF16 else np.uint32)


def _copies(problem: Problem, result: GdnResult) -> list[str]:
    """What must be copied word by word, and is not."""
    found: list[str] = []
    written = {slot for _, slot in problem.sequences.written()}
    kept = [slot for slot in range(len(problem.state)) if slot not in written]
    state = np.asarray(result.state)
    if state.shape == problem.state.shape and kept:
        same = _words(state[kept].astype(problem.state.dtype)) == _words(problem.state[kept])
        if not same.all():
            slots = [slot for slot, ok in zip(kept, same.reshape(len(kept), -1).all(axis=1), strict=True) if not ok]
            found.append(f"state: slots {slots} are written by no sequence and have changed")
    if isinstance(problem, GdnProblem) and result.conv_state is not None:
        due, got = final_conv_state(problem), np.asarray(result.conv_state)
        if got.shape != due.shape or got.dtype != due.dtype:
            found.append(f"conv_state: {due.dtype} {list(due.shape)} is due, got {got.dtype} {list(got.shape)}")
        else:
            wrong = _words(got) != _words(due)
            if wrong.any():
                slots = np.flatnonzero(wrong.reshape(len(wrong), -1).any(axis=1)).tolist()
                found.append(f"conv_state: {int(wrong.sum())} words are wrong, in slots {slots}")
    return found


def _notes(problem: Problem, bound: Bound) -> tuple[str, ...]:
    last = int(problem.sequences.boundaries[-1])
    outside = int(np.count_nonzero(~np.asarray(bound.inside_out)[:last]))
    if not outside:
        return ()
    return (f"{outside} of {last * problem.state.shape[1]} tokens and heads lie outside the domain: not judged",)

"""Judging one subject on one problem: never an exception, always a verdict."""

from __future__ import annotations

import dataclasses
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jax.experimental.pallas import tpu as pltpu

from verify.attention.gradients import oracle_float64 as gradient_oracle
from verify.attention.gradients.judge import GradientResult, cotangent, judge_gradients
from verify.attention.gradients.problem import GradientProblem
from verify.attention.judge import judge
from verify.backend import BackendUnsoundError, device_model
from verify.subjects.arithmetic import rounded_lse
from verify.subjects.subject import ATTENTION, GRADIENTS
from verify.verdict import Judgement, Verdict

if TYPE_CHECKING:
    from verify.attention.contract import ContractBound
    from verify.attention.gradients.reference import Gradients
    from verify.attention.open_cases import OpenCase
    from verify.attention.problem import AttentionProblem
    from verify.attention.reference import Reference
    from verify.attention.subjects import SubjectResult
    from verify.devices import DeviceModel
    from verify.subjects.subject import Subject

REFUSALS = (NotImplementedError, ValueError)
"""How a kernel says that it does not take an input; anything else that it raises is a failure."""


@dataclasses.dataclass(frozen=True, eq=False)
class JudgedSubject:
    """One subject on one problem.

    Attributes:
        subject: who.
        problem: what was asked.
        result: what came back; None if nothing did.
        judgement: the verdict.
        reference: the exact result; None if nothing was compared.
    """

    subject: Subject
    problem: AttentionProblem
    result: SubjectResult | GradientResult | None
    judgement: Judgement
    reference: Reference | Gradients | None = None


def judge_subject(  # noqa: PLR0911  one per verdict that needs no run
    subject: Subject,
    problem: AttentionProblem,
    *,
    config: tuple[int, int, int] = (0, 0, 0),
    interpret: str = "fast",
    power: bool = False,
) -> JudgedSubject:
    """Run and judge a subject; a backward kernel with the cotangent that goes with the problem.

    SKIPPED: it lacks a feature, is not installed, or refuses the input (NotImplementedError, ValueError).
    OUTSIDE_DOMAIN: it promises nothing there.  FAIL: beyond the bound, another class, or it raised anything else.

    Args:
        subject: who.
        problem: what to ask.
        config: (block_q, block_kv, fragment) for a subject that takes it; 0 leaves one to the subject.
        interpret: a name in `verify.attention.subjects.INTERPRET`, for a subject that takes it.
        power: also ask whether trivial answers would pass.
    """
    try:
        model = device_model()
    except BackendUnsoundError as error:
        return JudgedSubject(subject, problem, None, Judgement(Verdict.BACKEND_UNSOUND, str(error)))
    reason = subject.unsupported(problem)
    if reason is not None:
        return JudgedSubject(subject, problem, None, Judgement(Verdict.SKIPPED, reason))
    left_out = ~promised_rows(subject, problem)
    if left_out.size and left_out.all():
        reason = f"outside what {subject.name} promises: {subject.domain.words}"
        return JudgedSubject(subject, problem, None, Judgement(Verdict.OUTSIDE_DOMAIN, reason))
    d_out = cotangent(problem)
    try:
        if subject.operation == GRADIENTS:
            result = subject.gradients(problem, d_out, config=config, interpret=interpret)
        else:
            result = subject(problem, config=config, interpret=interpret)
    except REFUSALS as error:
        judgement = Judgement(Verdict.SKIPPED, f"the kernel refuses the input: {_in_words(error)}")
        return JudgedSubject(subject, problem, None, judgement)
    except Exception as error:  # noqa: BLE001  whatever a kernel raises is its result
        # After an exception the interpreter's state would make later calls hang.
        pltpu.reset_tpu_interpret_mode_state()
        return JudgedSubject(subject, problem, None, Judgement(Verdict.FAIL, f"the kernel raised {_in_words(error)}"))
    if isinstance(result, GradientResult):
        return _judged_gradients(subject, problem, d_out, result, left_out, model, power=power)
    reference, bound = reference_and_bound(subject, problem, model)
    judgement = verdict_on(problem, result, bound, reference, left_out, power=power)
    return JudgedSubject(subject, problem, result, judgement, reference)


def verdict_on(
    problem: AttentionProblem,
    result: SubjectResult,
    bound: ContractBound,
    reference: Reference,
    left_out: np.ndarray,
    *,
    power: bool = False,
    trends: bool = True,
) -> Judgement:
    """The verdict on all that a kernel returned; `left_out` are rows for which it promises nothing; else as `judge`."""
    try:
        return judge(
            problem,
            result.out,
            result.lse,
            bound,
            reference=reference,
            left_out=left_out if left_out.any() else None,
            got_max_logit=result.max_logit,
            power=power,
            trends=trends,
        )
    except TypeError as error:
        return Judgement(Verdict.FAIL, str(error))


def judge_open_case(subject: Subject, case: OpenCase, *, interpret: str = "fast", power: bool = False) -> JudgedSubject:
    """A subject on an open case, which says whether a trivial answer may pass; that is about outputs, not gradients."""
    asked = power or (case.power and subject.operation == ATTENTION)
    return judge_subject(subject, case.build(), config=case.config, interpret=interpret, power=asked)


def _judged_gradients(
    subject: Subject,
    problem: AttentionProblem,
    d_out: np.ndarray,
    result: GradientResult,
    left_out: np.ndarray,
    model: DeviceModel,
    *,
    power: bool,
) -> JudgedSubject:
    reference = gradient_oracle.gradients(GradientProblem.of(problem, d_out))
    bound = subject.arithmetic.gradient_bound(problem, d_out, model, reference)
    # What a row may hold that promises nothing, it may add to every key of its head.
    bound.dq[left_out] = np.inf
    of_kv_heads = left_out.any(axis=2).reshape(problem.batch, problem.kv_heads, -1).any(axis=2)
    bound.dk[of_kv_heads] = bound.dv[of_kv_heads] = np.inf
    if bound.dsinks is not None:
        bound.dsinks[left_out.any(axis=(0, 2))] = np.inf
    try:
        judgement = judge_gradients(problem, d_out, result, bound, reference=reference, power=power)
    except TypeError as error:
        judgement = Judgement(Verdict.FAIL, str(error))
    return JudgedSubject(subject, problem, result, judgement, reference)


def bound_of(subject: Subject, problem: AttentionProblem, reference: Reference, device: DeviceModel) -> ContractBound:
    """What the subject is held to: the contract of its arithmetic, and the format of its LSE."""
    bound = subject.arithmetic.bound(problem, device, reference)
    return rounded_lse(bound, reference.lse) if subject.features.lse == "bf16" else bound


def reference_and_bound(
    subject: Subject, problem: AttentionProblem, device: DeviceModel
) -> tuple[Reference, ContractBound]:
    """The float64 oracle's reference and `bound_of`, in less time than one after the other."""
    reference, bound = subject.arithmetic.reference_and_bound(problem, device)
    return reference, rounded_lse(bound, reference.lse) if subject.features.lse == "bf16" else bound


def promised_rows(subject: Subject, problem: AttentionProblem) -> np.ndarray:
    """Rows `[batch, heads, q_len]` for which the subject promises anything."""
    rows = np.broadcast_to(np.asarray(subject.domain.contains(problem)), problem.q.shape[:3]).copy()
    if subject.features.masked_rows == "unspecified":
        for b in range(problem.batch):
            rows[b] &= problem.mask(b).any(axis=1)[None, :]
    return rows


def _in_words(error: Exception) -> str:
    text = " ".join(str(error).split())
    if not text:  # a bare assertion says nothing but where it stands
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{frame.line} ({Path(frame.filename).name})"
    return f"{type(error).__name__}: {text[:300]}"

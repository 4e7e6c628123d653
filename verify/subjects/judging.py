"""Judging one subject on one problem: never an exception, always a verdict."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
from jax.experimental.pallas import tpu as pltpu

from verify.attention import oracle_float64
from verify.attention.judge import judge
from verify.backend import BackendUnsoundError, device_model
from verify.subjects.arithmetic import rounded_lse
from verify.verdict import Judgement, Verdict

if TYPE_CHECKING:
    from verify.attention.problem import AttentionProblem
    from verify.attention.reference import Reference
    from verify.attention.subjects import SubjectResult
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
    result: SubjectResult | None
    judgement: Judgement
    reference: Reference | None = None


def judge_subject(
    subject: Subject,
    problem: AttentionProblem,
    *,
    config: tuple[int, int, int] = (0, 0, 0),
    interpret: str = "fast",
    power: bool = False,
) -> JudgedSubject:
    """Run and judge a subject.

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
    try:
        result = subject(problem, config=config, interpret=interpret)
    except REFUSALS as error:
        judgement = Judgement(Verdict.SKIPPED, f"the kernel refuses the input: {_in_words(error)}")
        return JudgedSubject(subject, problem, None, judgement)
    except Exception as error:  # noqa: BLE001  whatever a kernel raises is its result
        # After an exception the interpreter's state would make later calls hang.
        pltpu.reset_tpu_interpret_mode_state()
        return JudgedSubject(subject, problem, None, Judgement(Verdict.FAIL, f"the kernel raised {_in_words(error)}"))
    reference = oracle_float64.attention(problem)
    bound = subject.arithmetic.bound(problem, model)
    if subject.features.lse == "bf16":
        bound = rounded_lse(bound, reference.lse)
    try:
        judgement = judge(
            problem,
            result.out,
            result.lse,
            bound,
            reference=reference,
            left_out=left_out if left_out.any() else None,
            power=power,
        )
    except TypeError as error:
        judgement = Judgement(Verdict.FAIL, str(error))
    return JudgedSubject(subject, problem, result, judgement, reference)


def promised_rows(subject: Subject, problem: AttentionProblem) -> np.ndarray:
    """Rows `[batch, heads, q_len]` for which the subject promises anything."""
    rows = np.broadcast_to(np.asarray(subject.domain.contains(problem)), problem.q.shape[:3]).copy()
    if subject.features.masked_rows == "unspecified":
        for b in range(problem.batch):
            rows[b] &= problem.mask(b).any(axis=1)[None, :]
    return rows


def _in_words(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"

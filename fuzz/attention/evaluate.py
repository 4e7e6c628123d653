"""One case of dense attention: run the subject, judge the result, and say what the search can learn from it."""

from __future__ import annotations

import dataclasses
import math
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.experimental.pallas import tpu as pltpu

from fuzz.attention.buckets import ANCHOR_KEYS, LOG2_E
from fuzz.operations import ATTENTION
from fuzz.outcome import severity, shares
from verify.attention.adversarial import FLYWHEEL_LIMIT
from verify.attention.examine import Examined, record_of
from verify.attention.problem import AttentionProblem, widen
from verify.attention.subjects import SubjectResult
from verify.backend import device_model
from verify.subjects.judging import REFUSALS, bound_of, promised_rows, reference_and_bound, verdict_on
from verify.subjects.registry import is_ours, load
from verify.verdict import Judgement, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from fuzz.case import Case
    from verify.attention.contract import ContractBound
    from verify.attention.reference import Reference
    from verify.subjects.subject import Subject

LARGEST_SCORE = 64.0
"""Scores are cut to +-64 log2 units: Hypothesis takes finite ones only."""


def load_attention(name: str) -> Subject:
    """A kernel for attention by name."""
    return load(name, operation=ATTENTION)


class OutsideError(Exception):
    """The case says nothing about the subject: it refuses it, or promises nothing there."""


class KernelRaisedError(Exception):
    """What a kernel raised is its result."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """A case and the subject that it is put to."""

    case: Case
    subject: Subject
    name: str

    @property
    def problem(self) -> AttentionProblem:
        """What the case builds."""
        return self.case.problem

    def run(self, problem: AttentionProblem, *, interpret: str = "fast") -> SubjectResult:
        """Run the subject on this problem or a relative of it.

        Raises:
            OutsideError: it does not take the problem.
            KernelRaisedError: it raised anything else.
        """
        refusals = (NotImplementedError,) if is_ours(self.name) else REFUSALS
        if self.subject.unsupported(problem) is not None:
            raise OutsideError
        try:
            return self.subject(problem, config=self.case.inputs.config, interpret=interpret)  # type: ignore[attr-defined]
        except refusals as error:
            raise OutsideError from error
        except Exception as error:
            # After an exception the interpreter's state would make later calls hang.
            pltpu.reset_tpu_interpret_mode_state()
            raise KernelRaisedError(error) from error

    def bound(self, problem: AttentionProblem, reference: Reference, *, everywhere: bool = True) -> ContractBound:
        """The subject's contract.

        Raises:
            OutsideError: some row lies outside its domain, and the hunt wants none there.
        """
        return _inside(bound_of(self.subject, problem, reference, device_model()), everywhere=everywhere)

    def expected(self, problem: AttentionProblem, *, everywhere: bool = True) -> tuple[Reference, ContractBound]:
        """The exact result and the subject's contract; raises as `bound`."""
        reference, found = reference_and_bound(self.subject, problem, device_model())
        return reference, _inside(found, everywhere=everywhere)


def _inside(bound: ContractBound, *, everywhere: bool) -> ContractBound:
    if everywhere and not bound.inside_domain.all():
        raise OutsideError
    return bound


@dataclasses.dataclass(frozen=True, eq=False)
class Answer:
    """What a question has found.

    Attributes:
        result: what the subject returned.
        judgement: the verdict.
        reference: the exact result, if it was needed.
        scores: more numbers to maximise.
        place: what the root of a failure says about where, beyond the compared array.
    """

    result: SubjectResult
    judgement: Judgement
    reference: Reference | None = None
    scores: dict[str, float] = dataclasses.field(default_factory=dict)
    place: str = ""


Question = "Callable[[Trial], Answer]"


def contract(trial: Trial, *, everywhere: bool = True) -> Answer:
    """Does the subject keep its contract on the problem itself?"""
    problem = trial.problem
    if trial.subject.unsupported(problem) is not None:
        raise OutsideError
    reference, bound = trial.expected(problem, everywhere=everywhere)
    return judged(trial, problem, trial.run(problem), bound, reference)


def judged(
    trial: Trial, problem: AttentionProblem, result: SubjectResult, bound: ContractBound, reference: Reference
) -> Answer:
    """The judge's verdict on a result."""
    left_out = ~promised_rows(trial.subject, problem)
    judgement = verdict_on(problem, result, bound, reference, left_out, trends=False)
    return Answer(result, judgement, reference)


def evaluate(case: Case, *, subject: Subject, name: str, reproduce: str) -> dict[str, Any] | None:
    """Judge a case by the contract alone; see `attempt`."""
    return attempt(case, contract, subject=subject, name=name, reproduce=reproduce)


def attempt(
    case: Case, question: Callable[[Trial], Answer], *, subject: Subject, name: str, reproduce: str
) -> dict[str, Any] | None:
    """Put a question about a case to a subject.

    Args:
        case: the case.
        question: from the trial to the answer.
        subject: the kernel.
        name: the kernel's name.
        reproduce: the command that judges the case again.

    Returns:
        A record (`verify.records`) with `case_spec`, `hunt`, `root`, `scores` and `cells` for the search; None if the
        kernel does not take the case, or if it says nothing because it lies outside the contract's domain.
    """
    start = time.perf_counter()
    problem, raised = case.problem, None
    try:
        answer = question(Trial(case, subject, name))
    except OutsideError:
        return None
    except KernelRaisedError as error:
        raised = type(error.cause).__name__
        frame = traceback.extract_tb(error.cause.__traceback__)[-1]
        reason = f"nothing came back: {raised}: {str(error.cause)[:300]} ({Path(frame.filename).name}:{frame.lineno})"
        answer = Answer(SubjectResult(np.zeros(0), None), Judgement(Verdict.FAIL, reason))
    examined = Examined(problem, answer.result, answer.judgement)
    # Attention cases, dense ones at least, have the digest of the problem itself.
    sha256 = case.sha256 if isinstance(problem, AttentionProblem) else None
    record = record_of(examined, name=case.name, family="fuzz", interpret="fast", reproduce=reproduce, sha256=sha256)
    bad = answer.judgement.verdict is Verdict.FAIL
    config = case.inputs.config  # type: ignore[attr-defined]
    return record | {
        "subject": name,
        "hunt": case.hunt,
        "case_spec": case.to_json(),
        "root": _root(record, config[0], raised, answer.place) if bad else None,
        "scores": _scores(problem, answer, record),
        "cells": _cells(problem, answer, record),
        "seconds": time.perf_counter() - start,
    }


def _root(record: dict[str, Any], block_q: int, raised: str | None, place: str) -> str:
    """What failed, how, and on which path: violations of one root are one finding."""
    prefix = f"{place}-" if place else ""
    if raised is not None:
        return f"{prefix}raised-{raised}"
    broken = {part: share for part, share in shares(record).items() if not share <= 1.0}
    if not broken:
        return f"{prefix}shape"
    part = max(broken, key=lambda name: severity(broken[name]))
    worst = record["measures"][part]["share"]
    kind = "beyond" if math.isfinite(broken[part]) else f"{_class(worst['got'])}-for-{_class(worst['want'])}"
    maps = record["replay_map"]
    if maps is None or not block_q or len(worst["index"]) < 3:
        return f"{prefix}{part}-{kind}"
    batch, head, row = worst["index"][:3]
    return f"{prefix}{part}-{kind}-{'replayed' if maps[batch][head][row // block_q] else 'fast'}"


def _class(encoded: float | str) -> str:
    value = float(encoded)
    return "nan" if math.isnan(value) else "inf" if math.isinf(value) else "finite"


def _scores(problem: AttentionProblem, answer: Answer, record: dict[str, Any]) -> dict[str, float]:
    """What Hypothesis climbs: the share of each bound that was used, and nearness to the check's limit."""
    scores = {f"log2 share of the bound, {part}": log2(share) for part, share in shares(record).items()}
    if answer.reference is not None and problem.window is None:
        scores["minus log2 distance to the limit"] = -log2(1.0 + abs(_above_limit(problem, answer.reference)))
    return scores | {name: log2(score) for name, score in answer.scores.items()}


def log2(x: float) -> float:
    """A score that Hypothesis takes."""
    if not x > 0.0:
        return LARGEST_SCORE if x != x else -LARGEST_SCORE  # noqa: PLR0124  NaN is the worst
    return min(max(math.log2(x), -LARGEST_SCORE), LARGEST_SCORE) if x < math.inf else LARGEST_SCORE


def _above_limit(problem: AttentionProblem, reference: Reference) -> float:
    """By how many log2 units the row that is nearest to the check's limit lies above it (about: lanes are summed)."""
    first = min(ANCHOR_KEYS, problem.kv_len)
    factor = np.float32(problem.scale * LOG2_E)
    counts = problem.causal_stops(0)
    visible = np.arange(first)[None, :] < counts[:, None]
    seen = counts > 0
    nearest = math.inf
    for b, h in np.ndindex(problem.batch, problem.heads):
        q, k = problem.q[b, h].astype(np.float32), problem.k[b, problem.kv_head(h), :first].astype(np.float32)
        with np.errstate(all="ignore"):
            anchor = np.ceil(np.where(visible, (q @ k.T) * factor, -np.inf).max(axis=1))[seen]
            above = reference.lse[b, h][seen] * LOG2_E - anchor - FLYWHEEL_LIMIT
        above = above[np.isfinite(above)]
        if above.size:
            nearest = min(nearest, float(np.abs(above).min()))
    return nearest


def _cells(problem: AttentionProblem, answer: Answer, record: dict[str, Any]) -> list[str]:
    """Numeric coverage: replay maps, kinds of anchors, buckets of exponents and ulps, cancellation, per shape."""
    where = f"{problem.q_len}x{problem.kv_len}-d{problem.head_dim}{'+'.join(['', *problem.features])}"
    found: set[str] = set()
    for batch in record["replay_map"] or ():
        for head in batch:
            found.add("replays " + "".join("R" if flag else "." for flag in head))
    if answer.result.anchor is not None and answer.result.anchor.size:
        anchor = answer.result.anchor.astype(np.float64)
        for value in (np.nanmin(anchor), np.nanmax(anchor)) if not np.isnan(anchor).all() else ():
            found.add(f"anchor {_bucket(float(value))}")
    if answer.reference is not None and answer.reference.max_logit is not None:
        highest = answer.reference.max_logit[np.isfinite(answer.reference.max_logit)]
        if highest.size:
            found.add(f"logit {_bucket(float(highest[np.abs(highest).argmax()]))}")
    for part, measures in record["measures"].items():
        ulp = float(measures["ulp"]["value"])
        found.add(f"{part} ulp 2^{math.ceil(math.log2(ulp)) if 0 < ulp < math.inf else ulp:g}")
    out = record["measures"].get("out")
    if out is not None and out["share"] is not None and len(out["share"]["index"]) == 4:
        found.add(f"cancellation {_cancellation(problem, tuple(out['share']['index']))}")
    return sorted(f"{where} {cell}" for cell in found)


def _bucket(value: float) -> str:
    """Sign and exponent of a number, eight exponents in a bucket."""
    if not math.isfinite(value) or value == 0.0:
        return f"{value:g}"
    return f"{'-' if value < 0 else '+'}2^{8 * math.floor(math.log2(abs(value)) / 8)}"


def _cancellation(problem: AttentionProblem, index: tuple[int, ...]) -> str:
    """How much larger the terms of an output are than their sum, in powers of four."""
    b, h, row, lane = index
    kv = problem.kv_head(h)
    seen = problem.seen(b, row)
    if not seen.size:
        return "no key"
    with np.errstate(all="ignore"):
        scores = widen(problem.k[b, kv, seen]) @ widen(problem.q[b, h, row]) * problem.scale
        weights = np.exp(scores - scores.max())
        terms = weights / weights.sum() * widen(problem.v[b, kv, seen, lane])
        total, size = abs(terms.sum()), np.abs(terms).sum()
    if not (np.isfinite(size) and size > 0):
        return "no number"
    return f"4^{min(round(math.log2(size / total) / 2), 12) if total > 0 else 13}"

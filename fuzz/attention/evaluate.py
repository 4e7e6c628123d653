"""One case of dense attention: run the subject, judge the result, and say what the search can learn from it."""

from __future__ import annotations

import math
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fuzz.attention.buckets import ANCHOR_KEYS, LOG2_E
from fuzz.outcome import severity, shares
from verify.attention import oracle_float64
from verify.attention.adversarial import FLYWHEEL_LIMIT
from verify.attention.examine import Examined, record_of
from verify.attention.judge import judge
from verify.attention.subjects import SubjectResult
from verify.backend import device_model
from verify.subjects.judging import bound_of, promised_rows
from verify.verdict import Judgement, Verdict

if TYPE_CHECKING:
    from verify.attention.cases import AttentionCase
    from verify.attention.problem import AttentionProblem
    from verify.attention.reference import Reference
    from verify.subjects.subject import Subject

LARGEST_SCORE = 64.0
"""Scores are cut to +-64 log2 units: Hypothesis takes finite ones only."""


def evaluate(
    case: AttentionCase, problem: AttentionProblem, spec: dict[str, Any], *, subject: Subject, name: str, reproduce: str
) -> dict[str, Any] | None:
    """Judge a case.

    Args:
        case: the case.
        problem: what it builds.
        spec: its JSON.
        subject: the kernel.
        name: the kernel's name.
        reproduce: the command that judges the case again.

    Returns:
        A record (`verify.records`) with `case_spec`, `root`, `scores` and `cells` for the search; None if the kernel
        does not take the case, or if the case holds a non-finite value or a row outside the contract's domain, so that
        it says nothing.
    """
    start = time.perf_counter()
    if subject.unsupported(problem) is not None:
        return None
    reference = oracle_float64.attention(problem)
    bound = bound_of(subject, problem, reference, device_model())
    if not bound.inside_domain.all():
        return None
    promised = promised_rows(subject, problem)
    try:
        result = subject(problem, config=case.config)
        judgement = judge(
            problem,
            result.out,
            result.lse,
            bound,
            reference=reference,
            left_out=None if promised.all() else ~promised,
        )
        raised = None
    except NotImplementedError:
        return None
    except Exception as error:  # noqa: BLE001  whatever a kernel raises is its result
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        reason = f"nothing came back: {type(error).__name__}: {error} ({where})"
        result = SubjectResult(np.zeros(0), None)
        judgement, raised = Judgement(Verdict.FAIL, reason), type(error).__name__
    examined = Examined(problem, result, judgement)
    record = record_of(examined, name=case.name, family="fuzz", interpret="fast", reproduce=reproduce)
    root = _root(record, case.config[0], raised) if judgement.verdict is not Verdict.PASS else None
    return record | {
        "subject": name,
        "case_spec": spec,
        "root": root,
        "scores": _scores(problem, reference, record),
        "cells": _cells(problem, record),
        "seconds": time.perf_counter() - start,
    }


def _root(record: dict[str, Any], block_q: int, raised: str | None) -> str:
    """What failed, how, and on which path: violations of one root are one finding."""
    if raised is not None:
        return f"raised-{raised}"
    broken = {part: share for part, share in shares(record).items() if not share <= 1.0}
    if not broken:
        return "shape"
    part = max(broken, key=lambda name: severity(broken[name]))
    worst = record["measures"][part]["share"]
    kind = "beyond" if math.isfinite(broken[part]) else f"{_class(worst['got'])}-for-{_class(worst['want'])}"
    batch, head, row = worst["index"][:3]
    maps = record["replay_map"]
    if maps is None or not block_q:
        return f"{part}-{kind}"
    return f"{part}-{kind}-{'replayed' if maps[batch][head][row // block_q] else 'fast'}"


def _class(encoded: float | str) -> str:
    value = float(encoded)
    return "nan" if math.isnan(value) else "inf" if math.isinf(value) else "finite"


def _scores(problem: AttentionProblem, reference: Reference, record: dict[str, Any]) -> dict[str, float]:
    """What Hypothesis climbs: the share of each bound that was used, and nearness to the check's limit."""
    scores = {f"log2 share of the bound, {part}": _log2(share) for part, share in shares(record).items()}
    scores["minus log2 distance to the limit"] = -_log2(1.0 + abs(_above_limit(problem, reference)))
    return scores


def _log2(x: float) -> float:
    if not x > 0.0:
        return LARGEST_SCORE if x != x else -LARGEST_SCORE  # noqa: PLR0124  NaN is the worst
    return min(max(math.log2(x), -LARGEST_SCORE), LARGEST_SCORE)


def _above_limit(problem: AttentionProblem, reference: Reference) -> float:
    """By how many log2 units the row that is nearest to the check's limit lies above it (about: lanes are summed)."""
    first = min(ANCHOR_KEYS, problem.kv_len)
    factor = np.float32(problem.scale * LOG2_E)
    counts = np.array([problem.visible(row) for row in range(problem.q_len)])
    visible = np.arange(first)[None, :] < counts[:, None]
    seen = counts > 0
    nearest = math.inf
    for b, h in np.ndindex(problem.batch, problem.heads):
        q, k = problem.q[b, h].astype(np.float32), problem.k[b, problem.kv_head(h), :first].astype(np.float32)
        anchor = np.ceil(np.where(visible, (q @ k.T) * factor, -np.inf).max(axis=1))[seen]
        above = reference.lse[b, h][seen] * LOG2_E - anchor - FLYWHEEL_LIMIT
        if above.size:
            nearest = min(nearest, float(np.abs(above).min()))
    return nearest


def _cells(problem: AttentionProblem, record: dict[str, Any]) -> list[str]:
    """Coverage: which query blocks of a head were replayed, per shape."""
    if record["replay_map"] is None:
        return []
    where = f"{problem.q_len}x{problem.kv_len}-d{problem.head_dim}"
    return sorted(
        {
            f"{where} " + "".join("R" if flag else "." for flag in head)
            for batch in record["replay_map"]
            for head in batch
        }
    )

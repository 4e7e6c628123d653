"""Poison where it must not matter: NaN and infinities reach the rows that see them, and no other."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from fuzz.attention.compare import same_bits
from fuzz.attention.evaluate import Answer, Trial, attempt, judged
from verify.attention.problem import widen
from verify.verdict import Judgement, Verdict

if TYPE_CHECKING:
    from fuzz.case import Case
    from verify.attention.problem import AttentionProblem
    from verify.subjects.subject import Subject

POISONS = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
TENSORS = ("v", "k", "q")


def poisoned(problem: AttentionProblem, case: Case) -> AttentionProblem:
    """The problem with one run of tokens of one tensor, in one lane or all, replaced by a non-finite value."""
    tensor = str(case.asked("tensor"))
    x = getattr(problem, tensor).copy()
    first, count, lane = (int(case.asked(name)) for name in ("token", "tokens", "lane"))
    head = int(case.asked("head")) % x.shape[1]
    lanes = slice(None) if lane < 0 else slice(lane % x.shape[3], lane % x.shape[3] + 1)
    x[:, head, first % x.shape[2] : first % x.shape[2] + count, lanes] = POISONS[str(case.asked("poison"))]
    return dataclasses.replace(problem, **{tensor: x})


def untouched(problem: AttentionProblem) -> np.ndarray:
    """Rows `[batch, heads, q_len]` that read nothing non-finite: neither as query nor through a key that they see."""
    clean = np.zeros(problem.q.shape[:3], dtype=bool)
    for b, h in np.ndindex(problem.batch, problem.heads):
        kv = problem.kv_head(h)
        bad = ~(np.isfinite(widen(problem.k[b, kv])).all(axis=1) & np.isfinite(widen(problem.v[b, kv])).all(axis=1))
        clean[b, h] = ~(problem.mask(b)[:, bad].any(axis=1)) & np.isfinite(widen(problem.q[b, h])).all(axis=1)
    return clean


def _question(trial: Trial) -> Answer:
    problem = trial.problem
    bad = poisoned(problem, trial.case)
    reference, bound = trial.expected(bad, everywhere=False)
    before, after = trial.run(problem), trial.run(bad)
    answer = judged(trial, bad, after, bound, reference)
    if answer.judgement.verdict is Verdict.FAIL:
        return dataclasses.replace(answer, place="poisoned")
    rows = untouched(bad)
    if before.replays is not None and after.replays is not None:
        # A row block that a poisoned row sends to the replay comes back in other roundings: the contract covers it.
        block = trial.case.inputs.config[0]  # type: ignore[attr-defined]
        same = np.repeat(before.replays == after.replays, block, axis=2)[:, :, : problem.q_len]
        rows &= same
    differs = same_bits(before, after, "a row that cannot see the poison does not depend on it", rows)
    if differs is None:
        return answer
    failed = Judgement(Verdict.FAIL, differs, answer.judgement.measures)
    return dataclasses.replace(answer, judgement=failed, place="poison-leaks")


def evaluate(case: Case, *, subject: Subject, name: str, reproduce: str) -> dict[str, Any] | None:
    """Judge the poisoned case by the contract, and rows that cannot see the poison against the clean one, bitwise."""
    return attempt(case, _question, subject=subject, name=name, reproduce=reproduce)

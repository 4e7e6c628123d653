"""Determinism and batch invariance, bitwise: what else is in the call, and when it runs, changes nothing."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from fuzz.attention.compare import same_bits
from fuzz.attention.evaluate import Answer, Trial, attempt, contract
from verify.attention.subjects import SubjectResult
from verify.verdict import Judgement, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from fuzz.case import Case
    from verify.subjects.subject import Subject


def _again(trial: Trial, first: SubjectResult) -> tuple[str, SubjectResult, SubjectResult]:
    return "the same call gives the same bits", first, trial.run(trial.problem)


def _batch(trial: Trial, first: SubjectResult) -> tuple[str, SubjectResult, SubjectResult]:
    """The batch entry in front of, and behind, another one: its own with heads and tokens reversed."""
    p = trial.problem
    both = dataclasses.replace(
        p,
        q=np.concatenate([p.q[:, ::-1, ::-1], p.q]),
        k=np.concatenate([p.k[:, :, ::-1], p.k]),
        v=np.concatenate([-p.v[:, :, ::-1], p.v]),
        **{
            name: np.concatenate([x, x]) for name in ("q_segments", "k_segments") if (x := getattr(p, name)) is not None
        },
    )
    found = trial.run(both)
    return "a batch entry does not depend on its neighbour", first, _part(found, slice(p.batch, None))


def _heads(trial: Trial, first: SubjectResult) -> tuple[str, SubjectResult, SubjectResult]:
    """The heads of the last KV head alone."""
    p = trial.problem
    group = p.heads // p.kv_heads
    alone = dataclasses.replace(
        p,
        q=p.q[:, -group:],
        k=p.k[:, -1:],
        v=p.v[:, -1:],
        sinks=None if p.sinks is None else p.sinks[-group:],
    )
    return "a head does not depend on other heads", _part(first, np.s_[:, -group:]), trial.run(alone)


def _part(result: SubjectResult, index: Any) -> SubjectResult:  # noqa: ANN401  anything that indexes
    return SubjectResult(result.out[index], None if result.lse is None else result.lse[index])


RELATIONS: dict[str, Callable[[Trial, SubjectResult], tuple[str, SubjectResult, SubjectResult]]] = {
    "run twice": _again,
    "in a batch": _batch,
    "heads alone": _heads,
}
"""The first is the one that a case shrinks to."""


def _question(trial: Trial) -> Answer:
    answer = contract(trial)
    relation = str(trial.case.asked("relation"))
    what, first, second = RELATIONS[relation](trial, answer.result)
    differs = same_bits(first, second, what)
    if differs is None:
        return answer
    failed = Judgement(Verdict.FAIL, differs, answer.judgement.measures)
    return dataclasses.replace(answer, judgement=failed, place=relation.replace(" ", "-"))


def evaluate(case: Case, *, subject: Subject, name: str, reproduce: str) -> dict[str, Any] | None:
    """Judge a case by the contract, and by one relation bit for bit."""
    return attempt(case, _question, subject=subject, name=name, reproduce=reproduce)

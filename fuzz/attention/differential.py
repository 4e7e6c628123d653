"""Two kernels on one case: they may differ by what both contracts allow, and no more."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from fuzz.attention.compare import close
from fuzz.attention.evaluate import Answer, Trial, attempt, judged, load_attention
from verify.measures import widen
from verify.verdict import Verdict

if TYPE_CHECKING:
    from fuzz.case import Case
    from verify.subjects.subject import Subject


load_peer = functools.cache(load_attention)


def _question(trial: Trial) -> Answer:
    problem = trial.problem
    other = str(trial.case.asked("peer"))
    peer = Trial(trial.case, load_peer(other), other)
    reference, bound = trial.expected(problem)
    bounds = bound, peer.bound(problem, reference)
    ours, theirs = (one.run(problem) for one in (trial, peer))
    pairs = {"out": (ours.out, widen(theirs.out), bounds[0].out + bounds[1].out)}
    if ours.lse is not None and theirs.lse is not None:
        pairs["lse"] = (ours.lse, widen(theirs.lse), bounds[0].lse + bounds[1].lse)
    judgement = close(pairs, f"agreement with {other}")
    place = f"against-{other.replace('.', '-')}"
    if judgement.verdict is not Verdict.FAIL:
        return Answer(ours, judgement, reference, place=place)
    # Whose fault it is, the oracle says.
    mine = judged(trial, problem, ours, bounds[0], reference)
    if mine.judgement.verdict is Verdict.FAIL:
        return dataclasses.replace(mine, place=place)
    peers_own = judged(peer, problem, theirs, bounds[1], reference).judgement
    if peers_own.verdict is Verdict.FAIL:
        note = f"{other} breaks its own contract here: {peers_own.reason}"
        return dataclasses.replace(mine, judgement=dataclasses.replace(mine.judgement, notes=(note,)))
    doubt = f"both keep their contracts, and yet {judgement.reason}: a bound or the oracle is unsound"
    return Answer(ours, dataclasses.replace(judgement, reason=doubt), reference, place="unsound")


def evaluate(case: Case, *, subject: Subject, name: str, reproduce: str) -> dict[str, Any] | None:
    """Judge a case by another kernel's result."""
    return attempt(case, _question, subject=subject, name=name, reproduce=reproduce)

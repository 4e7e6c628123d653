"""One layer call of Gated DeltaNet: run the kernel, judge outputs, states and copies, say what a search can learn."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any

from fuzz.attention.evaluate import log2
from fuzz.attention.schedule import SCHEDULE, judged_again
from fuzz.gdn.record import in_json, record_of
from fuzz.outcome import severity, shares
from verify.subjects.gdn import judge_gdn_subject
from verify.verdict import Verdict

if TYPE_CHECKING:
    import numpy as np

    from fuzz.case import Case
    from fuzz.gdn.subjects import LayerSubject
    from verify.gdn.judge import GdnResult
    from verify.gdn.problem import GdnProblem
    from verify.subjects.gdn import GdnSubject


def evaluate(case: Case, *, subject: LayerSubject, name: str, reproduce: str) -> dict[str, Any] | None:
    """Judge a call; None if the kernel does not take it or nothing lies inside the contract's domain."""
    start = time.perf_counter()
    problem: GdnProblem = case.problem
    precision = _precision(case)
    judged = judge_gdn_subject(subject.in_precision(precision), problem)
    judgement = judged.judgement
    if judgement.verdict in (Verdict.SKIPPED, Verdict.OUTSIDE_DOMAIN):
        return None
    shape = {"tokens": problem.tokens, "heads": list(problem.heads)}
    features = {"precision": precision, "width": problem.width, "beta_scale": problem.beta_scale}
    record = record_of(case, judgement, name=name, reproduce=reproduce, shape=shape, features=features)
    found = shares(record)
    inputs: Any = case.inputs
    cells = [f"{precision} {inputs.keys} {inputs.beta} {inputs.decay}"]
    cells += [
        f"{precision} {part} ulp 2^{_exponent(float(m['ulp']['value']))}" for part, m in record["measures"].items()
    ]
    cells += [f"{precision} {part} share 2^{_exponent(share)}" for part, share in found.items()]
    bad = judgement.verdict is Verdict.FAIL
    return record | {
        "root": f"{_root(judgement.reason, found)}-{precision}" if bad else None,
        "scores": {f"log2 share of the bound, {part}": log2(share) for part, share in found.items()},
        "classes": {f"{precision} {part} share": in_json(share) for part, share in found.items()},
        "cells": cells,
        "seconds": time.perf_counter() - start,
    }


def evaluate_schedule(case: Case, *, subject: LayerSubject, name: str, reproduce: str) -> dict[str, Any] | None:
    """The same, and a simulated run with the case's schedule against it, bitwise; None if it cannot be simulated."""
    simulate = subject.simulate
    if simulate is None:
        return None
    problem, precision = case.problem, _precision(case)
    kernel = subject.in_precision(precision)
    again = dataclasses.replace(kernel, call=lambda given: simulate(given, precision, SCHEDULE))

    def results(found: GdnResult) -> dict[str, np.ndarray]:
        arrays = {"out": found.out, "state": found.state, "conv_state": found.conv_state}
        return {part: x for part, x in arrays.items() if x is not None}

    def judge(kernel: GdnSubject) -> dict[str, Any] | None:
        return evaluate(
            case, subject=dataclasses.replace(subject, in_precision=lambda _: kernel), name=name, reproduce=reproduce
        )

    return judged_again(
        judge(kernel),
        case,
        lambda: results(kernel.call(problem)),
        lambda: results(again.call(problem)),
        lambda: judge(again),
    )


def _precision(case: Case) -> str:
    """Of the products; cases from before it was drawn do not say."""
    return str(dict(case.ask).get("precision", "bf16"))


def _root(reason: str, found: dict[str, float]) -> str:
    broken = {part: share for part, share in found.items() if not share <= 1.0}
    if broken:
        part = max(broken, key=lambda one: severity(broken[one]))
        return f"{part}-{'beyond' if math.isfinite(broken[part]) else 'not-finite'}"
    for word in ("conv_state", "slots", "raised"):
        if word in reason:
            return word
    return "shape"


def _exponent(x: float) -> str:
    return f"{math.ceil(math.log2(x))}" if 0 < x < math.inf else f"{x:g}"

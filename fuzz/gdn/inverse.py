"""One matrix of the chunk's inverse: run the kernel, judge it by its a-priori bound, say what a search can learn."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from fuzz.attention.evaluate import log2
from fuzz.gdn.record import in_json, record_of
from fuzz.outcome import shares
from verify.backend import device_model
from verify.gdn.inverse_judge import judge_inverse
from verify.verdict import Judgement, Verdict

if TYPE_CHECKING:
    from fuzz.case import Case
    from fuzz.gdn.inverse_case import InverseProblem
    from fuzz.gdn.subjects import InverseSubject


def evaluate(case: Case, *, subject: InverseSubject, name: str, reproduce: str) -> dict[str, Any] | None:
    """Judge a matrix in the precision that the case asks for; None if the kernel does not take it.

    The goal of the search is the largest error of an entry, as the published figures have it; the share of the bound
    decides the verdict.
    """
    start = time.perf_counter()
    problem: InverseProblem = case.problem
    precision = str(case.asked("precision"))
    if subject.missing() is not None or not np.isfinite(problem.lower).all():
        return None
    raised = None
    try:
        got = subject.invert(problem, precision)
    except NotImplementedError:
        return None
    except Exception as error:  # noqa: BLE001  whatever a kernel raises is its result
        raised = type(error).__name__
        judgement = Judgement(Verdict.FAIL, f"nothing came back: {raised}: {str(error)[:300]}")
        bound = None
    else:
        judged = judge_inverse(problem.lower, got, subject.steps(precision), device_model(), power=False)
        judgement, bound = judged.judgement, judged.bound
    record = record_of(
        case, judgement, name=name, reproduce=reproduce, shape={"chunk": 64}, features={"precision": precision}
    )
    if judgement.verdict is Verdict.FAIL:
        record["root"] = f"raised-{raised}" if raised else _root(record, precision)
    worst = record["measures"].get("inverse")
    error = 0.0 if worst is None else float(worst["absolute"]["value"])
    # A matrix that the bound calls hopeless convicts no kernel; its error says little about the algorithm.
    largest = 1.0 if bound is None else float(np.abs(bound.exact).max())
    beta = float(problem.beta.max(initial=0.0))
    where = f"{precision}-beta<={1 if beta <= 1.0 else 2}"
    share = shares(record).get("inverse", 0.0)
    cells = [
        f"{where} growth 2^{_exponent(largest)}",
        f"{where} error 2^{_exponent(error)}",
        f"{where} decay {'1' if getattr(case.inputs, 'decay', '') == '0x1p+0' else 'below 1'}",
    ]
    if worst is not None:
        row, column = worst["absolute"]["index"][:2]
        cells.append(f"{where} worst at {row // 16},{column // 16}")
    return record | {
        "scores": {"log2 error": log2(error), "log2 share of the bound": log2(share), "log2 growth": log2(largest)},
        "goal": in_json(error),
        "classes": {f"{where} error": in_json(error), f"{where} share": in_json(share)},
        "cells": cells,
        "seconds": time.perf_counter() - start,
    }


def _root(record: dict[str, Any], precision: str) -> str:
    share = shares(record).get("inverse")
    kind = "shape" if share is None else "beyond" if math.isfinite(share) else "not-finite"
    return f"inverse-{kind}-{precision}"


def _exponent(x: float) -> str:
    return f"{math.ceil(math.log2(x))}" if 0 < x < math.inf else f"{x:g}"

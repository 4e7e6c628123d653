"""Mistakes that show in a wrong row's numbers themselves, rather than in another input's answer (`explain`)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from verify.attention.problem import SMALLEST_NORMAL, widen
from verify.devices import BF16_UNIT_ROUNDOFF

if TYPE_CHECKING:
    from verify.attention.problem import AttentionProblem
    from verify.attention.reference import Reference

LN2 = math.log(2.0)
Index = tuple[int, int, int]


def lse_symptoms(problem: AttentionProblem, got: float, want: float, bound: float, index: Index) -> list[str]:
    """Names of what a wrong LSE equals, within its bound (scaled as the candidate is)."""
    if not (math.isfinite(got) and math.isfinite(want)):
        return []
    logits = _logits(problem, index)
    candidates = {
        "the LSE in log2 units instead of nats": want / LN2,
        "the LSE taken for log2 units and converted once too often": want * LN2,
        "the LSE with the wrong sign": -want,
        "the sum of the weights, not its logarithm": math.exp(want) if want < 700.0 else math.inf,
    }
    if logits.size and problem.softcap is None and problem.sinks is None:
        top = float(logits.max())
        candidates["the largest logit alone, without the logarithm of the sum"] = top
        candidates["the logarithm of the sum alone, without the largest logit"] = want - top
        if problem.scale not in (0.0, 1.0):
            raw = logits / problem.scale
            candidates["the LSE of logits that were not scaled"] = float(
                raw.max() + np.log(np.exp(raw - raw.max()).sum())
            )
    room = 2.0 * bound
    return [
        name
        for name, value in candidates.items()
        if value != want and abs(got - value) <= room * max(1.0, abs(value / want) if want else 1.0)
    ]


def output_symptoms(
    problem: AttentionProblem, got: np.ndarray, reference: Reference, bound: np.ndarray, index: Index
) -> list[str]:
    """Names of what a wrong output row looks like: a multiple of the right one, or an accumulator in BF16."""
    b, h, row = index
    want = reference.out[b, h, row]
    # Of a row that no BF16 or FP32 word can hold, nothing is a telling multiple.
    if not (np.isfinite(got).all() and np.isfinite(want).all()) or np.abs(want).max() < SMALLEST_NORMAL:
        return []
    factor = float(got @ want) / float(want @ want)
    slack = bound * max(1.0, abs(factor)) + BF16_UNIT_ROUNDOFF * np.abs(got)
    telling = abs(factor - 1.0) * np.abs(want).max() > 2.0 * bound.max()
    if telling and (np.abs(got - factor * want) <= slack).all():
        return [_multiple(problem, reference, factor, index, float(bound.max() / np.abs(want).max()))]
    return _coarse_accumulator(problem, got, want, bound, index)


def _multiple(problem: AttentionProblem, reference: Reference, factor: float, index: Index, doubt: float) -> str:
    b, h, row = index
    text = f"the right row times {factor:.4g}: normalised by a wrong sum"
    mask = problem.mask(b)
    scores = widen(problem.q[b, h]) @ widen(problem.k[b, problem.kv_head(h)]).T * problem.scale
    top = np.where(mask, scores, -np.inf).max(axis=1, initial=-np.inf)
    lse = reference.lse[b, h]
    with np.errstate(invalid="ignore", over="ignore"):
        # The sums of rows as they are, and relative to each row's largest logit.
        for sums in (lse, lse - top):
            near = np.abs(np.exp(sums[row] - sums) - factor)
            near[row] = np.inf
            near = np.where(np.isnan(near), np.inf, near)
            other = int(near.argmin())
            if near[other] <= 4.0 * (doubt + BF16_UNIT_ROUNDOFF) * abs(factor):
                return f"{text}, that of row {other}"
    return text


def _coarse_accumulator(
    problem: AttentionProblem, got: np.ndarray, want: np.ndarray, bound: np.ndarray, index: Index
) -> list[str]:
    """Whether rounding partial sums to BF16 after every block of keys explains the size of the errors."""
    b, h, row = index
    keys = np.flatnonzero(problem.mask(b, [row])[0])
    logits = _logits(problem, index)
    if not keys.size or problem.softcap is not None or problem.sinks is not None:
        return []
    weights = np.exp(logits - logits.max())
    size = (weights / weights.sum()) @ np.abs(widen(problem.v[b, problem.kv_head(h)][keys]))
    blocks = max(math.ceil(keys.size / 8), 1)
    error = np.abs(got - want)
    if (error <= bound + blocks * BF16_UNIT_ROUNDOFF * size).all() and (error > 0).mean() > 0.5:
        rounds = float((error / np.where(size > 0, size, np.inf)).max() / BF16_UNIT_ROUNDOFF)
        text = (
            f"errors of {rounds:.2g} BF16 roundings of sum P|v| (P and the output are allowed one each): partial sums, "
            "or the accumulator, rounded to BF16"
        )
        return [text]
    return []


def _logits(problem: AttentionProblem, index: Index) -> np.ndarray:
    """Scaled scores of the keys that a row sees, in float64."""
    b, h, row = index
    keys = np.flatnonzero(problem.mask(b, [row])[0])
    return widen(problem.k[b, problem.kv_head(h)][keys]) @ widen(problem.q[b, h, row]) * problem.scale

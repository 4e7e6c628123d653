"""Subjects with planted faults, which the hunts must find; loaded by name in worker processes too."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import signal
import time

import numpy as np

from verify.attention.adversarial import FLYWHEEL_LIMIT
from verify.attention.problem import AttentionProblem, widen
from verify.attention.subjects import SubjectResult, run_flywheel

LANES = 128
Config = tuple[int, int, int]


def oracle(problem: AttentionProblem, *, config: Config = (0, 0, 0)) -> SubjectResult:
    """A subject without faults and without compilation: float64, rounded."""
    del config
    return _softmax(problem, math.inf)


def skips_replay(problem: AttentionProblem, *, config: Config = (0, 0, 0)) -> SubjectResult:
    """Loses every key whose score lies more than the kernel's limit above the anchor: a check without its replay."""
    del config
    return _softmax(problem, FLYWHEEL_LIMIT)


def _softmax(problem: AttentionProblem, limit: float) -> SubjectResult:
    """The softmax without the keys whose score exceeds the anchor by more than the limit (log2 units)."""
    out = np.zeros(problem.q.shape)
    lse = np.full(problem.q.shape[:3], -np.inf)
    mask = problem.mask()
    seen = mask.any(axis=1)
    for b, h in np.ndindex(problem.batch, problem.heads):
        kv = problem.kv_head(h)
        q, k, v = widen(problem.q[b, h]), widen(problem.k[b, kv]), widen(problem.v[b, kv])
        s = np.where(mask, (q @ k.T) * (problem.scale * np.log2(np.e)), -np.inf)
        anchor = np.where(seen, s[:, :LANES].max(axis=1), 0.0)[:, None]
        kept = np.where(s - anchor > limit, -np.inf, s)
        top = np.where(seen, kept.max(axis=1), 0.0)[:, None]
        weights = np.exp2(kept - top)
        total = np.where(seen[:, None], weights.sum(axis=1, keepdims=True), 1.0)
        out[b, h] = (weights / total) @ v
        lse[b, h] = np.where(seen, (top + np.log2(total))[:, 0] * np.log(2.0), -np.inf)
    return SubjectResult(out.astype(problem.q.dtype), lse.astype(np.float32))


def crashes(problem: AttentionProblem, *, config: Config = (0, 0, 0)) -> SubjectResult:
    """Kills its own process at the third case."""
    if _count() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return oracle(problem, config=config)


def hangs(problem: AttentionProblem, *, config: Config = (0, 0, 0)) -> SubjectResult:
    """Never comes back from the third case."""
    if _count() == 3:
        time.sleep(3600.0)
    return oracle(problem, config=config)


def raises(problem: AttentionProblem, *, config: Config = (0, 0, 0)) -> SubjectResult:
    """Refuses |v| beyond 2**118."""
    if np.abs(widen(problem.v)).max() > 2.0**118:
        message = "values too large"
        raise OverflowError(message)
    return oracle(problem, config=config)


def raises_two_ways(problem: AttentionProblem, *, config: Config = (0, 0, 0)) -> SubjectResult:
    """Refuses |v| beyond 2**118, and |v| beyond 2**60 in other words."""
    largest = np.abs(widen(problem.v)).max()
    if 2.0**60 < largest <= 2.0**118:
        message = "values are large"
        raise ArithmeticError(message)
    return raises(problem, config=config)


@functools.cache
def _first_call(key: tuple[object, ...]) -> bool:
    time.sleep(1.0)
    return key is not None


def slow_first_call(problem: AttentionProblem, *, config: Config = (0, 0, 0)) -> SubjectResult:
    """Sleeps for a second at the first case of a shape, as a compilation would; right otherwise."""
    _first_call((problem.q.shape, problem.k.shape, problem.causal, config))
    return oracle(problem, config=config)


def slow_and_skips_replay(problem: AttentionProblem, *, config: Config = (0, 0, 0)) -> SubjectResult:
    """Slow at first, and wrong beyond the limit."""
    _first_call((problem.q.shape, problem.k.shape, problem.causal, config))
    return skips_replay(problem, config=config)


def stale_denominator(problem: AttentionProblem, *, config: Config = (0, 0, 0)) -> SubjectResult:
    """The real kernel, with results of replayed query blocks halved."""
    result = run_flywheel(problem, config=config)
    assert result.replays is not None
    rows = np.repeat(result.replays > 0, config[0], axis=2)[:, :, : problem.q_len, None]
    half = np.where(rows, result.out.astype(np.float32) / 2, result.out.astype(np.float32)).astype(result.out.dtype)
    return dataclasses.replace(result, out=half)


@functools.cache
def _counter() -> list[int]:
    return [0]


def _count() -> int:
    _counter()[0] += 1
    return _counter()[0]


def hoards(problem: AttentionProblem, *, config: Config = (0, 0, 0)) -> SubjectResult:
    """Takes six gigabytes of address space and holds them, touched page by page, for a while."""
    held = np.ones(6 * 2**27)
    time.sleep(30.0)
    del held
    return oracle(problem, config=config)

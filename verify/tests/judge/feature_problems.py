"""Adversarial problems with features, and a plain implementation that can be told to make well-known mistakes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from verify.attention.problem import BF16, AttentionProblem
from verify.attention.reference import Reference
from verify.tests.judge.problems import adversarial_problem


def feature_problem(seed: int, *names: str) -> AttentionProblem:
    """An adversarial problem with the named features drawn at random."""
    problem = adversarial_problem(seed)
    rng = np.random.default_rng([seed, 77])
    changes: dict[str, Any] = {}
    for name in names:
        changes |= FEATURES[name](rng, problem)
    return dataclasses.replace(problem, **changes)


def _window(rng: np.random.Generator, problem: AttentionProblem) -> dict[str, Any]:
    sides = [None, 0, 1, 2, 5, problem.kv_len, 2**40]
    left, right = (sides[int(rng.integers(len(sides)))] for _ in range(2))
    return {"window": (left, right)}


def _softcap(rng: np.random.Generator, problem: AttentionProblem) -> dict[str, Any]:
    """Caps far below, around and far above the logits, and a slightly larger score that saturates with another."""
    del problem
    return {
        "softcap": float(rng.choice([2.0**-60, 2.0**-3, 1.0, 20.0, 50.0, 2.0**20, 2.0**100, 2.0**-1000, 2.0**1000]))
    }


def _sinks(rng: np.random.Generator, problem: AttentionProblem) -> dict[str, Any]:
    kinds = [0.0, -np.inf, 1e-3, 30.0, -30.0, 700.0, -700.0, 1e30, -1e30, 3e38, 2.0**-130]
    sinks = rng.choice(kinds, problem.heads) + rng.choice([0.0, 1.0], problem.heads) * rng.standard_normal(
        problem.heads
    )
    return {"sinks": sinks.astype(np.float32)}


def _segments(rng: np.random.Generator, problem: AttentionProblem) -> dict[str, Any]:
    ids = [rng.integers(0, 3, (problem.batch, n)) * 65536 for n in (problem.q_len, problem.kv_len)]
    if rng.integers(2):
        ids = [np.sort(x, axis=1) for x in ids]
    return {"q_segments": ids[0], "k_segments": ids[1]}


def _positions(rng: np.random.Generator, problem: AttentionProblem) -> dict[str, Any]:
    return {"q_positions": rng.integers(-2, problem.kv_len + 3, (problem.batch, problem.q_len))}


def _v_dim(rng: np.random.Generator, problem: AttentionProblem) -> dict[str, Any]:
    """Another width, by dropping lanes or repeating them with other exponents."""
    width = int(rng.choice([1, 3, problem.head_dim + 1]))
    lanes = rng.integers(0, problem.v_dim, width)
    return {
        "v": np.clip(problem.v.astype(np.float64)[..., lanes] * 2.0 ** rng.integers(-3, 3, width), -3e38, 3e38).astype(
            BF16
        )
    }


FEATURES = {
    "window": _window,
    "softcap": _softcap,
    "sinks": _sinks,
    "segments": _segments,
    "positions": _positions,
    "v_dim": _v_dim,
}

MISTAKES = {
    "window one key too wide": ("window",),
    "window one key too narrow": ("window",),
    "window ignored": ("window",),
    "cap after the mask": ("softcap",),
    "no cap": ("softcap",),
    "cap before the scale": ("softcap",),
    "sink dropped": ("sinks",),
    "sink of the row modulo the heads": ("sinks",),
    "sink of the KV head": ("sinks",),
    "sink scaled": ("sinks",),
    "sink capped": ("sinks", "softcap"),
    "segments ignored": ("q_segments",),
    "segment ids in 16 bits": ("q_segments",),
    "aligned top-left": ("window",),
    "LSE without the sink": ("sinks",),
    "maximum with the sink": ("sinks",),
}
"""Each with the features without which it cannot show."""


def plain(problem: AttentionProblem, mistake: str = "") -> Reference:
    """f in float64 as one would write it down, with one mistake; for finite inputs and moderate logits.

    The errors claimed, 2^-40, are far above what it errs by without a mistake.
    """
    shape = (problem.batch, problem.heads, problem.q_len)
    q, k, v = (x.astype(np.float64) for x in (problem.q, problem.k, problem.v))
    out, lse, largest = np.zeros((*shape, problem.v_dim)), np.zeros(shape), np.zeros(shape)
    for b, h, i in np.ndindex(*shape):
        kv = h // (problem.heads // problem.kv_heads)
        scores = k[b, kv] @ q[b, h, i]
        z = _cap(scores, problem, mistake)
        seen = _seen(problem, b, i, mistake)
        if mistake == "cap after the mask" and problem.softcap is not None:
            z, seen = np.where(seen, z, -problem.softcap), np.ones_like(seen)
        z = np.where(seen, z, -np.inf)
        sink = _sink(problem, h, i, mistake)
        top = max(z.max(initial=-np.inf), sink)
        largest[b, h, i] = top if mistake == "maximum with the sink" else z.max(initial=-np.inf)
        if top == -np.inf:
            lse[b, h, i] = -np.inf
            continue
        weights = np.exp(z - top)
        total = weights.sum() + np.exp(sink - top)
        out[b, h, i] = weights @ v[b, kv] / total
        shown = weights.sum() if mistake == "LSE without the sink" else total
        with np.errstate(divide="ignore"):
            lse[b, h, i] = top + np.log(shown)
    doubts = [
        np.where(np.isfinite(x), 2.0**-40 * (1.0 + np.abs(np.where(np.isfinite(x), x, 0.0))), 0.0)
        for x in (out, lse, largest)
    ]
    return Reference(out, doubts[0], lse, doubts[1], "plain", max_logit=largest, max_logit_error=doubts[2])


def _cap(scores: np.ndarray, problem: AttentionProblem, mistake: str) -> np.ndarray:
    cap = problem.softcap
    if cap is None or mistake == "no cap":
        return scores * problem.scale
    if mistake == "cap before the scale":
        return cap * np.tanh(scores / cap) * problem.scale
    return cap * np.tanh(scores * problem.scale / cap)


def _seen(problem: AttentionProblem, batch: int, row: int, mistake: str) -> np.ndarray:
    keys = np.arange(problem.kv_len)
    aligned = row if mistake == "aligned top-left" else row + problem.kv_len - problem.q_len
    if problem.q_positions is not None and mistake != "aligned top-left":
        aligned = int(problem.q_positions[batch, row])
    seen = keys <= aligned if problem.causal else np.ones(problem.kv_len, dtype=bool)
    if problem.window is not None and mistake != "window ignored":
        step = {"window one key too wide": 1, "window one key too narrow": -1}.get(mistake, 0)
        left, right = (None if side is None else max(side + step, 0) for side in problem.window)
        seen &= True if left is None else keys >= aligned - left
        seen &= True if right is None else keys <= aligned + right
    if problem.q_segments is not None and problem.k_segments is not None and mistake != "segments ignored":
        a, b = problem.q_segments[batch, row], problem.k_segments[batch]
        if mistake == "segment ids in 16 bits":
            a, b = a.astype(np.int16), b.astype(np.int16)
        seen &= a == b
    return seen


def _sink(problem: AttentionProblem, head: int, row: int, mistake: str) -> float:
    if problem.sinks is None or mistake == "sink dropped":
        return -np.inf
    index = {
        "sink of the row modulo the heads": row % problem.heads,
        "sink of the KV head": head // (problem.heads // problem.kv_heads),
    }.get(mistake, head)
    sink = float(problem.sinks[index])
    if mistake == "sink scaled":
        return sink * problem.scale
    if mistake == "sink capped" and problem.softcap is not None:
        return problem.softcap * float(np.tanh(sink / problem.softcap))
    return sink

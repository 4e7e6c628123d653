"""A backward kernel in numpy that rounds as the contract says, and the same with one mistake at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from verify.attention.gradients.judge import GradientResult
from verify.attention.problem import BF16, AttentionProblem, widen
from verify.subjects import Arithmetic, Features, Subject

MISTAKES = (
    "no scale",
    "scale twice",
    "delta left out",
    "tiled heads",
    "first head of the group",
    "opposite sign",
    "BF16 accumulator",
    "unnormalised weights",
    "no slope of the soft cap",
    "mask one key off",
    "transposed weights",
    "neighbour's delta",
)


def single(x: np.ndarray) -> np.ndarray:
    """To FP32."""
    return np.asarray(x, np.float32)


def rounded(x: np.ndarray) -> np.ndarray:
    """To BF16 and back to FP32."""
    return np.asarray(x, np.float32).astype(BF16).astype(np.float32)


def accumulate(terms: np.ndarray, numbers: np.ndarray, *, narrow: bool) -> np.ndarray:
    """terms @ numbers with an FP32 accumulator, or one that is rounded to BF16 after every 8 terms."""
    if not narrow:
        return terms @ numbers
    total = np.zeros((terms.shape[0], numbers.shape[1]), np.float32)
    for start in range(0, terms.shape[1], 8):
        total = rounded(total + terms[:, start : start + 8] @ numbers[start : start + 8])
    return total


def backward(
    problem: AttentionProblem,
    d_out: np.ndarray,
    *,
    mistake: str = "",
    delta_from: str = "output",
    narrow_dp: bool = False,
    keep_ds: bool = False,
) -> GradientResult:
    """dq, dk, dv (BF16) and dsinks (FP32)."""
    scale, one = np.float32(problem.scale), np.float32(1.0)
    dq = np.zeros(problem.q.shape, np.float32)
    dk, dv = (np.zeros(x.shape, np.float32) for x in (problem.k, problem.v))
    dsinks = np.zeros(problem.heads, np.float32)
    narrow = mistake == "BF16 accumulator"
    group = problem.heads // problem.kv_heads
    for b, h in np.ndindex(problem.batch, problem.heads):
        g = h % problem.kv_heads if mistake == "tiled heads" else problem.kv_head(h)
        q, k, v = (single(widen(x)) for x in (problem.q[b, h], problem.k[b, g], problem.v[b, g]))
        d = single(widen(d_out[b, h]))
        seen = problem.mask(b)
        if mistake == "mask one key off":
            seen = np.roll(seen, -1, axis=1) & seen
        p, p_sink, slope = _weights(problem, h, (q @ k.T) * scale, seen)
        raw = p if mistake != "unnormalised weights" else p * np.float32(1.0 + 2.0**-5)
        dp = d @ v.T
        if narrow_dp:
            dp = rounded(dp)
        out = rounded(rounded(p) @ v)
        delta = (d * out).sum(axis=1) if delta_from == "output" else (p * dp).sum(axis=1, dtype=np.float32)
        delta = {"delta left out": np.zeros_like(delta), "neighbour's delta": np.roll(delta, 1)}.get(mistake, delta)
        ds = p * (dp - delta[:, None])
        if mistake != "no slope of the soft cap":
            ds = ds * slope
        ds = ds if keep_ds else rounded(ds)
        factor = {"no scale": one, "scale twice": scale * scale, "opposite sign": -scale}.get(mistake, scale)
        dq[b, h] = accumulate(ds, k, narrow=narrow) * factor
        if mistake == "first head of the group" and h % group:
            continue
        dk[b, g] += accumulate(np.ascontiguousarray(ds.T), q, narrow=narrow) * factor
        dv[b, g] += _d_values(raw, d, transposed=mistake == "transposed weights", narrow=narrow)
        dsinks[h] -= (p_sink * delta).sum(dtype=np.float32)
    found = [x.astype(BF16) for x in (dq, dk, dv)]
    return GradientResult(*found, dsinks=None if problem.sinks is None else dsinks)


def _d_values(p: np.ndarray, d: np.ndarray, *, transposed: bool, narrow: bool) -> np.ndarray:
    weights = rounded(p)
    if transposed and p.shape[0] == p.shape[1]:
        return accumulate(weights, d, narrow=narrow)
    return accumulate(np.ascontiguousarray(weights.T), d, narrow=narrow)


def _weights(
    problem: AttentionProblem, head: int, s: np.ndarray, seen: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """P from FP32 logits and an FP32 LSE, the sink's share, and the slope of the soft cap."""
    slope = np.ones_like(s)
    if problem.softcap is not None:
        cap = np.float32(problem.softcap)
        t = np.tanh(s / cap)
        s, slope = cap * t, np.float32(1.0) - t * t
    sink = problem.sink(head)
    s = np.where(seen, s, np.float32(-np.inf))
    logits = s if sink is None else np.column_stack([s, np.full(len(s), np.float32(sink))])
    top = np.maximum(logits.max(axis=1, initial=-np.inf), np.float32(-1e30))
    lse = top + np.log(np.maximum(np.exp(logits - top[:, None]).sum(axis=1, dtype=np.float32), np.float32(1e-30)))
    p_sink = np.zeros(len(s), np.float32) if sink is None else np.exp(np.float32(sink) - lse)
    return np.where(seen, np.exp(s - lse[:, None]), np.float32(0.0)), p_sink, slope


FEATURES = Features(window=True, softcap=True, sinks=True, segments=True, positions=True, v_dim=True)


def declared(mistake: str = "", **arithmetic: Any) -> Subject:
    """The kernel as a subject."""

    def call(problem: AttentionProblem, d_out: np.ndarray) -> GradientResult:
        return backward(problem, d_out, mistake=mistake)

    return Subject(
        name=mistake or "right",
        call=call,
        features=FEATURES,
        arithmetic=Arithmetic(block_kv=None, **arithmetic),
        takes_problem=True,
        operation="attention_gradients",
    )


RIGHT = declared()
NO_SCALE = declared("no scale")
NO_DELTA = declared("delta left out")
FIRST_HEAD = declared("first head of the group")
TILED_HEADS = declared("tiled heads")
OPPOSITE_SIGN = declared("opposite sign")

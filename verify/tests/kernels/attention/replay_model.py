"""When the kernel must replay, and when it must not: its checks evaluated in float64 from the exact scores."""

from __future__ import annotations

import dataclasses

import numpy as np

from flywheel.attention.budget import BIAS, FP32_MAX, LANE_LIMIT, LANES
from flywheel.attention.spec import ANCHOR_KEYS
from flywheel.attention.tile import LOG2_E, SUBLANES, ScoreRule
from verify.attention.problem import AttentionProblem, widen

# One exp2, the rounding of a weight to BF16 and of sums of up to 2**12 terms move a sum by less than this.
MARGIN = 2.0**-6


@dataclasses.dataclass(frozen=True)
class ExpectedReplays:
    """Query blocks `[batch, heads, q_blocks]` that certainly replay, and those that certainly do not."""

    must: np.ndarray
    must_not: np.ndarray


def expected_replays(problem: AttentionProblem, block_q: int, block_kv: int) -> ExpectedReplays:
    """Evaluate the checks for finite or non-finite inputs; near a limit neither answer is certain.

    For key blocks that do not overlap, or (block_kv = kv_len) that hold all that a query block sees.
    """
    blocks = -(-problem.q_len // block_q)
    must = np.zeros((problem.batch, problem.heads, blocks), dtype=bool)
    must_not = np.zeros_like(must)
    for b, h, i in np.ndindex(must.shape):
        rows = range(i * block_q, min((i + 1) * block_q, problem.q_len))
        fails, passes = _rows(problem, b, h, rows, block_kv)
        must[b, h, i], must_not[b, h, i] = fails.any(), passes.all()
    return ExpectedReplays(must, must_not)


def _rows(problem: AttentionProblem, b: int, h: int, rows: range, block_kv: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows that certainly fail a check, and rows that certainly pass all."""
    mask = problem.mask(b, list(rows))
    kv = problem.kv_head(h)
    q, k, v = (widen(x) for x in (problem.q[b, h, rows.start : rows.stop], problem.k[b, kv], problem.v[b, kv]))
    with np.errstate(all="ignore"):
        s = np.where(mask, _log2_logits(q @ k.T, problem), -np.inf)
        broken = np.isnan(s).any(axis=1) | (s == np.inf).any(axis=1)
        # Values of a visited block count also where the key is masked: 0 * inf is NaN.
        finite = np.isfinite(v).all(axis=1)
        may_break = broken | ~finite[_maybe_visited(problem, b, rows, block_kv)].all()
        must_break = broken | (mask & ~finite[None, :]).any(axis=1)
        sink = problem.sink(h)
        sink = -np.inf if sink is None else sink * LOG2_E
        lowest, highest = _anchors(s, mask, problem)
        visited = np.flatnonzero(_maybe_visited(problem, b, rows, block_kv))
        before_last = int(visited[-1]) // block_kv * block_kv
        low, high = (_checks(s, v, sink, anchor, before_last) for anchor in (lowest, highest))
    seen = mask.any(axis=1)
    # Weights are largest against the lowest anchor that a row may have, and least against the highest.
    fails = must_break | high.certainly_fails
    passes = ~may_break & low.certainly_passes
    return fails & seen, passes | (~seen & finite.all())


def _log2_logits(dot: np.ndarray, problem: AttentionProblem) -> np.ndarray:
    if problem.softcap is None:
        return dot * (problem.scale * LOG2_E)
    return np.tanh(dot * (problem.scale / problem.softcap)) * (problem.softcap * LOG2_E)


def _maybe_visited(problem: AttentionProblem, b: int, rows: range, block_kv: int) -> np.ndarray:
    """Keys of the key blocks of which some row of the query block may see something."""
    seen = dataclasses.replace(problem, q_segments=None, k_segments=None).mask(b, list(rows)).any(axis=0)
    blocks = np.unique(np.flatnonzero(seen) // block_kv)
    return np.isin(np.arange(problem.kv_len) // block_kv, blocks if blocks.size else [0])


def _anchors(s: np.ndarray, mask: np.ndarray, problem: AttentionProblem) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest anchor that each row may have."""
    shared = ScoreRule(problem.scale, problem.softcap).anchor
    if shared is not None:
        all_rows = np.full(len(s), shared)
        return all_rows, all_rows
    if problem.window is None and problem.q_segments is None:
        first = np.ceil(s[:, :ANCHOR_KEYS].max(axis=1)) + BIAS
        return first, first
    visible = np.where(mask, s, np.inf).min(axis=1), s.max(axis=1)
    return np.ceil(visible[0]) + BIAS, np.ceil(visible[1]) + BIAS


@dataclasses.dataclass(frozen=True)
class _Outcome:
    certainly_fails: np.ndarray
    certainly_passes: np.ndarray


def _checks(s: np.ndarray, v: np.ndarray, sink: float, anchor: np.ndarray, before_last: int) -> _Outcome:
    """`before_last`: the first key of the last visited block, where the sums are checked as part of the whole."""
    weights = np.exp2(np.minimum(s - anchor[:, None], 1000.0))
    weights = np.where(weights >= 2.0**-126, weights, 0.0)
    of_sink = np.exp2(np.minimum(sink - anchor, 1000.0))
    largest_sum, largest_earlier = (_partial_sums(weights[:, :keys]).max(axis=1) for keys in (None, before_last))
    total = weights.sum(axis=1) + of_sink
    values = np.where(np.isfinite(v), v, 0.0)
    net, gross = np.abs(weights @ values).max(axis=1), (weights @ np.abs(values)).max(axis=1)
    limit = LANES * LANE_LIMIT
    fails = (
        (largest_earlier * (1 - MARGIN) > LANE_LIMIT)
        | (total * (1 - MARGIN) > limit)
        | (net * (1 - MARGIN) > FP32_MAX)
        | np.isnan(total)
    )
    passes = (
        (largest_sum * (1 + MARGIN) < LANE_LIMIT) & (total * (1 + MARGIN) < limit) & (gross * (1 + MARGIN) < FP32_MAX)
    )
    return _Outcome(fails, passes)


def _partial_sums(weights: np.ndarray) -> np.ndarray:
    """A row's sums by sublane, `[rows, SUBLANES]`."""
    padded = np.pad(weights, ((0, 0), (0, -weights.shape[1] % SUBLANES)))
    return padded.reshape(len(padded), -1, SUBLANES).sum(axis=1)

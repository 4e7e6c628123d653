"""When the kernel must replay, and when it must not: its checks evaluated in float64 from the exact scores."""

from __future__ import annotations

import dataclasses

import numpy as np

from flywheel.attention.budget import BIAS, FP32_MAX, LANE_LIMIT, LANES
from verify.attention.problem import AttentionProblem, widen

# One exp2, the rounding of a weight to BF16 and of sums of up to 2**12 terms move a sum by less than this.
MARGIN = 2.0**-6


@dataclasses.dataclass(frozen=True)
class ExpectedReplays:
    """Query blocks `[batch, heads, q_blocks]` that certainly replay, and those that certainly do not."""

    must: np.ndarray
    must_not: np.ndarray


def expected_replays(problem: AttentionProblem, block_q: int, block_kv: int) -> ExpectedReplays:
    """Evaluate the checks for finite or non-finite inputs; near a limit neither answer is certain."""
    blocks = -(-problem.q_len // block_q)
    must = np.zeros((problem.batch, problem.heads, blocks), dtype=bool)
    must_not = np.zeros_like(must)
    mask = problem.mask()
    for b, h, i in np.ndindex(must.shape):
        rows = slice(i * block_q, min((i + 1) * block_q, problem.q_len))
        # Values of every visited block count: 0 * inf is NaN also where the key is masked.
        visited = -(-max(int(mask[rows].sum(axis=1).max()), 1) // block_kv) * block_kv
        kv = problem.kv_head(h)
        q, k, v = (widen(x) for x in (problem.q[b, h, rows], problem.k[b, kv, :visited], problem.v[b, kv, :visited]))
        fails, passes = _rows(q, k, v, mask[rows, :visited], problem.scale)
        must[b, h, i], must_not[b, h, i] = fails.any(), passes.all()
    return ExpectedReplays(must, must_not)


def _rows(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows that certainly fail a check, and rows that certainly pass all."""
    with np.errstate(all="ignore"):
        s = np.where(mask, (q @ k.T) * (scale * np.log2(np.e)), -np.inf)
        broken = np.isnan(s).any(axis=1) | (s == np.inf).any(axis=1) | ~np.isfinite(v).all()
        anchor = np.ceil(s[:, :LANES].max(axis=1)) + BIAS
        weights = np.exp2(np.minimum(s - anchor[:, None], 1000.0))
        weights = np.where(mask & (weights >= 2.0**-126), weights, 0.0)
        padded = np.pad(weights, ((0, 0), (0, -weights.shape[1] % LANES)))
        largest_sum = padded.reshape(len(padded), -1, LANES).sum(axis=1).max(axis=1)
        net = np.abs(weights @ v).max(axis=1)
        gross = (weights @ np.abs(v)).max(axis=1)
    fails = broken | (largest_sum * (1 - MARGIN) > LANE_LIMIT) | (net * (1 - MARGIN) > FP32_MAX)
    passes = ~broken & (largest_sum * (1 + MARGIN) < LANE_LIMIT) & (gross * (1 + MARGIN) < FP32_MAX)
    seen = mask.any(axis=1)
    return fails & seen, passes | ~seen

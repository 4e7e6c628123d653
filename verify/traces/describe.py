"""What a layer of a trace is like, numerically: the figures of `python -m verify.traces show`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from verify.attention.problem import widen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Float64

    from verify.attention.problem import AttentionProblem

ROWS = 512
"""Query rows handled at a time, so that long traces need rows x kv_len numbers and not q_len x kv_len."""


@dataclasses.dataclass(frozen=True)
class LayerFigures:
    """Figures of one attention call, computed in float64.

    Attributes:
        largest_logit: largest |z| over visible pairs, in nats.
        largest_spread: largest difference of two visible logits of one row, in nats.
        sink_mean: share of attention on key 0, mean over the rows that see at least two keys and over all heads; None
            if no row does.
        sink_strongest: the same of the head with the largest share.
        largest_v: largest |v|.
    """

    largest_logit: float
    largest_spread: float
    sink_mean: float | None
    sink_strongest: float | None
    largest_v: float


def blocks(problem: AttentionProblem, batch: int, head: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Logits in nats and mask of one head, `[<= ROWS, kv_len]` at a time."""
    k = widen(problem.k[batch, problem.kv_head(head)])
    keys = np.arange(problem.kv_len)
    for start in range(0, problem.q_len, ROWS):
        rows = range(start, min(start + ROWS, problem.q_len))
        q = widen(problem.q[batch, head, rows.start : rows.stop])
        visible = problem.visible_to(np.asarray(rows))
        yield problem.scale * (q @ k.T), keys[None, :] < visible[:, None]


def sink_shares(z: Float64[np.ndarray, "rows keys"], mask: np.ndarray) -> Float64[np.ndarray, " rows_seeing_two"]:
    """Softmax weight of key 0 in the rows that see at least two keys."""
    rows = mask.sum(axis=1) > 1
    seen = np.where(mask, z, -np.inf)[rows]
    if not len(seen):
        return np.empty(0)
    p = np.exp(seen - seen.max(axis=1, keepdims=True))
    return p[:, 0] / p.sum(axis=1)


def figures(problem: AttentionProblem) -> LayerFigures:
    """The figures of one attention call."""
    largest = spread = 0.0
    shares: list[float] = []
    for batch in range(problem.batch):
        for head in range(problem.heads):
            of_head = []
            for z, mask in blocks(problem, batch, head):
                some = mask.any(axis=1)
                largest = max(largest, float(np.abs(np.where(mask, z, 0.0)).max()))
                top, bottom = np.where(mask, z, -np.inf).max(axis=1)[some], np.where(mask, z, np.inf).min(axis=1)[some]
                spread = max(spread, float((top - bottom).max(initial=0.0)))
                of_head.append(sink_shares(z, mask))
            share = np.concatenate(of_head)
            if len(share):
                shares.append(float(share.mean()))
    return LayerFigures(
        largest_logit=largest,
        largest_spread=spread,
        sink_mean=float(np.mean(shares)) if shares else None,
        sink_strongest=max(shares, default=None),
        largest_v=float(np.abs(widen(problem.v)).max()),
    )

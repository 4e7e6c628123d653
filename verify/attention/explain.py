"""Which well-known mistake a wrong row agrees with."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from verify.attention import oracle_float64
from verify.attention.problem import AttentionProblem

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = 128


def explain(problem: AttentionProblem, got: np.ndarray, bound: np.ndarray, index: tuple[int, int, int]) -> list[str]:
    """Names of the mistakes whose output lies near what the kernel gave in one wrong row.

    Near means within the row's largest bound in every lane.  That is a hint for the reader, not a verdict.

    Args:
        problem: the inputs.
        got: the kernel's output row, float64 `[head_dim]`.
        bound: its bound, `[head_dim]`.
        index: (batch, head, row) of the row.
    """
    return [name for name, row in _mistakes(problem, *index) if _agrees(got, row, bound)]


def _agrees(got: np.ndarray, answer: np.ndarray, bound: np.ndarray) -> bool:
    """Within the largest bound in every lane, classes included."""
    finite = np.isfinite(answer)
    same = (got == answer) | (np.isnan(got) & np.isnan(answer))
    with np.errstate(invalid="ignore"):
        near = np.abs(got - answer) <= bound.max(initial=0.0)
    return bool(np.where(finite, near, same).all())


def _mistakes(problem: AttentionProblem, batch: int, head: int, row: int) -> Iterator[tuple[str, np.ndarray]]:
    count, right = problem.visible(row), problem.kv_head(head)
    for name, other in _counts(problem, row, count).items():
        yield name, _row(problem, (batch, head, row), right, other, problem.scale)
    for name, other in _kv_heads(problem, head, right).items():
        yield name, _row(problem, (batch, head, row), other, count, problem.scale)
    for name, scale in _scales(problem).items():
        yield name, _row(problem, (batch, head, row), right, count, scale)
    if count:
        yield "0", np.zeros(problem.head_dim)


def _counts(problem: AttentionProblem, row: int, count: int) -> dict[str, int]:
    """Other numbers of visible keys."""
    kv_len = problem.kv_len
    if not problem.causal:
        whole = kv_len // BLOCK * BLOCK
        return {"the last partial block of keys dropped": whole} if whole < kv_len else {}
    names = {
        "a causal mask that hides the diagonal": count - 1,
        "a causal mask one key late": count + 1,
        f"a causal mask one block ({BLOCK} keys) early": count - BLOCK,
        f"a causal mask one block ({BLOCK} keys) late": count + BLOCK,
        "a causal mask aligned top-left instead of bottom-right": min(row + 1, kv_len),
        "no causal mask": kv_len,
    }
    clipped = {name: min(max(other, 0), kv_len) for name, other in names.items()}
    return {name: other for name, other in clipped.items() if other != count}


def _kv_heads(problem: AttentionProblem, head: int, right: int) -> dict[str, int]:
    tiled = head % problem.kv_heads
    names = {f"KV head {other} read instead of {right}": other for other in range(problem.kv_heads) if other != right}
    if tiled != right:
        names[f"KV head {tiled} read instead of {right} (heads tiled, not repeated)"] = tiled
        del names[f"KV head {tiled} read instead of {right}"]
    return names


def _scales(problem: AttentionProblem) -> dict[str, float]:
    if problem.scale == 0.0:
        return {}
    names = {
        "uniform weights (the mean of the visible values)": 0.0,
        "logits not scaled": 1.0,
        "logits scaled twice": problem.scale**2,
        "exp2 of natural-log logits": problem.scale * math.log(2.0),
        "exp of log2 logits": problem.scale / math.log(2.0),
    }
    return {name: scale for name, scale in names.items() if scale != problem.scale and math.isfinite(scale)}


def _row(problem: AttentionProblem, index: tuple[int, int, int], kv_head: int, count: int, scale: float) -> np.ndarray:
    """One output row with another KV head, number of keys or scale."""
    batch, head, row = index
    lone = AttentionProblem(
        q=problem.q[batch : batch + 1, head : head + 1, row : row + 1],
        k=problem.k[batch : batch + 1, kv_head : kv_head + 1, :count],
        v=problem.v[batch : batch + 1, kv_head : kv_head + 1, :count],
        causal=False,
        scale=scale,
    )
    return oracle_float64.attention(lone).out[0, 0, 0]

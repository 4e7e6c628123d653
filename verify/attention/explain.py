"""Which well-known mistake a wrong row agrees with."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

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
        got: the kernel's output row, float64 `[v_dim]`.
        bound: its bound, `[v_dim]`.
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
    right, at = problem.kv_head(head), (batch, head, row)
    keys = problem.seen(batch, row)
    for name, other in _other_keys(problem, batch, row, keys).items():
        yield name, _row(problem, at, right, other)
    for name, other in _kv_heads(problem, head, right).items():
        yield name, _row(problem, at, other, keys)
    for name, scale in _scales(problem).items():
        yield name, _row(problem, at, right, keys, scale=scale)
    if problem.softcap is not None:
        yield "no soft cap", _row(problem, at, right, keys, softcap=None)
    for name, sinks in _sinks(problem, head, row).items():
        yield name, _row(problem, at, right, keys, sinks=sinks)
    if keys.size:
        yield "0", np.zeros(problem.v_dim)


def _other_keys(problem: AttentionProblem, batch: int, row: int, keys: np.ndarray) -> dict[str, np.ndarray]:
    """Other sets of visible keys."""
    if problem.window is None and problem.q_segments is None and problem.q_positions is None:
        counts = _counts(problem, row, problem.visible(row))
        return {name: np.arange(count) for name, count in counts.items()}
    names = {name: other.seen(batch, row) for name, other in _other_masks(problem).items()}
    names["positions of queries and keys that wrap around in 16 bits"] = _wrapped(problem, batch, row)
    return {name: other for name, other in names.items() if not np.array_equal(other, keys)}


def _wrapped(problem: AttentionProblem, batch: int, row: int) -> np.ndarray:
    """What the row sees if every position is stored as a 16-bit integer."""
    query, keys = problem.positions(batch)[row].astype(np.int16), np.arange(problem.kv_len).astype(np.int16)
    distance = keys.astype(np.int64) - np.int64(query)
    left, right = problem.window or (None, None)
    seen = distance <= 0 if problem.causal else np.ones(problem.kv_len, dtype=bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    if problem.q_segments is not None and problem.k_segments is not None:
        seen &= problem.k_segments[batch] == problem.q_segments[batch, row]
    return np.flatnonzero(seen)


def _top_left(problem: AttentionProblem, batch: int) -> np.ndarray:
    """Positions aligned top-left: with the row's own number, counted within its segment if there are segments."""
    rows = np.arange(problem.q_len)
    if problem.q_segments is None or problem.k_segments is None:
        return rows
    aligned = rows.copy()
    for segment in np.unique(problem.q_segments[batch]):
        members = np.flatnonzero(problem.q_segments[batch] == segment)
        keys = np.flatnonzero(problem.k_segments[batch] == segment)
        if keys.size:
            aligned[members] = keys[0] + np.arange(members.size)
    return aligned


def _other_masks(problem: AttentionProblem) -> dict[str, AttentionProblem]:
    """The same problem with a mistaken window or alignment, or without its segments."""
    names: dict[str, AttentionProblem] = {}
    if problem.window is not None:
        left, right = problem.window
        steps = {"one key too wide": 1, "one key too narrow": -1, f"one block ({BLOCK} keys) too wide": BLOCK}
        for name, step in steps.items():
            wide = tuple(None if side is None else max(side + step, 0) for side in (left, right))
            names[f"a window {name}"] = dataclasses.replace(problem, window=wide)
            names[f"a window {name} on the left"] = dataclasses.replace(problem, window=(wide[0], right))
        names["no window"] = dataclasses.replace(problem, window=None)
    if problem.q_segments is not None:
        names["segment ids ignored"] = dataclasses.replace(problem, q_segments=None, k_segments=None)
    aligned = np.stack([problem.positions(entry) for entry in range(problem.batch)])
    top_left = np.stack([_top_left(problem, entry) for entry in range(problem.batch)])
    names["rows aligned top-left instead of bottom-right"] = dataclasses.replace(problem, q_positions=top_left)
    for name, step in (("early", -1), ("late", 1)):
        names[f"rows aligned one key {name}"] = dataclasses.replace(problem, q_positions=aligned + step)
    wrapped = aligned.astype(np.int16).astype(np.int64)
    names["positions that wrap around in 16 bits"] = dataclasses.replace(problem, q_positions=wrapped)
    if problem.causal:
        names["no causal mask"] = dataclasses.replace(problem, causal=False)
    return names


def _sinks(problem: AttentionProblem, head: int, row: int) -> dict[str, np.ndarray | None]:
    """Other sinks of one head."""
    if problem.sinks is None:
        return {}
    sinks = problem.sinks
    names: dict[str, np.ndarray | None] = {"no sink": None}
    for other in range(problem.heads):
        how = " (the row modulo the heads)" if other == row % problem.heads else ""
        names[f"the sink of head {other} instead of {head}{how}"] = sinks[other : other + 1]
    with np.errstate(over="ignore"):
        names["a sink that is scaled"] = (sinks[head : head + 1] * problem.scale).astype(np.float32)
    return {name: x for name, x in names.items() if x is None or not np.array_equal(x, sinks[head : head + 1])}


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


def _row(
    problem: AttentionProblem,
    index: tuple[int, int, int],
    kv_head: int,
    keys: np.ndarray,
    **changes: Any,  # noqa: ANN401  a field of the problem
) -> np.ndarray:
    """One output row with another KV head, other keys, or another scale, soft cap or sink."""
    batch, head, row = index
    sinks = None if problem.sinks is None else problem.sinks[head : head + 1]
    lone = AttentionProblem(
        q=problem.q[batch : batch + 1, head : head + 1, row : row + 1],
        k=problem.k[batch : batch + 1, kv_head : kv_head + 1, keys],
        v=problem.v[batch : batch + 1, kv_head : kv_head + 1, keys],
        causal=False,
        scale=changes.get("scale", problem.scale),
        softcap=changes.get("softcap", problem.softcap),
        sinks=changes.get("sinks", sinks),
    )
    return oracle_float64.attention(lone).out[0, 0, 0]

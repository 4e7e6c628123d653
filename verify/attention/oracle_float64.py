"""Every element of f in float64, each with a proved bound.

The derivation is docs/oracle-bounds.md; `verify.attention.float64_rows` computes.

Holds for any summation order with or without fused multiply-add (so for any BLAS that multiplies matrices the
conventional way), with or without flush-to-zero.  Two assumptions about numpy, tested in
`verify/tests/judge/test_numpy_functions.py`: exp, log and tanh err by at most `FUNCTION_ULPS` ulp of float64 (an exp
below 2^-1022 by at most 2^-1022), and exp(0) is 1.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from verify.attention import oracle_arb
from verify.attention.float64_rows import (
    EXP_RANGE,
    FUNCTION_ERROR,
    FUNCTION_ULPS,
    LARGEST_LOGIT,
    LOOSE,
    TINY,
    UNIT,
    Block,
    Bounded,
    KVHead,
    LogitRule,
    Place,
    alike,
    attend,
    gamma,
)
from verify.attention.problem import View, widen
from verify.attention.reference import Reference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Float64, Int

    from verify.attention.problem import AttentionProblem

__all__ = [
    "EXP_RANGE",
    "FUNCTION_ERROR",
    "FUNCTION_ULPS",
    "LARGEST_LOGIT",
    "LOOSE",
    "TINY",
    "UNIT",
    "attention",
    "gamma",
    "refine",
]

# Scores, and rows, handled at a time: few enough for the cache, and under a causal mask few that nobody sees.
BLOCK_ELEMENTS = 1 << 15
MOST_ROWS, FEWEST_ROWS = 512, 64
# A reference has to be this much better than what is judged by it; rows that are not go to ball arithmetic.
SHARE_OF_TOLERANCE = 0.01


def attention(
    problem: AttentionProblem,
    *,
    rows_per_block: int | None = None,
    visible: Int[np.ndarray, " q_len"] | None = None,
    dtype: type[np.floating] = np.float64,
) -> Reference:
    """Compute f of every element with a proved error.

    Args:
        problem: the inputs.
        rows_per_block: query rows handled at a time (memory is a few arrays `[rows_per_block, kv_len]`); None picks it.
        visible: how many keys each row sees, instead of `problem.visible` (for answers to a wrong mask).
        dtype: working precision.  Anything but float64 voids the bound; it exists so that `verify.attention.health` can
            show that it would notice.

    Raises:
        ValueError: rows_per_block is not positive, or visible is not a count per row.
    """
    if rows_per_block is not None and rows_per_block < 1:
        message = f"rows_per_block must be at least 1, got {rows_per_block}"
        raise ValueError(message)
    counts = None if visible is None else _counts(problem, visible)
    result = Bounded.blank((problem.batch, problem.heads, problem.q_len), problem.v_dim)
    for batch in range(problem.batch):
        views = (
            problem.views(batch) if counts is None else [View(slice(None), slice(None), np.zeros_like(counts), counts)]
        )
        for view in views:
            for kv_head, query_heads in alike(problem):
                keys, values = (widen(x[batch, kv_head, view.keys]) for x in (problem.k, problem.v))
                head = KVHead.of(keys.astype(dtype, copy=False), values.astype(dtype, copy=False))
                _attend_view(problem, (batch, query_heads), view, head, rows_per_block, result)
    return Reference(
        result.out,
        result.out_error,
        result.lse,
        result.lse_error,
        "float64",
        max_logit=result.max_logit,
        max_logit_error=result.max_logit_error,
    )


def _attend_view(
    problem: AttentionProblem,
    at: tuple[int, list[int]],
    view: View,
    head: KVHead,
    rows_per_block: int | None,
    result: Bounded,
) -> None:
    """All rows of one view for query heads that see the same keys and sink, block by block."""
    batch, heads = at
    rule = LogitRule(problem.scale, problem.softcap, problem.sink(heads[0]))
    for part in _row_blocks(view, len(view.start), rows_per_block, len(heads)):
        place = Place(batch, heads, view, part)
        q = widen(place.take(problem.q)).astype(head.keys.dtype, copy=False)
        result.put(place, attend(Block(q, head, place.each(view.start), place.each(view.stop), rule)))


def refine(
    reference: Reference,
    problem: AttentionProblem,
    tolerance_out: Float64[np.ndarray, "batch heads q_len head_dim"],
    tolerance_lse: Float64[np.ndarray, "batch heads q_len"] | None = None,
) -> Reference:
    """Recompute by ball arithmetic the rows whose error exceeds a hundredth of a tolerance somewhere.

    Args:
        reference: what `attention` gave for the problem.
        problem: the inputs.
        tolerance_out: what the output will be judged by, elementwise; NaN where nothing will be judged.
        tolerance_lse: the same for the log-sum-exp (nats); None if it will not be judged.

    Returns:
        A copy with those rows replaced, of tier "float64+arb", with their number in `escalated`; the reference itself
        if there are none.

    Raises:
        ValueError: a tolerance has the wrong shape.
        OracleUnsound: ball arithmetic does not reach the precision.
    """
    rows = np.zeros(reference.lse.shape, dtype=bool)
    pairs = [("tolerance_out", reference.out_error, tolerance_out)]
    if tolerance_lse is not None:
        pairs.append(("tolerance_lse", reference.lse_error, tolerance_lse))
    for name, error, tolerance in pairs:
        if np.shape(tolerance) != error.shape:
            message = f"{name} must have shape {error.shape}, got {np.shape(tolerance)}"
            raise ValueError(message)
        weak = error > SHARE_OF_TOLERANCE * tolerance
        rows |= weak.any(axis=3) if weak.ndim == rows.ndim + 1 else weak
    if not rows.any():
        return reference
    better = oracle_arb.replace_rows(reference, problem, np.argwhere(rows).tolist())
    return dataclasses.replace(better, tier="float64+arb")


def _counts(problem: AttentionProblem, visible: np.ndarray) -> np.ndarray:
    visible = np.asarray(visible, dtype=np.int64)
    if visible.shape != (problem.q_len,) or np.any((visible < 0) | (visible > problem.kv_len)):
        message = f"visible must give a count in 0..{problem.kv_len} for each of {problem.q_len} rows, got {visible}"
        raise ValueError(message)
    return visible


def _row_blocks(view: View, rows: int, rows_per_block: int | None, heads: int) -> Iterator[slice]:
    """Consecutive rows that are handled together; unless told, as many as keep a block within BLOCK_ELEMENTS."""
    begin = 0
    fewest = max(FEWEST_ROWS // heads, 1)
    while begin < rows:
        count = min(rows_per_block or MOST_ROWS, rows - begin)
        while rows_per_block is None and count > fewest:
            part = slice(begin, begin + count)
            extent = int(view.stop[part].max() - view.start[part].min())
            if count * heads * extent <= BLOCK_ELEMENTS:
                break
            count = max(count // 2, fewest)
        yield slice(begin, begin + count)
        begin += count

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
from verify.attention.float64_blocks import blocks
from verify.attention.float64_rows import (
    EXP_RANGE,
    FUNCTION_ERROR,
    FUNCTION_ULPS,
    LARGEST_LOGIT,
    LOOSE,
    TINY,
    UNIT,
    Bounded,
    Scores,
    attend,
    gamma,
)

if TYPE_CHECKING:
    from jaxtyping import Float64, Int

    from verify.attention.problem import AttentionProblem
    from verify.attention.reference import Reference

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
    for place, block in blocks(problem, rows_per_block=rows_per_block, visible=counts, dtype=dtype):
        result.put(place, attend(Scores.of(block)))
    return result.reference()


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

"""The inverse of I + L, L strictly lower triangular: exact, in balls, in float64 with a bound; and a certificate.

A BF16 or FP32 matrix is rational, so the exact inverse is too (python-flint's `fmpq_mat`).  Every X here is unit lower
triangular: ones on the diagonal and zeros above it, exactly.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import flint
import numpy as np

from verify.gdn.float64_stages import TINY, UNIT, gamma
from verify.gdn.oracle_arb import to_float64
from verify.gdn.reference import OracleUnsound

if TYPE_CHECKING:
    from jaxtyping import Float64

FIRST_BITS = 128
MAX_BITS = 1 << 14
ROUNDED = 2.0**-52
"""Radius asked of balls, relative to max(1, |entry|)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Inverse:
    """X = (I + L)^-1 up to a proved error, elementwise."""

    value: Float64[np.ndarray, "n n"]
    error: Float64[np.ndarray, "n n"]
    tier: str


def _checked(lower: np.ndarray) -> Float64[np.ndarray, "n n"]:
    wide = np.asarray(lower, dtype=np.float64)
    if wide.ndim != 2 or wide.shape[0] != wide.shape[1]:
        message = f"lower must be a square matrix, got shape {wide.shape}"
        raise ValueError(message)
    if np.triu(wide).any():
        message = "lower must be strictly lower triangular, got entries on or above the diagonal"
        raise ValueError(message)
    if not np.isfinite(wide).all():
        message = "lower must be finite"
        raise ValueError(message)
    return wide


def rational(lower: Float64[np.ndarray, "n n"]) -> flint.fmpq_mat:
    """The exact inverse of I + L.

    Raises:
        ValueError: L is not square, strictly lower triangular and finite.
    """
    wide = _checked(lower)
    entries = (np.eye(len(wide)) + wide).ravel().tolist()
    n = len(wide)
    return flint.fmpq_mat(n, n, [flint.fmpq(*x.as_integer_ratio()) for x in entries]).inv()


def exact(lower: Float64[np.ndarray, "n n"]) -> Inverse:
    """The exact inverse, rounded to float64 (raises as `rational`)."""
    rows = rational(lower).tolist()
    value = np.array([[int(x.p) / int(x.q) for x in row] for row in rows])
    pairs = [zip(exact_row, row, strict=True) for exact_row, row in zip(rows, value.tolist(), strict=True)]
    same = np.array([[flint.fmpq(*v.as_integer_ratio()) == x for x, v in row] for row in pairs])
    # Python divides integers correctly rounded; a quotient below the normal range errs by at most TINY.
    return Inverse(value, np.where(same, 0.0, UNIT * np.abs(value) * (1.0 + 2 * UNIT) + TINY), "exact")


def balls(lower: Float64[np.ndarray, "n n"]) -> Inverse:
    """By forward substitution in ball arithmetic.

    Raises:
        ValueError: as `rational`.
        OracleUnsound: the balls do not become narrow.
    """
    wide = _checked(lower)
    n = len(wide)
    bits = FIRST_BITS + 2 * n
    while bits <= MAX_BITS:
        with flint.ctx.workprec(bits):
            matrix = flint.arb_mat(n, n, wide.ravel().tolist())
            rows: list[flint.arb_mat] = []
            for i in range(n):
                row = flint.arb_mat(1, n, [1 if j == i else 0 for j in range(n)])
                for j in range(i):
                    if wide[i, j]:
                        row = row - rows[j] * matrix[i, j]
                rows.append(row)
        entries = [ball for row in rows for ball in row.entries()]
        if all(bool(x.rad() <= flint.arb(ROUNDED) * max(1.0, abs(float(x.mid())))) for x in entries):
            pairs = np.array([to_float64(x) for x in entries]).reshape(n, n, 2)
            return Inverse(pairs[:, :, 0], pairs[:, :, 1], "arb")
        bits *= 2
    message = f"ball arithmetic with {MAX_BITS} bits does not give the inverse"
    raise OracleUnsound(message)


def float64(lower: Float64[np.ndarray, "n n"]) -> Inverse:
    """By forward substitution in float64, with an a-priori bound of the residual (lemma 12)."""
    wide = _checked(lower)
    n = len(wide)
    x = np.eye(n)
    with np.errstate(over="ignore", invalid="ignore"):
        for i in range(1, n):
            x[i, :i] = -(wide[i, :i] @ x[:i, :i])
        residual = np.tril(gamma(n + 2) * (np.abs(wide) @ np.abs(x) + np.abs(x)), -1) + np.tril(
            np.full((n, n), TINY), -1
        )
        error = of_residual(np.abs(x), residual)
    return Inverse(x, np.where(np.isnan(error), np.inf, error), "float64")


def of_residual(size: Float64[np.ndarray, "n n"], residual: Float64[np.ndarray, "n n"]) -> Float64[np.ndarray, "n n"]:
    """A bound of |T^-1 - X| from |X| and |I - T X| (strictly lower triangular): |X| R (I - R)^-1.

    T^-1 - X = T^-1 (I - T X) and |T^-1| <= |X| + |T^-1 - X|, so that E <= (|X| + E) R, and R is nilpotent.  The factor
    (I - R)^-1 comes from substitution with non-negative numbers alone: every operation errs by u relatively.
    """
    n = len(size)
    right = size @ residual
    error = right.copy()
    for j in range(n - 2, -1, -1):  # E = right + E R, column by column from the right
        error[:, j] = right[:, j] + error[:, j + 1 :] @ residual[j + 1 :, j]
    return error * (1.0 + 8 * n * n * UNIT)


def certificate(lower: Float64[np.ndarray, "n n"], x: Float64[np.ndarray, "n n"]) -> Float64[np.ndarray, "n n"]:
    """A rigorously measured bound of |(I + L)^-1 - X|, for any unit lower triangular X, right or wrong.

    It measures; it is never a tolerance: a wrong X gets a large certificate, and is within it all the same.

    Raises:
        ValueError: as `rational`, or X is not unit lower triangular and finite.
    """
    wide, given = _checked(lower), np.asarray(x, dtype=np.float64)
    if given.shape != wide.shape or np.triu(given, 1).any() or not (np.diag(given) == 1.0).all():
        message = f"x must be unit lower triangular of shape {wide.shape}"
        raise ValueError(message)
    if not np.isfinite(given).all():
        message = "x must be finite"
        raise ValueError(message)
    n = len(wide)
    computed = np.abs(np.tril(given + wide @ given, -1))
    rounding = gamma(n + 2) * (np.abs(wide) @ np.abs(given) + np.abs(given)) + TINY
    with np.errstate(over="ignore", invalid="ignore"):
        error = of_residual(np.abs(given), computed + np.tril(rounding, -1))
    return np.where(np.isnan(error), np.inf, error)

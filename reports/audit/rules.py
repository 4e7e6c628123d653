"""Acceptance rules in public use, each as its users apply it, and the contract.

Every rule sees the same: what a kernel gave, the exact result, and what a plain implementation of the same precision
gives.  Places where both sides are the same infinity, or both NaN, are taken out first, in favour of the rules: several
of them would turn such a place into NaN and reject a right kernel.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float64

RELATIVE_RMS = 0.005
RELATIVE_RMS_FLOOR = 1e-8
ABSOLUTE_PASS = 1e-6
CORRELATION = 0.99
CLOSE = 2e-2
BASELINES = 2.0
LAPACK_THRESHOLD = 30.0
BF16_EPSILON, FP32_EPSILON = 2.0**-8, 2.0**-24
"""LAPACK's EPS is half the distance of neighbouring numbers at 1."""


@dataclasses.dataclass(frozen=True, eq=False)
class Compared:
    """One array of one answer, flat, without the places whose class agrees.

    Attributes:
        got: what the kernel gave.
        want: the exact result.
        baseline: what a plain implementation gives.
        matrix: T, of which `got` is the inverse; None for other operations.
    """

    got: Float64[np.ndarray, " n"]
    want: Float64[np.ndarray, " n"]
    baseline: Float64[np.ndarray, " n"]
    matrix: Float64[np.ndarray, "m m"] | None = None


def compared(got: np.ndarray, want: np.ndarray, baseline: np.ndarray, matrix: np.ndarray | None = None) -> Compared:
    """Arrays of one shape, made ready for the rules."""
    wide = [np.asarray(x).astype(np.float64).ravel() for x in (got, want, baseline)]
    same = ~np.isfinite(wide[1]) & ((wide[0] == wide[1]) | (np.isnan(wide[0]) & np.isnan(wide[1])))
    return Compared(*(x[~same] for x in wide), matrix=matrix)


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule.

    Attributes:
        key: names it in the data.
        name: heads its column.
        words: what it asks.
        used: where.
        accepts: whether an array passes; None for the rules that need the contract's bound.
        inverse_only: it is about inverses.
    """

    key: str
    name: str
    words: str
    used: str
    accepts: Callable[[Compared], bool] | None = None
    inverse_only: bool = False


def relative_rms(x: Compared) -> bool:
    """Root mean square of the error over that of the reference."""
    error = x.got - x.want
    if float(np.abs(error).max(initial=0.0)) <= ABSOLUTE_PASS:
        return True
    ratio = np.sqrt(np.mean(error * error)) / (np.sqrt(np.mean(x.want * x.want)) + RELATIVE_RMS_FLOOR)
    return bool(ratio < RELATIVE_RMS)


def correlation(x: Compared) -> bool:
    """Pearson's correlation; where one side is constant it says nothing, and the other has to be constant too."""
    if np.ptp(x.got) == 0.0 or np.ptp(x.want) == 0.0:
        return bool(np.ptp(x.got) == np.ptp(x.want))
    return bool(np.corrcoef(x.got, x.want)[0, 1] >= CORRELATION)


def close(x: Compared) -> bool:
    """Elementwise, an absolute and a relative part."""
    return bool((np.abs(x.got - x.want) <= CLOSE + CLOSE * np.abs(x.want)).all())


def twice_the_baseline(x: Compared) -> bool:
    """The largest error against twice that of a plain implementation."""
    return bool(np.abs(x.got - x.want).max() <= BASELINES * np.abs(x.baseline - x.want).max())


def lapack_ratio(x: Compared, epsilon: float) -> float:
    """||T X - I|| / (n ||T|| ||X|| eps) in the 1-norm, as LAPACK's testing routine xTRT01 has it."""
    assert x.matrix is not None  # noqa: S101  the rule is about inverses
    n = len(x.matrix)
    inverse = x.got.reshape(n, n)
    residual = np.linalg.norm(x.matrix @ inverse - np.eye(n), 1)
    return float(residual / (n * np.linalg.norm(x.matrix, 1) * np.linalg.norm(inverse, 1) * epsilon))


def _lapack(epsilon: float) -> Callable[[Compared], bool]:
    return lambda x: lapack_ratio(x, epsilon) < LAPACK_THRESHOLD


CONTRACT, BIAS = "contract", "bias"
RULES = (
    Rule(
        "rms",
        f"relative RMS < {RELATIVE_RMS}",
        f"rms(got - want) < {RELATIVE_RMS} rms(want), or no error above {ABSOLUTE_PASS:g}",
        "tests of flash-linear-attention (assert_close)",
        relative_rms,
    ),
    Rule(
        "correlation",
        f"correlation ≥ {CORRELATION}",
        f"Pearson's correlation of got and want is at least {CORRELATION}",
        "bring-up tests of accelerators (comp_pcc and the like)",
        correlation,
    ),
    Rule(
        "close",
        f"allclose {CLOSE}",
        f"|got - want| ≤ {CLOSE} + {CLOSE} |want| in every element",
        "unit tests of BF16 attention kernels",
        close,
    ),
    Rule(
        "baseline",
        "twice the baseline",
        "max |got - want| is at most twice that of a plain implementation in the same precision",
        "tests of FlashAttention",
        twice_the_baseline,
    ),
    Rule(
        "lapack-bf16",
        f"LAPACK's ratio < {LAPACK_THRESHOLD:g}, BF16",
        f"‖T X - I‖ < {LAPACK_THRESHOLD:g} n ‖T‖ ‖X‖ 2^-8, the unit of the operands",
        "LAPACK's test suite (xTRT01)",
        _lapack(BF16_EPSILON),
        inverse_only=True,
    ),
    Rule(
        "lapack-fp32",
        f"LAPACK's ratio < {LAPACK_THRESHOLD:g}, FP32",
        f"‖T X - I‖ < {LAPACK_THRESHOLD:g} n ‖T‖ ‖X‖ 2^-24, the unit of the result",
        "LAPACK's test suite (xTRT01)",
        _lapack(FP32_EPSILON),
        inverse_only=True,
    ),
    Rule(
        CONTRACT,
        "this project's contract",
        "every element lies within its own certified bound, and its class (NaN, infinity) is right",
        "python -m verify judge",
    ),
    Rule(
        BIAS,
        "contract and bias",
        "the contract, and on ordinary data no alarm of the bias test",
        "python -m verify judge (an alarm is evidence, not a verdict)",
    ),
)


def of(operation: str) -> tuple[Rule, ...]:
    """The rules that an operation's answers can be held to."""
    return tuple(rule for rule in RULES if operation == "inverse" or not rule.inverse_only)

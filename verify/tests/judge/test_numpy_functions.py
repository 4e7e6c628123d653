"""The assumptions about numpy on which the float64 oracle's bound rests."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest

from verify.attention.oracle_float64 import FUNCTION_ULPS

SMALLEST_NORMAL = np.finfo(np.float64).tiny


def arguments(low: float, high: float, count: int) -> np.ndarray:
    """Evenly spread and random arguments, the ends, and powers of two, in a random order and of odd length.

    The order and the length matter because vectorised functions treat the lanes at the end of an array apart.
    """
    rng = np.random.default_rng(3)
    powers = 2.0 ** np.arange(-60, 10)
    near = np.concatenate([powers, -powers, 1.0 + powers, 1.0 - powers])
    points = np.concatenate([np.linspace(low, high, count), rng.uniform(low, high, count), near, [low, high]])
    return rng.permutation(points[(points >= low) & (points <= high)])


def worst_ulps(values: np.ndarray, exact: list[mpmath.mpf]) -> float:
    """Largest distance in ulp of the exact, non-negative result; below 2^-1022 in units of 2^-1022."""
    units = [np.spacing(float(want)) if want >= SMALLEST_NORMAL else SMALLEST_NORMAL for want in exact]
    distances = [abs(mpmath.mpf(x) - want) / unit for x, want, unit in zip(values.tolist(), exact, units, strict=True)]
    return float(max(distances))


@pytest.mark.smoke
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_exp_is_within_the_assumed_ulps(stride: int) -> None:
    """The exponential on [-800, 0], contiguous and strided, keeps to FUNCTION_ULPS (to 2^-1022 where it underflows)."""
    points = arguments(-800.0, 0.0, 2000)
    spaced = np.repeat(points, stride)[::stride]
    with mpmath.workdps(40):
        assert worst_ulps(np.exp(spaced), [mpmath.exp(mpmath.mpf(x)) for x in points.tolist()]) <= FUNCTION_ULPS


@pytest.mark.smoke
def test_log_is_within_the_assumed_ulps() -> None:
    """The logarithm on [1, 2^24], dense near 1, errs by no more than FUNCTION_ULPS."""
    points = np.concatenate([arguments(1.0, 2.0**24, 2000), arguments(1.0, 1.0 + 2.0**-10, 1000)])
    with mpmath.workdps(40):
        assert worst_ulps(np.log(points), [mpmath.log(mpmath.mpf(x)) for x in points.tolist()]) <= FUNCTION_ULPS


@pytest.mark.smoke
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_tanh_is_within_the_assumed_ulps(stride: int) -> None:
    """The hyperbolic tangent, from 2^-1000 to where it saturates and beyond, errs by no more than FUNCTION_ULPS."""
    tiny = np.logspace(-300, 0, 600)
    points = np.concatenate([arguments(-25.0, 25.0, 1500), tiny, -tiny, [700.0, -1e300, np.inf, -np.inf, 0.0]])
    spaced = np.repeat(points, stride)[::stride]
    values = np.tanh(spaced)
    with mpmath.workdps(40):
        assert worst_ulps(np.abs(values), [mpmath.tanh(abs(mpmath.mpf(x))) for x in points.tolist()]) <= FUNCTION_ULPS
    assert np.array_equal(np.sign(values), np.sign(points))


@pytest.mark.smoke
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 64, 1001])
def test_exp_of_zero_is_one(length: int) -> None:
    """exp(0) and exp(-0) are exactly 1 in every lane of an array, and exp(-inf) is 0."""
    assert np.all(np.exp(np.zeros(length)) == 1.0)
    assert np.all(np.exp(np.full(length, -0.0)) == 1.0)
    assert np.all(np.exp(np.full(length, -np.inf)) == 0.0)

"""What the float64 oracles assume about numpy's functions, measured against mpmath."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest

from verify.gdn.float64_stages import FUNCTION_ERROR, UNIT

COUNT = 3000


def arguments(name: str) -> np.ndarray:
    """Arguments over the whole range that the oracles use, ends and neighbourhoods of special points included."""
    rng = np.random.default_rng(7)
    if name == "exp":
        return np.concatenate([rng.uniform(-700.0, 700.0, COUNT), -(10.0 ** rng.uniform(-18.0, 2.8, COUNT))])
    if name == "log1p":
        return np.exp(-np.concatenate([rng.uniform(0.0, 700.0, COUNT), 10.0 ** rng.uniform(-18.0, 0.0, COUNT)]))
    return np.concatenate([np.exp(rng.uniform(-40.0, 80.0, COUNT)), 1.0 + rng.uniform(-0.5, 0.5, COUNT) ** 5])


@pytest.mark.parametrize("name", ["exp", "log", "log1p"])
def test_two_ulp(name: str) -> None:
    """exp, log and log1p err by at most 2 ulp of the result."""
    xs = arguments(name)
    found = getattr(np, name)(xs)
    for x, got in zip(xs.tolist(), found.tolist(), strict=True):
        with mpmath.workprec(160):
            exact = getattr(mpmath, name)(mpmath.mpf(x))
            error = abs(mpmath.mpf(got) - exact)
            assert error <= 2 * math.ulp(got), x
            assert error <= FUNCTION_ERROR * abs(mpmath.mpf(got)) or abs(got) < 2.0**-1000, x


def test_exp_of_zero_and_of_minus_infinity() -> None:
    """No decay is exactly 1, and a hard reset exactly 0."""
    assert np.exp(0.0) == 1.0
    assert np.exp(-np.inf) == 0.0
    assert np.finfo(np.float64).eps / 2 == UNIT

"""Growth over tokens: the fitted exponent, and the worst element with its bits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from verify.growth import growth
from verify.measures import ComparisonError, errors

ROWS = 512
RNG_SEED = 7

pytestmark = pytest.mark.smoke


def rounded_sum(*, every: int) -> tuple[np.ndarray, np.ndarray]:
    """Running means of values near 1, `[1, 1, rows, 8]`, with an accumulator rounded to 16 bits every few tokens."""
    x = 1.0 + np.random.default_rng(RNG_SEED).random((ROWS, 8))
    exact = np.cumsum(x, axis=0)
    total, got = np.zeros(8), []
    for t in range(ROWS):
        total = total + x[t]
        if t % every == 0:
            total = np.floor(total * 2.0**10) / 2.0**10
        got.append(total.copy())
    return np.array(got, np.float32)[None, None], exact[None, None]


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
def test_the_exponent_is_found(exponent: float) -> None:
    """Errors of position**e against a bound of 1 give the slope e, to within five of its standard errors."""
    rng = np.random.default_rng(RNG_SEED)
    size = np.arange(1, ROWS + 1.0) ** exponent * 2.0**-10
    want = np.ones((1, 1, ROWS, 4))
    got = (want + size[:, None] * rng.choice([-1.0, 1.0], (ROWS, 4)) * (0.5 + rng.random((ROWS, 4)) / 2)).astype(
        np.float32
    )
    found = growth(errors(got, want), np.ones_like(want))
    assert abs(found.slope - exponent) <= 5.0 * found.standard_error
    assert found.certain == (exponent > 0.0)


def test_accumulated_rounding_grows_and_one_rounding_does_not() -> None:
    """A sum that is truncated at every token grows as its length; a sum rounded once has no slope."""
    got, exact = rounded_sum(every=1)
    grows = growth(errors(got, exact), np.full_like(exact, 1.0))
    assert grows.certain
    assert 0.8 < grows.slope < 1.2
    once = np.floor(exact * 2.0**10) / 2.0**10
    flat = growth(errors(once.astype(np.float32), exact), np.full_like(exact, 1.0))
    assert not flat.certain


def test_the_worst_element_is_named_with_its_bits() -> None:
    """Index, both values and both words, as every other measure."""
    want = np.ones((1, 2, 5, 3))
    got = want.astype(np.float32)
    got[0, 1, 3, 2] = 1.5
    found = growth(errors(got, want), np.full_like(want, 0.25))
    assert found.worst.index == (0, 1, 3, 2)
    assert (found.worst.value, found.worst.got, found.worst.got_bits) == (2.0, 1.5, "0x3fc00000")
    assert found.worst.want_bits == "0x3f800000"
    assert found.rows.tolist() == [4]
    assert math.isnan(found.slope)
    assert not found.certain


def test_a_nan_is_the_worst_and_stays_out_of_the_fit() -> None:
    """A class mismatch is shown as NaN, and the slope is that of the others."""
    want = np.ones((1, 1, 8, 1))
    got = (want + 2.0**-10 * np.arange(1, 9.0)[:, None]).astype(np.float32)
    got[0, 0, 2, 0] = np.nan
    found = growth(errors(got, want), np.ones_like(want))
    assert math.isnan(found.worst.value)
    assert found.worst.index == (0, 0, 2, 0)
    assert 3 not in found.rows
    assert found.slope == pytest.approx(1.0, abs=2.0**-12)


def test_without_a_bound_half_ulps_are_the_unit() -> None:
    """One FP32 ulp off is two half ulps."""
    want = np.ones((1, 1, 4, 1))
    got = np.nextafter(want.astype(np.float32), np.float32(2))
    found = growth(errors(got, want))
    assert found.normalised_by == "half an ulp"
    assert found.profile.tolist() == [2.0] * 4


def test_wrong_axes_and_bounds_are_refused() -> None:
    """The axis must exist, and the bound must have the arrays' shape."""
    found = errors(np.zeros((2, 3), np.float32), np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"axis must be one of 0\.\.1, got 2"):
        growth(found)
    with pytest.raises(ComparisonError, match="shapes differ"):
        growth(found, np.ones(3), axis=0)

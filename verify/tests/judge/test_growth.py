"""Growth over tokens: the fitted exponent, and the worst element with its bits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from problems import normal_problem

from verify.attention import oracle_float64
from verify.attention.contract import contract_bound
from verify.attention.judge import judge
from verify.devices import CPU_INTERPRET
from verify.measures import ComparisonError, Errors, errors, measure

if TYPE_CHECKING:
    from verify.growth import Growth

ROWS = 512
RNG_SEED = 7

pytestmark = pytest.mark.smoke


def growth(found: Errors, bound: np.ndarray | None = None, *, axis: int = 2) -> Growth:
    """The growth among all measures."""
    grown = measure(found, bound, tokens=axis).growth
    assert grown is not None
    return grown


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
    assert [(r.first, r.last) for r in found.ranges] == [(0, 0), (1, 1), (2, 3), (4, 4)]
    assert [r.worst.value for r in found.ranges] == [0.0, 0.0, 2.0, 0.0]
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
    assert [r.worst.index[2] for r in found.ranges] == [0, 1, 2, 7]
    assert found.ranges[3].worst.value == 2.0**-7
    assert found.slope == pytest.approx(1.0, abs=2.0**-12)


def test_without_a_bound_half_ulps_are_the_unit() -> None:
    """One FP32 ulp off is two half ulps."""
    want = np.ones((1, 1, 4, 1))
    got = np.nextafter(want.astype(np.float32), np.float32(2))
    found = growth(errors(got, want))
    assert found.normalised_by == "half an ulp"
    assert [r.worst.value for r in found.ranges] == [2.0] * 3


def test_elements_that_are_not_compared_have_no_part() -> None:
    """Ranges of which nothing was compared are left out, and indices are those of the whole arrays."""
    want, where = np.ones((2, 1, 16, 3)), np.zeros((2, 1, 16, 3), dtype=bool)
    got = want.astype(np.float32)
    got[1, 0, 9, 2], got[1, 0, 5, 0] = 1.5, 7.0
    where[1, 0, 8:12] = where[0, 0, 0] = True
    found = growth(errors(got, want, where=where), np.ones_like(want))
    assert [(r.first, r.last) for r in found.ranges] == [(0, 0), (8, 15)]
    assert found.ranges[1].worst.index == (1, 0, 9, 2)
    assert found.ranges[1].worst.value == 0.5
    assert found.worst == found.ranges[1].worst


def test_a_judgement_shows_the_growth_of_its_arrays() -> None:
    """Output and LSE have one, by tokens; what is one number per head has none."""
    problem = normal_problem(1, q_len=9)
    reference = oracle_float64.attention(problem)
    bound = contract_bound(problem, CPU_INTERPRET)
    assert reference.head_max_logit is not None
    judged = judge(
        problem,
        reference.out.astype(np.float32),
        reference.lse.astype(np.float32),
        bound,
        reference=reference,
        got_max_logit=reference.head_max_logit.astype(np.float32),
    )
    grown = {name: measures.growth for name, measures in judged.measures.items()}
    assert grown["max_logit"] is None
    for name in ("out", "lse"):
        found = grown[name]
        assert found is not None
        assert [r.last for r in found.ranges] == [0, 1, 3, 7, 8]
        assert found.worst.value == judged.measures[name].share.value  # pyright: ignore[reportOptionalMemberAccess]


def test_wrong_axes_and_bounds_are_refused() -> None:
    """The axis must exist, and the bound must have the arrays' shape."""
    found = errors(np.zeros((2, 3), np.float32), np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"axis must be one of 0\.\.1, got 2"):
        growth(found)
    with pytest.raises(ComparisonError, match="shapes differ"):
        growth(found, np.ones(3), axis=0)

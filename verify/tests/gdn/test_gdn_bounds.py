"""The float64 oracles' proved bounds, against ball arithmetic, on adversarial problems."""

from __future__ import annotations

import numpy as np
import pytest
from gdn_problems import drawn, small_case, violations

from verify.gdn import oracle_arb, oracle_float64
from verify.gdn.cases import DECAYS, GdnCase

FAR_BELOW_FP32 = 2.0**-24 * 2.0**-8
"""FP32's unit roundoff, and a hundredth of it: what a reference has to be better than."""
ROUNDS_DEEP = 12
"""336 families as delta rule and as layer: 8064 cases, each for two oracles."""


def check(rounds: int, stride: int = 1) -> int:
    """Compare both float64 oracles with balls on drawn cases; returns how many cases there were."""
    count = 0
    for name, problem in drawn(rounds, stride=stride):
        balls = oracle_arb.gdn(problem)
        assert violations(oracle_float64.gdn(problem), balls) == 0, name
        assert violations(oracle_float64.gdn_chunked(problem, chunk=7), balls) == 0, name
        count += 1
    return count


def test_no_violation_on_a_sample() -> None:
    """An eleventh of all families, as delta rule and as layer: not one element beyond its bound."""
    assert check(1, stride=11) >= 60


@pytest.mark.deep
def test_no_violation_on_thousands_of_cases() -> None:
    """Every family many times over: not one element beyond its bound."""
    assert check(ROUNDS_DEEP) == ROUNDS_DEEP * 672


@pytest.mark.parametrize("decay", list(DECAYS))
def test_bounds_are_finite_and_small(decay: str) -> None:
    """Every decay, the hard reset and the largest |g| included: bounds far below FP32's roundings."""
    problem = GdnCase("near-duplicate", "up to 1", decay, seed=8, lengths=(96,), heads=(1, 1, 8, 4)).layer()
    for oracle in (oracle_float64.gdn, oracle_float64.gdn_chunked):
        reference = oracle(problem)
        assert (reference.out_error <= FAR_BELOW_FP32 * (1.0 + np.abs(reference.out).max())).all()
        assert (reference.state_error <= FAR_BELOW_FP32 * (1.0 + np.abs(reference.state).max())).all()


def test_the_two_forms_agree_on_a_long_sequence() -> None:
    """256 tokens with a 128 x 128 state: token by token and in chunks differ by less than the sum of their bounds."""
    problem = GdnCase("periodic", "1", "partly 0", seed=3, lengths=(256,), heads=(1, 1, 128, 128)).layer()
    assert violations(oracle_float64.gdn(problem), oracle_float64.gdn_chunked(problem)) == 0


def test_chunk_must_be_positive() -> None:
    """An impossible chunk is refused by name."""
    with pytest.raises(ValueError, match="chunk must be at least 1, got 0"):
        oracle_float64.gdn_chunked(small_case().rule(), chunk=0)


@pytest.mark.parametrize("dtype", [np.float32])
def test_inputs_in_fp32(dtype: type) -> None:
    """Keys and values that BF16 cannot hold are taken as they are."""
    problem = small_case().rule(np.dtype(dtype))
    assert problem.k.dtype == np.float32
    assert violations(oracle_float64.gdn(problem), oracle_arb.gdn(problem)) == 0

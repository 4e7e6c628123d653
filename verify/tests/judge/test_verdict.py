"""Verdicts on arrays: what passes, what fails, and what the reason says."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from verify.measures import BF16, FP32
from verify.verdict import Verdict, compare

pytestmark = pytest.mark.smoke

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("bound", [0.0, 1.0, INF])
@pytest.mark.parametrize(
    ("got", "want", "verdict"),
    [
        ([NAN], [1.0], "fail"),
        ([1.0], [NAN], "fail"),
        ([NAN], [NAN], "fail"),
        ([INF], [INF], "pass"),
        ([-INF], [INF], "fail"),
        ([1e30], [INF], "fail"),
        ([INF], [1e30], "fail"),
        ([0.0], [-0.0], "pass"),
        ([], [], "fail"),
    ],
)
def test_comparator_table(got: list[float], want: list[float], verdict: str, bound: float) -> None:
    """G1: NaN and infinities pass only where they are due, for any bound, and so beside elements that pass."""
    assert compare(np.array(got, FP32), np.array(want), bound).verdict == verdict
    if got:
        beside = compare(np.array([1.0, *got], FP32), np.array([1.0, *want]), bound)
        assert beside.verdict == verdict


def test_nan_passes_where_the_contract_says_nan() -> None:
    """G1: NaN against NaN passes if the contract says NaN."""
    assert compare(np.array([NAN], FP32), np.array([NAN]), 0.0, nan_matches=True).passed


def test_nothing_compared_is_said() -> None:
    """G1: two empty arrays fail with "nothing was compared"."""
    judgement = compare(np.zeros(0, FP32), np.zeros(0), 1.0)
    assert judgement.verdict is Verdict.FAIL
    assert "nothing was compared" in judgement.reason


def test_shapes_are_not_broadcast() -> None:
    """G1: shapes (3,) and (1, 3) fail, and both are named."""
    judgement = compare(np.zeros(3, FP32), np.zeros((1, 3)), 1.0)
    assert judgement.verdict is Verdict.FAIL
    assert "got (3,), want (1, 3)" in judgement.reason


@pytest.mark.parametrize("want", [1.0, 1.0 - 2.0**-53, -(2.0**-80), 2.0**-80])
def test_the_bound_itself_passes(want: float) -> None:
    """Against an exact reference, an error equal to the bound passes and one a hair larger fails, without rounding."""
    got = np.array([1.5], FP32)
    exact = Fraction(1.5) - Fraction(want)
    limits = {float(exact), math.nextafter(float(exact), 0.0), math.nextafter(float(exact), 9.0)}
    for limit in limits:
        judgement = compare(got, np.array([want]), limit)
        assert judgement.passed == (exact <= Fraction(limit))
        assert judgement.passed or "exceeds the bound" in judgement.reason


def test_the_error_of_the_reference_counts_against_a_pass() -> None:
    """With |got - want| = 0.5 and a bound of 0.6, a reference error of 0.05 passes and one of 0.2 is not certified."""
    got, want = np.array([1.5], FP32), np.array([1.0])
    assert compare(got, want, 0.6, want_error=0.05).passed
    doubtful = compare(got, want, 0.6, want_error=0.2)
    assert doubtful.verdict is Verdict.FAIL
    assert "not certified" in doubtful.reason
    assert "exceeds the bound" in compare(got, want, 0.2, want_error=0.2).reason


def test_a_failure_tells_worst_element_values_bits_and_bound() -> None:
    """The reason of a failure names index, values, words, error, bound and how far beyond it."""
    got = np.ones((1, 2, 3, 4), dtype=BF16)
    got[0, 1, 2, 3] = 1.0625
    judgement = compare(got, np.ones((1, 2, 3, 4)), 2.0**-8)
    assert judgement.reason == (
        "1 of 24 elements of out are wrong; worst out[0, 1, 2, 3]: got 1.0625 (0x3f88), want 1 (nearest 0x3f80): "
        "|got - want| = 0.0625 exceeds the bound 0.00390625 (16 times); "
        "only in head 1 of 2, row 2 of 3, lane 3 of 4"
    )


def test_the_worst_element_is_the_one_farthest_beyond_its_bound() -> None:
    """An element just beyond a tiny bound is worse than a larger error within a large bound; a NaN is worse yet."""
    got, want = np.array([9.0, 1.5, 2.0], FP32), np.array([1.0, 1.0, 1.0])
    assert "worst out[1]" in compare(got, want, np.array([10.0, 0.1, 0.5])).reason
    got[2] = NAN
    judgement = compare(got, want, np.array([10.0, 0.1, 0.5]))
    worst = "worst out[2]: got nan (0x7fc00000), want 1 (nearest 0x3f800000): NaN where a finite number is due"
    assert worst in judgement.reason


def test_where_the_failures_lie() -> None:
    """Rows in several ranges are listed, and axes along which everything fails are not."""
    got = np.zeros((1, 1, 40, 2), dtype=FP32)
    got[:, :, [0, 1, 2, 5, 8, 10, 12, 13, 20]] = 1.0
    reason = compare(got, np.zeros((1, 1, 40, 2)), 0.5).reason
    assert reason.endswith("only in row 0-2, 5, 8, 10 and 2 more ranges of 40")


def test_an_error_against_a_bound_of_zero_is_told() -> None:
    """A bound of 0 shows as 0, exceeded infinitely."""
    reason = compare(np.array([1.5], FP32), np.array([1.0]), 0.0).reason
    assert "|got - want| = 0.5 exceeds the bound 0 (inf times)" in reason


def test_a_pass_tells_the_share_of_the_bound() -> None:
    """A pass says how many elements were compared and how much of the bound they use."""
    judgement = compare(np.array([1.5, 1.0], FP32), np.array([1.0, 1.0]), 1.0)
    assert judgement.reason == "out: 2 elements within their bound, 0.5 of it used at most"
    assert judgement.measures["out"].count == 2

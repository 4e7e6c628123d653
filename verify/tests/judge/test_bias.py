"""The bias statistics notice biased rounding, and leave unbiased rounding alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from verify.bias import bias
from verify.measures import BF16, errors, measure

pytestmark = pytest.mark.cover


def rounded(values: np.ndarray, how: str) -> np.ndarray:
    """BF16 of positive values: to nearest, towards zero, or away from zero."""
    words = values.astype(np.float32).view(np.uint32)
    shift = {"nearest": ((words >> 16) & 1) + 0x7FFF, "down": 0, "up": 0xFFFF}[how]
    return ((words + shift) >> 16).astype(np.uint16).view(BF16)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("bounded", [True, False])
def test_round_to_nearest_raises_no_alarm(seed: int, bounded: bool) -> None:
    """Round-to-nearest of random values raises no alarm, normalised by its bound or by half an ulp."""
    want = np.random.default_rng(seed).uniform(1.0, 4.0, (64, 32)).astype(np.float32).astype(np.float64)
    found = errors(rounded(want, "nearest"), want)
    assert not measure(found, want * 2.0**-8 if bounded else None).bias.alarm


@pytest.mark.parametrize("how", ["down", "up"])
@pytest.mark.parametrize("bounded", [True, False])
def test_directed_rounding_raises_the_alarm(how: str, bounded: bool) -> None:
    """Truncation passes a bound of one ulp everywhere, and the sum of the errors gives it away."""
    want = np.random.default_rng(0).uniform(1.0, 4.0, (64, 32)).astype(np.float32).astype(np.float64)
    measures = measure(errors(rounded(want, how), want), want * 2.0**-7 if bounded else None)
    assert measures.ulp.value <= 1.0
    assert measures.bias.lean > measures.bias.lean_limit
    assert measures.bias.alarm


def test_a_slight_bias_shows_with_enough_rows() -> None:
    """A bias of a tenth of the spread is seen in ten thousand rows."""
    errors_ = np.random.default_rng(0).uniform(-1.0, 1.0, 10_000)
    rows = np.arange(10_000)
    assert not bias(errors_, rows, normalised_by="bound").alarm
    assert bias((errors_ + 0.1) / 1.1, rows, normalised_by="bound").alarm


def test_rows_are_the_units() -> None:
    """Errors that all lanes of a row share count once: fair signs per row are no bias, however many lanes."""
    signs = np.random.default_rng(0).choice([-1.0, 1.0], 100)
    shared = np.repeat(signs, 128) * 0.5
    by_row = bias(shared, np.repeat(np.arange(100), 128), normalised_by="half an ulp")
    by_lane = bias(shared, np.arange(12_800), normalised_by="half an ulp")
    assert by_row.lean == pytest.approx(abs(signs.sum()) / 10.0)
    assert by_lane.lean == pytest.approx(by_row.lean * math.sqrt(128))


def test_errors_at_their_bound_raise_the_alarm() -> None:
    """Errors that always reach their bound, with fair signs, have too large a mean square."""
    signs = np.random.default_rng(0).choice([-1.0, 1.0], 400)
    found = bias(signs, np.arange(400), normalised_by="bound")
    assert found.lean < found.lean_limit
    assert found.mean_square == 1.0
    assert found.mean_square > found.mean_square_limit
    assert found.alarm


def test_few_rows_cannot_raise_the_alarm() -> None:
    """With too few rows no statistic can reach its limit: 19 rows lean by sqrt(19) at most."""
    few = bias(np.ones(19), np.arange(19), normalised_by="bound")
    assert few.lean == pytest.approx(math.sqrt(19))
    assert not few.alarm


def test_limits_follow_from_the_false_alarm_rate() -> None:
    """The limits solve their tail bounds at half the rate each."""
    found = bias(np.zeros(1000), np.arange(1000), normalised_by="bound", false_alarm_rate=1e-6)
    assert 2.0 * math.exp(-(found.lean_limit**2) / 2.0) == pytest.approx(5e-7)
    x = found.mean_square_limit
    divergence = x * math.log(3.0 * x) + (1.0 - x) * math.log(1.5 * (1.0 - x))
    assert math.exp(-1000 * divergence) == pytest.approx(5e-7)
    assert found.false_alarm_rate == 1e-6
    assert found.lean == 0.0


def test_false_alarms_stay_below_the_stated_rate() -> None:
    """Of 4000 unbiased samples at a stated rate of 1 in 10, no more raise the alarm than that (conservative)."""
    rng = np.random.default_rng(0)
    rows = np.arange(30)
    alarms = sum(
        bias(rng.uniform(-1.0, 1.0, 30), rows, normalised_by="bound", false_alarm_rate=0.1).alarm for _ in range(4_000)
    )
    assert 0 < alarms < 400


@pytest.mark.parametrize(("values", "rate"), [([], 0.1), ([math.nan], 0.1), ([1.0], 0.0), ([1.0], 1.0)])
def test_bad_arguments_are_refused(values: list[float], rate: float) -> None:
    """Nothing, NaN, and rates that are none are named."""
    with pytest.raises(
        ValueError, match=r"normalised must hold finite errors|false_alarm_rate must lie between 0 and 1"
    ):
        bias(np.array(values), np.arange(len(values)), normalised_by="bound", false_alarm_rate=rate)

"""How pages write and rank numbers."""

from __future__ import annotations

import math

import pytest

from reports import numbers


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("x", "text"),
    [
        (math.nan, "NaN"),
        (math.inf, "infinity"),
        (-math.inf, "−infinity"),  # noqa: RUF001
        (None, "–"),  # noqa: RUF001
        (0.0, "0"),
        (-0.0, "−0"),  # noqa: RUF001
        (1e-320, "1e-320"),
        (-1e-320, "−1e-320"),  # noqa: RUF001
        (0.83449, "0.834"),
        (0.5, "0.500"),
        (99.96, "100"),
        (12345.0, "12,300"),
        (3.4e38, "3.4e+38"),
        (0.00099999999, "0.001"),
    ],
)
def test_show(x: float | None, text: str) -> None:
    """Non-finite values are words, subnormals keep their size, absent values are a dash."""
    assert numbers.show(x) == text


@pytest.mark.parametrize("x", [0.9996, 0.99999999, math.nextafter(1.0, 0.0), 1.0, math.nextafter(1.0, 2.0), 1.0004])
def test_share_shows_on_which_side_of_the_bound_it_lies(x: float) -> None:
    """A share below 1 never reads as 1, nor does one above it."""
    shown = float(numbers.show_share(x))
    assert (shown < 1, shown > 1) == (x < 1, x > 1)


def test_severity_ranks_nan_above_infinity_above_numbers() -> None:
    """NaN is worst, then infinities of either sign, then finite numbers by size; nothing measured is last."""
    values = [3.0, None, math.nan, 1e-320, -math.inf, 1e300, 0.0, math.inf]
    ordered = [x for _, x in sorted(zip(numbers.ranks(values), values, strict=True), key=lambda pair: pair[0])]
    assert ordered[:5] == [None, 0.0, 1e-320, 3.0, 1e300]
    assert all(map(math.isinf, ordered[5:7]))
    assert math.isnan(ordered[7])
    assert math.isnan(numbers.worst(values))
    assert numbers.worst([]) is None


def test_exact_values_tell_fp32_numbers_apart() -> None:
    """Nine digits name one FP32 number."""
    assert numbers.show_exact(1.0 + 2.0**-23) != numbers.show_exact(1.0)
    assert numbers.show_exact(-math.inf) == "−infinity"  # noqa: RUF001
    assert numbers.show_exact(-2.5) == "−2.5"  # noqa: RUF001


def test_dates() -> None:
    """A span of time is short where it can be, and a date that is none is left as it is."""
    assert numbers.show_dates("2026-11-29T10:00:01+00:00", "2026-11-29T10:00:59+00:00") == "on 2026-11-29 10:00 UTC"
    assert (
        numbers.show_dates("2026-11-29T10:00:01+00:00", "2026-11-29T11:00:59+00:00")
        == "from 2026-11-29 10:00 to 11:00 UTC"
    )
    assert numbers.show_dates("yesterday", "yesterday") == "yesterday"

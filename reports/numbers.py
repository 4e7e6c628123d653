"""Numbers as a page shows and ranks them: non-finite values are words, and rank as worst."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ABSENT = "–"  # noqa: RUF001  an en dash, as tables have it
PLAIN_FROM, PLAIN_BELOW = 1e-3, 1e6
GROUPED_FROM = 1e4
MINUTE = "%Y-%m-%d %H:%M"


def severity(x: float | None) -> tuple[int, float]:
    """Order of errors: nothing measured, finite by size, infinity, NaN."""
    if x is None:
        return (0, 0.0)
    if math.isnan(x):
        return (3, 0.0)
    if math.isinf(x):
        return (2, 0.0)
    return (1, abs(x))


def ranks(values: Sequence[float | None]) -> list[int]:
    """The place of each value in order of severity, equal values sharing one; what a page sorts by."""
    order = {key: place for place, key in enumerate(sorted({severity(x) for x in values}))}
    return [order[severity(x)] for x in values]


def worst(values: Sequence[float | None]) -> float | None:
    """The most severe value; None if none was measured."""
    return max(values, key=severity, default=None)


def words(x: float) -> str | None:
    """The word for a non-finite number."""
    if math.isnan(x):
        return "NaN"
    if math.isinf(x):
        return "infinity" if x > 0 else "−infinity"  # noqa: RUF001  a minus sign
    return None


def show(x: float | None, digits: int = 3) -> str:
    """A number with so many significant digits, never in a form that hides its size."""
    if x is None:
        return ABSENT
    if (word := words(x)) is not None:
        return word
    if x == 0:
        return "−0" if math.copysign(1.0, x) < 0 else "0"  # noqa: RUF001
    if PLAIN_FROM <= abs(x) < PLAIN_BELOW:
        rounded = float(f"{x:.{digits}g}")
        places = max(digits - 1 - math.floor(math.log10(abs(rounded))), 0)
        text = f"{rounded:,.{places}f}" if abs(rounded) >= GROUPED_FROM else f"{rounded:.{places}f}"
    else:
        text = f"{x:.{digits}g}"
    return text.replace("-", "−", 1) if x < 0 else text  # noqa: RUF001


def show_share(x: float | None) -> str:
    """A share of the bound, with as many digits as it takes to see on which side of 1 it lies."""
    if x is None or not math.isfinite(x):
        return show(x)
    for digits in range(3, 18):
        rounded = float(f"{x:.{digits}g}")
        if (x < 1) == (rounded < 1) and (x > 1) == (rounded > 1):
            return show(x, digits)
    return repr(x)


def show_exact(x: float | None) -> str:
    """A value of a kernel or an oracle: nine digits tell any two FP32 numbers apart."""
    if x is None or x == 0 or not math.isfinite(x):
        return show(x)
    text = f"{x:.9g}"
    return text.replace("-", "−", 1) if x < 0 else text  # noqa: RUF001


def show_seconds(x: float | None) -> str:
    """A duration."""
    minute = 60
    if x is None or not math.isfinite(x):
        return ABSENT
    return f"{x:.1f} s" if x < minute else f"{int(x // minute)} min {int(x % minute)} s"


def show_duration(x: float | None) -> str:
    """A short duration in the unit that suits it."""
    if x is None or not math.isfinite(x):
        return show(x)
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if x >= size:
            return f"{show(x / size)} {unit}"
    return f"{show(x / 1e-9)} ns"


def show_dates(first: str, last: str) -> str:
    """When something was measured, from ISO 8601 texts; other texts stay as they are."""
    try:
        start, end = (datetime.fromisoformat(text).astimezone(UTC) for text in (first, last))
    except ValueError:
        return first if first == last else f"{first} to {last}"
    if start.strftime(MINUTE) == end.strftime(MINUTE):
        return f"on {start:{MINUTE}} UTC"
    tail = f"{end:%H:%M}" if start.date() == end.date() else f"{end:{MINUTE}}"
    return f"from {start:{MINUTE}} to {tail} UTC"


def plural(n: int, noun: str, many: str | None = None) -> str:
    """Such as "1 case", "2,000 cases"."""
    return f"{n:,} {noun if n == 1 else many or noun + 's'}"

"""Processes that append records; apart from the tests so that they start without JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verify.records import FORMAT, REQUIRED, append

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized
    from pathlib import Path

LONG = "x" * 200_000
"""Longer than what one write takes at once on some systems."""


def record(**fields: Any) -> dict[str, Any]:
    """The least that a record holds."""
    return dict.fromkeys(REQUIRED, "") | {"format": FORMAT} | fields


def write(path: Path, name: str, count: int) -> None:
    """Append so many records of different lengths."""
    for number in range(count):
        append(path, record(subject=name, case=f"{number}", reason=LONG[: 1000 + 50 * number]))


def write_until_killed(path: Path, finished: Synchronized[int]) -> None:
    """Append without end, and say after each record that it has been appended."""
    number = 0
    while True:
        append(path, record(case=f"{number}", reason=LONG))
        number += 1
        finished.value = number

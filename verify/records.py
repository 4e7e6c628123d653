"""Records: what one judgement found, as a line of JSON.

A record is strictly valid JSON: NaN and infinities are the strings "nan", "inf", "-inf" (`encode_number`).  Several
processes may share a file (`append_line`), and a killed one loses no record that it had finished: a line is written,
and unless told otherwise on the disk, before `append` returns; what a killed process left of a line is cut off by the
next one and skipped on reading.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import io
    from collections.abc import Iterator
    from pathlib import Path

FORMAT = "flywheel-record/2"

REQUIRED = (
    "format",
    "subject",
    "case",
    "family",
    "shape",
    "features",
    "verdict",
    "reason",
    "measures",
    "environment",
    "reproduce",
)
"""Fields of every record; docs/records.md says what they and the others hold."""

_SEARCHED = 1 << 16
"""Bytes read at a time in search of the last line end."""


class RecordError(ValueError):
    """A record that breaks the format."""


def encode_number(x: float) -> float | str:
    """A number as strict JSON can hold it."""
    x = float(x)
    if math.isnan(x):
        return "nan"
    if math.isinf(x):
        return "inf" if x > 0 else "-inf"
    return x


def decode_number(x: float | str | None) -> float | None:
    """The inverse of `encode_number`; None stays None."""
    return None if x is None else float(x)


def append(path: Path, record: dict[str, Any], *, synced: bool = True) -> None:
    """Add one record; see `append_line`.

    Raises:
        RecordError: a required field is missing.
        ValueError: a value that strict JSON cannot hold (use `encode_number`).
    """
    missing = [name for name in REQUIRED if name not in record]
    if missing or record["format"] != FORMAT:
        message = f"a record needs format {FORMAT} and {', '.join(REQUIRED)}; missing: {', '.join(missing) or 'none'}"
        raise RecordError(message)
    append_line(path, json.dumps(record, allow_nan=False, separators=(",", ":")), synced=synced)


def append_line(path: Path, text: str, *, synced: bool = True) -> None:
    """Add one line to a file that several processes append to; it outlives the process when this returns.

    With `synced` it is on the disk, and outlives a loss of power; without, `sync` sees to that for many lines at once.

    Each takes an exclusive lock on the file while it writes, so that lines never mix.  What lies behind the last line
    end belongs to a process that was killed while it wrote, and is cut off.

    Raises:
        ValueError: the text is more than one line.
    """
    if "\n" in text:
        message = f"text must be one line, got {text[:80]!r}"
        raise ValueError(message)
    path.parent.mkdir(parents=True, exist_ok=True)
    created = not path.exists()
    with path.open("ab+", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, by a kill too
        end = _whole_lines(file)
        file.truncate(end)
        rest = memoryview(f"{text}\n".encode())
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:  # a full disk
            file.truncate(end)
            raise
        if synced:
            os.fsync(file.fileno())
    if created:
        _sync_directory(path.parent)


def sync(path: Path) -> None:
    """Bring to the disk whatever any process has appended."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _whole_lines(file: io.FileIO) -> int:
    """Bytes up to and including the last line end."""
    position = file.seek(0, os.SEEK_END)
    while position > 0:
        start = max(position - _SEARCHED, 0)
        file.seek(start)
        found = file.read(position - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        position = start
    return 0


def _sync_directory(directory: Path) -> None:
    """A new file's name is part of its directory, which is synced apart."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """All records of a file, in order.

    Raises:
        RecordError: a line other than a torn last one is no record.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        torn = number == len(lines) and not line.endswith("\n")
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if torn:
                return
            message = f"{path}, line {number}: not JSON: {error}"
            raise RecordError(message) from error
        missing = [name for name in REQUIRED if name not in record]
        if missing or record["format"] != FORMAT:
            message = f"{path}, line {number}: not a {FORMAT}; missing: {', '.join(missing) or 'nothing'}"
            raise RecordError(message)
        yield record

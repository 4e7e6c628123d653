"""Records: what one judgement found, as a line of JSON.

A record is strictly valid JSON: NaN and infinities are the strings "nan", "inf", "-inf" (`encode_number`).  A line is
written whole by one write on a file opened for appending, so that several processes may share a file and a killed one
loses at most the line it was writing; a torn last line is skipped on reading and reported.
"""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FORMAT = "flywheel-record/1"

REQUIRED = ("format", "subject", "case", "family", "shape", "verdict", "reason", "measures", "environment", "reproduce")
"""Fields of every record.

- `subject`: the kernel's name, never altered.
- `case`: the case's name; `case_file`: where it lies, if it is a file; `sha256`: digest of its bits.
- `family`: ordinary, adversarial, boundary, non-finite, trace, corpus, fuzz.
- `shape`: {batch, heads, kv_heads, q_len, kv_len, head_dim, causal, scale}.
- `verdict`, `reason`: see `verify.verdict`.
- `measures`: {"out": {...}, "lse": {...}}, see `verify.measures`.
- `replays`: query blocks replayed; `query_blocks`: how many there are; null when the subject does not say.
- `seconds`: wall time of the judgement.
- `environment`: {backend, device_model, interpret, versions: {package: version}, date}.
- `reproduce`: the command that judges the case again.
"""


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


def append(path: Path, record: dict[str, Any]) -> None:
    """Add one record.

    Raises:
        RecordError: a required field is missing.
        ValueError: a value that strict JSON cannot hold (use `encode_number`).
    """
    missing = [name for name in REQUIRED if name not in record]
    if missing or record["format"] != FORMAT:
        message = f"a record needs format {FORMAT} and {', '.join(REQUIRED)}; missing: {', '.join(missing) or 'none'}"
        raise RecordError(message)
    line = json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, line.encode())
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

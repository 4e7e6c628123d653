"""Which equation loses the digits: rankings of `python -m verify.emulate`, kept beside the records."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from reports.resume import ROOT
from verify.emulate.ranking import FORMAT
from verify.emulate.shown import shown
from verify.records import decode_number

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MOST = 8
"""Equations that a page shows of a function."""


class EquationsError(ValueError):
    """A ranking that cannot be computed, or a file that is none."""


@dataclasses.dataclass(frozen=True)
class Equation:
    """One equation.

    Attributes:
        alone: error of the function if this equation alone is computed as the device does.
        without: error if every equation but this one is.
    """

    operation: str
    source: str
    text: str
    alone: float
    without: float


@dataclasses.dataclass(frozen=True)
class Ranking:
    """The equations of one function, worst first."""

    function: str
    words: str
    arithmetic: str
    measure: str
    together: float
    equations: tuple[Equation, ...]
    count: int


def write(directory: Path, workers: int = 1) -> list[tuple[str, str]]:
    """Rank every function that the emulator knows by name, each in a process; returns those that failed, and why."""
    directory.mkdir(parents=True, exist_ok=True)

    def rank(name: str) -> tuple[str, str] | None:
        command = [sys.executable, "-m", "verify.emulate", name, "--json", str((directory / f"{name}.json").resolve())]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if not done.returncode:
            return None
        return f"Equations of {name}", done.stderr.strip()[-300:] or f"exit code {done.returncode}"

    with ThreadPoolExecutor(workers) as pool:
        return [failure for failure in pool.map(rank, shown()) if failure is not None]


def is_ranking(body: Any) -> bool:  # noqa: ANN401  from JSON
    """Whether a file is a ranking."""
    return isinstance(body, dict) and body.get("format") == FORMAT


def read(body: Mapping[str, Any]) -> Ranking:
    """A ranking.

    Raises:
        EquationsError: a field is missing.
    """
    try:
        equations = [_equation(one) for one in body["equations"]]
        device = f", {body['device']}" if body.get("device") else ""
        return Ranking(
            function=str(body["function"]),
            words=str(body["words"]),
            arithmetic=f"{body['arithmetic']}{device}",
            measure=str(body["measure"]),
            together=_error(body["together"]),
            equations=tuple(equations[:MOST]),
            count=len(equations),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        message = f"no {FORMAT}: {error!r}"
        raise EquationsError(message) from error


def _equation(body: Mapping[str, Any]) -> Equation:
    shape = ", ".join(str(size) for size in body["shape"])
    return Equation(
        operation=f"{body['primitive']} {body['dtype']}[{shape}]",
        source=f"{body['file']}:{body['line']}",
        text=str(body["text"]),
        alone=_error(body["alone"]),
        without=_error(body["without"]),
    )


def _error(body: Mapping[str, Any]) -> float:
    value = decode_number(body["error"])
    assert value is not None  # noqa: S101  a ranking has every error
    return value


def load(directory: Path) -> list[Ranking]:
    """The rankings of a directory, in order of their names."""
    return [read(json.loads(path.read_text(encoding="utf-8"))) for path in sorted(directory.glob("*.json"))]

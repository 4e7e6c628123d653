"""Checking `.g` files with Gappa, which bounds the rounding errors of straight-line floating-point code."""

from __future__ import annotations

import concurrent.futures
import functools
import re
import shutil
import subprocess
import time
from typing import TYPE_CHECKING

from proofs.checkers.coq import ROOT
from proofs.checkers.outcome import Outcome, Report, Tool
from proofs.checkers.written_constants import gappa_script

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_SECONDS_PER_FILE = 120
_AT_ONCE = 2


def sources() -> dict[str, Path]:
    """Every `.g` file of this room by its name, which is unique in it."""
    return {path.stem: path for path in sorted(ROOT.rglob("*.g"))}


@functools.cache
def version() -> str | None:
    """Gappa's version, or None where it is missing."""
    if shutil.which("gappa") is None:
        return None
    return subprocess.run(["gappa", "--version"], capture_output=True, text=True, check=True).stdout.strip()  # noqa: S607


def check(names: Iterable[str]) -> dict[str, Report]:
    """Check the goals of the files of these names, with the constants as the code has them now."""
    wanted = list(names)
    if version() is None:
        return {name: Report(Tool.GAPPA, Outcome.NOT_CHECKED, "gappa is not installed") for name in wanted}
    known = sources()
    scripts = [gappa_script(known[name].read_text(encoding="utf-8")) for name in wanted]
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(wanted, pool.map(check_script, scripts), strict=True))


def goals_of(script: str) -> list[str]:
    """What the script's formulas conclude; the arrows of hints, which stand outside of braces, are none."""
    formulas = re.findall(r"^\{(.*?)\}", script, flags=re.MULTILINE | re.DOTALL)
    return [goal.strip() for formula in formulas for goal in formula.rpartition("->")[2].split("/\\")]


def check_script(script: str) -> Report:
    """One finished script, all of whose goals must hold."""
    start = time.perf_counter()
    try:
        done = subprocess.run(
            ["gappa"],  # noqa: S607
            input=script,
            capture_output=True,
            text=True,
            check=False,
            timeout=_SECONDS_PER_FILE,
        )
    except subprocess.TimeoutExpired:
        return Report(Tool.GAPPA, Outcome.FAILED, f"no proof within {_SECONDS_PER_FILE} s", _SECONDS_PER_FILE)
    seconds = time.perf_counter() - start
    said = [line.strip() for line in done.stderr.split("\n") if line.strip()]
    # A warning is a failure too: it says that a hint or a hypothesis did not do what was meant.
    wrong = [line for line in said if "error" in line.lower() or "warning" in line.lower() or "not satisfied" in line]
    if done.returncode or wrong:
        return Report(Tool.GAPPA, Outcome.FAILED, " ".join((wrong or said or ["no proof"])[0].split())[:160], seconds)
    goals = len(goals_of(script))
    return Report(Tool.GAPPA, Outcome.CHECKED, f"{goals} goal{'s' if goals != 1 else ''}", seconds)

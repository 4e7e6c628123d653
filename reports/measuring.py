"""Measuring with a display: kernels on a grid, then what stands beside the records."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from reports import equations, grid, inverse, lemmas, resume
from reports.measure import measure
from reports.numbers import plural, severity, show_share
from reports.rows import row_of
from reports.sources import EQUATIONS, INVERSE, LEMMAS, NOTES, PLAN, RECORDS
from reports.subjects import load
from verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path

    from rich.console import Console

    from reports.item import Item

QUIET_STEP = 25
"""Finished cases per line where no progress bar can be drawn."""

NONE = "none"
"""What `--subject` says to measure no other kernel."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """How measuring ended: why a planned case may have no record, and whether it was interrupted."""

    why_missing: str
    interrupted: bool


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def everything(
    out: Path,
    *,
    grid_name: str,
    subjects: Sequence[str] | None,
    minutes: float | None,
    workers: int,
    fresh: bool,
    console: Console,
) -> Measured:
    """Measure a grid into `out`, and compute what a page shows beside it; what exists already is kept.

    Args:
        out: directory.
        grid_name: a name in `grid.GRIDS`.
        subjects: further kernels; None: all that the judge knows, on the standard grid.
        minutes: start no further case after so many.
        workers: processes.
        fresh: measure everything again.
        console: where progress is shown.
    """
    others, absent = _others(grid_name, subjects)
    until = None if minutes is None else time.monotonic() + 60.0 * minutes
    why = "not measured" if minutes is None else f"not started within {minutes:g} minutes"
    code = resume.code_digest()
    try:
        _measure(out / RECORDS, grid.plan(grid_name, others), grid_name, code, workers, until, console, fresh=fresh)
        absent += _beside(out, grid_name, code, workers, until, console, fresh=fresh)
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on from here")
        return Measured("interrupted", interrupted=True)
    resume.write_whole(out / NOTES, json.dumps(absent) + "\n")
    return Measured(why, interrupted=False)


def _others(grid_name: str, subjects: Sequence[str] | None) -> tuple[list[str], list[tuple[str, str]]]:
    """Further kernels that can run here, and those that cannot, with the reason."""
    chosen = (grid.others() if grid_name == "standard" else ()) if subjects is None else subjects
    here: list[str] = []
    absent: list[tuple[str, str]] = []
    for name in chosen:
        if name == NONE:
            continue
        reason = load(name).missing()
        if reason is None:
            here.append(name)
        else:
            absent.append((name, reason))
    return here, absent


def _measure(
    path: Path,
    items: Sequence[Item],
    grid_name: str,
    code: str,
    workers: int,
    until: float | None,
    console: Console,
    *,
    fresh: bool,
) -> None:
    done, aside = resume.prepare(path, code, fresh=fresh)
    if aside is not None:
        console.print(f"earlier records are now {aside}: {'as asked' if fresh else 'the code has changed since'}")
    resume.write_plan(path.with_name(PLAN), grid_name, items)
    left = [item for item in items if item.key not in done]
    if len(left) < len(items):
        console.print(f"{plural(len(items) - len(left), 'case')} of {len(items):,} already in {path}")
    if left:
        with Display(console, len(items), len(items) - len(left)) as display:
            measure(left, path, code=code, workers=workers, until=until, on_record=display.add)


def _beside(
    out: Path, grid_name: str, code: str, workers: int, until: float | None, console: Console, *, fresh: bool
) -> list[tuple[str, str]]:
    """Lemmas, the inverse's table and rankings of equations, on the standard grid; what was not done, and why."""
    if grid_name != "standard":
        return [("Lemmas, inverse and equations", f"not part of the {grid_name} grid: see reports build --help")]
    stamp = out / "beside.txt"
    kept = not fresh and stamp.exists() and stamp.read_text(encoding="utf-8") == code
    failed: list[tuple[str, str]] = []
    parts: tuple[tuple[str, Path, Callable[[], object]], ...] = (
        ("the lemmas", out / LEMMAS, lambda: lemmas.write(out / LEMMAS)),
        ("the inverse, level by level", out / INVERSE, lambda: inverse.write(out / INVERSE)),
        (
            "which equation loses the digits",
            out / EQUATIONS,
            lambda: failed.extend(equations.write(out / EQUATIONS, workers)),
        ),
    )
    wanted = [(words, compute) for words, path, compute in parts if not (kept and path.exists())]
    if until is not None and time.monotonic() >= until:
        return [(words, "not started within the time given") for words, _ in wanted]

    def done(words: str, compute: Callable[[], object]) -> None:
        try:
            compute()
        except (lemmas.LemmasError, OSError) as error:
            failed.append((words, str(error)))
        console.print(f"done: {words}", markup=False)

    # Threads: each part waits for processes of its own, or for the interpreter.
    with console.status(", ".join(words for words, _ in wanted)), ThreadPoolExecutor(workers) as pool:
        for task in [pool.submit(done, words, compute) for words, compute in wanted]:
            task.result()
    if not failed:
        resume.write_whole(stamp, code)
    return failed


class Display:
    """Progress of measuring: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        self.console, self.total, self.done = console, total, done
        self.verdicts: Counter[str] = Counter()
        self.worst: float | None = None
        self.replays = 0
        self.progress = _progress(console, "measuring")
        self.task = self.progress.add_task("", total=total, completed=done)

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def add(self, record: dict[str, Any]) -> None:
        """Count a record."""
        row = row_of(record)
        self.done += 1
        self.verdicts[row.verdict] += 1
        self.worst = max((self.worst, row.share), key=severity)
        self.replays += row.replays or 0
        failures = plural(self.verdicts[Verdict.FAIL], "failure")
        words = f"worst {show_share(self.worst)} of the bound, {plural(self.replays, 'replay')}, {failures}"
        self.progress.update(self.task, completed=self.done, description=words)
        if row.verdict in (Verdict.FAIL, Verdict.BACKEND_UNSOUND):
            self.progress.console.print(f"{row.verdict}: {row.subject}: {row.case}: {row.reason}", markup=False)
        if self.progress.disable and (self.done % QUIET_STEP == 0 or self.done == self.total):
            self.console.print(f"{self.done}/{self.total} cases: {words}", markup=False)


def _progress(console: Console, word: str) -> Progress:
    return Progress(
        TextColumn(word),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        disable=not console.is_terminal,
    )


@contextlib.contextmanager
def bar(console: Console, word: str) -> Generator[Callable[[int, int, str], None]]:
    """A progress bar that is told how many are done, of how many, and the latest."""
    progress = _progress(console, word)
    task = progress.add_task("", total=None)

    def show(done: int, total: int, latest: str) -> None:
        progress.update(task, completed=done, total=total, description=latest)
        if progress.disable:
            console.print(f"{done}/{total} {latest}", markup=False)

    with progress:
        yield show

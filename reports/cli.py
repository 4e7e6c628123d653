"""Commands: `build`, `case`, `cases`."""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from reports import grid, resume
from reports.build import PLAN, RECORDS, SourceError, records_file, write_page
from reports.measure import judge, measure
from reports.numbers import plural, severity, show, show_exact, show_seconds, show_share
from reports.rows import Row, row_of
from verify.attention.cases import CaseError, load_case
from verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
DEFAULT_OUT = Path("out") / "report"
QUIET_STEP = 25
"""Finished cases per line where no progress bar can be drawn."""

console = Console(highlight=False, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0: something was compared and nothing fails; 1: a failure, or nothing was compared (the page is written all the
        same); 2: bad arguments or unreadable records; 130: interrupted (the page shows what was finished).
    """
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (SourceError, CaseError) as error:
        console.print(f"error: {error}", markup=False)
        return USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m reports", description="Records to figures to pages.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    build = commands.add_parser("build", help="measure the kernels (or take records) and write the report")
    build.add_argument(
        "--out", type=Path, default=DEFAULT_OUT, metavar="DIR", help=f"where to write (default: {DEFAULT_OUT})"
    )
    build.add_argument(
        "--from",
        type=Path,
        nargs="+",
        dest="sources",
        metavar="RECORDS",
        help="records files or report directories; measures nothing",
    )
    build.add_argument(
        "--grid", choices=grid.GRIDS, default="standard", help="which cases to measure (default: standard)"
    )
    build.add_argument("--minutes", type=_positive, metavar="M", help="start no further case after so many minutes")
    build.add_argument(
        "--workers",
        type=_count,
        default=cores(),
        metavar="N",
        help="processes (default: one per core)",
    )
    build.add_argument("--fresh", action="store_true", help="set finished records aside and measure everything again")
    build.set_defaults(run=_build)
    case = commands.add_parser("case", help="judge one case, by name or from a case file")
    case.add_argument("name", help="a name that `cases` lists, or a case file")
    case.add_argument(
        "--interpret", choices=("fast", "tpu"), default="fast", help="interpret mode of Pallas (default: fast)"
    )
    case.set_defaults(run=_case)
    cases = commands.add_parser("cases", help="list the cases of a grid")
    cases.add_argument("--grid", choices=grid.GRIDS, default="standard", help="which grid (default: standard)")
    cases.set_defaults(run=_cases)
    return parser


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _positive(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes < float("inf"):
        message = f"must be a positive number of minutes, got {text}"
        raise argparse.ArgumentTypeError(message)
    return minutes


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        message = f"must be at least 1, got {text}"
        raise argparse.ArgumentTypeError(message)
    return count


def _build(options: argparse.Namespace) -> int:
    if options.sources:
        sources = [records_file(source) for source in options.sources]
        return _finish(options.out, sources, "no record of it was found", interrupted=False)
    path = options.out / RECORDS
    interrupted = False
    try:
        _measure(options, path)
    except KeyboardInterrupt:
        interrupted = True
        console.print("interrupted; the same command goes on from here")
    why = (
        "interrupted"
        if interrupted
        else f"not started within {options.minutes:g} minutes"
        if options.minutes
        else "not measured"
    )
    return _finish(options.out, [path], why, interrupted=interrupted)


def _measure(options: argparse.Namespace, path: Path) -> None:
    items = grid.plan(options.grid)
    code = resume.code_digest()
    done, aside = resume.prepare(path, code, fresh=options.fresh)
    if aside is not None:
        console.print(
            f"earlier records are now {aside}: {'as asked' if options.fresh else 'the code has changed since'}"
        )
    resume.write_plan(path.with_name(PLAN), options.grid, items)
    left = [item for item in items if item.key not in done]
    if len(left) < len(items):
        console.print(f"{plural(len(items) - len(left), 'case')} of {len(items):,} already in {path}")
    if not left:
        return
    until = None if options.minutes is None else time.monotonic() + 60.0 * options.minutes
    with _Display(len(items), len(items) - len(left)) as display:
        measure(left, path, code=code, workers=options.workers, until=until, on_record=display.add)


class _Display:
    """Progress: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, total: int, done: int) -> None:
        self.total, self.done = total, done
        self.verdicts: Counter[str] = Counter()
        self.worst: float | None = None
        self.replays = 0
        self.progress = Progress(
            TextColumn("measuring"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task("", total=total, completed=done)

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def add(self, record: dict[str, Any]) -> None:
        row = row_of(record)
        self.done += 1
        self.verdicts[row.verdict] += 1
        self.worst = max((self.worst, row.share), key=severity)
        self.replays += row.replays or 0
        failures = plural(self.verdicts[Verdict.FAIL], "failure")
        words = f"worst {show_share(self.worst)} of the bound, {plural(self.replays, 'replay')}, {failures}"
        self.progress.update(self.task, completed=self.done, description=words)
        if row.verdict in (Verdict.FAIL, Verdict.BACKEND_UNSOUND):
            self.progress.console.print(f"{row.verdict}: {row.case}: {row.reason}", markup=False)
        if self.progress.disable and (self.done % QUIET_STEP == 0 or self.done == self.total):
            console.print(f"{self.done}/{self.total} cases: {words}", markup=False)


def _finish(out: Path, sources: Sequence[Path], why: str, *, interrupted: bool) -> int:
    written = write_page(out, sources, why_missing=why)
    report = written.report
    if report.empty:
        console.print("nothing was compared: this is a failure")
    for kernel in report.kernels:
        worst = kernel.worst_row
        tail = "" if worst is None else f", worst share of the certified bound {show_share(worst.share)} ({worst.case})"
        console.print(
            f"{kernel.name}: {kernel.verdict}, {plural(len(kernel.judged), 'case')} judged{tail}", markup=False
        )
    console.print(str(written.page), markup=False)
    if interrupted:
        return INTERRUPTED
    return OK if report.ok else FAILED


def _case(options: argparse.Namespace) -> int:
    if options.name.endswith(".json"):
        item = grid.of_case("corpus", load_case(Path(options.name)), interpret=options.interpret)
    else:
        try:
            item = grid.find(options.name, interpret=options.interpret)
        except KeyError as error:
            console.print(f"error: {error.args[0]}", markup=False)
            return USAGE
    row = row_of(judge(item))
    console.print(
        f"{row.verdict}: {row.case} ({row.family}, {row.shape_words}), {show_seconds(row.seconds)}", markup=False
    )
    console.print(row.reason, markup=False)
    for note in row.notes:
        console.print(note, markup=False)
    if row.parts:
        console.print(_measures(row))
    if row.replays is not None:
        console.print(f"replays: {row.replays} of {plural(row.query_blocks or 0, 'query block')}")
    return OK if row.verdict in (Verdict.PASS, Verdict.NO_POWER, Verdict.OUTSIDE_DOMAIN) else FAILED


def _measures(row: Row) -> Table:
    table = Table(box=None)
    for heading in ("array", "share of the bound", "ulp", "absolute", "worst element", "got", "want", "bound"):
        table.add_column(heading)
    for part in row.parts:
        cells = [part.array, show_share(part.share), show(part.ulp), show(part.absolute)]
        if part.worst is not None:
            e = part.worst
            cells += [
                e.where,
                f"{show_exact(e.got)} {e.got_bits}",
                f"{show_exact(e.want)} {e.want_bits}",
                show(e.bound),
            ]
        table.add_row(*cells)
    return table


def _cases(options: argparse.Namespace) -> int:
    for item in grid.plan(options.grid):
        print(f"{item.family}\t{item.name}\t{item.interpret}")
    return OK

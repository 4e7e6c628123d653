"""Commands: `build`, `publish`, `compare`, `audit`, `case`, `cases`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from reports import grid, measuring
from reports.audit import document
from reports.audit import run as audit_run
from reports.build import AUDIT, write_page
from reports.compare import compare, read_run
from reports.measure import judge
from reports.numbers import plural, show, show_exact, show_seconds, show_share
from reports.resume import write_whole
from reports.rows import Row, row_of
from reports.site.publish import PublishError, publish
from reports.sources import SourceError
from reports.subjects import load
from verify.attention.cases import CaseError
from verify.subjects.gdn import GdnSubjectError
from verify.subjects.registry import SubjectError
from verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
DEFAULT_OUT = Path("out") / "report"
DEFAULT_SITE = Path("out") / "site"

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
    except (SourceError, CaseError, SubjectError, GdnSubjectError, PublishError) as error:
        console.print(f"error: {error}", markup=False)
        return USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m reports", description="Records to figures to pages.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_build(commands.add_parser("build", help="measure the kernels (or take records) and write the report"))
    site = commands.add_parser("publish", help="make or update a static site with history")
    site.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="directories that `build` has written")
    site.add_argument(
        "--site", type=Path, default=DEFAULT_SITE, metavar="DIR", help=f"the site (default: {DEFAULT_SITE})"
    )
    site.add_argument("--title", default="Flywheel", help="name of the project, for its pages (default: Flywheel)")
    site.set_defaults(run=_publish)
    two = commands.add_parser("compare", help="what changed from run A to run B; exit code 1 if something got worse")
    two.add_argument("first", type=Path, metavar="A", help="a report's directory, or its records")
    two.add_argument("second", type=Path, metavar="B", help="the later one")
    two.set_defaults(run=_compare)
    audit = commands.add_parser("audit", help="which acceptance rule lets which wrong kernel pass")
    audit.add_argument("--out", type=Path, metavar="FILE", help="write the page as Markdown")
    audit.add_argument(
        "--results", type=Path, default=AUDIT, metavar="FILE", help=f"where results are kept (default: {AUDIT.name})"
    )
    audit.add_argument("--recorded", action="store_true", help="judge nothing: write the page from the results")
    audit.add_argument("--workers", type=_count, default=measuring.cores(), metavar="N", help="processes")
    audit.set_defaults(run=_audit)
    case = commands.add_parser("case", help="judge one case, by name or from a case file")
    case.add_argument("name", help="a name that `cases` lists, or a case file")
    case.add_argument("--subject", metavar="NAME", help="the kernel (default: ours)")
    case.add_argument(
        "--interpret", choices=("fast", "tpu"), default="fast", help="interpret mode of Pallas (default: fast)"
    )
    case.set_defaults(run=_case)
    cases = commands.add_parser("cases", help="list the cases of a grid")
    cases.add_argument("--grid", choices=grid.GRIDS, default="standard", help="which grid (default: standard)")
    cases.set_defaults(run=_cases)
    return parser


def _add_build(build: argparse.ArgumentParser) -> None:
    build.add_argument(
        "--out", type=Path, default=DEFAULT_OUT, metavar="DIR", help=f"where to write (default: {DEFAULT_OUT})"
    )
    build.add_argument(
        "--from",
        type=Path,
        nargs="+",
        dest="sources",
        metavar="RECORDS",
        help="records files, report or campaign directories, or JSON of proofs or equations; measures nothing",
    )
    build.add_argument(
        "--grid", choices=grid.GRIDS, default="standard", help="which cases to measure (default: standard)"
    )
    build.add_argument(
        "--subject",
        action="append",
        metavar="NAME",
        help="also this kernel, on a part of the grid; may be repeated (default for the standard grid: every kernel "
        "that the judge knows; none: only ours)",
    )
    build.add_argument("--minutes", type=_positive, metavar="M", help="start no further case after so many minutes")
    build.add_argument(
        "--workers", type=_count, default=measuring.cores(), metavar="N", help="processes (default: one per core)"
    )
    build.add_argument("--fresh", action="store_true", help="set finished records aside and measure everything again")
    build.set_defaults(run=_build)


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
        return _finish(options.out, options.sources, "no record of it was found", interrupted=False)
    for name in options.subject or ():
        if name != measuring.NONE:
            load(name)
    measured = measuring.everything(
        options.out,
        grid_name=options.grid,
        subjects=options.subject,
        minutes=options.minutes,
        workers=options.workers,
        fresh=options.fresh,
        console=console,
    )
    return _finish(options.out, [options.out], measured.why_missing, interrupted=measured.interrupted)


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


def _publish(options: argparse.Namespace) -> int:
    published = publish(options.site, options.runs, title=options.title)
    for run in published:
        console.print(f"{run.id}: {'published' if run.new else 'was published before'}", markup=False)
    console.print(str(options.site / "index.html"), markup=False)
    return OK


def _compare(options: argparse.Namespace) -> int:
    first, second = read_run(options.first), read_run(options.second)
    found = compare(first, second)
    console.print(found.words, markup=False)
    for change in found.changes:
        console.print(f"{change.kind}: {change.kernel}: {change.case}: {change.words}", markup=False)
    for name, before, after in found.versions:
        console.print(f"version: {name}: {before} -> {after}", markup=False)
    if not found.common:
        console.print("nothing was compared: the runs have no case in common, and this is a failure")
    return OK if found.ok else FAILED


def _audit(options: argparse.Namespace) -> int:
    if options.recorded:
        bodies = audit_run.read(options.results)
    else:
        with measuring.bar(console, "auditing") as progress:
            bodies = audit_run.run(options.results, workers=options.workers, progress=progress)
        for what, why in audit_run.absences():
            console.print(f"{what}: {why}", markup=False)
    if not bodies:
        console.print("nothing was compared: this is a failure")
        return FAILED
    text = document.render(bodies)
    if options.out is not None:
        write_whole(options.out, text)
    console.print(text if options.out is None else str(options.out), markup=False)
    return OK


def _case(options: argparse.Namespace) -> int:
    if options.subject is not None:
        load(options.subject)
    if options.name.endswith(".json"):
        item = grid.of_file(Path(options.name), interpret=options.interpret, subject=options.subject)
    else:
        try:
            item = grid.find(options.name, interpret=options.interpret, subject=options.subject)
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

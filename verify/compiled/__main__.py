"""`python -m verify.compiled`: what the TPU compiler made of a kernel, without a TPU."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from verify.compiled import calibration, checks, published
from verify.compiled import compare as comparison
from verify.compiled.compile import CompileError, Job, cache_directory, clear_cache, compile_many
from verify.compiled.generations import GENERATIONS
from verify.compiled.progress import progress
from verify.compiled.render import render, render_calibration, render_checks, render_comparison
from verify.compiled.report import analyse_artifact
from verify.compiled.run import Assume
from verify.compiled.target import Argument, Target

if TYPE_CHECKING:
    from collections.abc import Sequence

PIPE_WIDTH = 200

EPILOG = """\
examples:
  python -m verify.compiled report flywheel:attention --shapes bf16[1,8,4096,128] bf16[1,2,4096,128] \\
      bf16[1,2,4096,128] --options '{"causal": true}' --vector-values zero
  python -m verify.compiled report kernels/mine.py:matmul --shapes bf16[512,1024] bf16[1024,1024] --for v5e v6e
  python -m verify.compiled report mine.py:ragged --shapes bf16[8,96,128] 'lengths=i32[3]=13,30,53'
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m verify.compiled",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="compile a callable and read its schedule")
    report.add_argument("target", help="package.module:callable or path/file.py:callable")
    report.add_argument("--shapes", nargs="+", default=[], metavar="[NAME=]DTYPE[SHAPE][=VALUES]")
    report.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="static keyword arguments")
    report.add_argument("--factory", action="store_true", help="the callable returns (function, arguments)")
    report.add_argument("--path", nargs="+", default=[], metavar="DIR", help="directories to import from")
    report.add_argument("--flops", type=float, help="useful FLOP of one call, for the share of peak")
    report.add_argument(
        "--vector-values",
        choices=[each.value for each in Assume],
        default=Assume.NOTHING.value,
        help="what the vector unit tells the scalar unit (default: unknown, and a branch on it stops the run)",
    )
    report.add_argument("--json", action="store_true", help="print one JSON document")
    report.add_argument("--fresh", action="store_true", help="compile even if the cache has it")
    _compiler_options(report)
    check = commands.add_parser("check", help="check the public configurations of this project's kernels")
    check.add_argument("--case", dest="cases", nargs="+", choices=list(checks.PUBLIC), default=list(checks.PUBLIC))
    check.add_argument(
        "--renew", action="store_true", help="commit what is found as budgets, and as the baseline of this libtpu"
    )
    _compiler_options(check)
    check.set_defaults(generations=list(GENERATIONS))
    compare = commands.add_parser("compare", help="ours beside JAX's, Tokamax's and flywheel-tpu's, modelled")
    compare.add_argument("--smoke", action="store_true", help="4096 tokens alone: minutes")
    compare.add_argument("--out", type=Path, default=Path("out/compiled/compare.jsonl"), help="file of records")
    _compiler_options(compare)
    calibrate = commands.add_parser("calibrate", help="modelled times beside published ones of real TPUs")
    calibrate.add_argument("--limit", type=int, help="a spread of so many calls instead of all")
    calibrate.add_argument("--out", type=Path, help="write the result as JSON")
    _compiler_options(calibrate)
    cache = commands.add_parser("cache", help="where finished compilations are kept")
    cache.add_argument("--clear", action="store_true", help="remove them all")
    return top


def _compiler_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--for", dest="generations", nargs="+", choices=list(GENERATIONS), default=["v6e"])
    command.add_argument("--python", help="interpreter of the environment that holds the kernel")
    command.add_argument("--flag", action="append", default=[], help="further libtpu flag; may be repeated")
    command.add_argument("--time-limit", type=float, default=600.0, metavar="SECONDS")
    command.add_argument("--workers", type=int, help="compilations at a time (default: one for each core)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 is success, 1 that something did not compile, 2 a wrong call."""
    options = parser().parse_args(argv)
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
    run = {"report": _report, "check": _check, "compare": _compare, "calibrate": _calibrate, "cache": _cache}[
        options.command
    ]
    return run(options, console)


def _report(options: argparse.Namespace, console: Console) -> int:
    try:
        target = Target(
            options.target,
            tuple(Argument.parse(text) for text in options.shapes),
            options.options,
            factory=options.factory,
            path=tuple(options.path),
        )
        jobs = [
            Job(target, name, tuple(options.flag), options.python, options.time_limit) for name in options.generations
        ]
    except ValueError as error:
        console.print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    documents, failed = [], False
    for job, result in compile_many(jobs, workers=options.workers, fresh=options.fresh):
        if isinstance(result, CompileError):
            failed = True
            documents.append({"generation": job.generation, "error": str(result)})
            if not options.json:
                console.print(f"{job.generation}: {result}", markup=False, soft_wrap=True)
            continue
        found = analyse_artifact(result, flops=options.flops, assume=Assume(options.vector_values))
        documents.append(found.to_json())
        if not options.json:
            for piece in render(found):
                console.print(piece)
    if options.json:
        print(json.dumps(documents, indent=1))
    return int(failed)


def _check(options: argparse.Namespace, console: Console) -> int:
    budgets = checks.load_budgets()
    jobs = {
        checks.job(case, name, options.python): (case, name) for case in options.cases for name in options.generations
    }
    failed, rows = False, []
    with progress(console, len(jobs)) as step:
        for job, result in compile_many(list(jobs), workers=options.workers, started=step.started):
            place = jobs[job]
            step.finished(" ".join(place))
            if isinstance(result, CompileError):
                failed = True
                rows.append((place, None, [str(result)]))
                continue
            one = checks.checked(result, None if options.renew else budgets.get(place), checks.PUBLIC[place[0]].flops)
            found = [str(finding) for finding in checks.findings(one)]
            failed = failed or bool(found)
            rows.append((place, one.report, found))
            if options.renew:
                kept = budgets.get(place)
                budgets[place] = checks.renewed(dataclasses.replace(one, budget=kept))
                checks.save_budgets(budgets)
    for piece in render_checks(sorted(rows, key=lambda row: row[0])):
        console.print(piece)
    return int(failed)


def _compare(options: argparse.Namespace, console: Console) -> int:
    todo = [
        case for name in options.generations for case in comparison.cases(name, options.python, smoke=options.smoke)
    ]
    records = []
    with progress(console, len(todo)) as step:
        for one in comparison.run(todo, options.out, workers=options.workers, started=step.started):
            records.append(one)
            step.finished(f"{one['subject']} {one['problem']['tokens']} x {one['problem']['head_dim']}")
    for piece in render_comparison(comparison.best(records)):
        console.print(piece)
    console.print(f"records: {options.out}")
    return 0


def _calibrate(options: argparse.Namespace, console: Console) -> int:
    interpreter = options.python or sys.executable
    try:
        package = published.package_directory(interpreter, "tokamax")
    except CompileError as error:
        console.print(f"no published timings: {error}", markup=False, soft_wrap=True)
        return 1
    timings = [
        timing
        for name in options.generations
        for timing in calibration.choose(published.tokamax_timings(package, name), options.limit)
    ]
    found = []
    with progress(console, len(timings)) as step:
        for one in calibration.calibrate(timings, options.python, workers=options.workers, started=step.started):
            found.append(one)
            step.finished(one.timing.name)
    line = calibration.fit(found)
    for piece in render_calibration(found, line):
        console.print(piece)
    if options.out:
        document = calibration.document(found, line)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if line else 1


def _cache(options: argparse.Namespace, console: Console) -> int:
    place = cache_directory()
    if options.clear:
        console.print(f"{clear_cache()} compilations removed from {place}")
    else:
        entries = [path for path in place.iterdir() if path.is_dir()] if place.is_dir() else []
        size = sum(file.stat().st_size for entry in entries for file in entry.iterdir())
        console.print(f"{len(entries)} compilations, {size / 2**20:.1f} MiB in {place}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

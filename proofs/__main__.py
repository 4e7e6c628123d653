"""`python -m proofs [NAME ...]`: check the lemmas behind the constants and show what each rests on.

Exit codes: 0, every lemma holds; 1, one does not; 2, a name is no lemma's; 3, a tool that --require names is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from proofs import catalogue, constants, formal
from proofs.checkers.outcome import Outcome, Report, Tool
from proofs.lemma import Verdict, examine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proofs.lemma import Lemma

# Wide enough that no column folds its words where the output is no terminal (a log, a file).
_PLAIN_WIDTH = 160

_STYLES = {Outcome.CHECKED: "green", Outcome.FAILED: "bold red", Outcome.NOT_CHECKED: "yellow"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        chosen = catalogue.select(options.names)
    except ValueError as unknown:
        print(unknown, file=sys.stderr)
        return 2
    absent = formal.missing(options.require)
    if absent:
        print(f"required and not installed: {', '.join(absent)} (see proofs/README.md)", file=sys.stderr)
        return 3
    start = time.perf_counter()
    verdicts = _examine_all(chosen, without=options.without, fresh=options.fresh)
    seconds = time.perf_counter() - start
    if options.json:
        print(json.dumps(as_json(verdicts), indent=2))
    else:
        console = Console()
        if not console.is_terminal:
            console.width = _PLAIN_WIDTH
        console.print(as_table(verdicts))
        for line in _summary(verdicts, seconds):
            console.print(line)
    return 0 if all(verdict.holds for verdict in verdicts) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m proofs", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", metavar="NAME", nargs="*", help="lemmas to check (all of them by default)")
    parser.add_argument("--json", action="store_true", help="print the verdicts as JSON instead of a table")
    tools = ", ".join(Tool)
    parser.add_argument(
        "--require", type=_tools, default=(), metavar="TOOLS", help=f"an error if one is missing: some of {tools}"
    )
    parser.add_argument(
        "--without", type=_tools, default=(), metavar="TOOLS", help=f"do not ask these: some of {tools}"
    )
    parser.add_argument("--fresh", action="store_true", help="prove everything now, and take nothing from earlier runs")
    return parser


def _tools(text: str) -> tuple[Tool, ...]:
    try:
        return tuple(Tool(name) for name in text.split(","))
    except ValueError:
        message = f"{text!r}: must be some of {', '.join(Tool)}, separated by commas"
        raise argparse.ArgumentTypeError(message) from None


def _examine_all(lemmas: tuple[Lemma, ...], *, without: Sequence[Tool], fresh: bool) -> list[Verdict]:
    progress = Console(stderr=True)
    verdicts: list[Verdict] = []
    with progress.status("checking") as status:
        for number, lemma in enumerate(lemmas, 1):
            status.update(f"checking {number} of {len(lemmas)}: {lemma.name}")
            verdicts.append(examine(lemma))
        reports = formal.examine(lemmas, without=without, fresh=fresh, progress=status.update)
        return formal.add(verdicts, reports)


def as_json(verdicts: list[Verdict]) -> dict[str, Any]:
    """The verdicts as plain data; values of constants are written out as in the table."""
    return {
        "holds": all(verdict.holds for verdict in verdicts),
        "lemmas": [
            {
                "name": verdict.lemma.name,
                "statement": verdict.lemma.statement,
                "constants": {name: constants.written(constants.value_of(name)) for name in verdict.lemma.rests_on},
                "assumptions": [
                    {"text": assumption.text, "covered_by": assumption.covered_by}
                    for assumption in verdict.lemma.assumptions
                ],
                "methods": [method.value for method in verdict.lemma.methods],
                "holds": verdict.holds,
                "finding": verdict.finding,
                "seconds": round(verdict.seconds, 3),
                "tools": [
                    {
                        "tool": report.tool.value,
                        "outcome": report.outcome.value,
                        "finding": report.finding,
                        "axioms": list(report.axioms),
                        "seconds": round(report.seconds, 3),
                        "earlier": report.earlier,
                    }
                    for report in verdict.reports
                ],
            }
            for verdict in verdicts
        ],
    }


def as_table(verdicts: list[Verdict]) -> Table:
    """One row per lemma: verdict, statement and finding, what it rests on, how it was checked, time."""
    table = Table(show_lines=True, expand=True)
    table.add_column("lemma", no_wrap=True)
    table.add_column("statement and finding", overflow="fold", ratio=6)
    table.add_column("rests on", overflow="fold", ratio=6)
    table.add_column("checked by", overflow="fold", ratio=4)
    table.add_column("time", justify="right", no_wrap=True)
    for verdict in verdicts:
        lemma = verdict.lemma
        rests_on = [constants.describe(name) for name in lemma.rests_on]
        rests_on += [
            f"assumes: {assumption.text} [{assumption.covered_by.split(':')[-1]}]" for assumption in lemma.assumptions
        ]
        word = Text("holds", style="green") if verdict.holds else Text("REFUTED", style="bold red")
        checked_by = Text(", ".join(lemma.methods))
        for report in verdict.reports:
            checked_by.append("\n").append(_told(report))
        table.add_row(
            Text(f"{lemma.name}\n").append(word),
            Text(f"{lemma.statement}\n").append(verdict.finding, style="" if verdict.established else "bold red"),
            Text("\n".join(rests_on)),
            checked_by,
            Text(f"{verdict.seconds + sum(report.seconds for report in verdict.reports):.2f} s"),
        )
    return table


def _told(report: Report) -> Text:
    earlier = " (earlier run)" if report.earlier else ""
    text = f"{report.tool}: {report.outcome}{earlier}, {report.finding}"
    return Text(text, style=_STYLES[report.outcome])


def _summary(verdicts: list[Verdict], seconds: float) -> list[Text]:
    refuted = [verdict.lemma.name for verdict in verdicts if not verdict.holds]
    if refuted:
        first = f"{len(refuted)} of {len(verdicts)} lemmas refuted: {', '.join(refuted)} ({seconds:.1f} s)"
    else:
        first = f"all {len(verdicts)} lemmas hold ({seconds:.1f} s)"
    lines = [Text(first)]
    for tool in Tool:
        reports = [report for verdict in verdicts for report in verdict.reports if report.tool is tool]
        if not reports:
            continue
        counts = [f"{sum(report.outcome is word for report in reports)} {word}" for word in Outcome]
        text = f"{tool}: {', '.join(count for count in counts if not count.startswith('0 '))}"
        axioms = {axiom for report in reports for axiom in report.axioms}
        lines.append(Text(text + (f"; {len(axioms)} axioms in all" if axioms else "")))
    return lines


if __name__ == "__main__":
    sys.exit(main())

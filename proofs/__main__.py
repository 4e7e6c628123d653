"""`python -m proofs [NAME ...] [--json]`: check the lemmas behind the constants and show what each rests on.

Exit codes: 0, every lemma holds; 1, one does not; 2, a name is no lemma's.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from proofs import catalogue, constants
from proofs.lemma import Verdict, examine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proofs.lemma import Lemma

# Wide enough that no column folds its words where the output is no terminal (a log, a file).
_PLAIN_WIDTH = 160


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m proofs", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", metavar="NAME", nargs="*", help="lemmas to check (all of them by default)")
    parser.add_argument("--json", action="store_true", help="print the verdicts as JSON instead of a table")
    options = parser.parse_args(arguments)
    try:
        chosen = catalogue.select(options.names)
    except ValueError as unknown:
        print(unknown, file=sys.stderr)
        return 2
    verdicts = _examine_all(chosen)
    if options.json:
        print(json.dumps(as_json(verdicts), indent=2))
    else:
        console = Console()
        if not console.is_terminal:
            console.width = _PLAIN_WIDTH
        console.print(as_table(verdicts))
        console.print(_summary(verdicts))
    return 0 if all(verdict.holds for verdict in verdicts) else 1


def _examine_all(lemmas: tuple[Lemma, ...]) -> list[Verdict]:
    progress = Console(stderr=True)
    verdicts: list[Verdict] = []
    with progress.status("checking") as status:
        for number, lemma in enumerate(lemmas, 1):
            status.update(f"checking {number} of {len(lemmas)}: {lemma.name}")
            verdicts.append(examine(lemma))
    return verdicts


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
    table.add_column("checked by", overflow="fold", ratio=2)
    table.add_column("time", justify="right", no_wrap=True)
    for verdict in verdicts:
        lemma = verdict.lemma
        rests_on = [constants.describe(name) for name in lemma.rests_on]
        rests_on += [
            f"assumes: {assumption.text} [{assumption.covered_by.split(':')[-1]}]" for assumption in lemma.assumptions
        ]
        word = Text("holds", style="green") if verdict.holds else Text("REFUTED", style="bold red")
        table.add_row(
            Text(f"{lemma.name}\n").append(word),
            Text(f"{lemma.statement}\n").append(verdict.finding, style="" if verdict.holds else "bold red"),
            Text("\n".join(rests_on)),
            Text(", ".join(lemma.methods)),
            Text(f"{verdict.seconds:.2f} s"),
        )
    return table


def _summary(verdicts: list[Verdict]) -> Text:
    refuted = [verdict.lemma.name for verdict in verdicts if not verdict.holds]
    seconds = sum(verdict.seconds for verdict in verdicts)
    if refuted:
        return Text(f"{len(refuted)} of {len(verdicts)} lemmas refuted: {', '.join(refuted)} ({seconds:.1f} s)")
    return Text(f"all {len(verdicts)} lemmas hold ({seconds:.1f} s)")


if __name__ == "__main__":
    sys.exit(main())

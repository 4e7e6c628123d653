"""The audit as a Markdown page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reports.audit.rules import RULES
from reports.audit.summary import GROUPS, Cell, headlines, tables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reports.audit.summary import Line, Table

INTRODUCTION = """\
# Metric audit: which acceptance rule lets which wrong kernel pass

Made by `python -m reports audit --out docs/metric-audit.md`; every figure is computed, none is typed. Do not edit.

A kernel is accepted because some rule compared it with a reference and was satisfied. This page turns that round:
kernels that are *known to be wrong* are held to each rule in public use, and so are kernels that are known to be right.

- A **wrong** kernel has one mistake, and only inputs on which the mistake shows are counted: where its result differs
  from what it would have been. A rule that rejects none of them lets the kernel **pass**.
- **Ordinary** inputs are what unit tests draw: bell-shaped, without structure. The others were built to show mistakes;
  a rule may well work on them, if only someone runs it on them.
- Every rule gets the same exact reference (float64 with a proved error, ball arithmetic where that does not decide) and
  every array that the kernel returns, and places where both sides are the same infinity or NaN are taken out first.
  Their users often have less.
- What is judged is a rule as it is used, not the project that uses it; each of them runs other tests too.
"""


def render(bodies: Sequence[Mapping[str, Any]]) -> str:
    """The page."""
    found = tables(bodies)
    lines = [*INTRODUCTION.splitlines(), "", *(f"- {line}" for line in headlines(found)), ""]
    for table in found:
        lines += _summary(table)
    lines += ["## The rules", "", "| rule | asks | used in |", "| --- | --- | --- |"]
    lines += [f"| {rule.name} | {_escaped(rule.words)} | {_escaped(rule.used)} |" for rule in RULES]
    for table in found:
        lines += ["", f"## {table.title}: every kernel", ""]
        lines += [
            "**passes**: no input makes the rule reject it. Otherwise: on how many inputs it is rejected, of those"
        ]
        lines += ["on which the mistake shows; in brackets the same for ordinary inputs.", ""]
        lines += _details(table)
    versions = sorted({f"jax {body['versions']['jax']}, numpy {body['versions']['numpy']}" for body in bodies})
    codes = sorted({str(body["code"])[:16] for body in bodies})
    lines += [
        "",
        f"Measured with {'; '.join(versions)}, in interpret mode on a CPU. Digest of kernels, judge and audit:",
    ]
    lines += [f"{', '.join(codes)}."]
    return "\n".join(lines) + "\n"


def _summary(table: Table) -> list[str]:
    lines = [
        f"## {table.title}",
        "",
        "| rule | wrong kernels it lets pass, ordinary data | ... on every input here | right kernels it rejects |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {total.rule.name} | {total.passed_ordinary} of {total.wrong_ordinary} | {total.passed} of {total.wrong} | "
        f"{total.rejected} of {total.right} |"
        for total in table.totals
    ]
    return [*lines, ""]


def _details(table: Table) -> list[str]:
    names = " | ".join(rule.name for rule in table.rules)
    head = [f"| kernel | what is wrong | {names} |", f"| --- | --- |{' --- |' * len(table.rules)}"]
    lines: list[str] = []
    for group, kernels in table.groups.items():
        lines += [f"### Wrong: {GROUPS.get(group, group)}", "", *head, *map(_row, kernels), ""]
    lines += ["### Right", "", *[line.replace("what is wrong", "why it is right") for line in head]]
    lines += [*map(_row_right, table.right), ""]
    if table.hidden:
        lines += [f"Not shown by any of these inputs (the suite has tests for them): {', '.join(table.hidden)}.", ""]
    names = ", ".join(f"{name}{' (ordinary)' if ordinary else ''}" for name, ordinary in table.inputs)
    return [*lines, f"Inputs: {names}."]


def _row(line: Line) -> str:
    return f"| {line.name} | {_escaped(line.words)} | {' | '.join(map(_cell, line.cells))} |"


def _cell(cell: Cell) -> str:
    if cell.passes:
        return "**passes**"
    ordinary = f" ({cell.ordinary_rejected}/{cell.ordinary_shown})" if cell.ordinary_shown else ""
    return f"{cell.rejected}/{cell.shown}{ordinary}"


def _row_right(line: Line) -> str:
    cells = ["accepted" if cell.passes else f"**rejected** {cell.rejected}/{cell.shown}" for cell in line.cells]
    return f"| {line.name} | {_escaped(line.words)} | {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")

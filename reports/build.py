"""The main job: measure, then write the page."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from reports.model import FAMILIES, Absence, build_report
from reports.numbers import plural
from reports.page import render
from reports.resume import missing, write_whole
from verify import records

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from reports.model import Report

RECORDS = "records.jsonl"
PLAN = "plan.json"
PAGE = "index.html"


class SourceError(ValueError):
    """Records that cannot be read."""


@dataclasses.dataclass(frozen=True)
class Written:
    """A page that was written."""

    page: Path
    report: Report


def records_file(source: Path) -> Path:
    """The records of a source: a file, or the directory of an earlier report.

    Raises:
        SourceError: there is none.
    """
    path = source / RECORDS if source.is_dir() else source
    if not path.is_file():
        message = f"--from must name a records file or the directory of a report, got {source}, which has none"
        raise SourceError(message)
    return path


def write_page(out: Path, sources: Sequence[Path], *, why_missing: str) -> Written:
    """Write the page of some records files into a directory.

    Args:
        out: the directory.
        sources: records files.
        why_missing: why a planned case has no record.

    Raises:
        SourceError: a file cannot be read.
    """
    found: list[dict[str, Any]] = []
    absences: list[Absence] = []
    for source in sources:
        try:
            here = list(records.read(source)) if source.exists() else []
        except (OSError, UnicodeDecodeError, records.RecordError) as error:
            message = f"{source} cannot be read: {error}"
            raise SourceError(message) from error
        absences += _unmeasured(missing(source.with_name(PLAN), here), why_missing)
        found += here
    try:
        report = build_report(found)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        message = f"a record of {', '.join(map(str, sources))} breaks its format: {error}"
        raise SourceError(message) from error
    report = dataclasses.replace(report, absences=(*absences, *report.absences, *standing_absences(report)))
    link = _records_beside(out, sources, found)
    page = out / PAGE
    write_whole(page, render(report, records_link=link, sources=sorted({source.name for source in sources})))
    return Written(page, report)


def _records_beside(out: Path, sources: Sequence[Path], found: Sequence[dict[str, Any]]) -> str:
    """The records lie beside the page: those measured here, or a copy of those read."""
    own = out / RECORDS
    if len(sources) == 1 and sources[0].exists() and own.exists() and own.samefile(sources[0]):
        return RECORDS
    copy = out / "shown.jsonl"
    partial = copy.with_name(copy.name + ".partial")
    partial.unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    partial.touch()
    for record in found:
        records.append(partial, record)
    partial.replace(copy)
    return copy.name


def _unmeasured(keys: Sequence[tuple[str, str, str]], why: str) -> Iterable[Absence]:
    by_family: dict[str, list[str]] = {}
    for family, name, _ in keys:
        by_family.setdefault(family, []).append(name)
    most = 4
    for family, names in by_family.items():
        more = f" and {len(names) - most} more" if len(names) > most else ""
        yield Absence(f"{plural(len(names), f'{family} case')} of the plan", f"{why}: {', '.join(names[:most])}{more}")


def standing_absences(report: Report) -> list[Absence]:
    """What no record here can show, said whether or not anyone asks."""
    rows = report.rows
    if not rows:
        return []
    absences = []
    if not any(row.environment.get("backend") == "tpu" for row in rows):
        absences.append(
            Absence(
                "Any TPU",
                "no record comes from one. The kernels ran in an interpret mode of Pallas, on a CPU: the same program, "
                "block by block, rounded as the device model cpu-interpret says. A TPU's exp2, reciprocal and order of "
                "accumulation were not observed; the bound covers them as far as the TPU's device model is right.",
            )
        )
    raced = sum(row.environment.get("interpret") == "tpu" for row in rows)
    absences.append(
        Absence(
            "Races and unwritten memory",
            f"looked for in {plural(raced, 'case')} of {len(rows):,}: the interpreter that finds them is slow."
            if raced
            else "not looked for: no case ran in the interpreter that finds them.",
        )
    )
    families = {row.family for row in rows}
    absent = [name for name in FAMILIES if name not in families]
    if absent:
        absences.append(
            Absence(
                f"Families without a record: {', '.join(absent)}",
                "not part of these records. Searches, and the corpus they fill, are run by python -m fuzz.",
            )
        )
    absences.append(Absence("Speed", "not measured: wall time in interpret mode says nothing about a TPU."))
    return absences

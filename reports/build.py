"""From sources to a report's directory: the page, its records, and the case files of its findings."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reports import speed
from reports.audit.summary import Table, tables
from reports.findings import Finding, of_rows, of_tables
from reports.grid_gdn import INVERSE_SUBJECT, LAYER_SUBJECT
from reports.grid_ragged import RAGGED
from reports.model import FAMILIES, Absence, build_report
from reports.numbers import plural
from reports.page import Contents, render
from reports.resume import missing, write_whole
from reports.sources import PLAN, RECORDS, SourceError, read

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reports.model import Report
    from reports.sources import Material

PAGE = "index.html"
CASES = "cases"
AUDIT = Path(__file__).parent / "data" / "audit.jsonl"
"""What `python -m reports audit` has found."""

OTHER_KERNELS = {
    RAGGED: "Packed attention",
    LAYER_SUBJECT: "Gated DeltaNet layers",
    INVERSE_SUBJECT: "Triangular inverses",
}

NOT_COMPILED = (
    "one configuration per precision: 1 key head, 2 value heads, 4 taps without a bias, beta up to 1. Each further one "
    "is a compilation of its own in interpret mode; pytest verify and python -m fuzz run gdn-layer go through them."
)


@dataclasses.dataclass(frozen=True)
class Written:
    """A page that was written."""

    page: Path
    report: Report


def write_page(out: Path, sources: Sequence[Path], *, why_missing: str, notes: Sequence[Absence] = ()) -> Written:
    """Write the page of some sources into a directory.

    Args:
        out: the directory.
        sources: what `reports.sources` reads.
        why_missing: why a planned case has no record.
        notes: what else was not done, and why.

    Raises:
        SourceError: a source cannot be read.
    """
    material = read(sources)
    try:
        report = build_report(material.records)
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        message = f"a record of {', '.join(map(str, sources))} breaks its format: {error!r}"
        raise SourceError(message) from error
    audit, modelled, known = audit_tables(), speed.load(), of_tables()
    absences = [
        *notes,
        *(Absence(what, why) for what, why in material.notes),
        *(absence for path, here in material.files for absence in _unplanned(path, here, why_missing)),
        *report.absences,
        *standing_absences(report),
        *_absent_sections(material, report, audit),
        *(Absence(what, why) for what, why in modelled.absences),
    ]
    report = dataclasses.replace(report, absences=tuple(absences))
    own = [row for kernel in report.answered_for for row in kernel.failures]
    contents = Contents(
        report=report,
        failures=tuple(of_rows(own)),
        findings=tuple(known),
        peer_failures=tuple(of_rows(row for kernel in report.peers for row in kernel.failures)),
        campaigns=tuple(material.campaigns),
        lemmas=material.lemmas,
        inverse=material.inverse,
        rankings=tuple(material.rankings),
        speed=modelled,
        audit=tuple(audit),
    )
    link = _records_beside(out, material)
    _write_cases(out / CASES, (*contents.failures, *contents.findings, *contents.peer_failures))
    page = out / PAGE
    write_whole(page, render(contents, records_link=link, sources=sorted({source.name for source in sources})))
    return Written(page, report)


def audit_tables(path: Path = AUDIT) -> list[Table]:
    """The audit's tables, from the committed results."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return tables(json.loads(line) for line in lines)


def _records_beside(out: Path, material: Material) -> str:
    """The records lie beside the page: those measured here, or a copy of those read."""
    own = out / RECORDS
    files = [path for path, _ in material.files]
    if len(files) == 1 and not material.campaigns and files[0].exists() and own.exists() and own.samefile(files[0]):
        return RECORDS
    name = "shown.jsonl"
    lines = [json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n" for record in material.records]
    write_whole(out / name, "".join(lines))
    return name


def _write_cases(directory: Path, findings: Iterable[Finding]) -> None:
    for finding in findings:
        name, text = finding.file
        write_whole(directory / name, text)


def _unplanned(path: Path, here: Sequence[dict[str, Any]], why: str) -> Iterable[Absence]:
    by_family: dict[str, list[str]] = {}
    for subject, family, name, _ in missing(path.with_name(PLAN), here):
        by_family.setdefault(f"{family} case of {subject}", []).append(name)
    most = 4
    for words, names in by_family.items():
        more = f" and {len(names) - most} more" if len(names) > most else ""
        noun, _, rest = words.partition(" case")
        what = f"{plural(len(names), f'{noun} case')}{rest} of the plan"
        yield Absence(what, f"{why}: {', '.join(names[:most])}{more}")


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
    absent = [name for name in FAMILIES if name not in families and name != "open"]
    if absent:
        absences.append(
            Absence(
                f"Families without a record: {', '.join(absent)}",
                "not part of these records. Searches, and the corpus they fill, are run by python -m fuzz.",
            )
        )
    absences.append(Absence("Measured speed", "wall time in interpret mode says nothing about a TPU; what is modelled "
                            "from the compiler's schedule stands under Speed."))  # fmt: skip
    return absences


def _absent_sections(material: Material, report: Report, audit: Sequence[Table]) -> Iterable[Absence]:
    """Sections that have nothing to show, and the command that would fill them."""
    ours = {row.subject.partition("[")[0] for kernel in report.answered_for for row in kernel.rows}
    for subject, words in OTHER_KERNELS.items():
        if ours and subject not in ours:
            yield Absence(words, f"no record of {subject} here: python -m reports build makes them.")
    if LAYER_SUBJECT in ours:
        yield Absence("Other configurations of the Gated DeltaNet layer", NOT_COMPILED)
    if material.lemmas is None:
        yield Absence("Lemmas", "not checked here: python -m proofs --json > lemmas.json, then --from it.")
    elif unasked := [lemma.name for lemma in material.lemmas if lemma.unasked]:
        yield Absence(
            f"Coq or Gappa for {plural(len(unasked), 'lemma')}",
            "not checked here: the tool is not installed. What a lemma claims never rests on it alone.",
        )
    if material.inverse is None:
        yield Absence("Inverse error per merge level", "not computed: reports build does it.")
    if not material.rankings:
        yield Absence("Which equation loses the digits", "not ranked: python -m verify.emulate NAME --json FILE.")
    if not material.campaigns:
        yield Absence("Search campaigns", "none among the sources: python -m fuzz run HUNT, then --from its directory.")
    if not audit:
        yield Absence("Metric audit", "not run in this checkout: python -m reports audit.")

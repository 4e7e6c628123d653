"""Findings: open cases that a kernel fails, kept as records and shown as a table.

A finding is a fact about one version of a kernel on one machine, in interpret mode; whether the input lies inside what
the kernel's documentation promises is said beside it.  The records are data (`FINDINGS`), the table is made from them.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verify.attention.examine import record_of
from verify.attention.open_cases import OPEN_CASES
from verify.records import FORMAT, REQUIRED, RecordError
from verify.subjects.judging import judge_open_case
from verify.subjects.registry import load
from verify.subjects.subject import ATTENTION
from verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from verify.attention.open_cases import OpenCase
    from verify.subjects.judging import JudgedSubject
    from verify.subjects.subject import Subject

FINDINGS = Path(__file__).parent / "data" / "findings.jsonl"
FAMILY = "open"


@dataclasses.dataclass(frozen=True)
class Stance:
    """Whether documentation covers an input: the first whose patterns match speaks.

    Attributes:
        subject: regular expression on the subject's name.
        case: regular expression on the case's name.
        inside: "inside", "outside" or "not stated".
        words: why.
    """

    subject: str
    case: str
    inside: str
    words: str


STANCES = (
    Stance(
        r"splash_attention",
        r"a1-",
        "outside",
        "the mask's documentation calls rows without a key an undefined softmax",
    ),
    Stance(
        r"max_logit_const",
        r"b2|b3|b7|b8",
        "outside",
        "misuse: the caller's constant lies outside its safe band, about C - 87 < row maximum < C + 88 - ln(N |v|); "
        "no band is documented",
    ),
    Stance(
        r"varlen",
        r"e9-",
        "inside",
        "the documentation says that buffer rows past the last boundary never attend or are attended",
    ),
    Stance(r"varlen", r"e2-", "outside", "the documentation leaves rows without a visible key unspecified"),
    Stance(
        r"flywheel_tpu",
        r"b2d-|b8-|b10-",
        "outside",
        "a source comment assumes |v| <= 2^12; the documentation does not say so",
    ),
    Stance(r"", r"a2-", "not stated", "the documentation does not speak of a causal mask that hides nothing"),
    Stance(r"", r"e8-|e9-", "not stated", "the documentation does not speak of NaN in what a row does not see"),
    Stance(r"", r"", "not stated", "finite BF16 inputs; the documentation states no numerical bound and no condition"),
)


def stance(subject: str, case: str) -> Stance:
    """What the documentation says about a case."""
    return next(s for s in STANCES if re.search(s.subject, subject) and re.search(s.case, case))


def reproduce(subject: str, case: str) -> str:
    """The command that shows a finding again."""
    return f"python -m verify judge --subject '{subject}' {case}"


def judge_open_cases(
    subject: Subject,
    cases: Iterable[OpenCase] = OPEN_CASES.values(),
    *,
    progress: Callable[[OpenCase], None] | None = None,
) -> dict[str, JudgedSubject]:
    """Judge a subject on open cases, by name."""
    judged: dict[str, JudgedSubject] = {}
    for case in cases:
        judged[case.name] = judge_open_case(subject, case)
        if progress is not None:
            progress(case)
    return judged


def finding_of(case: OpenCase, judged: JudgedSubject) -> dict[str, Any]:
    """The record of a failed case (`verify.records`), with the input and the answer in words."""
    name = judged.subject.name
    record = record_of(
        judged, name=case.name, family=FAMILY, interpret="fast", reproduce=reproduce(name, case.name), subject=name
    )
    return record | {
        "operation": judged.subject.operation,
        "subject_version": judged.subject.version,
        "input": case.words,
        "expected": case.answer if judged.subject.operation == ATTENTION else f"the gradients of: {case.answer}",
        "contract": _contract(name, case.name),
    }


def read(path: Path = FINDINGS) -> list[dict[str, Any]]:
    """All recorded findings.

    Raises:
        RecordError: a line is no finding.
    """
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        record = json.loads(line)
        missing = [key for key in (*REQUIRED, "input", "expected", "contract") if key not in record]
        if record.get("format") != FORMAT or missing:
            message = f"{path}, line {number}: no finding; missing: {', '.join(missing) or 'nothing'}"
            raise RecordError(message)
        found.append(record)
    return found


def write(records: Sequence[dict[str, Any]], path: Path = FINDINGS) -> None:
    """Write all findings; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    lines = [json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n" for record in records]
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(path)


def renew(
    names: Sequence[str],
    path: Path = FINDINGS,
    *,
    cases: Iterable[OpenCase] | None = None,
    progress: Callable[[str, OpenCase], None] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Judge subjects on open cases (None: on every one) and put what they fail in place of their old records of these.

    Returns the records, and why each subject that could not run was left as it was.  A subject's records are written as
    soon as it is done, so that stopping loses no finished one.
    """
    left: dict[str, str] = {}
    chosen = list(OPEN_CASES.values() if cases is None else cases)
    # A record of a case that the suite no longer has goes too.
    renewed = {case.name for case in chosen} | {r["case"] for r in read(path) if r["case"] not in OPEN_CASES}
    for name in names:
        subject = load(name)
        reason = subject.missing()
        if reason is not None:
            left[name] = reason
            continue

        def report(case: OpenCase, name: str = name) -> None:
            if progress is not None:
                progress(name, case)

        judged = judge_open_cases(subject, chosen, progress=report)
        failed = [finding_of(OPEN_CASES[c], j) for c, j in judged.items() if j.judgement.verdict is Verdict.FAIL]
        kept = [record for record in read(path) if record["subject"] != name or record["case"] not in renewed]
        write(sorted(kept + failed, key=_order), path)
    found = [record | {"contract": _contract(record["subject"], record["case"])} for record in read(path)]
    write(found, path)
    return found, left


def _contract(subject: str, case: str) -> dict[str, str]:
    said = stance(subject, case)
    return {"inside": said.inside, "words": said.words}


def _order(record: dict[str, Any]) -> tuple[str, int]:
    cases = list(OPEN_CASES)
    return record["subject"], cases.index(record["case"]) if record["case"] in cases else len(cases)


ARRAYS = {"lse": "LSE", "dq": "dq", "dk": "dk", "dv": "dv", "dsinks": "dsinks"}


def kind(record: dict[str, Any]) -> str:
    """What sort of failure it is: which array comes first, and whether a class or a size is wrong there."""
    if record["reason"].startswith("the kernel raised"):
        return "raised"
    # The first clause counts the wrong elements of an array, the second shows the worst and says why.
    first = "; ".join(record["reason"].split("; ")[:2])
    array = next((words for name, words in ARRAYS.items() if f" of {name} " in first), "output")
    if "where a finite number is due" not in first:
        return f"{array}: beyond the bound"
    return f"{array}: NaN" if "NaN where" in first else f"{array}: infinite"


def got(record: dict[str, Any]) -> str:
    """What came back, in a few words: the worst element of the first array that fails."""
    found = re.search(
        r"(\d+) of (\d+) elements? of (\w+) (?:are|is) wrong; worst \w+\[[^\]]*\]: got (\S+)", record["reason"]
    )
    if found is None:
        return record["reason"][:200]
    wrong, size, array, value = found.groups()
    return f"{value} ({wrong} of {size} elements of {array} wrong)"


HEADING = """\
# Findings in kernels in public use

Made by `python -m verify findings --out docs/findings.md` from `verify/subjects/data/findings.jsonl`; do not edit.

Each row is what one version of a kernel did with one small input in interpret mode on a CPU; nothing here was run on a
TPU, and a configuration other than the one named may behave otherwise. *Contract* says whether the input lies inside
what the kernel's own documentation promises; where that is silent, the conventions of [semantics.md](semantics.md) and
a bound for FP32 scores are what we compare with, which its authors never agreed to. Kernels for Gated DeltaNet have a
table of their own: [gdn-findings.md](gdn-findings.md).

| subject | input | expected | got | contract | reproduce |
| --- | --- | --- | --- | --- | --- |
"""


def table(records: Sequence[dict[str, Any]]) -> str:
    """The findings as a Markdown page; failures of one kind stand in one row, the clearest first."""
    lines = HEADING.splitlines()
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["subject"], kind(record), record["contract"]["words"]), []).append(record)
    lines += [_row(group) for group in groups.values()]
    versions = sorted({(r["subject"].split(".")[0], r["subject_version"]) for r in records})
    jax_versions = sorted({r["environment"]["versions"]["jax"] for r in records})
    packages = ", ".join(f"{name} {version}" for name, version in versions)
    lines += [
        "",
        f"Versions: {packages}; run with jax {', '.join(jax_versions)}.",
        "Reproducing a row of tokamax or flywheel_tpu needs the group `peers` (`uv sync --group peers`).",
    ]
    return "\n".join(lines) + "\n"


def _row(group: Sequence[dict[str, Any]]) -> str:
    first = max(group, key=_clarity)
    others = [record["case"] for record in group if record is not first]
    also = f" Also: {', '.join(others)}." if others else ""
    contract = first["contract"]
    cells = (
        f"{first['subject']} {first['subject_version']}",
        f"{first['input']}",
        first["expected"],
        f"{kind(first)}: {got(first)}.{also}",
        f"{contract['inside']}: {contract['words']}",
        f"`{first['reproduce']}`",
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _clarity(record: dict[str, Any]) -> float:
    """The largest finite share of the bound: the case that shows the failure best."""
    shares = [part["share"]["value"] for part in record["measures"].values() if part.get("share")]
    finite = [share for share in shares if isinstance(share, float)]
    return max(finite, default=0.0)

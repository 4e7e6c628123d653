"""Findings: what a kernel gets wrong, as a minimal input in words, what is due, what came back, and how to see it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING, Any

from reports.rows import Row, row_of
from verify.records import RecordError
from verify.subjects import findings as tables
from verify.subjects import gdn_findings
from verify.subjects.findings import kind
from verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from reports.rows import Element

TENSORS = {"q": "query", "k": "key", "v": "value"}
MOST_EDITS = 4


@dataclasses.dataclass(frozen=True)
class Finding:
    """One finding; failures of one kind of one kernel stand together.

    Attributes:
        row: the clearest case.
        source: "public use" (the tables of other kernels), "campaign" or "run".
        input: in words.
        expected: in words, where the case has some.
        kind: what sort of failure it is.
        element: the worst element of the first array that fails; None if nothing came back.
        also: names of other cases of the kind.
        file: its case file, or its record where the case is built by name: (name, text).
    """

    row: Row
    source: str
    input: str
    expected: str
    kind: str
    element: Element | None
    also: tuple[str, ...]
    file: tuple[str, str]


def of_tables() -> list[Finding]:
    """Findings in kernels in public use, from their committed records."""
    found = list(tables.read())
    found += [record for record in gdn_findings.read() if _fails(record)]
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for record in found:
        sort = kind(record) if record["verdict"] == Verdict.FAIL else "more than its source states"
        groups.setdefault((record["subject"], sort, record["contract"]["words"]), []).append(record)
    return [_of_group(group, sort) for (_, sort, _), group in groups.items()]


def _fails(record: Mapping[str, Any]) -> bool:
    return record["verdict"] == Verdict.FAIL or record.get("found", 0.0) > record.get("stated", float("inf"))


def _of_group(group: Sequence[dict[str, Any]], sort: str) -> Finding:
    rows = [row_of(record) for record in group]
    best = max(range(len(rows)), key=lambda n: _clarity(rows[n]))
    row = rows[best]
    also = tuple(other.case for n, other in enumerate(rows) if n != best)
    name = row.case if row.input.startswith(row.case) else f"{row.input}"
    return Finding(row, "public use", name, row.expected, sort, _element(row), also, _file(row, group[best]))


def _clarity(row: Row) -> float:
    shares = [part.share for part in row.parts if part.share is not None and part.share < float("inf")]
    return max(shares, default=0.0)


def _element(row: Row) -> Element | None:
    wrong = [part for part in row.parts if part.mismatches or (part.share is not None and not part.share <= 1)]
    return next((part.worst for part in [*wrong, *row.parts] if part.worst is not None), None)


def of_rows(rows: Iterable[Row], source: str = "run") -> Iterator[Finding]:
    """Failures of a run or a campaign, each with its case file."""
    for row in rows:
        spec = json.loads(row.spec) if row.spec else None
        words = row.input or (case_words(spec) if spec else row.case)
        body = spec or {"subject": row.subject, "case": row.case, "reproduce": row.reproduce}
        sort = kind({"reason": row.reason})
        yield Finding(row, source, words, row.expected, sort, _element(row), (), _file(row, body))


def _file(row: Row, body: Mapping[str, Any]) -> tuple[str, str]:
    digest = hashlib.sha256(f"{row.subject}\n{row.case}".encode()).hexdigest()[:12]
    return f"case-{digest}.json", json.dumps(body, indent=1) + "\n"


def case_words(spec: Mapping[str, Any]) -> str:
    """A case file in words."""
    try:
        batch, heads, kv_heads, q_len, kv_len, head_dim = spec["shape"]
    except (KeyError, TypeError, ValueError):
        return _drawn_words(spec) or str(spec.get("name", "a case"))
    mask = "causal" if spec.get("causal", True) else "full"
    parts = [
        f"{q_len} queries on {kv_len} keys, {mask}, head_dim {head_dim}",
        f"{heads} heads on {kv_heads}, batch {batch}",
    ]
    parts += [f"{name} {spec[name]}" for name in ("window", "softcap", "sinks", "scale") if spec.get(name) is not None]
    parts.append(_values(spec))
    edits = spec.get("edits") or []
    parts += [_edit(edit) for edit in edits[:MOST_EDITS]]
    if len(edits) > MOST_EDITS:
        parts.append(f"and {len(edits) - MOST_EDITS} more edits")
    return "; ".join(parts)


DRAWN = {"keys": "keys", "family": "keys", "beta": "write strengths", "beta_kind": "write strengths", "decay": "decay"}
DEFAULTS: dict[str, dict[str, Any]] = {
    "flywheel-layer-case/1": {"keys": "random", "beta": "up to 1", "decay": "0", "lengths": [64]},
    "flywheel-inverse-case/1": {"family": "repeated", "beta_kind": "constant", "beta_max": "0x1p+0", "decay": "0x1p+0"},
}
"""What a case file of Gated DeltaNet leaves out."""


def _drawn_words(spec: Mapping[str, Any]) -> str:
    """A call or a matrix of Gated DeltaNet in words; empty for another format."""
    defaults = DEFAULTS.get(str(spec.get("format")))
    if defaults is None:
        return ""
    whole = defaults | dict(spec)
    parts = [f"sequences of {', '.join(map(str, whole['lengths']))} tokens"] if "lengths" in defaults else ["64 x 64"]
    parts += [f"{words} {whole[name]}" for name, words in DRAWN.items() if name in defaults and not whole.get("betas")]
    parts += [f"up to {_number(str(whole['beta_max']))}"] if "beta_max" in defaults else []
    if "lengths" in defaults:
        parts += [f"{words} {spec[name]}" for name, words in LAYER_WORDS.items() if spec.get(name) is not None]
    return f"{'; '.join(parts)} (seed {spec.get('seed', 0)})"


LAYER_WORDS = {
    "padding": "tokens of padding:",
    "initial": "initial states that count:",
    "reads": "slots read:",
    "writes": "slots written:",
    "size": "log2 of the projection's size:",
    "gates": "gates:",
    "poison": "NaN where nothing is read:",
}


def _values(spec: Mapping[str, Any]) -> str:
    exponents: list[int | None] = list(spec.get("exponents") or (0, 0, 0))
    sizes = ["zero" if exponent is None else f"of size 2^{exponent}" for exponent in exponents]
    texts = [f"{name} {size}" for name, size in zip(TENSORS.values(), sizes, strict=False)]
    return f"{', '.join(texts)} (seed {spec.get('seed', 0)})"


def _edit(edit: Mapping[str, Any]) -> str:
    tensor = TENSORS.get(str(edit.get("tensor")), str(edit.get("tensor")))
    start, stop, step = edit.get("start", 0), edit.get("stop"), edit.get("step", 1)
    where = f"{start}" if stop == start + 1 else f"{start}..{'end' if stop is None else stop - 1}"
    where += f" step {step}" if step != 1 else ""
    value = str(edit.get("value"))
    words = {"set": f"set to {_number(value)}", "scale": f"times 2^{value}", "mod": f"holds t mod {value}",
             "copy": f"copies token {value}"}  # fmt: skip
    return f"{tensor} {where} {words.get(str(edit.get('op')), str(edit.get('op')))}"


def _number(text: str) -> str:
    try:
        return f"{float.fromhex(text):.6g}"
    except ValueError:
        return text


@dataclasses.dataclass
class Campaign:
    """What a campaign's directory holds, without keeping its records.

    Attributes:
        name: of its hunt.
        cases: judged cases.
        violations: of them, failures.
        keep: the records that a page shows: one per root that failed, and the worst of each class.
    """

    name: str
    subject: str
    cases: int
    violations: int
    keep: list[dict[str, Any]]


def read_campaign(directory: Path) -> Campaign:
    """A campaign directory (`fuzz.store`), record by record.

    Raises:
        RecordError: campaign.json or a record is not what it should be.
    """
    try:
        state = json.loads((directory / "campaign.json").read_text(encoding="utf-8"))
        hunt, subject = str(state["hunt"]), str(state["subject"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"{directory / 'campaign.json'}: not a campaign: {error!r}"
        raise RecordError(message) from error
    found = Campaign(hunt, subject, 0, 0, [])
    worst: dict[tuple[str, ...], tuple[float, dict[str, Any]]] = {}
    failed: dict[str, dict[str, Any]] = {}
    for record in _lines(directory / "records.jsonl"):
        found.cases += 1
        if record.get("root"):
            found.violations += 1
            failed[str(record["root"])] = record  # the latest is the smallest: hunts shrink
            continue
        row = row_of(record)
        key = (str(row.shape.get("head_dim")), "replayed" if row.replays else "not")
        share = row.share
        if share is not None and share > worst.get(key, (-1.0, record))[0]:
            worst[key] = (share, record)
    found.keep = [*failed.values(), *(record for _, record in worst.values())]
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Records one at a time: a campaign's file may be larger than memory."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                message = f"{path}, line {number}: not JSON: {error}"
                raise RecordError(message) from error

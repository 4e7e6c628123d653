"""Findings in Gated DeltaNet kernels: open cases that one fails, kept as records and shown as a table.

`python -m verify.subjects.gdn_findings --out docs/gdn-findings.md` makes the page from the records; with `--renew` the
subjects that are installed are judged again first, one record file for all, written after each subject.
"""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
import importlib
import importlib.metadata
import json
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from verify.backend import device_model
from verify.gdn.inverse_judge import judge_inverse
from verify.gdn.inverse_steps import InverseSteps
from verify.gdn.open_cases import OPEN_CASES
from verify.gdn.tables import matrix
from verify.records import FORMAT, encode_number
from verify.subjects.gdn import PEERS, judge_gdn_subject, load
from verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from verify.gdn.open_cases import GdnOpenCase
    from verify.gdn.problem import GdnProblem
    from verify.measures import Measures
    from verify.subjects.gdn import JudgedGdn

FINDINGS = Path(__file__).parent / "data" / "gdn_findings.jsonl"
OPERATION = "gated_delta_net"
SEEDS = 8
PACKAGES = ("jax", "jaxlib", "numpy", "python-flint", "mpmath")

STANCES = (
    (r"p10-", "not stated", "a_log is documented as the log-decay's scale, without a range; models keep it far below"),
    (
        r"huge",
        "not stated",
        "finite inputs, without a stated range; log-decays of that size do not come from ordinary models",
    ),
    (r"e2-", "not stated", "the documentation does not speak of sequences without tokens"),
    (r"f8-padded", "inside", "slot 0 is documented as the null block of padded tokens"),
    (r"f1-", "not stated", "a source comment gives 9e-3 as the inverse's largest error on repeated keys"),
    (r"", "not stated", "finite BF16 inputs; the documentation states no numerical bound and no condition"),
)


def reproduce(subject: str, case: str) -> str:
    """The command that shows a finding again."""
    return f"python -m verify.subjects.gdn_findings --subject '{subject}' --case {case}"


def digest(problem: GdnProblem) -> str:
    """SHA-256 of all inputs' words: the layer's, also for a kernel that computes a part of it."""
    arrays = (problem.qkv, problem.taps, problem.b, problem.a, problem.a_log, problem.dt_bias, problem.state)
    found = hashlib.sha256()
    for array in (*arrays, problem.conv_state, problem.sequences.boundaries, problem.sequences.read_slots):
        found.update(array.tobytes())
    return found.hexdigest()


def numbers_json(measures: Measures) -> dict[str, Any]:
    """Measures as strict JSON."""
    found: dict[str, Any] = {"format": measures.format, "count": measures.count, "mismatches": measures.mismatches}
    for name in ("absolute", "relative", "ulp", "share"):
        worst = getattr(measures, name)
        if worst is not None:
            found[name] = {
                "value": encode_number(worst.value),
                "got": encode_number(worst.got),
                "want": encode_number(worst.want),
                "index": list(worst.index),
            }
    return found


def record_of(case: GdnOpenCase, judged: JudgedGdn) -> dict[str, Any]:
    """The record of a judged case (`verify.records`), with the input and the answer in words."""
    problem, subject = case.build_layer(), judged.subject
    assert problem is not None  # noqa: S101  what was judged is this layer, or the delta rule in it
    n_kq, n_v, d_k, d_v = problem.heads
    inside, words = next((i, w) for pattern, i, w in STANCES if re.search(pattern, case.name))
    versions = {name: importlib.metadata.version(name) for name in PACKAGES} | {"python": platform.python_version()}
    return {
        "format": FORMAT,
        "operation": OPERATION,
        "subject": subject.name,
        "subject_version": subject.version,
        "case": case.name,
        "family": "open",
        "sha256": digest(problem),
        "shape": {"tokens": problem.tokens, "n_kq": n_kq, "n_v": n_v, "d_k": d_k, "d_v": d_v, "width": problem.width},
        "features": {"sequences": problem.sequences.lengths.tolist()},
        "verdict": judged.judgement.verdict.value,
        "reason": judged.judgement.reason,
        "notes": list(judged.judgement.notes),
        "measures": {name: numbers_json(measures) for name, measures in judged.judgement.measures.items()},
        "environment": {
            "backend": jax.default_backend(),
            "device_model": device_model().name,
            "interpret": "tpu interpreter",
            "versions": versions,
            "date": dt.datetime.now(tz=dt.UTC).isoformat(timespec="seconds"),
        },
        "reproduce": reproduce(subject.name, case.name),
        "input": case.words,
        "expected": case.answer,
        "contract": {"inside": inside, "words": words},
    }


def judge_cases(subject: str, cases: Iterable[str] = tuple(OPEN_CASES)) -> list[dict[str, Any]]:
    """Records of a subject on the open cases that are layers; those that it does not take are left out."""
    found: list[dict[str, Any]] = []
    for name in cases:
        problem = OPEN_CASES[name].build_layer()
        if problem is None:
            continue
        judged = judge_gdn_subject(load(subject), problem)
        if judged.judgement.verdict is not Verdict.SKIPPED:
            found.append(record_of(OPEN_CASES[name], judged))
            print(f"{subject} {name}: {judged.judgement.verdict}: {judged.judgement.reason[:200]}", file=sys.stderr)
    return found


def read(path: Path = FINDINGS) -> list[dict[str, Any]]:
    """All records."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(records: Sequence[dict[str, Any]], path: Path = FINDINGS) -> None:
    """Write all records; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    lines = [json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n" for record in records]
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(path)


INVERSE = "flywheel_tpu.invert_triangular_matrix"
STATED = 9e-3
"""A comment in the kernel's source: the largest error of the inverse against float64 on repeated keys."""


def stated_error() -> dict[str, Any]:
    """The record of the inverse's stated error: the largest one measured on repeated keys, beta up to 1."""
    steps, worst = InverseSteps(), -1.0
    record: dict[str, Any] = {}
    run = importlib.import_module("verify.subjects.peers.gdn_layers").flywheel_inverse
    for seed in range(SEEDS):
        for keys in ("identical", "near-duplicate", "alternating"):
            lower = matrix(keys, "1", "mild", seed)
            got = run(lower)
            judged = judge_inverse(lower, got, steps, device_model())
            error = float(np.abs(got - judged.bound.exact).max())
            if error > worst:
                worst = error
                record = {
                    "case": f"p9-inverse-of-{keys}-keys",
                    "verdict": judged.judgement.verdict.value,
                    "reason": judged.judgement.reason,
                    "measures": {name: numbers_json(m) for name, m in judged.judgement.measures.items()},
                    "input": f"64 {keys} keys in BF16, beta 1, mild decay (seed {seed})",
                }
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return record | {
        "format": FORMAT,
        "operation": "triangular_inverse",
        "subject": INVERSE,
        "subject_version": importlib.metadata.version("flywheel-tpu"),
        "family": "stated",
        "shape": {"tokens": 64},
        "features": {},
        "environment": {"backend": jax.default_backend(), "device_model": device_model().name, "versions": versions},
        "reproduce": "python -m verify.subjects.gdn_findings --renew",
        "expected": f"within {STATED:g}, as a comment in the source says of repeated keys",
        "contract": {"inside": "inside", "words": "a comment in the source states the largest error on repeated keys"},
        "stated": STATED,
        "found": worst,
    }


def renew(path: Path = FINDINGS) -> dict[str, str]:
    """Judge every peer that is installed, and say why the others were left as they were."""
    left: dict[str, str] = {}
    if load("flywheel_tpu.fused_conv1d_gdn").missing() is None:
        write([*(r for r in read(path) if r["subject"] != INVERSE), stated_error()], path)
    for name in PEERS:
        reason = load(name).missing()
        if reason is not None:
            left[name] = reason
            continue
        found = judge_cases(name)
        write(sorted([r for r in read(path) if r["subject"] != name] + found, key=lambda r: r["subject"]), path)
    return left


HEADING = """\
# Findings in Gated DeltaNet kernels in public use

Made by `python -m verify.subjects.gdn_findings --out docs/gdn-findings.md` from
`verify/subjects/data/gdn_findings.jsonl`; do not edit.

Each row is what one version of a kernel did with one small layer call in Pallas' TPU interpreter on a CPU; nothing here
was run on a TPU, and a configuration other than the one named may behave otherwise. *Contract* says whether the input
lies inside what the kernel's own documentation promises; where that is silent, the conventions of
[gdn-semantics.md](gdn-semantics.md) and the bound of [gdn-contract.md](gdn-contract.md) for BF16 operands are what we
compare with (its section 9, the FP32 recurrence, for decode kernels), which its authors never agreed to. Passed cases
are counted below the table.

| subject | input | expected | got | contract | reproduce |
| --- | --- | --- | --- | --- | --- |
"""


def table(records: Sequence[dict[str, Any]]) -> str:
    """The page."""
    lines = [str(line) for line in HEADING.splitlines()]
    for record in records:
        if record["verdict"] != Verdict.FAIL.value and record.get("found", 0.0) <= record.get("stated", 0.0):
            continue
        reason = "; ".join(record["reason"].split("; ")[:2])
        if "stated" in record:
            reason = f"{record['found']:.3g} (within the proved bound: {reason})"
        contract: dict[str, str] = record["contract"]
        cells = (
            f"{record['subject']} {record['subject_version']}",
            f"{record['case']}: {record['input']}",
            str(record["expected"]),
            reason,
            f"{contract['inside']}: {contract['words']}",
            f"`{record['reproduce']}`",
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", "| subject | cases | passed | no power | failed |", "| --- | --- | --- | --- | --- |"]
    for subject in sorted({record["subject"] for record in records}):
        verdicts = [record["verdict"] for record in records if record["subject"] == subject]
        counts = [verdicts.count(v.value) for v in (Verdict.PASS, Verdict.NO_POWER, Verdict.FAIL)]
        lines.append(f"| {subject} | {len(verdicts)} | {' | '.join(map(str, counts))} |")
    versions = sorted({str(record["environment"]["versions"]["jax"]) for record in records})
    lines += ["", f"Run with jax {', '.join(versions)}. Reproducing a row needs the group `peers`."]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge, renew, or print the page."""
    parser = argparse.ArgumentParser(prog="python -m verify.subjects.gdn_findings", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the page there")
    parser.add_argument("--renew", action="store_true", help="judge every installed subject first")
    parser.add_argument("--subject", help="judge this one alone, and print its records")
    parser.add_argument("--case", action="append", help="with --subject: this case alone (may be repeated)")
    given = parser.parse_args(arguments)
    if given.subject is not None:
        for record in judge_cases(given.subject, given.case or tuple(OPEN_CASES)):
            print(json.dumps(record, indent=1))
        return 0
    if given.renew:
        for name, reason in renew().items():
            print(f"{name} left as it was: {reason}", file=sys.stderr)
    text = table(read())
    if given.out is None:
        print(text)
    else:
        given.out.write_text(text, encoding="utf-8")
        print(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

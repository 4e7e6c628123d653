"""What a page shows besides its tables of cases: profiles, findings, campaigns, lemmas, equations, speed, the audit."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from report_records import inverse_record, layer_record, packed_record, profile, record

from reports import equations, findings, inverse, lemmas, speed
from reports.audit import document, inverses, planted, rules, summary
from reports.audit import run as audit_run
from reports.audit.answers import Asked, Due, shows, verdicts
from reports.build import audit_tables, write_page
from reports.cli import main
from reports.figures import elements
from reports.model import build_report
from reports.profile import RANK, profile_of, read_heat
from reports.sources import SourceError, read
from verify import records
from verify.attention.cases import AttentionCase
from verify.attention.contract import ContractBound
from verify.attention.reference import Reference
from verify.faults import FAULTS, FaultError

BF16 = np.dtype(ml_dtypes.bfloat16)


def judged_arrays(shape: tuple[int, ...]) -> tuple[np.ndarray, Reference, ContractBound]:
    """An output of ones against a reference of ones, with a bound of one BF16 spacing."""
    out, rows = np.ones(shape).astype(BF16), shape[:3]
    zero = np.zeros(shape)
    reference = Reference(np.ones(shape), zero, np.zeros(rows), np.zeros(rows), "float64")
    bound = ContractBound(np.full(shape, 2.0**-7), np.ones(rows), np.ones(rows, dtype=bool), np.ones(rows))
    return out, reference, bound


def test_a_profile_counts_every_element_and_finds_the_head() -> None:
    """Ulp counts add up, another class has its own place, and the heat map is of the head with the worst element."""
    out, reference, bound = judged_arrays((1, 2, 40, 64))
    out[0, 1, 7, 9] = 1.0 + 2.0**-6
    out[0, 1, 8, 9] = np.nan
    found = profile_of(out, None, reference, bound, None)
    counts = dict(map(tuple, found["out"]["ulp"]))
    assert counts == {0.0: 40 * 64 * 2 - 2, 2.0: 1, "nan": 1}
    assert found["heat"]["head"] == 1
    rows, columns, cells = read_heat(found["heat"])
    assert (rows[0], rows[-1], columns[-1]) == (0, 40, 64)
    assert np.isnan(cells).sum() == 1
    assert np.nanmax(cells) == 2.0
    json.dumps(found, allow_nan=False)


def test_the_nth_row_is_the_nth_largest() -> None:
    """With n rows that err by 1, 2, .. n, the RANK-th largest is n - RANK + 1; with fewer rows there is none."""
    out, reference, bound = judged_arrays((1, 1, 50, 64))
    limit = np.full(out.shape, 2.0**-7)
    limit[0, 0] *= 64.0 / np.arange(1, 51)[:, None]
    out[...] = 1.0 + 2.0**-7
    found = profile_of(out, None, reference, dataclasses.replace(bound, out=limit), None)
    assert found["out"]["nth_row"] == {"rank": RANK, "rows": 50, "share": (50 - RANK + 1) / 64.0}
    few = profile_of(out[:, :, :4], None, *(_cut(x) for x in (reference, bound)), None)
    assert few["out"]["nth_row"]["share"] is None


def _cut(x: Reference | ContractBound) -> Reference | ContractBound:
    arrays = {
        field.name: value[:, :, :4]
        for field in dataclasses.fields(x)
        if isinstance(value := getattr(x, field.name), np.ndarray)
    }
    return dataclasses.replace(x, **arrays)


@pytest.mark.smoke
@pytest.mark.parametrize(
    "body", [None, {}, {"rows": [0], "columns": [0], "cells": []}, {"rows": "ab", "columns": [0, 1], "cells": [[1]]}]
)
def test_a_broken_heat_map_is_none(body: object) -> None:
    """What is no heat map is left out, and the page stands."""
    assert read_heat(body) is None


def test_figures_of_hostile_profiles() -> None:
    """NaN, infinities and 1e-320 in profiles are drawn, beyond the scale."""
    odd = profile(math.nan) | {"lse": {"ulp": [["inf", 3]], "nth_row": {"rank": 30, "share": "nan"}}}
    odd["heat"]["cells"] = [["nan", "inf", 1e-320], [0.0, None, 1e300]]
    kernel = build_report([record("<b>", math.nan, verdict="fail", profile=odd)]).kernels[0]
    assert "var(--fail)" in elements.heat_map(kernel.rows[0], "h").svg
    assert "other class" in elements.ulp_distribution(kernel, "u").svg
    assert elements.bias_map(kernel, "b") is not None


@pytest.mark.smoke
def test_cases_in_words() -> None:
    """A case file reads as a sentence, edits included; what is no case keeps its name."""
    spec = {
        "shape": [1, 2, 1, 8, 16, 64], "causal": True, "seed": 3, "exponents": [0, None, 4], "window": [4, 0],
        "edits": [{"tensor": "k", "op": "set", "value": "0x1.8p+1", "start": 5, "stop": 6}],
    }  # fmt: skip
    words = findings.case_words(spec)
    assert words.startswith("8 queries on 16 keys, causal, head_dim 64; 2 heads on 1, batch 1; window [4, 0]")
    assert "key zero, value of size 2^4 (seed 3)" in words
    assert words.endswith("key 5 set to 3")
    assert findings.case_words({"name": "odd"}) == "odd"


def test_committed_findings_have_all_that_a_page_shows() -> None:
    """Every kind of failure has an input in words, a verdict, a command, what the contract says, and a file."""
    found = findings.of_tables()
    assert {finding.row.subject.split(".")[0] for finding in found} >= {"jax", "tokamax", "flywheel_tpu"}
    for finding in found:
        assert finding.input
        assert finding.row.reproduce
        assert finding.row.contract.split(":")[0] in ("inside", "outside", "not stated")
        json.loads(finding.file[1])
    names = [finding.file[0] for finding in found]
    assert len(set(names)) == len(names)


def test_a_campaign_is_a_source(tmp_path: Path) -> None:
    """Of a campaign's records the page keeps a failure per root and the worst of each class, and says how many ran."""
    campaign = tmp_path / "anchor"
    for n in range(20):
        records.append(campaign / "records.jsonl", record(f"c{n}", n / 40, family="fuzz") | {"root": None})
    for share in (3.0, 2.0):
        bad = record("bad", share, verdict="fail", family="fuzz", reason="1 of 2 elements of out are wrong; worst")
        spec = AttentionCase("bad", (1, 1, 1, 2, 2, 64)).to_json()
        records.append(campaign / "records.jsonl", bad | {"root": "out-beyond", "case_spec": spec})
    (campaign / "campaign.json").write_text(json.dumps({"hunt": "anchor", "subject": "flywheel.attention"}), "utf-8")
    found = read([campaign])
    assert (found.campaigns[0].cases, found.campaigns[0].violations, len(found.records)) == (22, 2, 2)
    assert main(["build", "--from", str(campaign), "--out", str(tmp_path / "page")]) == 1
    text = (tmp_path / "page" / "index.html").read_text("utf-8")
    assert "22 cases judged, 2 failures" in text.replace("\n", " ")
    assert "2 queries on 2 keys, causal" in text
    link = text.partition('href="cases/')[2].partition('"')[0]
    assert json.loads((tmp_path / "page" / "cases" / link).read_text("utf-8"))["name"] == "bad"


def test_a_peer_s_failure_is_a_finding_not_the_report_s(tmp_path: Path) -> None:
    """A peer that fails leaves the exit code alone; alone in the records, it decides."""
    source, alone = tmp_path / "both.jsonl", tmp_path / "alone.jsonl"
    bad = record("bad", 2.0, verdict="fail", subject="jax.splash_attention")
    for row in (record(), bad):
        records.append(source, row)
    records.append(alone, bad)
    assert main(["build", "--from", str(source), "--out", str(tmp_path / "a")]) == 0
    assert main(["build", "--from", str(alone), "--out", str(tmp_path / "b")]) == 1


def test_json_sources(tmp_path: Path) -> None:
    """Verdicts of the proofs and rankings are taken as they come; another file is refused by name."""
    effect = {"error": "inf"}
    ranking = {
        "format": equations.FORMAT, "function": "f", "words": "w", "arithmetic": "nearest", "device": "",
        "measure": "relative", "together": effect, "equations": [
            {"primitive": "add", "dtype": "float32", "shape": [2], "file": "a.py", "line": 1, "text": "x + y",
             "alone": effect, "without": {"error": 0.5}},
        ],
    }  # fmt: skip
    lemma = {
        "name": "l", "statement": "s", "constants": {}, "assumptions": [], "methods": ["exact"], "holds": False,
        "finding": "no", "tools": [{"tool": "coq", "outcome": "not checked here", "finding": "absent", "axioms": []}],
    }  # fmt: skip
    for name, body in {"r": ranking, "l": {"holds": False, "lemmas": [lemma]}, "odd": {"a": 1}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(body), "utf-8")
    found = read([tmp_path / "r.json", tmp_path / "l.json"])
    assert math.isinf(found.rankings[0].equations[0].alone)
    assert found.lemmas is not None
    assert (found.lemmas[0].status, found.lemmas[0].unasked) == ("refuted", True)
    with pytest.raises(SourceError, match=r"odd.json is no records file, no verdicts of python -m proofs --json"):
        read([tmp_path / "odd.json"])
    with pytest.raises(lemmas.LemmasError, match="no verdicts"):
        lemmas.read({"lemmas": [{}]})
    written = write_page(tmp_path / "page", [tmp_path / "r.json", tmp_path / "l.json"], why_missing="")
    text = written.page.read_text("utf-8")
    assert "1 of 1 lemma refuted: l." in " ".join(text.split())
    assert "not checked here: the tool is not installed" in text
    assert "Nothing was compared." in text


def test_absent_sections_are_named(tmp_path: Path) -> None:
    """A report of bare records names every section that it has nothing for, and how to fill it."""
    source = tmp_path / "records.jsonl"
    records.append(source, record())
    absent = {absence.what: absence.why for absence in write_page(tmp_path, [source], why_missing="").report.absences}
    for what in ("Lemmas", "Inverse error per merge level", "Which equation loses the digits", "Search campaigns",
                 "Packed attention", "Gated DeltaNet layers", "Triangular inverses", "Any TPU"):  # fmt: skip
        assert what in absent
    source.unlink()
    records.append(source, layer_record())
    again = {absence.what for absence in write_page(tmp_path, [source], why_missing="").report.absences}
    assert "Gated DeltaNet layers" not in again
    assert "Other configurations of the Gated DeltaNet layer" in again


@pytest.mark.smoke
def test_an_odd_shape_has_words_too() -> None:
    """A record of a layer whose shape says nothing, or something else, is shown with question marks."""
    for shape in ({}, {"tokens": "many", "sequences": None, "heads": 2}):
        assert build_report([layer_record() | {"shape": shape}]).rows[0].shape_words == "? tokens, ? sequences, heads ?"


def test_speed_states_its_bias() -> None:
    """Ratios are of the same problem, ours is 1, the bias comes from the calibration, and gaps have reasons."""
    found = speed.load()
    assert found.bias["lowest"] <= found.bias["median"] <= found.bias["highest"]
    for comparison in found.comparisons:
        assert comparison.kernels[0].startswith("flywheel,")
        for row in comparison.times:
            assert row[0].ratio == 1.0
            assert all(time.seconds is not None or time.reason for time in row)
    assert any("softmax = online" in cost.what for cost in found.costs)
    assert all(ratio > 0 for cost in found.costs for ratio in cost.ratios.values())


def test_nothing_committed_is_said(tmp_path: Path) -> None:
    """Without figures of the compiler the section is empty and says so."""
    found = speed.load(tmp_path)
    assert not found.comparisons
    assert len(found.absences) == 3


def test_the_inverse_grows_with_the_level() -> None:
    """Each level's error lies within its bound, and that of all blocks is at least that of the smaller ones."""
    lower = inverses.inputs()[0].problem
    levels = inverse.level_errors(lower[None], "bf16")
    assert [one["level"] for one in levels] == [4, 16, 64]
    assert all(0.0 < one["error"] <= one["bound"] and one["share"] <= 1.0 for one in levels)


def test_a_planted_kernel_is_another_one() -> None:
    """The package with the fault is imported beside the one in use, which stays as it was."""
    import flywheel  # noqa: PLC0415

    fault = next(fault for fault in FAULTS if fault.name == "LSE in log2 units")
    with planted.kernel_with(fault) as package:
        assert package is not flywheel
        assert fault.after in Path(package.attention.__globals__["__file__"]).with_name(fault.file).read_text("utf-8")
    import flywheel as again  # noqa: PLC0415

    assert again is flywheel
    with (
        pytest.raises(FaultError, match="occurs 0 times"),
        planted.kernel_with(dataclasses.replace(fault, before="no such text")),
    ):
        pass


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("got", "accepted"),
    [
        ([1.0, 2.0, 3.0], {"rms", "correlation", "close", "baseline", "contract", "bias"}),
        ([1.009, 2.0, 3.0], {"rms", "correlation", "close", "contract", "bias"}),
        ([1.02, 2.02, 3.02], {"correlation", "close"}),
        ([2.0, 4.0, 6.0], {"correlation"}),
        ([math.nan, 2.0, 3.0], set()),
        ([3.0, 2.0, 1.0], set()),
    ],
)
def test_rules_on_small_answers(got: list[float], accepted: set[str]) -> None:
    """Each rule accepts and rejects what its words say; a NaN passes none."""
    want = np.array([1.0, 2.0, 3.0])
    due = Due(want, np.zeros(3), np.full(3, 0.01), want + 0.001)
    asked = Asked("attention", "n", "w", False, None, {"out": due})
    found = verdicts(asked, {"out": np.array(got, dtype=np.float32)})
    assert {name for name, accepts in found.items() if accepts} == accepted
    assert shows(asked, {"out": np.array(got, np.float32)}, None) == (got != [1.0, 2.0, 3.0])


def test_lapack_s_ratio_accepts_the_identity() -> None:
    """By the unit of its operands, LAPACK's ratio takes X = I for an inverse; by the contract it is none."""
    asked = inverses.inputs()[0]
    kernel = next(kernel for kernel in inverses.wrong_kernels() if kernel.name == "X = I")
    found = verdicts(asked, kernel.answer(asked))
    assert found["lapack-bf16"]
    assert not found["contract"]
    assert not found["rms"]
    sides = rules.compared(np.eye(64), asked.due["inverse"].want, np.eye(64), asked.matrix)
    residual = np.linalg.norm(asked.matrix - np.eye(64), 1) / (64 * np.linalg.norm(asked.matrix, 1) * 2.0**-8)
    assert rules.lapack_ratio(sides, rules.BF16_EPSILON) == pytest.approx(residual)


def test_right_inverses_pass_the_contract() -> None:
    """No right inverse is rejected by the contract on any family of keys."""
    for kernel in inverses.right_kernels():
        for asked in inverses.inputs():
            assert verdicts(asked, kernel.answer(asked))["contract"], (kernel.name, asked.name)


def test_the_committed_audit_is_whole() -> None:
    """It holds every kernel that the audit knows, and the page is made of it."""
    bodies = audit_run.read(audit_run.HERE.parent / "data" / "audit.jsonl")
    kept = {(body["operation"], body["group"], body["name"]) for body in bodies}
    assert kept == {(task.operation, task.group, task.name) for task in audit_run.tasks()}
    found = audit_tables()
    assert [table.operation for table in found] == list(summary.OPERATIONS)
    for table in found:
        own = next(total for total in table.totals if total.rule.key == rules.CONTRACT)
        assert own.rejected == 0, "the contract rejects a right kernel"
    assert document.render(bodies) == (planted.ROOT / "docs" / "metric-audit.md").read_text("utf-8")


def test_an_interrupted_audit_goes_on(tmp_path: Path) -> None:
    """Finished kernels of the same code are kept, a torn line and other code's results are not."""
    path = tmp_path / "audit.jsonl"
    body = {"format": audit_run.FORMAT, "code": "c", "operation": "inverse", "group": "right", "name": "n"}
    path.write_text(
        json.dumps(body) + "\n" + json.dumps(body | {"code": "d", "name": "m"}) + '\n{"format": "fly', "utf-8"
    )
    assert audit_run.finished(path, "c") == [body]
    assert main(["audit", "--recorded", "--results", str(tmp_path / "none.jsonl")]) == 1


def test_other_operations_have_sections_of_their_own(tmp_path: Path) -> None:
    """Layers and inverses get columns, figures and words of their own, and none about query blocks."""
    rows = [layer_record(f"length-{n}", length=n, keys=keys) for n in (1, 64) for keys in ("random", "low-rank")]
    rows += [inverse_record("a", keys="random"), inverse_record("b", keys="periodic")]
    for n, row in enumerate(rows):
        records.append(tmp_path / "records.jsonl", row | {"case": f"{row['case']}-{n}"})
    text = write_page(tmp_path, [tmp_path / "records.jsonl"], why_missing="").page.read_text("utf-8")
    assert "state: share" in text
    assert "inverse: share" in text
    assert "share of the certified bound against length, 4 cases" in text
    assert "tokens of the sequence" in text
    assert text.count("Share of the bound by family of keys") == 2
    assert "64 tokens, 1 sequence, heads 2/1" in text
    assert "query blocks replayed" not in text
    assert "Replays</h3>" not in text


@pytest.mark.smoke
def test_packed_batches_are_drawn_by_their_longest_sequence() -> None:
    """The length of a packed case is that of its longest sequence, not of the batch."""
    row = build_report([packed_record(length=300)]).rows[0]
    assert row.length == 300
    assert row.shape_words.endswith("causal, 8 sequences")


@pytest.mark.smoke
def test_gated_delta_net_in_words() -> None:
    """Case files of layers and matrices read as sentences, with what the file leaves out."""
    layer = {"format": "flywheel-layer-case/1", "lengths": [13, 0, 3], "keys": "low-rank", "padding": 4, "seed": 2}
    words = (
        "sequences of 13, 0, 3 tokens; keys low-rank; write strengths up to 1; decay 0; tokens of padding: 4 (seed 2)"
    )
    assert findings.case_words(layer) == words
    matrix = {"format": "flywheel-inverse-case/1", "family": "periodic", "beta_max": "0x1p+1"}
    assert findings.case_words(matrix).startswith(
        "64 x 64; keys periodic; write strengths constant; decay 0x1p+0; up to 2"
    )

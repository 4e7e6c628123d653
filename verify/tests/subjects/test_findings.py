"""The findings: data that agrees with the page made from it, worded fairly, and each reproducible by its command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from verify.__main__ import main
from verify.attention.open_cases import OPEN_CASES
from verify.records import RecordError
from verify.subjects import findings, names
from verify.subjects.judging import judge_subject
from verify.subjects.registry import is_ours, load
from verify.verdict import Verdict

ROOT = Path(__file__).parents[3]
RECORDS = findings.read()
PUBLISHED = {
    "log2(e) in BF16 multiplies every logit, Tokamax": ("tokamax.splash_attention", "b7-keys-from-minus-500-to-500"),
    "scale and log2(e) folded into q in BF16": ("flywheel_tpu.flash_attn_func", "b7-keys-from-minus-500-to-500"),
    "and its output": ("flywheel_tpu.flash_attn_func", "b9-queries-and-keys-of-size-4"),
    "the check bounds l, not o": ("flywheel_tpu.flash_attn_func", "b8-jump-of-20-nats-with-large-values"),
    "normalising last overflows, JAX": ("jax.splash_attention", "b10-largest-values"),
    "normalising last overflows, Tokamax": ("tokamax.splash_attention", "b10-largest-values"),
    "normalising last overflows, flywheel-tpu": ("flywheel_tpu.flash_attn_func", "b10-largest-values"),
    "0 * NaN from the padding": ("flywheel_tpu.flash_attn_varlen_func", "e9-nan-in-the-padding"),
    "0 * NaN from a neighbour, splash": ("jax.splash_attention", "e8-nan-in-a-neighbour"),
    "0 * NaN from a neighbour, flash": ("jax.flash_attention", "e8-nan-in-a-neighbour"),
    "query blocks without a key, JAX": ("jax.splash_attention", "a1-blocks-without-a-key"),
    "query blocks without a key, Tokamax": ("tokamax.splash_attention", "a1-blocks-without-a-key"),
    "a constant below the logits": ("tokamax.splash_attention[max_logit_const=30]", "b3a-above-a-callers-constant"),
    "a constant above the logits": ("tokamax.splash_attention[max_logit_const=30]", "b3b-below-a-callers-constant"),
}

pytestmark = pytest.mark.smoke


def test_the_page_is_made_from_the_records() -> None:
    """docs/findings.md is what the command writes."""
    assert findings.table(RECORDS) == (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")


def test_every_record_names_a_known_case_and_subject() -> None:
    """No finding is about a case or a kernel that the suite does not have, none twice, and none about a pass."""
    assert RECORDS
    pairs = [(record["subject"], record["case"]) for record in RECORDS]
    assert len(set(pairs)) == len(pairs)
    for record in RECORDS:
        assert record["subject"] in names()
        assert record["case"] in OPEN_CASES
        assert record["verdict"] == Verdict.FAIL.value
        assert record["contract"]["inside"] in ("inside", "outside", "not stated")
        assert record["subject_version"]
        assert record["reproduce"] == f"python -m verify judge --subject '{record['subject']}' {record['case']}"


def test_our_kernel_has_no_finding() -> None:
    """A finding of our own is a failing test, not a row."""
    assert not any(is_ours(record["subject"]) for record in RECORDS)


@pytest.mark.parametrize("pair", PUBLISHED.values(), ids=list(PUBLISHED))
def test_what_is_known_of_peers_is_reproduced(pair: tuple[str, str]) -> None:
    """Each known failure of a kernel in public use stands among the records."""
    assert pair in {(record["subject"], record["case"]) for record in RECORDS}


def test_natural_exponentials_read_the_scores_right() -> None:
    """Tokamax without exp2 gives the right LSE: the failure of its default lies in log2(e), and the records show it."""
    failing = {record["case"] for record in RECORDS if record["subject"] == "tokamax.splash_attention[exp]"}
    assert not any(case.startswith("b7-") for case in failing)


def test_the_command_renews_one_subject_and_keeps_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Judging one kernel on some cases replaces its records of these alone; one that is not installed keeps its own."""
    chosen = ("e8-nan-in-a-neighbour", "g3-bottom-right-alignment")
    path, page = tmp_path / "findings.jsonl", tmp_path / "findings.md"
    others = [record for record in RECORDS if record["subject"].startswith("jax.splash")]
    own = [record for record in RECORDS if record["subject"] == "jax.nn.dot_product_attention"]
    stale = own[0] | {"case": "g3-bottom-right-alignment"}
    kept_back = next(record for record in own if record["case"] not in chosen)
    findings.write([*others, stale, kept_back], path)
    command = ["findings", "--records", str(path), "--out", str(page)]
    command += [word for name in chosen for word in ("--case", name)] + ["--subject", "jax.nn.dot_product_attention"]
    assert main(command) == 0
    found = findings.read(path)
    cases = {r["case"] for r in found if r["subject"] == "jax.nn.dot_product_attention"}
    assert cases == {"e8-nan-in-a-neighbour", kept_back["case"]}
    kept = {r["case"]: r for r in found if r["subject"].startswith("jax.splash")}
    assert kept == {r["case"]: r for r in others}
    assert page.read_text(encoding="utf-8") == findings.table(found)
    absent = next((name for name in names() if load(name).missing()), None)
    if absent is not None:
        assert main([*command[:-1], absent]) == 0
        assert "its records stay as they are" in " ".join(capsys.readouterr().out.split())
        assert findings.read(path) == found


def test_a_finding_says_what_a_reader_needs() -> None:
    """A row has version, input and answer in words, what came, the contract with its ground, and a command."""
    judged = judge_subject(load("jax.nn.dot_product_attention"), OPEN_CASES["e8-nan-in-a-neighbour"].build())
    record = findings.finding_of(OPEN_CASES["e8-nan-in-a-neighbour"], judged)
    row = findings.table([record]).splitlines()[-4]
    assert re.search(r"^\| jax\.nn\.dot_product_attention \d", row)
    for words in (
        "100 and 156 tokens",
        "as if the second were not there",
        "output: NaN: nan",
        "not stated: ",
        "`python -m",
    ):
        assert words in row


def test_a_line_that_is_no_finding_is_refused(tmp_path: Path) -> None:
    """A damaged file names the line and what is missing."""
    path = tmp_path / "findings.jsonl"
    path.write_text('{"format": "flywheel-record/2"}\n', encoding="utf-8")
    with pytest.raises(RecordError, match="line 1: no finding; missing: subject, case"):
        findings.read(path)

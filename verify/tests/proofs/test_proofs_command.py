"""`python -m proofs`: its table, its JSON and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flywheel.attention import budget
from proofs import __main__ as command
from proofs import catalogue
from proofs.checkers import coq, gappa
from proofs.lemma import Lemma, Method, lemma, require

ROOT = Path(__file__).parents[3]
QUICK = ("checked_sum_has_normal_reciprocal", "floor_is_reached", "clamp_keeps_the_bound")
# Coq has tests of its own (test_proofs_coq.py); here it would only take time.
WITHOUT = ("--without", "coq,gappa")


@lemma(statement="never holds", rests_on=("budget.BIAS",), methods=(Method.EXACT,))
def refuted_on_purpose() -> str:
    """A lemma that is refuted."""
    require(fact=False, otherwise="as it should be")
    return ""


@lemma(statement="is broken", rests_on=(), methods=(Method.EXACT,))
def broken_on_purpose() -> str:
    """A lemma whose check is in error."""
    message = "a mistake in the proof"
    raise RuntimeError(message)


@pytest.mark.deep
def test_command_checks_every_lemma_and_exits_0() -> None:
    """Run as users do: exit code 0, a row for each lemma, a line that says that all hold."""
    done = subprocess.run(
        [sys.executable, "-m", "proofs"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for each in catalogue.LEMMAS:
        assert each.name in done.stdout
    assert f"all {len(catalogue.LEMMAS)} lemmas hold" in done.stdout
    assert "REFUTED" not in done.stdout


def test_command_runs_as_a_program() -> None:
    """From a shell: exit code 0 and a table, with the progress on the other stream."""
    command_line = [sys.executable, "-m", "proofs", *QUICK, *WITHOUT]
    done = subprocess.run(command_line, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(name in done.stdout for name in QUICK)
    assert "all 3 lemmas hold" in done.stdout


def test_names_select_lemmas(capsys: pytest.CaptureFixture[str]) -> None:
    """Only the lemmas named are checked."""
    assert command.main([*QUICK, *WITHOUT]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in QUICK)
    assert "article_tau" not in printed
    assert "all 3 lemmas hold" in printed


def test_table_shows_statement_constants_assumptions_method(capsys: pytest.CaptureFixture[str]) -> None:
    """A row shows the constants with their values, each assumption with its test, and how it was checked."""
    assert command.main(["floor_is_reached", *WITHOUT]) == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for text in ("budget.BIAS = 32", "budget.SUM_FLOOR = 2**-34", "assumes:", "exact integers", "holds"):
        assert text in printed


def test_refuted_lemma_exits_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An unsafe constant gives exit code 1 and a table that names the refuted lemma and the reason."""
    monkeypatch.setattr(budget, "LANE_LIMIT", 2.0**120)
    assert command.main([*QUICK, *WITHOUT]) == 1
    printed = capsys.readouterr().out
    assert "REFUTED" in printed
    assert "1 of 3 lemmas refuted: checked_sum_has_normal_reciprocal" in printed
    assert "budget.LANE_LIMIT = 2**120" in printed


def test_unknown_name_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is no lemma's is refused before anything is checked, and the message lists the names."""
    assert command.main(["no_such_lemma"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "no lemma is called 'no_such_lemma'" in printed.err
    assert "article_tau" in printed.err


@pytest.mark.parametrize(("subject", "code"), [("clamp_keeps_the_bound", 0), ("refuted_on_purpose", 1)])
def test_json_carries_the_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], subject: str, code: int
) -> None:
    """--json prints one object with every field of the table, and the exit code agrees with it."""
    _add(monkeypatch, refuted_on_purpose)
    assert command.main([subject, "--json", *WITHOUT]) == code
    document = json.loads(capsys.readouterr().out)
    assert document["holds"] is (code == 0)
    (entry,) = document["lemmas"]
    assert entry["name"] == subject
    assert entry["holds"] is (code == 0)
    assert set(entry) == {
        "name",
        "statement",
        "constants",
        "assumptions",
        "methods",
        "holds",
        "finding",
        "seconds",
        "tools",
    }
    if code:
        assert entry["finding"] == "as it should be"
        assert entry["constants"] == {"budget.BIAS": "32"}


def test_mistake_in_a_proof_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception other than a refutation propagates: a proof in error neither holds nor is refuted."""
    _add(monkeypatch, broken_on_purpose)
    with pytest.raises(RuntimeError, match="a mistake in the proof"):
        command.main(["broken_on_purpose", *WITHOUT])


def test_missing_tool_is_neither_held_nor_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where Coq and Gappa are missing the table says `not checked here`, and what Python established stands."""
    monkeypatch.setattr(coq, "version", lambda: None)
    monkeypatch.setattr(gappa, "version", lambda: None)
    assert command.main(["clamp_keeps_the_bound", "final_division"]) == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "coq: not checked here" in printed
    assert "coq: 2 not checked here" in printed
    assert "gappa: 1 not checked here" in printed
    assert "all 2 lemmas hold" in printed


def test_required_tool_that_is_missing_exits_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--require makes a missing tool an error, before anything is checked, with a message that names it."""
    monkeypatch.setattr(coq, "version", lambda: None)
    assert command.main(["clamp_keeps_the_bound", "--require", "coq"]) == 3
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "required and not installed: coq" in printed.err


@pytest.mark.parametrize("option", ["--require", "--without"])
def test_unknown_tool_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A tool that there is none of is an error of usage that lists those that there are."""
    with pytest.raises(SystemExit) as stopped:
        command.main([option, "coq,lean"])
    assert stopped.value.code == 2
    assert "must be some of coq, gappa" in capsys.readouterr().err


def test_json_carries_what_the_tools_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each counterpart has an entry with its tool, outcome and axioms."""
    monkeypatch.setattr(coq, "version", lambda: None)
    monkeypatch.setattr(gappa, "version", lambda: None)
    assert command.main(["final_division", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["lemmas"]
    assert [(tool["tool"], tool["outcome"]) for tool in entry["tools"]] == [
        ("coq", "not checked here"),
        ("gappa", "not checked here"),
    ]
    assert set(entry["tools"][0]) == {"tool", "outcome", "finding", "axioms", "seconds", "earlier"}


def _add(monkeypatch: pytest.MonkeyPatch, extra: Lemma) -> None:
    monkeypatch.setattr(catalogue, "LEMMAS", (*catalogue.LEMMAS, extra))

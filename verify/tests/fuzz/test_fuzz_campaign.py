"""Campaigns with real worker processes: exit codes, resuming, crashes, hangs, interrupts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fuzz.campaign import Campaign, Plan
from fuzz.case import Case, case_key, load_case
from fuzz.cli import INTERRUPTED, OK, USAGE, VIOLATED, _parser, main
from fuzz.crew import LocalCrew
from fuzz.store import State, Store
from verify import records
from verify.attention.cases import AttentionCase, Edit

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
SMALL = "128x200-d256"


def arguments(out: Path, subject: str, *more: str) -> list[str]:
    """A small hunt with one worker."""
    fixed = ["run", "anchor", "--workers", "1", "--bucket", SMALL, "--seed", "3", "--out", str(out)]
    return [*fixed, "--subject", f"fuzz_subjects:{subject}", *more]


def start(out: Path, subject: str, *more: str) -> subprocess.Popen[str]:
    """The same hunt as a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    return subprocess.Popen(
        [sys.executable, "-m", "fuzz", *arguments(out, subject, *more)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def judged(out: Path) -> list[dict[str, Any]]:
    """The records so far."""
    path = out / "records.jsonl"
    return list(records.read(path)) if path.exists() else []


def wait_for(out: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Until so many cases are judged, or the process has ended."""
    while len(judged(out)) < count and process.poll() is None:
        time.sleep(0.05)


class Notes:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        """Keep the line."""
        self.lines.append(text)

    def refresh(self, tally: Any, new: int) -> None:
        """Nothing to show."""


def test_no_violation_is_exit_code_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As many cases as asked for are judged, the summary says so, and the same command has nothing left to do."""
    asked = arguments(tmp_path, "oracle", "--examples", "12")
    assert main(asked) == OK
    assert len(judged(tmp_path)) == 12
    said = capsys.readouterr().out
    assert "12 judged" in said
    assert "violations: 0" in said
    assert "of the bound (searched)" in said
    for path in (tmp_path / "worst").glob("*.json"):
        assert load_case(path).provenance.startswith("searched: hunt anchor against fuzz_subjects:oracle, seed 3, ")
    assert len(list((tmp_path / "worst").iterdir())) == 2
    assert main(asked) == OK
    assert len(judged(tmp_path)) == 12


def test_a_violation_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The summary names the command that judges the minimal case again; it fails with both values and their bits."""
    assert main(arguments(tmp_path, "skips_replay", "--examples", "60")) == VIOLATED
    files = sorted(str(path) for path in (tmp_path / "failures").glob("*.json"))
    said = capsys.readouterr().out
    assert files
    for path in files:
        assert f"python -m fuzz replay {path} --subject fuzz_subjects:skips_replay" in said
    assert main(["replay", files[0], "--subject", "fuzz_subjects:skips_replay"]) == VIOLATED
    again = capsys.readouterr().out
    assert again.startswith("fail: ")
    assert "exceeds the bound" in again
    assert "(0x" in again
    assert main(["replay", files[0], "--subject", "fuzz_subjects:oracle"]) == OK
    assert capsys.readouterr().out.startswith("pass: ")


@pytest.mark.deep
def test_a_crash_is_a_finding(tmp_path: Path) -> None:
    """A case that ends its process is saved, recorded as failing, and the hunt goes on in a new process."""
    assert main(arguments(tmp_path, "crashes", "--examples", "5")) == VIOLATED
    found = judged(tmp_path)
    assert len(found) == 5
    assert len({case_key(record["case_spec"]) for record in found}) == 5
    (bad,) = [record for record in found if record["verdict"] == "fail"]
    assert "exit code -9" in bad["reason"]
    case = load_case(tmp_path / "failures" / "attention-crash-signal-9.json")
    assert case_key(case.to_json()) == case_key(bad["case_spec"])
    assert not list((tmp_path / "running").iterdir())


@pytest.mark.deep
def test_a_hang_is_a_finding(tmp_path: Path) -> None:
    """A case without a result is cut off after the time that was allowed, and saved."""
    assert main(arguments(tmp_path, "hangs", "--examples", "4", "--case-seconds", "20")) == VIOLATED
    (bad,) = [record for record in judged(tmp_path) if record["verdict"] == "fail"]
    assert "no result within 20 seconds" in bad["reason"]
    assert (tmp_path / "failures" / "attention-hang.json").exists()


@pytest.mark.deep
def test_killed_and_resumed(tmp_path: Path) -> None:
    """After kill -9 nothing finished is lost, nothing is run twice, and seeds move on."""
    process = start(tmp_path, "oracle", "--examples", "40")
    wait_for(tmp_path, 10, process)
    process.kill()
    process.communicate()
    before = judged(tmp_path)
    state = json.loads((tmp_path / "campaign.json").read_text(encoding="utf-8"))
    assert 10 <= len(before) < 40
    assert main(arguments(tmp_path, "oracle", "--examples", "40")) == OK
    after = judged(tmp_path)
    assert after[: len(before)] == before
    assert len(after) >= 40
    assert len({case_key(record["case_spec"]) for record in after}) == len(after)
    assert json.loads((tmp_path / "campaign.json").read_text(encoding="utf-8"))["next_round"] > state["next_round"]
    assert not list((tmp_path / "running").iterdir())


@pytest.mark.deep
def test_interrupt_stops_cleanly(tmp_path: Path) -> None:
    """Ctrl-C ends the hunt between two cases, with a summary, and leaves no process and no running case behind."""
    process = start(tmp_path, "oracle")
    wait_for(tmp_path, 3, process)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate()
    assert process.returncode == INTERRUPTED, said
    assert "the same command goes on from here" in said
    assert f"{len(judged(tmp_path))} judged" in said
    assert "Traceback" not in said
    assert not list((tmp_path / "running").iterdir())
    assert Store(tmp_path).wait_for_orphans(0.0)


@pytest.mark.deep
def test_changed_code_starts_afresh(tmp_path: Path) -> None:
    """Records about other code are set aside, and saved failures are judged again by the code of today."""
    store = Store(tmp_path)
    store.prepare()
    store.save_state(State(["anchor"], "fuzz_subjects:raises", [SMALL], 3, "the code of yesterday"))
    (tmp_path / "records.jsonl").write_text("judged by the code of yesterday\n", encoding="utf-8")
    huge = Edit("v", "set", "0x1p+120")
    failed = AttentionCase("huge", (1, 1, 1, 128, 128, 64), edits=(huge,), config=(128, 128, 128))
    fixed = AttentionCase("fixed", (1, 1, 1, 128, 128, 64), config=(128, 128, 128))
    store.save_failure("attention", "raised-OverflowError", Case("anchor", failed), final=True)
    store.save_failure("attention", "out-beyond", Case("anchor", fixed), final=True)
    notes = Notes()
    campaign = Campaign(
        Plan(("anchor",), tmp_path, subject="fuzz_subjects:raises", buckets=(SMALL,), examples=2), notes
    )
    assert campaign.run().cases == 2
    assert any("the code has changed" in line for line in notes.lines)
    assert len(list(tmp_path.glob("records-until-*.jsonl"))) == 1
    assert {record["case"]: record["verdict"] for record in judged(tmp_path)} == {"huge": "fail", "fixed": "pass"}
    assert [path.name for path in store.failures.glob("*.json")] == ["attention-raised-OverflowError.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--seed", "4"], "holds a campaign with seed 3, not 4"),
        (["--subject", "fuzz_subjects:raises"], "holds a campaign with subject fuzz_subjects:oracle"),
    ],
)
def test_another_campaign_in_the_directory_is_refused(
    tmp_path: Path, change: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory keeps to one hunt, subject and seed; the error names both and the way out."""
    store = Store(tmp_path)
    store.prepare()
    state = State(["anchor"], "fuzz_subjects:oracle", [SMALL], 3, "code")
    store.save_state(state)
    assert main([*arguments(tmp_path, "oracle", "--examples", "1"), *change]) == USAGE
    said = capsys.readouterr().out
    assert message in said
    assert "--out" in said


def test_a_directory_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two campaigns never write into one directory."""
    with Store(tmp_path).owned():
        assert main(arguments(tmp_path, "oracle", "--examples", "1")) == USAGE
    assert "another campaign is running here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "nothing"], "there is no hunt 'nothing'; there are anchor"),
        (["run", "anchor", "--bucket", "1x1"], "hunt anchor has no bucket 1x1; it has 256x256-d128"),
        (["run", "anchor", "--subject", "nowhere"], "subject must be package.module:object or one of flywheel"),
        (["run", "anchor", "--subject", "nowhere:at_all"], "subject 'nowhere:at_all' cannot be loaded"),
        (["replay", "missing.json"], "missing.json"),
        (["replay", "missing.jsonl#00"], "missing.jsonl: no such records file"),
    ],
)
def test_bad_arguments_are_named(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not exist is named before any process is started, with exit code 2."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LocalCrew, "hire", None)
    assert main(words) == USAGE
    assert message in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--minutes", "0"], ["--minutes", "nan"], ["--examples", "0"], ["--workers", "-1"]])
def test_limits_must_be_positive(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A limit that allows nothing is refused with its value."""
    with pytest.raises(SystemExit) as stopped:
        main(["run", "anchor", *words])
    assert stopped.value.code == USAGE
    assert f"got {words[1]}" in capsys.readouterr().err


def test_workflow_runs_commands_that_exist() -> None:
    """The command line takes each command of the example workflow, and none needs a file that is not tracked."""
    text = (ROOT / ".github" / "workflows" / "fuzz.yml").read_text(encoding="utf-8")
    commands = re.findall(r"run: uv run python -m fuzz (.*)", text)
    assert len(commands) == 2
    for command in commands:
        words = re.sub(r"\$\{\{.*?\}\}", "nightly", command).split()
        assert callable(_parser().parse_args(words).run)
    assert "--frozen" not in text  # uv.lock is not tracked

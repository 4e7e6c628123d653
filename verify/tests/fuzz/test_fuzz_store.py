"""Files of a campaign, the corpus commands, and totals."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import pytest

from fuzz import corpus, plans
from fuzz.case import Case, case_key, load_case, save_case
from fuzz.cli import OK, USAGE, _parser, _plan, main
from fuzz.describe import pytest_source, sentence
from fuzz.index import Index
from fuzz.outcome import Outcome, severity
from fuzz.store import NOT_SHRUNK, Store, StoreError
from fuzz.tally import Elite, Tally
from verify import records
from verify.attention.cases import AttentionCase, Edit

if TYPE_CHECKING:
    from pathlib import Path

INPUTS = AttentionCase("a case; of words", (1, 1, 1, 128, 128, 64), seed=5, config=(128, 128, 128))
CASE = Case("anchor", INPUTS)


def record(case: Case = CASE, share: float | str = 0.5, root: str | None = None) -> dict[str, Any]:
    """A record as a hunt writes it."""
    spec = case.to_json()
    return {
        "format": records.FORMAT,
        "subject": "x",
        "hunt": "anchor",
        "case": case.name,
        "family": "fuzz",
        "sha256": spec["sha256"],
        "shape": {"q_len": 128, "kv_len": 128, "head_dim": 64},
        "features": {},
        "verdict": "pass" if root is None else "fail",
        "reason": "said",
        "measures": {"out": {"share": {"value": share}}},
        "replays": 1,
        "query_blocks": 2,
        "environment": {},
        "reproduce": "",
        "case_spec": spec,
        "root": root,
        "scores": {"a": 1.0},
        "cells": ["128x128-d64 R."],
    }


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty campaign directory."""
    found = Store(tmp_path)
    found.prepare()
    return found


def test_torn_last_line_is_cut_off(store: Store) -> None:
    """A record that a killed process wrote in part is dropped, and the next one starts a line of its own."""
    store.append(record())
    whole = store.records.read_bytes()
    store.records.write_bytes(whole + whole[: len(whole) // 2])
    store.append(record())
    assert store.records.read_bytes() == whole * 2


def test_file_of_one_torn_line(store: Store) -> None:
    """The very first record may be torn as well."""
    store.records.write_bytes(b'{"format":')
    store.append(record())
    assert len(list(records.read(store.records))) == 1


def test_totals_come_back_from_the_records(store: Store) -> None:
    """A resumed campaign knows what was judged, what failed, and the worst case of each class."""
    other = Case("anchor", AttentionCase("other", INPUTS.shape, seed=6, config=INPUTS.config))
    store.append(record())
    store.append(record(other, share=0.75, root="out-beyond"))
    tally, known = store.known()
    assert (tally.cases, tally.violations, tally.replays, tally.blocks) == (2, 1, 2, 4)
    assert tally.worst is not None
    assert tally.worst.share == 0.75
    assert known[case_key(CASE.to_json())] == Outcome(None, "", {"a": 1.0}, 0.5)
    assert known[case_key(other.to_json())].root == "out-beyond"


def test_case_key_is_about_content() -> None:
    """Names and provenance do not make another case; a seed does."""
    named = AttentionCase("another name", INPUTS.shape, seed=5, config=INPUTS.config, provenance="x")
    assert CASE.with_inputs(named).key == CASE.key == case_key(CASE.to_json())
    assert Case("anchor", AttentionCase("a case", INPUTS.shape, seed=6)).key != CASE.key
    assert Case("anchor", INPUTS, (("seed", 1),)).key != CASE.key


def test_case_left_running_is_found(store: Store) -> None:
    """What a worker was running is read back; a torn file means that the case had not been started."""
    store.start(0, CASE.to_json())
    (store.directory / "running" / "worker-1.json").write_text('{"format": "fly', encoding="utf-8")
    assert [case.name for case in store.take_left_over()] == [CASE.name]
    store.clear_running()
    assert store.take_left_over() == []


def test_only_a_smaller_case_replaces_a_provisional_one(store: Store) -> None:
    """While shrinking, the smallest failing case so far is on disk; the final one always is."""
    one = (Edit("v", "set", "0x1p+0"),)
    shape = INPUTS.shape
    long = CASE.with_inputs(AttentionCase("long", shape, seed=5, edits=one, provenance=NOT_SHRUNK))
    short = CASE.with_inputs(AttentionCase("short", shape, seed=5, provenance=NOT_SHRUNK))
    path = store.save_failure("attention", "out-nan-for-finite", short, final=False)
    store.save_failure("attention", "out-nan-for-finite", long, final=False)
    assert load_case(path).name == "short"
    assert not store.is_shrunk("attention", "out-nan-for-finite")
    final = CASE.with_inputs(AttentionCase("final", shape, seed=5, edits=one))
    store.save_failure("attention", "out-nan-for-finite", final, final=True)
    assert load_case(path).name == "final"
    assert store.is_shrunk("attention", "out-nan-for-finite")


def test_foreign_state_is_refused(store: Store) -> None:
    """A campaign.json of another program stops the run with its path."""
    (store.directory / "campaign.json").write_text('{"something": "else"}', encoding="utf-8")
    with pytest.raises(StoreError, match=r"campaign\.json: not a flywheel-campaign/2"):
        store.load_state()


def test_nan_is_worse_than_any_share() -> None:
    """A NaN share is never taken for a small one."""
    tally = Tally()
    for share in (0.5, "nan", 3.0):
        tally.add(record(share=share))
    assert tally.worst is not None
    assert math.isnan(tally.worst.share)
    assert severity(math.nan) > severity(math.inf) >= severity(1e308) > severity(1.0) > severity(None)
    assert Elite(math.nan, {}).beats(Elite(math.inf, {}))


def test_promote_adds_a_case_with_provenance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The case keeps its bits, and says how it was found, when, at which versions, and what it used of the bound."""
    save_case(CASE, tmp_path / "found.json")
    there = tmp_path / "corpus"
    asked = ["promote", str(tmp_path / "found.json"), "--corpus", str(there)]
    assert main(asked) == USAGE
    assert "say it with --found" in capsys.readouterr().out
    assert main([*asked, "--found", "searched: by a test"]) == OK
    (path,) = there.glob("*.json")
    assert path.name == "a-case-of-words.json"
    case = load_case(path)
    assert case.to_json()["sha256"] == CASE.to_json()["sha256"]
    for words in ("searched: by a test", "jax ", "numpy ", "cpu-interpret", "pass, share of the bound: lse 0."):
        assert words in case.provenance
    assert main([*asked, "--found", "x"]) == USAGE
    assert "give another name with --name" in capsys.readouterr().out
    assert main([*asked, "--found", "x", "--name", "again"]) == USAGE
    assert "holds the same case" in capsys.readouterr().out
    assert main(["list", "--corpus", str(there)]) == OK
    said = capsys.readouterr().out
    assert "anchor (flywheel.attention): static-anchor softmax" in said
    assert "corpus (1 cases)" in said
    assert "searched: by a test" in said


def test_replay_by_digest(tmp_path: Path, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """Any judged case can be replayed from the records by the beginning of its digest."""
    del tmp_path
    store.append(record())
    sha = record()["sha256"]
    assert main(["replay", f"{store.records}#{sha[:12]}"]) == OK
    said = capsys.readouterr().out
    assert f"bits {sha[:16]}" in said
    assert "replays: 0 of 1 query blocks" in said
    assert main(["replay", f"{store.records}#ffff"]) == USAGE
    assert "no record of a case whose SHA-256 starts with 'ffff'" in capsys.readouterr().out


def test_file_names_are_plain() -> None:
    """Names of corpus files hold nothing that a shell or a file system minds."""
    assert (
        corpus.slug("512x512-d64; 150.0 at keys 3:19 rows 2::3; v 2^118")
        == "512x512-d64-150.0-at-keys-3-19-rows-2-3-v-2^118"
    )


def test_index_follows_the_records(store: Store) -> None:
    """Each record is taken in once, torn lines are waited for, and failures are told by root with their count."""
    others = [CASE.with_inputs(AttentionCase("n", INPUTS.shape, seed=n)) for n in range(3)]
    for other in others[:2]:
        store.append(record(other, share=2.0, root="out-beyond"))
    store.update_index()
    with store.records.open("ab") as file:
        file.write(b'{"format":')
    store.update_index()
    store.append(record(others[2], share=0.25))
    store.update_index()
    with Index(store.index) as index:
        assert index.count() == 3
        (found,) = index.roots()
        assert (found.root, found.cases, found.hunts) == ("out-beyond", 2, ("anchor",))
        (at,) = index.worst("anchor")
    assert store.records.read_bytes()[at:].startswith(b"{")
    again = store.index.with_name("again.sqlite")
    with Index(again) as index:
        assert index.catch_up(store.records) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("minutes = 0", "minutes must be positive, got 0"),
        ("hours = 1", "unknown field 'hours'"),
        ('workers = "two"', "workers has the wrong type, got 'two'"),
        ('kinds = ["magic"]', "kinds must be among random, target"),
        ("minutes = ", "no campaign file"),
    ],
)
def test_campaign_files_are_checked(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong field is named with its value and the rule, before anything starts."""
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    assert main(["run", "--campaign", str(path)]) == USAGE
    assert message in capsys.readouterr().out


def test_own_campaign_files_can_be_read() -> None:
    """smoke takes a minute, nightly a night, weekend longer; the command line wins over the file."""
    minutes = [plans.load(name)["minutes"] for name in ("smoke", "nightly", "weekend")]
    assert minutes[0] == 1
    assert minutes == sorted(minutes)
    options = _parser().parse_args(["run", "masks", "--campaign", "smoke", "--minutes", "2", "--seed", "9"])
    plan = _plan(options)
    assert (plan.hunts, plan.minutes, plan.seed) == (("masks",), 2, 9)


def test_test_to_paste_fails_as_long_as_the_case_does(tmp_path: Path) -> None:
    """The source runs by itself under pytest's rules: it judges the very case, and says what is special about it."""
    jump = Edit("v", "set", "0x1p+120", start=3, stop=4)
    case = CASE.with_inputs(dataclasses.replace(INPUTS, edits=(jump,)))
    assert "|v| up to 2^120.0" in sentence(case)
    for subject, fails in (("fuzz_subjects:oracle", False), ("fuzz_subjects:raises", True)):
        space: dict[str, Any] = {}
        exec(compile(pytest_source(case, subject), str(tmp_path / "pasted.py"), "exec"), space)  # noqa: S102
        (test,) = [value for name, value in space.items() if name.startswith("test_")]
        assert "|v| up to 2^120.0" in test.__doc__
        if fails:
            with pytest.raises(AssertionError, match="values too large"):
                test()
        else:
            test()

"""Records on disk: strict, whole, and kept whoever is killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
from pathlib import Path

import pytest
from appending import LONG, record, write, write_until_killed

from verify import records
from verify.attention.cases import GENERATOR, AttentionCase, CaseError, features_json, load_case, save_case
from verify.attention.examine import examine
from verify.records import FORMAT, REQUIRED, RecordError, append, append_line, read

ROOT = Path(__file__).parents[3]
CASE = AttentionCase("windowed", (1, 2, 1, 4, 8, 64), window=(3, None), softcap="0x1p3", sinks=("-inf", "0x1p0"))


@pytest.mark.smoke
def test_processes_that_append_at_once_lose_and_mix_nothing(tmp_path: Path) -> None:
    """Two processes, 25 records each of different lengths: all are there, whole, in each one's order."""
    path = tmp_path / "records.jsonl"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=write, args=(path, f"p{n}", 25)) for n in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    found = list(read(path))
    for n in range(2):
        assert [r["case"] for r in found if r["subject"] == f"p{n}"] == [str(i) for i in range(25)]


@pytest.mark.smoke
def test_a_killed_process_loses_no_finished_record(tmp_path: Path) -> None:
    """Killed at any moment: what `append` had returned from is there, and the next record starts a line of its own."""
    path = tmp_path / "records.jsonl"
    context = multiprocessing.get_context("spawn")
    finished = context.Value("i", 0)
    process = context.Process(target=write_until_killed, args=(path, finished))
    process.start()
    while finished.value < 5:
        process.join(0.001)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    kept = finished.value
    assert [r["case"] for r in read(path)][:kept] == [str(i) for i in range(kept)]
    append(path, record(case="after"))
    assert [r["case"] for r in read(path)][-1] == "after"


@pytest.mark.smoke
@pytest.mark.parametrize("torn", ['{"format":', LONG, "{"], ids=["part", "long", "brace"])
def test_what_a_killed_process_left_of_a_line_is_cut_off(tmp_path: Path, torn: str) -> None:
    """A torn line is skipped on reading, and gone with the next record."""
    path = tmp_path / "records.jsonl"
    append(path, record(case="first"))
    with path.open("a", encoding="utf-8") as file:
        file.write(torn)
    assert [r["case"] for r in read(path)] == ["first"]
    append(path, record(case="second"))
    assert [r["case"] for r in read(path)] == ["first", "second"]
    assert len(path.read_text(encoding="utf-8").splitlines()) == 2


@pytest.mark.smoke
def test_a_line_is_synced_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file after its line has been written, and the directory when the file is new."""
    synced: list[int] = []
    monkeypatch.setattr(records.os, "fsync", lambda handle: synced.append(os.fstat(handle).st_size))
    path = tmp_path / "new" / "records.jsonl"
    append_line(path, "{}")
    assert synced[0] == 3
    assert len(synced) == 2
    append_line(path, "{}")
    assert synced[2:] == [6]


@pytest.mark.smoke
def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    """Missing fields, another version, numbers that strict JSON lacks, and more than one line."""
    path = tmp_path / "records.jsonl"
    with pytest.raises(RecordError, match=r"needs format flywheel-record/2 and .*missing: features"):
        append(path, {key: value for key, value in record().items() if key != "features"})
    with pytest.raises(RecordError, match="flywheel-record/2"):
        append(path, record(format="flywheel-record/1"))
    with pytest.raises(ValueError, match="not JSON compliant"):
        append(path, record(seconds=float("nan")))
    with pytest.raises(ValueError, match="text must be one line"):
        append_line(path, "{}\n{}")
    assert not path.exists()
    path.write_text('{"format": "flywheel-record/1"}\n', encoding="utf-8")
    with pytest.raises(RecordError, match="line 1: not a flywheel-record/2"):
        list(read(path))


@pytest.mark.smoke
def test_a_record_lists_the_features_of_the_call() -> None:
    """Window, soft cap, sinks, segments, positions and value width, and nothing for a plain call."""
    assert CASE.features_json() == {"window": [3, None], "softcap": 8.0, "sinks": ["-inf", 1.0]}
    ragged = AttentionCase("r", (1, 1, 1, 5, 6, 64), v_dim=32, cu_seqlens_q=(0, 2, 5), cu_seqlens_k=(0, 3, 6))
    assert features_json(ragged.build()) == {
        "v_dim": 32,
        "segments": {"q": 2, "k": 2},
        "positions": [1, 5],
    }
    assert AttentionCase("plain", (1, 1, 1, 4, 4, 64)).features_json() == {}


def test_the_record_of_a_judgement_is_strict_and_shows_the_growth(tmp_path: Path) -> None:
    """As read back: features, and the worst of each power-of-two range of tokens with index, values and bits."""
    case = AttentionCase("plain", (1, 1, 1, 5, 5, 64))
    append(tmp_path / "r.jsonl", examine(case, family="ordinary", reproduce="-"))
    body = json.loads((tmp_path / "r.jsonl").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert body["features"] == {}
    growth = body["measures"]["out"]["growth"]
    assert growth["normalised_by"] == "bound"
    assert [(r["first"], r["last"]) for r in growth["ranges"]] == [(0, 0), (1, 1), (2, 3), (4, 4)]
    for found in growth["ranges"]:
        assert found["first"] <= found["worst"]["index"][2] <= found["last"]
        assert set(found["worst"]) == {"value", "got", "want", "index", "got_bits", "want_bits"}
    assert max(r["worst"]["value"] for r in growth["ranges"]) == body["measures"]["out"]["share"]["value"]


def test_the_documentation_lists_every_field() -> None:
    """docs/records.md names each field of a record, each measure, and what is required."""
    page = (ROOT / "docs" / "records.md").read_text(encoding="utf-8")
    assert f"`{FORMAT}`" in page
    body = examine(AttentionCase("plain", (1, 1, 1, 5, 5, 64)), family="ordinary", reproduce="-")
    named = set(re.findall(r"`([a-z_0-9]+)`", page))
    assert set(body) <= named
    assert set(body["measures"]["out"]) <= named
    rows = [line for line in page.splitlines() if line.startswith("| `") and "required" in line.rsplit("|", 2)[1]]
    required = {name for line in rows for name in re.findall(r"`([a-z_]+)`", line.split("|")[1])}
    assert required - {"notes"} == set(REQUIRED)


def test_a_case_file_says_what_it_was_made_with(tmp_path: Path) -> None:
    """Generator, data type and versions stand in it; another generator's file is refused."""
    path = tmp_path / "case.json"
    save_case(CASE, path)
    body = json.loads(path.read_text(encoding="utf-8"))
    assert (body["generator"], body["dtype"]) == (GENERATOR, "bfloat16")
    assert set(body["versions"]) == {"jax", "numpy"}
    assert load_case(path) == CASE
    path.write_text(json.dumps(body | {"generator": "another"}), encoding="utf-8")
    with pytest.raises(CaseError, match=f"generator must be {GENERATOR}, got 'another'"):
        load_case(path)

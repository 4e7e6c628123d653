"""The comparison with other kernels: what is compared, what is kept, how it goes on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from verify.compiled import __main__ as command
from verify.compiled import compare
from verify.compiled.compile import Artifact, CompilerMissingError, Job, RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, kept: Callable[[str], Artifact]) -> list[Job]:
    """Compilations replaced by a kept dump; JAX's splash attention is refused."""
    jobs: list[Job] = []
    artifact = kept("lengths-v6e-0.0.50.1")

    def compile_many(given: Sequence[Job], **_: object) -> Iterator[tuple[Job, object]]:
        for job in given:
            jobs.append(job)
            refused = RefusedError("compile", "MosaicError", "out of VMEM", None)
            yield job, refused if "jax_splash" in job.target.reference else artifact

    monkeypatch.setattr(compare, "compile_many", compile_many)
    monkeypatch.setattr(
        compare, "result_key", lambda job: f"{job.target.reference} {sorted(job.target.options.items())}"
    )
    return jobs


def test_the_comparison_covers_what_it_should() -> None:
    """Ours, flywheel-tpu, Tokamax and JAX splash; head_dim 256 and 128; 1K to 16K; a smoke subset of one length."""
    full, smoke = compare.cases("v6e", None, smoke=False), compare.cases("v6e", None, smoke=True)
    assert {case.contestant.subject for case in smoke} == {"flywheel", "flywheel-tpu", "tokamax splash", "jax splash"}
    assert {(case.problem.head_dim, case.problem.tokens) for case in full} == {
        (head_dim, tokens) for head_dim in (256, 128) for tokens in (1024, 2048, 4096, 8192, 16384)
    }
    assert {case.problem.tokens for case in smoke} == {4096}
    assert len(smoke) == 10


def test_peers_compile_in_their_own_environment() -> None:
    """The given interpreter is for the peers; our kernel is compiled by this one."""
    for case in compare.cases("v6e", "/peers/python", smoke=True):
        assert (case.job().python is None) == (case.contestant.subject == "flywheel")


def test_useful_flops() -> None:
    """Two products over the visible pairs of a causal mask, diagonal included."""
    assert compare.Problem(head_dim=128, tokens=4, heads=2, kv_heads=1).flops == 4 * 2 * 128 * (1 + 2 + 3 + 4)


def test_records_hold_times_or_messages(compiled: list[Job], tmp_path: Path) -> None:
    """Each case has a record: the modelled time with its versions, or the compiler's message."""
    path = tmp_path / "records.jsonl"
    found = list(compare.run(compare.cases("v6e", None, smoke=True), path))
    assert len(found) == len(compiled) == 10
    assert [json.loads(line) for line in path.read_text().splitlines()] == found
    for one in found:
        if one["subject"] == "jax splash":
            assert one["seconds"] is None
            assert "out of VMEM" in one["error"]
        else:
            assert one["seconds"] > 0
            assert one["versions"]["libtpu"] == "0.0.50.1"
            assert one["format"] == "flywheel-modelled/1"


def test_a_second_run_goes_on(compiled: list[Job], tmp_path: Path) -> None:
    """Finished cases are taken from the file, a torn last line is made again."""
    path = tmp_path / "records.jsonl"
    cases = compare.cases("v6e", None, smoke=True)
    list(compare.run(cases[:4], path))
    path.write_text(path.read_text()[:-40])
    compiled.clear()
    found = list(compare.run(cases, path))
    assert len(found) == 10
    assert len(compiled) == 7


def test_the_best_candidate_counts(compiled: list[Job], tmp_path: Path) -> None:
    """Of several block sizes of one contestant the fastest is shown; those without a time come last."""
    cases = [case for case in compare.cases("v6e", None, smoke=False) if case.problem.tokens == 1024]
    records = list(compare.run(cases, tmp_path / "records.jsonl"))
    assert compiled
    splash = [one for one in records if one["subject"] == "jax splash" and one["problem"]["head_dim"] == 128]
    splash[1].update(seconds=2.0, error=None)
    splash[2].update(seconds=1.0, error=None)
    shown = [one for one in compare.best(records) if one["subject"] == "jax splash"]
    assert [one["seconds"] for one in shown if one["problem"]["head_dim"] == 128] == [1.0]


def test_the_command_prints_a_table(compiled: list[Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`compare --smoke` prints a table for each head_dim, the messages, and where the records are."""
    assert command.main(["compare", "--smoke", "--out", str(tmp_path / "r.jsonl")]) == 0
    printed = capsys.readouterr().out
    assert len(compiled) == 10
    for text in ("head_dim 256", "head_dim 128", "flywheel (default)", "out of VMEM", "r.jsonl", "10/10"):
        assert text in printed


def test_a_missing_package_is_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment that does not start is a message for its contestants, not an end of the comparison."""

    def missing(_: Job) -> str:
        message = "cannot ask /no/python for its packages"
        raise CompilerMissingError(message)

    monkeypatch.setattr(compare, "result_key", missing)
    found = list(compare.run(compare.cases("v6e", "/no/python", smoke=True), tmp_path / "records.jsonl"))
    assert all("cannot ask /no/python" in one["error"] for one in found)

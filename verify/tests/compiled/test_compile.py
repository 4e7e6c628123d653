"""The compiler's process and its cache, with a stand-in for the process."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from verify.compiled import compile as compiling
from verify.compiled.compile import (
    CompilerMissingError,
    Job,
    RefusedError,
    TimeLimitError,
    clear_cache,
    compile_job,
    compile_many,
    kernel_line,
    missing,
)
from verify.compiled.target import Target
from verify.tests.compiled.conftest import KERNELS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def target() -> Target:
    """Any target; nothing compiles it here."""
    return Target(f"{KERNELS}:product", factory=True)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Job]:
    """Jobs that reached the compiler, which is replaced by one that writes what a real one leaves."""
    source = tmp_path / "source.py"
    source.write_text("first")
    seen: list[Job] = []

    def worker(job: Job, scratch: Path) -> None:
        seen.append(job)
        sources = {str(source): compiling._digest(str(source))}
        if "error" in job.target.options:
            error = {"stage": "trace", "kind": "ValueError", "message": "no", "frames": [], "sources": sources}
            (scratch / "error.json").write_text(json.dumps(error))
            return
        (scratch / "meta.json").write_text(json.dumps({"versions": {"libtpu": "1"}, "sources": sources}))
        (scratch / "17-mine.1-03-packed-bundles-post-ra.txt").write_text("bundles")
        (scratch / "17-mine.1-04-pre-delay_hlo-static-per-bundle-utilization.txt").write_text("table")
        (scratch / "17-mine.1-02-schedule-analysis_packed-bundles-post-ra.txt").write_text("dropped")
        (scratch / "17-<late-initialization>-03-packed-bundles-post-ra.txt").write_text("dropped")
        (scratch / "17-TLP-00-deduplication-map.txt").write_text("key:mine.1\nordinal:1\n  mine.1\n  twin.2\n")

    monkeypatch.setattr(compiling, "_run_worker", worker)
    monkeypatch.setattr(compiling, "missing", lambda _: None)
    monkeypatch.setattr(compiling, "versions", lambda _: {"jax": "1", "jaxlib": "1", "libtpu": "1"})
    return seen


def test_what_a_compilation_keeps(runs: list[Job], target: Target, tmp_path: Path) -> None:
    """Bundles and utilization of each operation are kept under its name; the rest of the dump is not."""
    artifact = compile_job(Job(target, "v6e"), cache=tmp_path / "cache")
    assert len(runs) == 1
    assert list(artifact.operations()) == ["mine.1"]
    assert artifact.same_schedule() == {"twin.2": "mine.1"}
    kept = sorted(path.name for path in artifact.directory.iterdir())
    assert kept == ["deduplication.json", "meta.json", "mine.1.bundles.txt.gz", "mine.1.utilization.txt.gz"]


def test_the_cache_knows_what_a_result_depends_on(runs: list[Job], target: Target, tmp_path: Path) -> None:
    """The same job is compiled once; another generation, flag or option, or a changed source file, compiles anew."""
    cache = tmp_path / "cache"

    def count(job: Job) -> int:
        compile_job(job, cache=cache)
        return len(runs)

    assert [count(Job(target, "v6e")), count(Job(target, "v6e"))] == [1, 1]
    assert count(Job(target, "v7x")) == 2
    assert count(Job(target, "v6e", flags=("--xla_tpu_foo=1",))) == 3
    assert count(Job(Target(target.reference, factory=True, options={"m": 8}), "v6e")) == 4
    assert count(Job(target, "v6e", time_limit=5)) == 4
    (tmp_path / "source.py").write_text("second")
    assert [count(Job(target, "v6e")), count(Job(target, "v6e"))] == [5, 5]
    compile_job(Job(target, "v6e"), cache=cache, fresh=True)
    assert len(runs) == 6
    assert clear_cache(cache) == 4
    assert count(Job(target, "v6e")) == 7


def test_versions_are_part_of_the_key(
    runs: list[Job], target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another libtpu does not find the results of the first."""
    compile_job(Job(target, "v6e"), cache=tmp_path)
    monkeypatch.setattr(compiling, "versions", lambda _: {"jax": "1", "jaxlib": "1", "libtpu": "2"})
    compile_job(Job(target, "v6e"), cache=tmp_path)
    assert len(runs) == 2


def test_refusals_are_kept(runs: list[Job], tmp_path: Path) -> None:
    """A refusal is a result like any other: kept, and raised again."""
    job = Job(Target(f"{KERNELS}:product", factory=True, options={"error": True}), "v6e")
    for _ in range(2):
        with pytest.raises(RefusedError, match="trace failed with ValueError: no"):
            compile_job(job, cache=tmp_path)
    assert len(runs) == 1


def test_several_at_once(runs: list[Job], target: Target, tmp_path: Path) -> None:
    """Jobs are yielded as they finish, a failure in place of its artifact, and each start is told."""
    bad = Target(f"{KERNELS}:product", factory=True, options={"error": True})
    jobs = [Job(target, "v6e"), Job(bad, "v6e"), Job(target, "v5e")]
    started: list[Job] = []
    results = dict(compile_many(jobs, workers=2, cache=tmp_path, started=started.append))
    assert len(runs) == len(started) == len(results) == 3
    assert isinstance(results[jobs[1]], RefusedError)
    assert not isinstance(results[jobs[2]], Exception)


def test_without_libtpu_there_is_a_reason(target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An interpreter without libtpu is named as such, with what to install; nothing passes silently."""
    monkeypatch.setattr(compiling, "versions", lambda _: {"jax": "0.12", "jaxlib": "0.12", "libtpu": None})
    assert missing() == "libtpu is not installed in this environment (pip install 'jax[tpu]')"
    with pytest.raises(CompilerMissingError, match="libtpu is not installed"):
        compile_job(Job(target, "v6e"), cache=tmp_path)


def test_the_time_limit_stops_the_compiler(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that does not finish is stopped, nothing of it is kept, and it is no refusal."""
    slow = tmp_path / "slow.py"
    slow.write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(compiling, "WORKER", slow)
    monkeypatch.setattr(compiling, "missing", lambda _: None)
    with pytest.raises(TimeLimitError, match=r"product for v6e: stopped after 0\.5 s"):
        compile_job(Job(target, "v6e", time_limit=0.5), cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_compiler_that_dies_leaves_its_log(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort inside the compiler raises with the end of what it printed."""
    dying = tmp_path / "dying.py"
    dying.write_text("import os\nprint('F0000 check failed: oops', flush=True)\nos.abort()\n")
    monkeypatch.setattr(compiling, "WORKER", dying)
    monkeypatch.setattr(compiling, "missing", lambda _: None)
    with pytest.raises(RefusedError, match="check failed: oops"):
        compile_job(Job(target, "v6e"), cache=tmp_path / "cache")


def test_the_line_an_error_points_at(tmp_path: Path) -> None:
    """The line that the compiler names comes first, else the innermost frame that is neither JAX nor Python."""
    file = tmp_path / "mine.py"
    file.write_text("one\n  two()\n")
    named = {"message": f'loc("{file}:2:7")', "frames": []}
    assert kernel_line(named) == f"{file}:2: two()"
    frames = [["/a/site-packages/jax/core.py", 1, "x"], [str(file), 1, "one"], ["/a/site-packages/jax/api.py", 2, "y"]]
    assert kernel_line({"message": "no location", "frames": frames}) == f"{file}:1: one"
    assert kernel_line({"message": "no location", "frames": frames[:1]}) is None


def test_interpreters_are_asked_for_their_packages() -> None:
    """The versions of another interpreter come from that interpreter; one that does not start is named."""
    found = compiling.versions(sys.executable)
    assert found["jax"]
    with pytest.raises(CompilerMissingError, match="cannot ask /no/such/python"):
        compiling.versions("/no/such/python")

"""The engine at its limits: kills at random moments, memory, two workers against one, a cluster that loses a node."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fuzz import bench
from fuzz.case import case_key
from fuzz.cli import OK, VIOLATED, main
from fuzz.index import Index
from verify import records

if TYPE_CHECKING:
    from collections.abc import Generator

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
SMALL = "128x200-d256"
KILLS = 100
CLUSTER_CASES = 600
ATTEMPTS = 4
"""Ray gives a node 30 seconds to start, which a busy machine may need more than once."""


def command(out: Path, *more: str, subject: str | None = "oracle", workers: int = 1) -> list[str]:
    """A hunt at the cheapest shape, against a subject of the tests or (None) our kernel."""
    fixed = ["run", "anchor", "--workers", str(workers), "--bucket", SMALL, "--seed", "3", "--out", str(out)]
    return [*fixed, *([] if subject is None else ["--subject", f"fuzz_subjects:{subject}"]), *more]


def started(arguments: list[str], said: Path | None = None, **more: str) -> subprocess.Popen[bytes]:
    """The command as a process group of its own; what it says goes to a file, and more names into its environment."""
    environment = os.environ | {"PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}"} | more
    with (Path(os.devnull) if said is None else said).open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "fuzz", *arguments],
            cwd=ROOT,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.mark.deep
def test_a_hundred_kills_lose_nothing(tmp_path: Path) -> None:
    """kill -9 of the whole campaign at random moments: finished records stay as they were, and none is judged twice.

    Half of the moments lie anywhere in the first seconds, start and resumption included; half in the second and a half
    after the first new record.
    """
    rng = random.Random(1)  # noqa: S311  moments, not secrets
    path = tmp_path / "records.jsonl"
    lines: list[bytes] = []
    cut_off = torn = 0
    for kill in range(KILLS):
        process = started(command(tmp_path))
        if kill % 2:
            time.sleep(rng.uniform(0.5, 8.0))
        else:
            while len(whole_lines(path)) <= len(lines) and process.poll() is None:
                time.sleep(0.02)
            time.sleep(rng.uniform(0.0, 1.5))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        now = whole_lines(path)
        assert now[: len(lines)] == lines
        lines = now
        cut_off += bool(list((tmp_path / "running").glob("*.json")))
        torn += path.exists() and not path.read_bytes().endswith(b"\n")
    found = list(records.read(path))
    assert len(found) == len(lines) >= KILLS // 2
    keys = [case_key(record["case_spec"]) for record in found]
    assert len(keys) == len(set(keys))
    assert main(command(tmp_path, "--examples", str(len(found) + 5))) == OK
    with Index(tmp_path / "index.sqlite") as index:
        assert index.count() == len(list(records.read(path)))
    print(f"{KILLS} kills, {len(found)} records, {cut_off} cases cut off, {torn} torn lines")


def whole_lines(path: Path) -> list[bytes]:
    """The records that are finished."""
    text = path.read_bytes() if path.exists() else b""
    return text[: text.rfind(b"\n") + 1].splitlines()


@pytest.mark.deep
def test_workers_share_what_they_compile_and_survive_torn_entries(tmp_path: Path) -> None:
    """A compiled kernel is in the campaign's directory; an entry that a kill has torn is compiled again, silently."""

    def run(examples: int) -> set[str]:
        said = tmp_path / "said.txt"
        process = started(command(out, "--examples", str(examples), subject=None), said)
        assert process.wait() == OK, said.read_text()
        assert "Traceback" not in said.read_text()
        assert "warning" not in said.read_text().lower()
        return {path.name for path in (out / "compiled").glob("*-cache")}

    out = tmp_path / "campaign"
    names = run(3)
    assert names
    for path in (out / "compiled").glob("*-cache"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert run(6) == names
    shutil.rmtree(out / "compiled")
    assert run(9) == names
    kept = {path: path.stat().st_mtime_ns for path in (out / "compiled").glob("*-cache")}
    assert run(12) == names
    assert kept == {path: path.stat().st_mtime_ns for path in (out / "compiled").glob("*-cache")}


@pytest.mark.deep
def test_a_worker_out_of_memory_is_a_finding(tmp_path: Path) -> None:
    """A worker that holds more than it may is stopped, and its case saved."""
    assert main(command(tmp_path, "--examples", "3", "--case-megabytes", "5000", subject="hoards")) == VIOLATED
    assert (tmp_path / "failures" / "attention-memory.json").exists()


@pytest.mark.deep
def test_the_benchmark_takes_a_rate() -> None:
    """One worker and two: cases per second and per CPU-second once they are warm; how they compare is printed."""
    one, two = (bench.measured(workers, 5.0) for workers in (1, 2))
    assert min(one.per_second, one.per_cpu_second, two.per_second, two.per_cpu_second) > 0.0
    print(
        f"one worker {one.per_second:.1f} cases per second, {one.per_cpu_second:.1f} per CPU-second; "
        f"two {two.per_second / one.per_second:.2f} times as many"
    )


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def redis_server(directory: Path) -> Generator[str]:
    """A Redis server of our own on loopback."""
    server, port = shutil.which("redis-server"), free_port()
    assert server is not None
    words = [server, "--port", str(port), "--save", "", "--bind", "127.0.0.1", "--dir", str(directory)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait()


def saved_examples(where: str) -> int:
    """How many entries Hypothesis has left in the shared database of a hunt."""
    if not where.startswith("redis://"):
        return sum(path.is_file() for path in (Path(where) / "anchor").rglob("*"))
    redis = pytest.importorskip("redis", reason="the Redis client is not installed (uv sync --group cluster)")
    client = redis.Redis.from_url(where)
    return sum(client.scard(key) for key in client.scan_iter("flywheel:anchor:*"))


needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (uv sync --group cluster)"
)
needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None or importlib.util.find_spec("redis") is None,
    reason="redis-server (apt-get install redis-server) or its client (uv sync --group cluster) is missing",
)


@pytest.mark.deep
@needs_ray
@pytest.mark.parametrize("shared", ["folder", pytest.param("redis", marks=needs_redis)])
def test_cluster_that_loses_a_worker(tmp_path: Path, shared: str) -> None:
    """Two Ray workers, one killed during the run: nothing lost, nothing run twice, no failure made up.

    Hypothesis' examples lie in Redis, or in a shared folder.
    """
    with contextlib.ExitStack() as stack:
        database = str(tmp_path / "examples") if shared == "folder" else stack.enter_context(redis_server(tmp_path))
        out, said, mark = tmp_path / "out", tmp_path / "said", secrets.token_hex(8)
        arguments = ["run", "anchor", "--bucket", SMALL, "--seed", "3", "--workers", "2", "--out", str(out)]
        arguments += ["--subject", "fuzz_subjects:oracle", "--ray", "local", "--examples", str(CLUSTER_CASES)]
        path = out / "records.jsonl"
        for _ in range(ATTEMPTS):
            process = started([*arguments, "--database", database], said, FUZZ_TEST_MARK=mark)
            while process.poll() is None and len(judges(path)) < 2:
                time.sleep(0.1)
            if "timed out during startup" not in said.read_text(encoding="utf-8"):
                break
        killed = one_worker(mark)
        assert killed is not None, said.read_text(encoding="utf-8")
        before = path.read_bytes()
        before = before[: before.rfind(b"\n") + 1]
        os.kill(killed, signal.SIGKILL)
        assert process.wait() == OK, said.read_text(encoding="utf-8")
        entries = saved_examples(database)
    assert "is gone" in said.read_text(encoding="utf-8")
    assert path.read_bytes().startswith(before)
    found = list(records.read(path))
    keys = [case_key(record["case_spec"]) for record in found]
    assert len(keys) >= CLUSTER_CASES
    # The one that took its place, and the other from its next round on, know what had been judged by then.
    first = {case_key(json.loads(line)["case_spec"]) for line in before.splitlines()}
    early = judges(path, before)
    late = [case_key(record["case_spec"]) for record in found if record["process"] not in early]
    assert len(late) == len(set(late))
    assert not first.intersection(late)
    assert len({record["process"] for record in found}) == 3  # two, and the one that took the place of the killed
    assert not list((out / "failures").glob("*.json"))
    assert entries > 0
    print(f"{shared}: {len(keys)} cases, {entries} examples shared, one of two workers killed")


def judges(path: Path, text: bytes | None = None) -> set[str]:
    """The processes that have judged something so far."""
    if text is None:
        text = path.read_bytes() if path.exists() else b""
    return {json.loads(line)["process"] for line in text.splitlines(keepends=True) if line.endswith(b"\n")}


def one_worker(mark: str) -> int | None:
    """A process that runs `_work` for the campaign with this mark in its environment; None if the campaign ended."""
    for entry in Path("/proc").iterdir():
        try:
            words, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
        except OSError:
            continue
        if words.startswith(b"ray::") and b"_work" in words and mark.encode() in environment:
            return int(entry.name)
    return None

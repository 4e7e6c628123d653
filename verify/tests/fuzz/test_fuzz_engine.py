"""The engine at its limits: kills at random moments, memory, two workers against one, a cluster that loses a node."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fuzz.case import case_key
from fuzz.cli import OK, VIOLATED, main
from fuzz.index import Index
from verify import records

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
SMALL = "128x200-d256"
KILLS = 100


def command(out: Path, *more: str, subject: str = "oracle", workers: int = 1) -> list[str]:
    """A hunt at the cheapest shape."""
    fixed = ["run", "anchor", "--workers", str(workers), "--bucket", SMALL, "--seed", "3", "--out", str(out)]
    return [*fixed, "--subject", f"fuzz_subjects:{subject}", *more]


def started(arguments: list[str]) -> subprocess.Popen[bytes]:
    """The command as a process group of its own."""
    environment = os.environ | {"PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}"}
    return subprocess.Popen(
        [sys.executable, "-m", "fuzz", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@pytest.mark.deep
def test_a_hundred_kills_lose_nothing(tmp_path: Path) -> None:
    """kill -9 of the whole campaign at random moments: finished records stay as they were, and none is judged twice."""
    rng = random.Random(1)  # noqa: S311  moments, not secrets
    lines: list[bytes] = []
    for _ in range(KILLS):
        process = started(command(tmp_path))
        time.sleep(rng.uniform(0.5, 8.0))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        path = tmp_path / "records.jsonl"
        text = path.read_bytes() if path.exists() else b""
        now = text[: text.rfind(b"\n") + 1].splitlines()
        assert now[: len(lines)] == lines
        lines = now
    found = list(records.read(tmp_path / "records.jsonl"))
    assert found
    keys = [case_key(record["case_spec"]) for record in found]
    assert len(keys) == len(set(keys))
    assert main(command(tmp_path, "--examples", str(len(found) + 5))) == OK
    with Index(tmp_path / "index.sqlite") as index:
        assert index.count() == len(list(records.read(tmp_path / "records.jsonl")))
    print(f"{KILLS} kills, {len(found)} records")


@pytest.mark.deep
def test_a_worker_out_of_memory_is_a_finding(tmp_path: Path) -> None:
    """A worker that holds more than it may is stopped, and its case saved."""
    assert main(command(tmp_path, "--examples", "3", "--case-megabytes", "5000", subject="hoards")) == VIOLATED
    assert (tmp_path / "failures" / "attention-memory.json").exists()


@pytest.mark.deep
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_two_workers_against_one(tmp_path: Path) -> None:
    """Two workers judge more cases than one in the same time; how many more is printed, not asserted."""
    counts = []
    for workers in (1, 2):
        out = tmp_path / str(workers)
        main(
            [
                "run",
                "anchor",
                "--bucket",
                "256x256-d128",
                "--minutes",
                "1",
                "--workers",
                str(workers),
                "--out",
                str(out),
            ]
        )
        counts.append(sum(1 for _ in records.read(out / "records.jsonl")))
    print(f"one worker {counts[0]}, two workers {counts[1]} cases in a minute: {counts[1] / counts[0]:.2f} times")
    assert counts[1] > counts[0]


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.deep
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (uv sync --group cluster)")
def test_cluster_that_loses_a_worker(tmp_path: Path) -> None:
    """Two Ray workers, one killed during the run: every case is judged, no failure is made up; examples in Redis."""
    server = shutil.which("redis-server")
    database: list[str] = []
    redis = None
    if server and importlib.util.find_spec("redis"):
        port = free_port()
        redis = subprocess.Popen(
            [server, "--port", str(port), "--save", "", "--bind", "127.0.0.1", "--dir", str(tmp_path)],
            stdout=subprocess.DEVNULL,
        )
        database = ["--database", f"redis://127.0.0.1:{port}/0"]
    out = tmp_path / "out"
    try:
        arguments = ["run", "anchor", "--bucket", SMALL, "--seed", "3", "--workers", "2", "--out", str(out)]
        process = started([*arguments, "--ray", "local", "--examples", "60", *database])
        path = out / "records.jsonl"
        while process.poll() is None and not (path.exists() and path.read_bytes().count(b"\n") >= 5):
            time.sleep(0.5)
        os.kill(one_worker(process.pid), signal.SIGKILL)
        assert process.wait() == OK
    finally:
        if redis is not None:
            redis.terminate()
            redis.wait()
    found = list(records.read(path))
    keys = [case_key(record["case_spec"]) for record in found]
    assert len(keys) >= 60
    assert len(keys) == len(set(keys))
    assert len({record["process"] for record in found}) >= 2
    assert not list((out / "failures").glob("*.json"))


def one_worker(campaign: int) -> int:
    """A Ray process below the campaign that runs `_work`."""
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes()
            group = int((entry / "stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[3])
        except (OSError, ValueError, IndexError):
            continue
        if words.startswith(b"ray::") and b"_work" in words and group == campaign:
            return int(entry.name)
    pytest.fail("no worker to kill")

"""Run a plan: one process per core, one record per finished item, nothing lost when killed.

The parent hands one item at a time to each worker over a pipe and appends what comes back; a worker keeps to one group
(one compiled kernel) until it is used up.  A worker whose parent is gone reads the end of its pipe and leaves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
from datetime import UTC, datetime
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reports.grid import groups
from verify import records
from verify.attention.cases import AttentionCase
from verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.context import SpawnContext, SpawnProcess

    from reports.item import Item


def judge(item: Item) -> dict[str, Any]:
    """Run a kernel on an item and judge the result; an exception becomes a record of its own."""
    # Imported here: the parent process plans and draws, and never starts JAX.
    from reports import judges  # noqa: PLC0415
    from reports.subjects import is_ours  # noqa: PLC0415
    from verify.backend import BackendUnsoundError  # noqa: PLC0415

    try:
        start = time.perf_counter()
        record = judges.OPERATIONS[item.operation](item)
        if record["verdict"] == Verdict.SKIPPED and is_ours(item.subject):
            return broken(item, Verdict.FAIL, record["reason"])
        return record | {"seconds": time.perf_counter() - start}
    except BackendUnsoundError as error:
        return broken(item, Verdict.BACKEND_UNSOUND, str(error))
    except Exception as error:  # noqa: BLE001  whatever a kernel raises is its result
        reason = f"nothing came back: {type(error).__name__}: {error}"
        return broken(item, Verdict.FAIL, reason) | {"traceback": traceback.format_exc()}


def broken(item: Item, verdict: Verdict, reason: str) -> dict[str, Any]:
    """The record of an item that gave no result; a resumed run tries it again."""
    shape: dict[str, Any] = {}
    if isinstance(item.case, AttentionCase):
        names = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim")
        shape = dict(zip(names, item.case.shape, strict=True))
        shape |= {"causal": item.case.causal, "scale": item.case.scale_value}
    date = datetime.now(tz=UTC).isoformat(timespec="seconds")
    return {
        "format": records.FORMAT,
        "subject": item.subject,
        "case": item.name,
        "family": item.family,
        "shape": shape,
        "operation": item.operation,
        "features": item.case.features_json() if isinstance(item.case, AttentionCase) else {},
        "verdict": verdict.value,
        "reason": reason,
        "measures": {},
        "environment": {"interpret": item.interpret, "date": date},
        "reproduce": item.reproduce,
        "unfinished": True,
    }


@dataclasses.dataclass
class _Worker:
    """A process, our end of its pipe, what it will do, and what it is doing."""

    process: SpawnProcess
    pipe: Any
    queue: list[Item]
    item: Item | None = None


def measure(
    items: Sequence[Item],
    path: Path,
    *,
    code: str,
    workers: int,
    until: float | None,
    on_record: Callable[[dict[str, Any]], None],
    judge: Callable[[Item], dict[str, Any]] = judge,
) -> None:
    """Judge items and append their records to `path`.

    Args:
        items: what is left to judge.
        path: the records file.
        code: digest of the measured code, stored in every record.
        workers: how many processes.
        until: `time.monotonic()` after which no further item is started; None: no limit.
        on_record: called with every record once it is on disk.
        judge: what a worker calls; it must be importable by name.
    """
    context = multiprocessing.get_context("spawn")
    waiting = groups(items)
    running = [_start(context, judge, waiting.pop(0)) for _ in range(min(workers, len(waiting)))]
    try:
        for worker in running:
            _next(worker, waiting, until)
        while busy := [worker for worker in running if worker.item is not None]:
            ready = connection.wait([worker.pipe for worker in busy])
            for worker in [worker for worker in busy if worker.pipe in ready]:
                record = _receive(worker)
                if record.get("unfinished") and not worker.process.is_alive():
                    running[running.index(worker)] = worker = _start(context, judge, worker.queue)  # noqa: PLW2901
                records.append(path, record | {"code": code})
                on_record(record)
                _next(worker, waiting, until)
    finally:
        for worker in running:
            worker.pipe.close()
            worker.process.terminate()
            worker.process.join()


def _start(context: SpawnContext, judge: Callable[[Item], dict[str, Any]], queue: list[Item]) -> _Worker:
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, judge), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours, queue)


def _next(worker: _Worker, waiting: list[list[Item]], until: float | None) -> None:
    """Give the worker its next item, if there is one and there is time."""
    worker.item = None
    if until is not None and time.monotonic() >= until:
        return
    if not worker.queue and waiting:
        worker.queue = waiting.pop(0)
    if worker.queue:
        worker.item = worker.queue.pop(0)
        with contextlib.suppress(OSError):  # it has died: receiving says so
            worker.pipe.send(worker.item)


def _receive(worker: _Worker) -> dict[str, Any]:
    item = worker.item
    assert item is not None  # noqa: S101
    try:
        return worker.pipe.recv()
    except (EOFError, OSError):
        worker.process.join()
        reason = f"nothing came back: the process that ran it ended with exit code {worker.process.exitcode}"
        return broken(item, Verdict.FAIL, reason)


MOST_RESIDENT = 600 * 2**20
"""Bytes of memory from which a worker drops the kernels that it has compiled."""


def _forget_kernels() -> None:
    """Drop compiled kernels, none of which another group uses, where they fill the memory."""
    if "jax" in sys.modules and resident() > MOST_RESIDENT:
        import jax  # noqa: PLC0415  it is imported already

        jax.clear_caches()
        gc.collect()


def resident() -> int:
    """Bytes of memory that this process has; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _work(pipe: connection.Connection, judge: Callable[[Item], dict[str, Any]]) -> None:
    """A worker: items in, records out, until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent decides what an interrupt means.
    group = None
    while True:
        try:
            item = pipe.recv()
            if item.group != group:
                _forget_kernels()
            group = item.group
            pipe.send(judge(item))
        except (EOFError, OSError):
            return

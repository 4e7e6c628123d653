"""Run a plan: one process per core, one record per finished item, nothing lost when killed.

The parent hands one item at a time to each worker over a pipe and appends what comes back; a worker keeps to one group
(one compiled kernel) until it is used up.  A worker whose parent is gone reads the end of its pipe and leaves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import signal
import time
import traceback
from datetime import UTC, datetime
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

from reports.grid import groups
from verify import records
from verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.context import SpawnContext, SpawnProcess
    from pathlib import Path

    from reports.grid import Item
    from verify.subjects.judging import JudgedSubject


def judge(item: Item) -> dict[str, Any]:
    """Run a kernel on an item and judge the result; an exception becomes a record of its own."""
    # Imported here: the parent process plans and draws, and never starts JAX.
    from verify.attention import examine  # noqa: PLC0415
    from verify.backend import BackendUnsoundError  # noqa: PLC0415
    from verify.subjects.judging import judge_subject  # noqa: PLC0415
    from verify.subjects.registry import is_ours, load  # noqa: PLC0415

    try:
        start = time.perf_counter()
        problem = _traced_problems()[item.name] if item.case is None else item.case.build()
        config = (0, 0, 0) if item.case is None else item.case.config
        subject = load(item.subject)
        judged = judge_subject(subject, problem, config=config, interpret=item.interpret, power=True)
        if judged.judgement.verdict is Verdict.SKIPPED and is_ours(item.subject):
            return broken(item, Verdict.FAIL, judged.judgement.reason)
        record = examine.record_of(
            judged,
            name=item.name,
            family=item.family,
            interpret=item.interpret,
            reproduce=item.reproduce,
            subject=item.subject,
        )
        record |= {"subject_version": subject.version, "profile": _profile(judged)}
        if item.case is not None:
            record["case_spec"] = item.case.to_json(sha256=record["sha256"])
        return record | {"seconds": time.perf_counter() - start}
    except BackendUnsoundError as error:
        return broken(item, Verdict.BACKEND_UNSOUND, str(error))
    except Exception as error:  # noqa: BLE001  whatever a kernel raises is its result
        reason = f"nothing came back: {type(error).__name__}: {error}"
        return broken(item, Verdict.FAIL, reason) | {"traceback": traceback.format_exc()}


def _profile(judged: JudgedSubject) -> dict[str, Any]:
    from reports.profile import profile_of  # noqa: PLC0415
    from verify.attention.reference import Reference  # noqa: PLC0415
    from verify.attention.subjects import SubjectResult  # noqa: PLC0415
    from verify.backend import device_model  # noqa: PLC0415
    from verify.subjects.judging import bound_of, promised_rows  # noqa: PLC0415

    result, reference = judged.result, judged.reference
    if not isinstance(result, SubjectResult) or not isinstance(reference, Reference):
        return {}
    bound = bound_of(judged.subject, judged.problem, reference, device_model())
    left_out = ~promised_rows(judged.subject, judged.problem)
    return profile_of(result.out, result.lse, reference, bound, left_out)


def broken(item: Item, verdict: Verdict, reason: str) -> dict[str, Any]:
    """The record of an item that gave no result; a resumed run tries it again."""
    shape: dict[str, Any] = {}
    if item.case is not None:
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
        "features": {} if item.case is None else item.case.features_json(),
        "verdict": verdict.value,
        "reason": reason,
        "measures": {},
        "environment": {"interpret": item.interpret, "date": date},
        "reproduce": item.reproduce,
        "unfinished": True,
    }


@functools.cache
def _traced_problems() -> dict[str, Any]:
    from verify.traces.load import committed_trace, load_trace  # noqa: PLC0415  read by the worker that needs it

    return dict(load_trace(committed_trace()).problems())


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


def _work(pipe: connection.Connection, judge: Callable[[Item], dict[str, Any]]) -> None:
    """A worker: items in, records out, until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent decides what an interrupt means.
    while True:
        try:
            item = pipe.recv()
            pipe.send(judge(item))
        except (EOFError, OSError):
            return

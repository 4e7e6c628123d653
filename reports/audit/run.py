"""Run the audit: every kernel on every input by every rule, one line of JSON per kernel as soon as it is done."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reports.resume import code_digest, write_whole
from verify.faults import FAULTS
from verify.records import append_line, encode_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reports.audit.answers import Asked, Kernel

FORMAT = "flywheel-audit/1"
HERE = Path(__file__).parent
DECIDING = ("answers", "attention", "delta", "inverses", "planted", "rules", "run")
"""Modules that decide what the audit finds; the others only show it."""

OPERATIONS = ("attention", "inverse", "delta rule")
PLANTED_INPUTS_LEFT_OUT = ("ordinary-unequal", "softcap")
"""Inputs of shapes that another input stands for: each shape costs a planted kernel a compilation."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A kernel by its place, so that another process can make it: operation, group and name."""

    operation: str
    group: str
    name: str


def digest() -> str:
    """Digest of what decides the audit: the kernels, the judge with its list of faults, and the audit."""
    h = hashlib.sha256(code_digest().encode())
    for path in (HERE / f"{name}.py" for name in DECIDING):
        h.update(path.name.encode() + b"\0" + path.read_bytes())
    return h.hexdigest()


def tasks() -> list[Task]:
    """Every kernel, the costliest first."""
    left = [Task("attention", "planted", fault.name) for fault in FAULTS]
    return left + [Task(kernel.operation, kernel.group, kernel.name) for kernel in _plain().values()]


def _plain() -> dict[tuple[str, str, str], Kernel]:
    from reports.audit import attention, delta, inverses  # noqa: PLC0415

    kernels = [
        *attention.right_kernels(),
        *attention.arithmetic_kernels(),
        *attention.definition_kernels(),
        *inverses.right_kernels(),
        *inverses.wrong_kernels(),
        *delta.right_kernels(),
        *delta.wrong_kernels(),
    ]
    return {(kernel.operation, kernel.group, kernel.name): kernel for kernel in kernels}


def inputs(operation: str) -> tuple[Asked, ...]:
    """The inputs of an operation."""
    from reports.audit import attention, delta, inverses  # noqa: PLC0415

    return {"attention": attention.inputs, "inverse": inverses.inputs, "delta rule": delta.inputs}[operation]()


def judge(task: Task) -> dict[str, Any]:
    """What one kernel did: for each input that it takes, the rules that accept it and whether its mistake shows."""
    from reports.audit import planted  # noqa: PLC0415

    if task.group != "planted":
        return _judged(_plain()[task.operation, task.group, task.name], inputs(task.operation))
    fault = next(fault for fault in FAULTS if fault.name == task.name)
    chosen = [asked for asked in inputs(task.operation) if asked.name not in PLANTED_INPUTS_LEFT_OUT]
    usual = [planted.usual_answers(asked, _USUAL) for asked in chosen]
    with planted.kernel_with(fault) as package:
        kernel = planted.planted_kernel(fault, package)
        known = dict(zip((asked.name for asked in chosen), usual, strict=True))
        return _judged(dataclasses.replace(kernel, usual=lambda asked: known[asked.name]), chosen)


_USUAL: dict[str, Any] = {}


def _judged(kernel: Kernel, chosen: Sequence[Asked]) -> dict[str, Any]:
    from reports.audit.answers import shows, verdicts, worst_share  # noqa: PLC0415

    found: dict[str, Any] = {}
    for asked in chosen:
        answer = kernel.answer(asked)
        if answer is None:
            continue
        if not kernel.right and not shows(asked, answer, None if kernel.usual is None else kernel.usual(asked)):
            found[asked.name] = {"ordinary": asked.ordinary, "shows": False}
            continue
        accepted = [rule for rule, accepts in verdicts(asked, answer).items() if accepts]
        share = encode_number(worst_share(asked, answer))
        found[asked.name] = {"ordinary": asked.ordinary, "shows": True, "accepted": accepted, "share": share}
    return {
        "operation": kernel.operation,
        "group": kernel.group,
        "name": kernel.name,
        "right": kernel.right,
        "words": kernel.words,
        "inputs": found,
    }


def finished(path: Path, code: str) -> list[dict[str, Any]]:
    """Kernels that an earlier run of the same code has judged."""
    return [body for body in read(path) if body["code"] == code]


def read(path: Path) -> list[dict[str, Any]]:
    """All results of a file, the latest of each kernel; a torn line is none."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            body = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(body, dict) and body.get("format") == FORMAT:
            found[body["operation"], body["group"], body["name"]] = body
    return list(found.values())


def run(
    path: Path, *, workers: int, progress: Callable[[int, int, str], None] = lambda *_: None
) -> list[dict[str, Any]]:
    """Judge what has not been judged yet; a killed run goes on where it stopped.

    Args:
        path: JSON Lines, appended to.
        workers: processes.
        progress: called with how many are done, of how many, and the latest.
    """
    code, todo = digest(), tasks()
    done = {(body["operation"], body["group"], body["name"]) for body in finished(path, code)}
    left = [task for task in todo if (task.operation, task.group, task.name) not in done]
    about = {"format": FORMAT, "code": code, "versions": _versions()}
    context = multiprocessing.get_context("spawn")
    count = len(todo) - len(left)
    progress(count, len(todo), "")
    if left:
        with concurrent.futures.ProcessPoolExecutor(min(workers, len(left)), mp_context=context) as pool:
            futures = {pool.submit(judge, task): task for task in left}
            try:
                for future in concurrent.futures.as_completed(futures):
                    append_line(path, json.dumps(about | future.result(), allow_nan=False))
                    count += 1
                    progress(count, len(todo), futures[future].name)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    kept = finished(path, code)
    write_whole(path, "".join(json.dumps(body, allow_nan=False) + "\n" for body in kept))
    return kept


@functools.cache
def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("jax", "numpy")}


def absences() -> Iterator[tuple[str, str]]:
    """What the audit does not cover here, and why."""
    from reports.audit import inverses  # noqa: PLC0415

    if importlib.util.find_spec(inverses.PEER) is None:
        yield "Peers' inverses in the metric audit", f"{inverses.PEER} is not installed (uv sync --group peers)"

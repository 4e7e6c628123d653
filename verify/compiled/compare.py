"""Ours beside other people's attention kernels, all compiled here: `python -m verify.compiled compare`.

Every time is modelled, in one run, by one compiler for one TPU; what does not install, compile or have a modelled time
is listed with its message.  Results are appended to a file of records as they come, so that a killed run loses nothing
that was finished, and a second run goes on.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verify.compiled.compile import CompileError, Job, compile_many, result_key
from verify.compiled.report import analyse_artifact
from verify.compiled.run import Assume
from verify.compiled.target import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from verify.compiled.compile import Artifact

FORMAT = "flywheel-modelled/1"
PEERS = Path(__file__).with_name("peers.py")

TOKENS = (1024, 2048, 4096, 8192, 16384)
SMOKE_TOKENS = (4096,)
HEADS = {256: (8, 2), 128: (16, 4)}
"""(query heads, key heads) by head_dim: the same work at either."""

SPLASH_BLOCKS = ((1024, 1024, 512), (2048, 1024, 512), (2048, 2048, 512))
"""(block_q, block_kv, block_kv_compute) tried for JAX's splash attention, which ships with placeholder blocks of
128."""
TOKAMAX_TUNED = {"block_q": 2048, "block_kv": 2048, "block_kv_compute": 512, "q_layout": 2}
"""What Tokamax's published v6e tuning chose for causal calls of 8K tokens and more at both head_dims."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One causal forward call, batch 1.

    Attributes:
        head_dim: width of a head.
        tokens: queries, and keys.
        heads: query heads.
        kv_heads: key heads.
    """

    head_dim: int
    tokens: int
    heads: int
    kv_heads: int

    @property
    def flops(self) -> float:
        """Useful FLOP: two products over the visible pairs, diagonal included."""
        return 4.0 * self.heads * self.head_dim * self.tokens * (self.tokens + 1) / 2

    def options(self) -> dict[str, int]:
        """Options of the factories in `verify.compiled.peers`."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A kernel in one configuration.

    Attributes:
        subject: whose kernel.
        configuration: which of its configurations, in words.
        factory: name of its factory in `verify.compiled.peers`.
        options: configuration for the factory.
        package: distribution that holds it; None is this project.
        candidate: one of several configurations of which the best counts.
    """

    subject: str
    configuration: str
    factory: str
    options: dict[str, Any]
    package: str | None
    candidate: bool = False


def contestants(*, smoke: bool) -> list[Contestant]:
    """Everyone who is compared."""
    blocks = SPLASH_BLOCKS[:1] if smoke else SPLASH_BLOCKS
    names = ("block_q", "block_kv", "block_kv_compute")
    return [
        Contestant("flywheel", "default", "flywheel", {}, None),
        Contestant("flywheel-tpu", "its tuned blocks", "flywheel_tpu", {}, "flywheel-tpu"),
        Contestant("tokamax splash", "its heuristic", "tokamax_splash", {}, "tokamax"),
        Contestant("tokamax splash", "its published tuning", "tokamax_splash", TOKAMAX_TUNED, "tokamax"),
        *(
            Contestant(
                "jax splash",
                "x".join(map(str, each)),
                "jax_splash",
                dict(zip(names, each, strict=True)),
                "jax",
                candidate=len(blocks) > 1,
            )
            for each in blocks
        ),
    ]


def problems(*, smoke: bool) -> list[Problem]:
    """What they are compared on."""
    return [
        Problem(head_dim, tokens, *HEADS[head_dim])
        for head_dim in HEADS
        for tokens in (SMOKE_TOKENS if smoke else TOKENS)
    ]


@dataclasses.dataclass(frozen=True)
class Case:
    """One contestant on one problem on one generation."""

    contestant: Contestant
    problem: Problem
    generation: str
    python: str | None

    def job(self) -> Job:
        """Its compilation.  Our kernel is compiled in this environment, peers in theirs."""
        options = self.problem.options() | self.contestant.options
        target = Target(f"{PEERS}:{self.contestant.factory}", options=options, factory=True)
        return Job(target, self.generation, python=self.python if self.contestant.package else None)


def cases(generation: str, python: str | None, *, smoke: bool) -> list[Case]:
    """The whole comparison, ours first, short problems before long ones."""
    return [
        Case(contestant, problem, generation, python)
        for problem in sorted(problems(smoke=smoke), key=lambda each: each.tokens)
        for contestant in contestants(smoke=smoke)
    ]


def record(case: Case, result: Artifact | CompileError, key: str | None) -> dict[str, Any]:
    """What is kept of one case."""
    found: dict[str, Any] = {
        "format": FORMAT,
        "key": key,
        "subject": case.contestant.subject,
        "configuration": case.contestant.configuration,
        "candidate": case.contestant.candidate,
        "generation": case.generation,
        "problem": case.problem.options() | {"causal": True, "batch": 1, "dtype": "bfloat16"},
        "flops": case.problem.flops,
        "seconds": None,
        "error": None,
    }
    if isinstance(result, CompileError):
        return found | {"error": str(result)}
    report = analyse_artifact(result, flops=case.problem.flops, assume=Assume.ZERO)
    kernels = [kernel.seconds for kernel in report.kernels]
    executed = [kernel.executed for kernel in report.kernels if kernel.executed]
    return found | {
        "versions": dict(report.versions),
        "seconds": report.seconds,
        "kernel_seconds": None if None in kernels else sum(time for time in kernels if time is not None),
        "issue_seconds": _total([kernel.issue_seconds for kernel in report.kernels]),
        "share_of_peak": report.share_of_peak,
        "around_seconds": _total([each.seconds for each in report.around if each.role != "prefetch"]),
        "vmem_bytes": max((kernel.vmem_bytes or 0 for kernel in report.kernels), default=None),
        "mxu_busy": executed[0].occupancy["mxu"] if len(executed) == 1 and executed[0].occupancy else None,
        "assumed_values": sum(sum(kernel.assumed.values()) for kernel in report.kernels),
        "compile_seconds": report.compile_seconds,
        "error": report.reasons.get("seconds"),
    }


def _total(parts: Sequence[float | None]) -> float | None:
    return None if None in parts else sum(part for part in parts if part is not None)


def record_key(job: Job) -> str | None:
    """Names a kept compilation and the reader of its schedule; None if it has to be compiled first."""
    kept = result_key(job)
    return None if kept is None else f"{kept}-{_reader()}"


@functools.cache
def _reader() -> str:
    """Digest of this package: another reader may find other figures in the same schedule."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def read_records(path: Path) -> list[dict[str, Any]]:
    """Finished cases of earlier runs; a torn last line is dropped."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            one = json.loads(line)
        except json.JSONDecodeError:
            continue
        if one.get("format") == FORMAT:
            found.append(one)
    return found


def run(
    todo: Sequence[Case],
    path: Path,
    *,
    workers: int | None = None,
    started: Callable[[Job], None] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the record of every case: first those already in the file, then new ones as they are made and appended.

    A case is known by its compilation and the source files behind it, so that an edited kernel is compared anew.
    """
    done = {one["key"]: one for one in read_records(path) if one["key"]}
    left: dict[Job, Case] = {}
    for case in todo:
        try:
            key = record_key(case.job())
        except CompileError as error:
            yield record(case, error, None)
            continue
        if key in done:
            yield done[key]
        else:
            left[case.job()] = case
    path.parent.mkdir(parents=True, exist_ok=True)
    for job, result in compile_many(list(left), workers=workers, started=started):
        one = record(left[job], result, record_key(job))
        with path.open("a") as file:
            file.write(json.dumps(one, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        yield one


def best(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One record for each contestant and problem: of candidates, the fastest."""
    chosen: dict[tuple[Any, ...], dict[str, Any]] = {}
    for one in records:
        name = "best of its blocks" if one["candidate"] else one["configuration"]
        place = (one["subject"], name, one["generation"], *one["problem"].values())
        kept = chosen.get(place)
        if kept is None or _order(one) < _order(kept):
            chosen[place] = one
    return list(chosen.values())


def _order(one: dict[str, Any]) -> float:
    return float("inf") if one["seconds"] is None else one["seconds"]

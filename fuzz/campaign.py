"""A campaign: one worker process per core, rounds of Hypothesis handed out one at a time, everything on disk.

Nothing is decided here about a case; the parent hands out seeds, adds up totals, notices workers that crash or hang,
and stops in time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import hashlib
import multiprocessing
import secrets
import time
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, Protocol

import fuzz.hunts
from fuzz.outcome import with_provenance
from fuzz.store import State, Store, StoreError, code_digest
from fuzz.tally import Tally
from fuzz.worker import EXAMPLES_PER_ROUND, FINISH, STOP, Assignment, Report, Round, work
from verify import records
from verify.attention.problem import BF16
from verify.subjects.registry import FLYWHEEL, load
from verify.subjects.subject import ATTENTION
from verify.verdict import Verdict

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess
    from pathlib import Path

    from fuzz.outcome import Outcome
    from verify.attention.cases import AttentionCase

CASE_SECONDS = 300.0
"""A case without a result after so long counts as a hang; compiling a kernel takes a few seconds."""

STOP_SECONDS = 20.0
MOST_CRASHES = 10
MOST_EMPTY_ROUNDS = 50

assert BF16.itemsize == 2  # noqa: S101  `verify` is imported first: it sets the flags that workers inherit


class CampaignError(RuntimeError):
    """A campaign that cannot go on."""


class Watcher(Protocol):
    """Who is told what happens."""

    def note(self, text: str) -> None:
        """Something worth a line."""
        ...

    def refresh(self, tally: Tally, new: int) -> None:
        """Totals, and how many cases this run has judged; called several times a second."""
        ...


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is asked for.

    Attributes:
        hunt: its name.
        directory: where everything goes; a directory that holds a campaign continues it.
        subject: the kernel, see `verify.subjects.load`.
        buckets: shapes; none means all.
        seed: None: that of the campaign, or a new one.
        minutes: time limit; None: none.
        examples: stop once the directory holds so many judged cases; None: no limit.
        workers: processes.
        case_seconds: when a case counts as a hang.
    """

    hunt: str
    directory: Path
    subject: str = FLYWHEEL
    buckets: tuple[str, ...] = ()
    seed: int | None = None
    minutes: float | None = None
    examples: int | None = None
    workers: int = 1
    case_seconds: float = CASE_SECONDS


@dataclasses.dataclass(eq=False)
class _Worker:
    number: int
    process: SpawnProcess
    token: str
    pipe: Any  # a Connection, or its kin on other systems
    heard: float | None = None
    order: Round | AttentionCase | None = None
    new_cases: int = 0
    reported: int = 0


class Campaign:
    """One run of a plan."""

    def __init__(self, plan: Plan, watcher: Watcher) -> None:
        self.plan, self.watcher = plan, watcher
        self.hunt = fuzz.hunts.find(plan.hunt)
        self.hunt.chosen(plan.buckets)
        if plan.subject != FLYWHEEL:
            load(plan.subject, operation=ATTENTION)
        self.store = Store(plan.directory)
        self.tally = Tally()
        self.new = 0
        self.known: dict[bytes, Outcome] = {}
        self.pending: list[AttentionCase] = []
        self.workers: list[_Worker] = []
        self.announced: set[Path] = set()
        self.crashes = self.empty_rounds = 0
        self.finishing = False
        self.interrupted = False
        self.context = multiprocessing.get_context("spawn")

    def run(self) -> Tally:
        """Hunt until the time is up, enough cases are judged, or an interrupt; returns the totals of the directory.

        Raises:
            StoreError: the directory holds another campaign, or is in use.
            CampaignError: no verdict can be given, or workers crash again and again.
        """
        with self.store.owned():
            self.store.prepare()
            self.state = self._resume()
            try:
                self._hunt()
            except KeyboardInterrupt:
                self.interrupted = True
                self.watcher.note("interrupted; the same command goes on from here")
                self._end(STOP)
            finally:
                self._kill()
                self._save()
        return self.tally

    def _resume(self) -> State:
        plan = self.plan
        code = code_digest(plan.subject)
        state = self.store.load_state()
        if state is None:
            seed = plan.seed if plan.seed is not None else time.time_ns() % 2**32
            state = State(plan.hunt, plan.subject, list(plan.buckets), seed, code)
        for name, asked in (("hunt", plan.hunt), ("subject", plan.subject), ("seed", plan.seed)):
            if asked is not None and asked != getattr(state, name):
                message = (
                    f"{plan.directory} holds a campaign with {name} {getattr(state, name)}, not {asked}: "
                    "choose another directory with --out"
                )
                raise StoreError(message)
        if not self.store.wait_for_orphans():
            self.watcher.note("a worker of an earlier campaign is still busy with its case")
        self.pending = self.store.take_left_over()
        if state.code != code:
            aside = self.store.set_aside()
            self.watcher.note(f"the code has changed: earlier records are now {aside}, saved failures are judged again")
            self.pending += self.store.take_failures()
            state = dataclasses.replace(state, code=code, repeats=0, rejected=0, cpu=0.0, compiling=0.0)
        self.tally, self.known = self.store.known()
        for name in ("repeats", "rejected", "cpu", "compiling"):
            setattr(self.tally, name, getattr(state, name))
        self.store.clear_running()
        if self.tally.cases:
            self.watcher.note(f"{self.tally.cases} cases in {self.store.records} already, going on")
        self.store.save_state(state)
        return state

    def _hunt(self) -> None:
        if self.plan.examples is not None and self.tally.cases >= self.plan.examples and not self.pending:
            return
        until = None if self.plan.minutes is None else time.monotonic() + 60.0 * self.plan.minutes
        self.workers = [self._start(number) for number in range(self.plan.workers)]
        for worker in self.workers:
            self._assign(worker)
        while busy := [worker for worker in self.workers if worker.order is not None]:
            self._receive(busy)
            now = time.monotonic()
            if not self.finishing and until is not None and now >= until:
                self._end(FINISH)
            for worker in busy:
                if worker.order is not None and worker.heard and now - worker.heard > self.plan.case_seconds:
                    self._lost(worker, f"no result within {self.plan.case_seconds:g} seconds", "hang")
            self.watcher.refresh(self.tally, self.new)

    def _receive(self, busy: list[_Worker]) -> None:
        ready = connection.wait([worker.pipe for worker in busy], timeout=0.25)
        for worker in [worker for worker in busy if worker.pipe in ready]:
            try:
                report: Report = worker.pipe.recv()
            except (EOFError, OSError):
                worker.process.join()
                code = worker.process.exitcode or 0
                root = f"crash-signal-{-code}" if code < 0 else f"crash-exit-{code}"
                self._lost(worker, f"the process that ran it ended with exit code {code}", root)
                continue
            self._take(worker, report)

    def _take(self, worker: _Worker, report: Report) -> None:
        if report.broken is not None:
            raise CampaignError(report.broken)
        worker.heard = time.monotonic()
        worker.new_cases += report.tally.cases
        worker.reported += report.tally.cases
        self.new += report.tally.cases
        before = dict(self.tally.elites)
        self.tally.merge(report.tally)
        for key, elite in self.tally.elites.items():
            if elite is not before.get(key):
                today = dt.datetime.now(tz=dt.UTC).date().isoformat()
                found = (
                    f"searched: hunt {self.plan.hunt} against {self.plan.subject}, seed {self.state.seed}, {today}: "
                    f"the largest share of the bound that it found, {key}"
                )
                self.store.save_worst(key, elite, found)
        for root, path, reason in report.failures:
            if path not in self.announced:
                self.announced.add(path)
                self.watcher.note(f"VIOLATION {root}: {path}\n  {reason}")
        if report.done:
            self._done(worker)

    def _done(self, worker: _Worker) -> None:
        if isinstance(worker.order, Round):
            self.empty_rounds = 0 if worker.new_cases else self.empty_rounds + 1
            if self.empty_rounds > MOST_EMPTY_ROUNDS and not self.finishing:
                self.watcher.note(
                    f"{MOST_EMPTY_ROUNDS} rounds in a row drew no new case: the search space is exhausted"
                )
                self.finishing = True
        worker.order = None
        self._save()
        self._assign(worker)
        for idle in self.workers:
            if idle.order is None and idle is not worker:
                self._assign(idle)

    def _assign(self, worker: _Worker) -> None:
        """Give the worker what comes next; it stays idle if there is nothing."""
        order = self._next_order()
        if order is None:
            return
        worker.order, worker.new_cases = order, 0
        if worker.heard is not None:
            worker.heard = time.monotonic()
        with contextlib.suppress(OSError):  # It has died: receiving says so.
            worker.pipe.send(order)

    def _next_order(self) -> Round | AttentionCase | None:
        if self.finishing or self.interrupted:
            return None
        if self.pending:
            return self.pending.pop(0)
        cases = EXAMPLES_PER_ROUND
        if self.plan.examples is not None:
            given = sum(w.order.cases - w.new_cases for w in self.workers if isinstance(w.order, Round))
            cases = min(cases, self.plan.examples - self.tally.cases - max(given, 0))
            if cases <= 0:
                return None
        number = self.state.next_round
        self.state.next_round += 1
        self.store.save_state(self.state)  # Before it starts: no round is ever played twice.
        word = hashlib.sha256(f"{self.state.seed} {number}".encode()).digest()
        return Round(number, int.from_bytes(word[:8], "big"), cases)

    def _start(self, number: int) -> _Worker:
        ours, theirs = self.context.Pipe()
        token = secrets.token_hex(6)
        assignment = Assignment(
            self.plan.directory, number, token, self.plan.hunt, self.plan.buckets, self.plan.subject, self.known
        )
        process = self.context.Process(target=work, args=(theirs, assignment), daemon=True)
        process.start()
        theirs.close()
        return _Worker(number, process, token, ours)

    def _lost(self, worker: _Worker, reason: str, root: str) -> None:
        """A worker has crashed or hangs: its case is a finding; another worker takes its place."""
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()
        unreported, self.known = self.store.unreported(worker.token, worker.reported)
        self.tally.merge(unreported)
        self.new += unreported.cases
        case = self.store.running(worker.number)
        self.store.finish(worker.number)
        if case is None:
            message = f"a worker is gone between two cases: {reason}"
            raise CampaignError(message)
        self.crashes += 1
        record = self._crash_record(case, reason, root)
        self.store.append(record)
        self.new += 1
        self.tally.add(record)
        kept = with_provenance(case, f"searched: hunt {self.plan.hunt}; not shrunk; {reason}")
        path = self.store.save_failure(self.plan.hunt, root, kept, final=False)
        self.watcher.note(f"VIOLATION {root}: {path}\n  {reason}")
        if self.crashes >= MOST_CRASHES:
            message = f"{self.crashes} workers crashed or hung; the cases are in {self.store.failures}"
            raise CampaignError(message)
        self.workers[self.workers.index(worker)] = fresh = self._start(worker.number)
        self._assign(fresh)

    def _crash_record(self, case: AttentionCase, reason: str, root: str) -> dict[str, Any]:
        names = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim")
        spec = case.to_json()
        return {
            "format": records.FORMAT,
            "subject": self.plan.subject,
            "case": case.name,
            "family": "fuzz",
            "sha256": spec["sha256"],
            "shape": dict(zip(names, case.shape, strict=True)) | {"causal": case.causal, "scale": case.scale_value},
            "features": case.features_json(),
            "verdict": Verdict.FAIL.value,
            "reason": f"nothing came back: {reason}",
            "notes": [],
            "measures": {},
            "replays": None,
            "query_blocks": None,
            "replay_map": None,
            "environment": {"date": dt.datetime.now(tz=dt.UTC).isoformat(timespec="seconds")},
            "reproduce": f"python -m fuzz replay {self.store.records}#{spec['sha256'][:16]}",
            "case_spec": spec,
            "root": root,
            "scores": {},
            "cells": [],
        }

    def _end(self, order: str) -> None:
        """Ask the workers to come to an end; after an interrupt, wait for them here."""
        self.finishing = True
        for worker in self.workers:
            with contextlib.suppress(OSError):
                worker.pipe.send(order)
        if order == STOP:
            limit = time.monotonic() + STOP_SECONDS
            while (busy := [w for w in self.workers if w.order is not None]) and time.monotonic() < limit:
                self._receive(busy)

    def _kill(self) -> None:
        """End the workers: idle ones leave by themselves, others are stopped (what they judged is on disk)."""
        for worker in self.workers:
            with contextlib.suppress(OSError):
                worker.pipe.send(None)
                worker.pipe.close()
        for worker in self.workers:
            worker.process.join(2.0 if worker.order is None else 0.0)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()

    def _save(self) -> None:
        for name in ("repeats", "rejected", "cpu", "compiling"):
            setattr(self.state, name, getattr(self.tally, name))
        self.store.save_state(self.state)

"""A campaign: one worker process per core, rounds of Hypothesis handed out one at a time, everything on disk.

Nothing is decided here about a case; the parent hands out seeds, adds up totals, notices workers that crash or hang,
and stops in time.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import secrets
import time
from typing import TYPE_CHECKING, Any, Protocol

import fuzz.hunts
from fuzz.crew import LocalCrew
from fuzz.kinds import CLIMB, EVOLVE, TARGET
from fuzz.search import starts
from fuzz.store import State, Store, StoreError, code_digest
from fuzz.tally import Tally
from fuzz.worker import EXAMPLES_PER_ROUND, FINISH, SLOW_ROUND, STOP, Assignment, Report, Round, seed_of
from verify import records
from verify.attention.problem import BF16
from verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fuzz.case import Case
    from fuzz.crew import Crew
    from fuzz.outcome import Outcome

CASE_SECONDS = 300.0
"""A case without a result after so long counts as a hang; compiling a kernel takes a few seconds."""

CASE_MEGABYTES = 8192.0
"""A worker that holds more counts as out of memory; one with every kernel of every hunt compiled holds about 2000."""

STOP_SECONDS = 20.0
SAVE_SECONDS = 5.0
MOST_CRASHES = 10
MOST_EMPTY_ROUNDS = 50
CYCLE = (TARGET, CLIMB, EVOLVE)
"""Kinds of rounds, which each hunt takes in turn."""

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
        hunts: their names; they take turns.
        directory: where everything goes; a directory that holds a campaign continues it.
        subject: the kernel; None: the default one of each hunt's operation.
        buckets: shapes; none means all.
        seed: None: that of the campaign, or a new one.
        minutes: time limit; None: none.
        examples: stop once the directory holds so many judged cases; None: no limit.
        workers: processes.
        case_seconds: when a case counts as a hang.
        case_megabytes: when a worker counts as out of memory.
        kinds: of rounds, which each hunt takes in turn.
        ray: address of a Ray cluster that the workers run on; None: this machine.
        database: where Hypothesis keeps examples: a folder or `redis://...`; empty: in the directory.
        fail_fast: stop once a failure has been made small.
    """

    hunts: tuple[str, ...]
    directory: Path
    subject: str | None = None
    buckets: tuple[str, ...] = ()
    seed: int | None = None
    minutes: float | None = None
    examples: int | None = None
    workers: int = 1
    case_seconds: float = CASE_SECONDS
    case_megabytes: float = CASE_MEGABYTES
    kinds: tuple[str, ...] = CYCLE
    ray: str | None = None
    database: str = ""
    fail_fast: bool = False


@dataclasses.dataclass(eq=False)
class _Worker:
    number: int
    hand: Any  # a fuzz.crew.Hand
    token: str
    heard: float | None = None
    order: Round | Case | None = None
    new_cases: int = 0
    reported: int = 0
    news: list[tuple[bytes, Outcome]] = dataclasses.field(default_factory=list)


class Campaign:
    """One run of a plan."""

    def __init__(self, plan: Plan, watcher: Watcher) -> None:
        self.plan, self.watcher = plan, watcher
        self.hunts = [fuzz.hunts.find(name) for name in plan.hunts]
        self._check_buckets()
        if plan.subject is not None:
            for operation in {hunt.operation: hunt.attacks for hunt in self.hunts}.values():
                operation.load(plan.subject)
        self.store = Store(plan.directory)
        self.tally = Tally()
        self.new = 0
        self.known: dict[bytes, Outcome] = {}
        self.pending: list[Case] = []
        self.workers: list[_Worker] = []
        self.announced: set[Path] = set()
        self.second_try: set[bytes] = set()
        self.crashes = self.empty_rounds = 0
        self.saved = 0.0
        self.finishing = False
        self.interrupted = False
        self.crew: Crew = self._crew()

    def _check_buckets(self) -> None:
        """Each bucket must be one that some hunt has."""
        for name in self.plan.buckets:
            having = [hunt for hunt in self.hunts if name in hunt.buckets]
            if not having:
                self.hunts[0].chosen((name,))

    def _crew(self) -> Crew:
        if self.plan.ray is None:
            return LocalCrew()
        from fuzz.cluster import RayCrew  # noqa: PLC0415  an optional group

        return RayCrew(self.plan.ray, self.store)

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
            state = State(list(plan.hunts), plan.subject, list(plan.buckets), seed, code)
        for name, asked in (("hunts", list(plan.hunts)), ("subject", plan.subject), ("seed", plan.seed)):
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
                self._check_limits(worker, now)
            self.watcher.refresh(self.tally, self.new)

    def _check_limits(self, worker: _Worker, now: float) -> None:
        if worker.order is None:
            return
        if worker.heard and now - worker.heard > self.plan.case_seconds:
            self._lost(worker, "hang", f"no result within {self.plan.case_seconds:g} seconds")
            return
        held = worker.hand.megabytes()
        if held is not None and held > self.plan.case_megabytes:
            limit = f"the limit is {self.plan.case_megabytes:g} megabytes"
            self._lost(worker, "memory", f"the process that ran it holds {held:.0f} megabytes, {limit}")

    def _receive(self, busy: list[_Worker]) -> None:
        ready = self.crew.ready([worker.hand for worker in busy], 0.25)
        for worker in [worker for worker in busy if worker.hand in ready]:
            try:
                report: Report = worker.hand.receive()
            except EOFError:
                self._lost(worker, *worker.hand.epitaph())
                continue
            self._take(worker, report)

    def _take(self, worker: _Worker, report: Report) -> None:
        if report.broken is not None:
            raise CampaignError(report.broken)
        worker.heard = time.monotonic()
        worker.new_cases += report.tally.cases
        worker.reported += report.tally.cases
        self.new += report.tally.cases
        for other in self.workers:
            if other is not worker:
                other.news += report.judged
        self._merge(report.tally)
        for root, path, reason in report.failures:
            if path not in self.announced:
                self.announced.add(path)
                self.watcher.note(f"VIOLATION {root}: {path}\n  {reason}")
            if self.plan.fail_fast and not self.finishing and self.store.is_small(path):
                self._end(FINISH)
        if report.done:
            self._done(worker)
        if worker.heard - self.saved > SAVE_SECONDS:
            self.saved = worker.heard
            self.store.sync()
            self.store.update_index()

    def _merge(self, tally: Tally) -> None:
        """Add what a worker has counted, and save the cases that are worse than any before."""
        before = dict(self.tally.elites)
        self.tally.merge(tally)
        for key, elite in self.tally.elites.items():
            if elite is not before.get(key):
                today = dt.datetime.now(tz=dt.UTC).date().isoformat()
                subject = self.plan.subject or fuzz.hunts.find(elite.spec["hunt"]).attacks.subject
                found = (
                    f"searched: hunt {elite.spec['hunt']} against {subject}, seed {self.state.seed}, {today}: "
                    f"the largest share of the bound that it found, {key}"
                )
                self.store.save_worst(key, elite, found)

    def _done(self, worker: _Worker) -> None:
        if isinstance(worker.order, Round):
            self.empty_rounds = 0 if worker.new_cases else self.empty_rounds + 1
            if self.empty_rounds > MOST_EMPTY_ROUNDS and not self.finishing:
                self.watcher.note(
                    f"{MOST_EMPTY_ROUNDS} rounds in a row drew no new case: the search space is exhausted, or the "
                    "kernel takes none of it"
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
        if isinstance(order, Round):
            order = dataclasses.replace(order, news=tuple(worker.news))
            worker.news.clear()
        worker.order, worker.new_cases = order, 0
        if worker.heard is not None:
            worker.heard = time.monotonic()
        worker.hand.send(order)

    def _next_order(self) -> Round | Case | None:
        if self.finishing or self.interrupted:
            return None
        if self.pending:
            return self.pending.pop(0)
        number = self.state.next_round
        hunt = self.hunts[number % len(self.hunts)]
        kind = self.plan.kinds[number // len(self.hunts) % len(self.plan.kinds)]
        cases = SLOW_ROUND if kind in hunt.slow_kinds else EXAMPLES_PER_ROUND
        if self.plan.examples is not None:
            given = sum(w.order.cases - w.new_cases for w in self.workers if isinstance(w.order, Round))
            cases = min(cases, self.plan.examples - self.tally.cases - max(given, 0))
            if cases <= 0:
                return None
        self.state.next_round += 1
        self.store.save_state(self.state)  # Before it starts: no round is ever played twice.
        elites = starts(self.tally.archive.get(hunt.name, {}), (self.state.seed, number))
        return Round(number, seed_of(self.state.seed, number), cases, hunt.name, kind, elites)

    def _start(self, number: int) -> _Worker:
        token = secrets.token_hex(6)
        plan = self.plan
        assignment = Assignment(plan.directory, number, token, plan.buckets, plan.subject, self.known, plan.database)
        return _Worker(number, self.crew.hire(assignment), token)

    def _lost(self, worker: _Worker, root: str, reason: str) -> None:
        """A worker has crashed or hangs: its case is a finding; another worker takes its place."""
        worker.hand.end(0.0)
        unreported, self.known = self.store.unreported(worker.token, worker.reported)
        self.tally.merge(unreported)
        self.new += unreported.cases
        case = self.store.running(worker.number)
        self.store.finish(worker.number)
        if case is not None and case.key in self.known:
            self.watcher.note(f"worker {worker.number} is gone; its case had been judged")
        elif case is not None and self.crew.may_vanish and case.key not in self.second_try:
            self.second_try.add(case.key)
            self.pending.append(case)
            self.watcher.note(f"worker {worker.number} is gone; its case gets a second try")
        elif case is not None:
            self._blame(case, root, reason)
        elif not self.crew.may_vanish:
            message = f"a worker is gone between two cases: {reason}"
            raise CampaignError(message)
        else:
            self.watcher.note(f"worker {worker.number} is gone; it had no case in hand")
        self.crashes += 1
        if self.crashes >= MOST_CRASHES:
            message = f"{self.crashes} workers crashed or hung; the cases are in {self.store.failures}"
            raise CampaignError(message)
        self.workers[self.workers.index(worker)] = fresh = self._start(worker.number)
        self._assign(fresh)

    def _blame(self, case: Case, root: str, reason: str) -> None:
        """Record a case that ended or blocked its worker."""
        record = self._crash_record(case, reason, root)
        self.store.append(record)
        self.new += 1
        self.tally.add(record)
        kept = case.renamed(f"searched: hunt {case.hunt}; not shrunk; {reason}")
        path = self.store.save_failure(fuzz.hunts.find(case.hunt).operation, root, kept, final=False)
        self.watcher.note(f"VIOLATION {root}: {path}\n  {reason}")

    def _crash_record(self, case: Case, reason: str, root: str) -> dict[str, Any]:
        spec = case.to_json()
        return {
            "format": records.FORMAT,
            "subject": self.plan.subject or fuzz.hunts.find(case.hunt).attacks.subject,
            "hunt": case.hunt,
            "case": case.name,
            "family": "fuzz",
            "sha256": spec["sha256"],
            "shape": _shape(case),
            "features": {},
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
            worker.hand.send(order)
        if order == STOP:
            limit = time.monotonic() + STOP_SECONDS
            while (busy := [w for w in self.workers if w.order is not None]) and time.monotonic() < limit:
                self._receive(busy)

    def _kill(self) -> None:
        """End the workers: idle ones leave by themselves, others are stopped (what they judged is on disk)."""
        for worker in self.workers:
            worker.hand.end(2.0 if worker.order is None else 0.0)

    def _save(self) -> None:
        for name in ("repeats", "rejected", "cpu", "compiling"):
            setattr(self.state, name, getattr(self.tally, name))
        self.store.sync()
        self.store.save_state(self.state)
        self.store.update_index()


def _shape(case: Case) -> dict[str, Any]:
    """The shape of a case that gave no record, as far as its inputs name one."""
    names = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim")
    shape: Sequence[int] = getattr(case.inputs, "shape", ())
    return dict(zip(names, shape, strict=False)) | {"causal": getattr(case.inputs, "causal", False)}

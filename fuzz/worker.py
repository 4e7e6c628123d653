"""A worker: one spawned, single-threaded process that draws cases, judges them, and shrinks what fails."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import functools
import hashlib
import signal
import time
import warnings
from typing import TYPE_CHECKING, Any

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, given, reject, settings, target
from hypothesis.errors import Unsatisfiable

import fuzz.hunts
from fuzz.case import Case
from fuzz.database import opened
from fuzz.kinds import CLIMB, DRAWN, EVOLVE, RANDOM, TARGET
from fuzz.outcome import Outcome
from fuzz.search import Climb, Evolution, reduced
from fuzz.store import MOST_KNOWN, NOT_SHRUNK, REDUCED, SHRUNK, Store
from fuzz.tally import Tally
from verify.backend import device_model
from verify.memory import forget_kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path

    from hypothesis.database import ExampleDatabase

    from fuzz.hunts import Hunt

FINISH, STOP = "finish", "stop"
"""Orders: draw no further case, but finish shrinking; stop before the next case."""

EXAMPLES_PER_ROUND, SLOW_ROUND = 60, 12
"""Short rounds let hunts take turns, and bound what a killed round leaves undrawn."""

REPORT_SECONDS = 0.25
BACKEND_COMPILES = "/jax/core/compile/backend_compile_duration"
WORTH_KEEPING_SECONDS = 0.2
"""What compiles faster is not read from a file much faster."""

SHRINKING_GRACE_SECONDS = 60.0
VERSIONS = ("python", "jax", "jaxlib", "numpy", "flywheel-verified")


@dataclasses.dataclass(frozen=True)
class Assignment:
    """What a worker works on; `token` marks the records of this process.

    Attributes:
        directory: of the campaign.
        worker: its number.
        token: marks the records of this process.
        buckets: shapes; none means all of each hunt.
        subject: the kernel; None: the default one of each hunt's operation.
        known: outcomes of cases that have been judged.
        database: where Hypothesis keeps examples; empty: in the directory, those of rounds that do not climb.
    """

    directory: Path
    worker: int
    token: str
    buckets: tuple[str, ...]
    subject: str | None
    known: dict[bytes, Outcome]
    database: str = ""


@dataclasses.dataclass(frozen=True)
class Round:
    """One turn of a hunt.

    Attributes:
        number: of the round in the campaign.
        seed: of the draws.
        cases: stop after so many new cases; draws of cases that are known do not count.
        hunt: whose turn it is.
        kind: one of `fuzz.kinds.KINDS`.
        elites: cases to start from, for the kinds that do.
        news: what other workers have judged since the last round.
    """

    number: int
    seed: int
    cases: int
    hunt: str
    kind: str = TARGET
    elites: tuple[dict[str, Any], ...] = ()
    news: tuple[tuple[bytes, Outcome], ...] = ()


@dataclasses.dataclass(frozen=True)
class Report:
    """What a worker has done since its last report.

    Attributes:
        tally: new totals.
        failures: (root, path, reason) of failing cases that were saved.
        done: the order is carried out.
        broken: why no verdict can be given (the backend or an oracle is unsound, the subject cannot be loaded).
        judged: keys and outcomes of the new cases.
    """

    tally: Tally
    failures: tuple[tuple[str, Path, str], ...] = ()
    done: bool = False
    broken: str | None = None
    judged: tuple[tuple[bytes, Outcome], ...] = ()


class Stop(KeyboardInterrupt):
    """Ends a run of Hypothesis in between two cases; as a KeyboardInterrupt it is no failure of the case."""


class Broken(Stop):
    """No verdict can be given: the backend, an oracle or the judge failed, which is no finding about the subject."""


class Violation(Exception):  # noqa: N818  a finding, not an error of ours
    """A case that breaks the contract."""

    def __init__(self, case: Case, outcome: Outcome) -> None:
        super().__init__(outcome.reason)
        self.case, self.outcome = case, outcome


@functools.cache
def violation_type(root: str) -> type[Violation]:
    """One exception type per root, so that Hypothesis does not slip from one finding to another while it shrinks."""
    return type(f"Violation_{root}", (Violation,), {})


def _leaves(group: ExceptionGroup[Violation]) -> Iterator[Violation]:
    """One violation per root: what Hypothesis has shrunk each to."""
    for inner in group.exceptions:
        if isinstance(inner, ExceptionGroup):
            yield from _leaves(inner)
        else:
            yield inner


def work(pipe: Connection, assignment: Assignment) -> None:
    """Entry of a process on this machine: orders in, reports out, until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent decides what an interrupt means.
    store = Store(assignment.directory)
    with store.at_work():
        _share_compiled(store.compiled)
        serve(pipe, lambda: Worker(pipe, assignment))


def serve(pipe: Connection, make: Callable[[], Worker]) -> None:
    """Make a worker and let it serve, wherever it runs; what it cannot go on after is its last report."""
    try:
        worker = make()
        device_model()
        pipe.send(Report(Tally()))  # Ready: from here on a silence is a hang.
        worker.serve()
    except (EOFError, OSError):
        return  # The parent is gone; whatever was judged is on disk.
    except Broken as broken:
        pipe.send(Report(Tally(), broken=str(broken)))
    except Exception as error:  # noqa: BLE001  the parent says so and stops
        pipe.send(Report(Tally(), broken=f"{type(error).__name__}: {error}"))


def seed_of(campaign: int, number: int) -> int:
    """The seed of a round of a campaign."""
    return int.from_bytes(hashlib.sha256(f"{campaign} {number}".encode()).digest()[:8], "big")


class Worker:
    """State of one worker."""

    def __init__(self, pipe: Connection, assignment: Assignment, store: Store | None = None) -> None:
        self.pipe, self.assignment = pipe, assignment
        self.store = Store(assignment.directory) if store is None else store
        self.known = dict(assignment.known)
        self.evaluate, self.load = evaluate, _loaded
        self.tally = Tally()
        self.failures: list[tuple[str, Path, str]] = []
        self.judged: list[tuple[bytes, Outcome]] = []
        self.round = Round(0, 0, 0, "")
        self.new_cases = 0
        self.order: str | None = None
        self.finish_by = float("inf")
        self.shrinking = False
        self.last_report = time.monotonic()
        self.last_cpu = time.process_time()
        self.compiled = False
        _notice_compilation(self)

    def serve(self) -> None:
        """Carry out orders: a case, a round, or None to leave."""
        while (order := self.pipe.recv()) is not None:
            if isinstance(order, str):
                self.order = order
                continue
            self.carry_out(order)

    def carry_out(self, order: Round | Case) -> None:
        """Play a round or judge a case, and report.

        Raises:
            Broken: no verdict can be given.
        """
        try:
            if isinstance(order, Round):
                self._play(order)
            else:
                self._judge_alone(order)
        except Broken:
            raise
        except Stop:
            pass
        self._report(done=True)

    def _judge_alone(self, case: Case) -> None:
        """A case that was cut off, or that failed before the code changed."""
        outcome = self._judge(case)
        if outcome is not None and outcome.root is not None:
            self._keep(case, outcome, NOT_SHRUNK)

    def _play(self, order: Round) -> None:
        self.round, self.shrinking, self.new_cases = order, False, 0
        for key, outcome in order.news:
            self._remember(key, outcome)
        done = {path.name for path in self.store.failures.glob("*.json")}
        hunt = fuzz.hunts.find(order.hunt)
        if order.kind in DRAWN or not order.elites or not hunt.moves:
            self._draw(order, hunt, done)
        else:
            self._search(order, hunt)

    def _draw(self, order: Round, hunt: Hunt, done: set[str]) -> None:
        phases = [Phase.reuse, Phase.generate, Phase.shrink]
        if order.kind != RANDOM:
            phases.append(Phase.target)

        # No deadline and no health checks: the first case of a shape compiles for seconds.
        # `seed` stands inside `settings`, since it would take the database away again.
        @settings(
            max_examples=order.cases + max(order.cases // 4, 40),  # some draws are repeats, which do not count
            deadline=None,
            suppress_health_check=[*HealthCheck],  # pyright: ignore[reportArgumentType]  members of an enum
            database=self._examples(order, hunt),
            phases=phases,
            report_multiple_bugs=True,  # so that every root of the round is shrunk, not the last one alone
            verbosity=Verbosity.quiet,
            print_blob=False,
        )
        @hypothesis.seed(order.seed)
        @given(hunt.cases(self._buckets(hunt)))
        def attack(case: Case) -> None:
            self._attack(case, done)

        try:
            # A subject that refuses every draw of a round leaves it empty, and says nothing against the campaign.
            with contextlib.suppress(Unsatisfiable):
                attack()  # pyright: ignore[reportCallIssue]  `given` supplies the case
        except* Violation as group:
            for violation in _leaves(group):
                self._keep(violation.case, violation.outcome, SHRUNK)

    def _examples(self, order: Round, hunt: Hunt) -> ExampleDatabase | None:
        """Where Hypothesis keeps examples: nowhere in rounds that climb, unless workers share them.

        With a database it compares each case with a front of others in all its scores, for a tenth of the round's
        time.  What fails is in the store all the same, and what comes nearest to failing in the archive.
        """
        if order.kind == TARGET and not self.assignment.database:
            return None
        return opened(self.assignment.database, self.store.examples / hunt.name)

    def _buckets(self, hunt: Hunt) -> tuple[Any, ...]:
        """The shapes that the hunt has of those asked for; all of them if it has none."""
        return hunt.chosen([name for name in self.assignment.buckets if name in hunt.buckets])

    def _search(self, order: Round, hunt: Hunt) -> None:
        """Vary or climb from elites; what fails is made smaller by leaving out and simplifying."""
        moves = hunt.moved()
        assert moves is not None  # noqa: S101  asked before
        starts = [Case.from_json(spec) for spec in order.elites]
        if order.kind == EVOLVE:
            steps = Evolution(moves, starts, order.seed, order.cases)
        else:
            ways = fuzz.hunts.WAYS if order.kind == CLIMB else (order.kind,)
            steps = Climb(moves, starts, order.seed, order.cases, ways)
        for case in steps:
            outcome = self._judge(case)
            steps.learn(outcome)
            if outcome is None or outcome.root is None:
                continue
            if not self.store.is_shrunk(hunt.operation, outcome.root):
                self._keep(case, outcome, NOT_SHRUNK)
                self.shrinking = True
                small, found = reduced(case, outcome, moves, self._judge)
                self._keep(small, found, REDUCED)
                self.shrinking = False

    def _attack(self, case: Case, saved: set[str]) -> None:
        outcome = self._judge(case)
        if outcome is None:
            reject()
        if outcome.root is None:
            if self.round.kind != RANDOM:
                for label, score in outcome.scores.items():
                    target(score, label=label)
            return
        operation = fuzz.hunts.find(case.hunt).operation
        if self.store.failure_path(operation, outcome.root).name in saved and self.store.is_shrunk(
            operation, outcome.root
        ):
            return
        self.shrinking = True
        self._keep(case, outcome, NOT_SHRUNK)
        raise violation_type(outcome.root)(case, outcome)

    def _judge(self, case: Case) -> Outcome | None:
        """Judge a case, unless that was done before; None: outside the domain."""
        self._listen()
        if case.key in self.known:
            self.tally.repeats += 1
            return self.known[case.key]
        hunt = fuzz.hunts.find(case.hunt)
        name = self.assignment.subject or hunt.attacks.subject
        self.store.start(self.assignment.worker, case.to_json(digest=False))
        began, self.compiled = time.process_time(), False
        try:
            reproduce = f"python -m fuzz replay {self.store.records}#{case.sha256[:16]}"
            if name != hunt.attacks.subject:
                reproduce += f" --subject {name}"
            subject = self.load(hunt.operation, name)
            record = self.evaluate(case, subject=subject, name=name, reproduce=reproduce)
        except Exception as error:
            # Hypothesis would take it for a failing case, and shrink it.
            message = f"{type(error).__name__}: {error} (while judging {case.name!r} of hunt {case.hunt})"
            raise Broken(message) from error
        if self.compiled:
            self.tally.compiling += time.process_time() - began
            forget_kernels()
        outcome = None
        if record is None:
            self.tally.rejected += 1
        else:
            record |= {"process": self.assignment.token, "kind": self.round.kind}
            self.store.append(record)
            self.tally.add(record)
            self.new_cases += 1
            outcome = Outcome.of(record)
            self._remember(case.key, outcome)
            self.judged.append((case.key, outcome))
        self.store.finish(self.assignment.worker)
        return outcome

    def _remember(self, key: bytes, outcome: Outcome) -> None:
        self.known[key] = outcome
        if len(self.known) > MOST_KNOWN:
            self.known.pop(next(iter(self.known)))

    def _keep(self, case: Case, outcome: Outcome, how: str) -> None:
        assert outcome.root is not None  # noqa: S101  called for failures
        words = how
        if how != NOT_SHRUNK and self._fails_again(case) != outcome.root:
            words += "; it failed once and did not fail the same way when run again"
        kept = case.renamed(f"{self._provenance(case)}; {words}; {outcome.reason}")
        operation = fuzz.hunts.find(case.hunt).operation
        path = self.store.save_failure(operation, outcome.root, kept, final=how != NOT_SHRUNK)
        self.failures.append((outcome.root, path, outcome.reason))

    def _fails_again(self, case: Case) -> str | None:
        hunt = fuzz.hunts.find(case.hunt)
        name = self.assignment.subject or hunt.attacks.subject
        record = self.evaluate(case, subject=self.load(hunt.operation, name), name=name, reproduce="")
        return None if record is None else record["root"]

    def _provenance(self, case: Case) -> str:
        from verify.attention.examine import environment  # noqa: PLC0415  starts JAX

        versions = environment("fast")["versions"]
        date = dt.datetime.now(tz=dt.UTC).date().isoformat()
        named = ", ".join(f"{name} {versions[name]}" for name in VERSIONS)
        subject = self.assignment.subject or fuzz.hunts.find(case.hunt).attacks.subject
        return (
            f"searched: hunt {case.hunt} against {subject}, "
            f"seed {self.round.seed}, round {self.round.number} ({self.round.kind}), {date}; {named}"
        )

    def _listen(self) -> None:
        """Report now and then, and obey orders between two cases."""
        now = time.monotonic()
        try:
            if now - self.last_report > REPORT_SECONDS:
                self._report()
            while self.pipe.poll():
                self.order = self.pipe.recv()
                if self.order == FINISH:
                    self.finish_by = now + SHRINKING_GRACE_SECONDS
        except (EOFError, OSError):
            self.order = STOP  # The parent is gone.
        used_up = self.new_cases >= self.round.cases > 0 and not self.shrinking
        if self.order == STOP or (self.order == FINISH and not (self.shrinking and now < self.finish_by)) or used_up:
            raise Stop

    def _report(self, *, done: bool = False) -> None:
        cpu = time.process_time()
        self.tally.cpu += cpu - self.last_cpu
        self.store.sync()
        self.pipe.send(Report(self.tally, tuple(self.failures), done=done, judged=tuple(self.judged)))
        self.tally, self.failures, self.judged = Tally(), [], []
        self.last_cpu, self.last_report = cpu, time.monotonic()


def evaluate(case: Case, **who: Any) -> dict[str, Any] | None:  # noqa: ANN401  as the hunt's evaluator
    """Judge a case by its hunt."""
    return _evaluator(case.hunt)(case, **who)


@functools.cache
def _evaluator(hunt: str) -> Any:  # noqa: ANN401  the judge of a hunt's cases
    return fuzz.hunts.find(hunt).evaluate()


@functools.cache
def _loaded(operation: str, name: str) -> Any:  # noqa: ANN401  a subject of the operation
    return fuzz.hunts.OPERATIONS[operation].load(name)


def _share_compiled(directory: Path) -> None:
    """Let JAX keep compiled kernels where other workers, and a resumed campaign, find them.

    The key is of the program, the flags and the versions.  JAX writes in place: an entry that was torn by a kill cannot
    be decompressed, and is compiled again by each worker that meets it.
    """
    import jax  # noqa: PLC0415  slow, and only workers need it

    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_KEEPING_SECONDS)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    warnings.filterwarnings("ignore", message="Error reading persistent compilation cache entry")


def _notice_compilation(worker: Worker) -> None:
    """Let JAX say when it compiles: the CPU time of such a case is no part of the rate."""
    import jax  # noqa: PLC0415  slow, and only workers need it

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        del duration_secs
        worker.compiled |= event == BACKEND_COMPILES

    jax.monitoring.register_event_duration_secs_listener(listen)

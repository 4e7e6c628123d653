"""A worker: one spawned, single-threaded process that draws cases, judges them, and shrinks what fails."""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import pkgutil
import signal
import time
from typing import TYPE_CHECKING, Any

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, given, reject, settings, target
from hypothesis.database import DirectoryBasedExampleDatabase

import fuzz.hunts
from fuzz.outcome import Outcome, case_key, with_provenance
from fuzz.store import MOST_KNOWN, NOT_SHRUNK, SHRUNK, Store
from fuzz.tally import Tally
from verify.attention.cases import digest
from verify.backend import device_model
from verify.subjects.registry import FLYWHEEL, load
from verify.subjects.subject import ATTENTION

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

    from verify.attention.cases import AttentionCase

FINISH, STOP = "finish", "stop"
"""Orders: draw no further case, but finish shrinking; stop before the next case."""

EXAMPLES_PER_ROUND = 250
"""Half of a round is random, half climbs; short rounds also bound what a killed round leaves undrawn."""

REPORT_SECONDS = 0.25
SHRINKING_GRACE_SECONDS = 60.0
VERSIONS = ("python", "jax", "jaxlib", "numpy", "flywheel-verified")


@dataclasses.dataclass(frozen=True)
class Assignment:
    """What a worker works on; `token` marks the records of this process."""

    directory: Path
    worker: int
    token: str
    hunt: str
    buckets: tuple[str, ...]
    subject: str
    known: dict[bytes, Outcome]


@dataclasses.dataclass(frozen=True)
class Round:
    """One run of Hypothesis.

    Attributes:
        number: of the round in the campaign.
        seed: of the draws.
        cases: stop after so many new cases; draws of cases that are known do not count.
    """

    number: int
    seed: int
    cases: int


@dataclasses.dataclass(frozen=True)
class Report:
    """What a worker has done since its last report.

    Attributes:
        tally: new totals.
        failures: (root, path, reason) of failing cases that were saved.
        done: the order is carried out.
        broken: why no verdict can be given (the backend or an oracle is unsound, the subject cannot be loaded).
    """

    tally: Tally
    failures: tuple[tuple[str, Path, str], ...] = ()
    done: bool = False
    broken: str | None = None


class Stop(KeyboardInterrupt):
    """Ends a run of Hypothesis in between two cases; as a KeyboardInterrupt it is no failure of the case."""


class Broken(Stop):
    """No verdict can be given: the backend, an oracle or the judge failed, which is no finding about the subject."""


class Violation(Exception):  # noqa: N818  a finding, not an error of ours
    """A case that breaks the contract."""

    def __init__(self, case: AttentionCase, outcome: Outcome) -> None:
        super().__init__(outcome.reason)
        self.case, self.outcome = case, outcome


@functools.cache
def violation_type(root: str) -> type[Violation]:
    """One exception type per root, so that Hypothesis does not slip from one finding to another while it shrinks."""
    return type(f"Violation_{root}", (Violation,), {})


def work(pipe: Connection, assignment: Assignment) -> None:
    """Entry of the process: orders in, reports out, until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent decides what an interrupt means.
    try:
        with Store(assignment.directory).at_work():
            worker = Worker(pipe, assignment)
            device_model()
            pipe.send(Report(Tally()))  # Ready: from here on a silence is a hang.
            worker.serve()
    except (EOFError, OSError):
        return  # The parent is gone; whatever was judged is on disk.
    except Broken as broken:
        pipe.send(Report(Tally(), broken=str(broken)))
    except Exception as error:  # noqa: BLE001  the parent says so and stops
        pipe.send(Report(Tally(), broken=f"{type(error).__name__}: {error}"))


class Worker:
    """State of one worker."""

    def __init__(self, pipe: Connection, assignment: Assignment) -> None:
        self.pipe, self.assignment = pipe, assignment
        self.store = Store(assignment.directory)
        self.hunt = fuzz.hunts.find(assignment.hunt)
        self.subject = load(assignment.subject, operation=ATTENTION)
        self.evaluate = pkgutil.resolve_name(self.hunt.evaluator)
        self.known = dict(assignment.known)
        self.compiled: set[tuple[Any, ...]] = set()
        self.tally = Tally()
        self.failures: list[tuple[str, Path, str]] = []
        self.round = Round(0, 0, 0)
        self.new_cases = 0
        self.order: str | None = None
        self.finish_by = float("inf")
        self.shrinking = False
        self.last_report = time.monotonic()
        self.last_cpu = time.process_time()

    def serve(self) -> None:
        """Carry out orders: a case, a round, or None to leave."""
        while (order := self.pipe.recv()) is not None:
            if isinstance(order, str):
                self.order = order
                continue
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

    def _judge_alone(self, case: AttentionCase) -> None:
        """A case that was cut off, or that failed before the code changed."""
        outcome = self._judge(case)
        if outcome is not None and outcome.root is not None:
            self._keep(case, outcome, final=False)

    def _play(self, order: Round) -> None:
        self.round, self.shrinking, self.new_cases = order, False, 0
        done = {path.name for path in self.store.failures.glob("*.json")}

        # No deadline and no health checks: the first case of a shape compiles for seconds.
        # `seed` stands inside `settings`, since it would take the database away again.
        @settings(
            max_examples=EXAMPLES_PER_ROUND,
            deadline=None,
            suppress_health_check=[*HealthCheck],  # pyright: ignore[reportArgumentType]  members of an enum
            database=DirectoryBasedExampleDatabase(self.store.examples),
            phases=(Phase.reuse, Phase.generate, Phase.target, Phase.shrink),
            report_multiple_bugs=False,
            verbosity=Verbosity.quiet,
            print_blob=False,
        )
        @hypothesis.seed(order.seed)
        @given(self.hunt.cases(self.hunt.chosen(self.assignment.buckets)))
        def attack(case: AttentionCase) -> None:
            self._attack(case, done)

        try:
            attack()  # pyright: ignore[reportCallIssue]  `given` supplies the case
        except Violation as violation:
            self._keep(violation.case, violation.outcome, final=True)

    def _attack(self, case: AttentionCase, saved: set[str]) -> None:
        outcome = self._judge(case)
        if outcome is None:
            reject()
        if outcome.root is None:
            for label, score in outcome.scores.items():
                target(score, label=label)
            return
        if self.store.failure_path(self.hunt.name, outcome.root).name in saved and self.store.is_shrunk(
            self.hunt.name, outcome.root
        ):
            return
        self.shrinking = True
        self._keep(case, outcome, final=False)
        raise violation_type(outcome.root)(case, outcome)

    def _judge(self, case: AttentionCase) -> Outcome | None:
        """Judge a case, unless that was done before; None: outside the domain."""
        self._listen()
        spec = case.to_json(sha256="")
        key = case_key(spec)
        if key in self.known:
            self.tally.repeats += 1
            return self.known[key]
        problem = case.build()
        spec["sha256"] = digest(problem)
        self.store.start(self.assignment.worker, spec)
        reproduce = f"python -m fuzz replay {self.store.records}#{spec['sha256'][:16]}"
        if self.assignment.subject != FLYWHEEL:
            reproduce += f" --subject {self.assignment.subject}"
        kernel = (case.shape, case.causal, case.scale, case.config)
        began = time.process_time()
        try:
            record = self.evaluate(
                case, problem, spec, subject=self.subject, name=self.assignment.subject, reproduce=reproduce
            )
        except Exception as error:
            # Hypothesis would take it for a failing case, and shrink it.
            message = f"{type(error).__name__}: {error} (while judging {case.name!r})"
            raise Broken(message) from error
        if kernel not in self.compiled:
            self.compiled.add(kernel)
            self.tally.compiling += time.process_time() - began
        outcome = None
        if record is None:
            self.tally.rejected += 1
        else:
            self.store.append(record | {"process": self.assignment.token})
            self.tally.add(record)
            self.new_cases += 1
            outcome = Outcome.of(record)
            self._remember(key, outcome)
        self.store.finish(self.assignment.worker)
        return outcome

    def _remember(self, key: bytes, outcome: Outcome) -> None:
        self.known[key] = outcome
        if len(self.known) > MOST_KNOWN:
            self.known.pop(next(iter(self.known)))

    def _keep(self, case: AttentionCase, outcome: Outcome, *, final: bool) -> None:
        assert outcome.root is not None  # noqa: S101  called for failures
        words = SHRUNK if final else NOT_SHRUNK
        if final and self._fails_again(case) != outcome.root:
            words += "; it failed once and did not fail the same way when run again"
        kept = with_provenance(case, f"{self._provenance()}; {words}; {outcome.reason}")
        path = self.store.save_failure(self.hunt.name, outcome.root, kept, final=final)
        self.failures.append((outcome.root, path, outcome.reason))

    def _fails_again(self, case: AttentionCase) -> str | None:
        record = self.evaluate(case, case.build(), {}, subject=self.subject, name=self.assignment.subject, reproduce="")
        return None if record is None else record["root"]

    def _provenance(self) -> str:
        from verify.attention.examine import environment  # noqa: PLC0415  starts JAX

        versions = environment("fast")["versions"]
        date = dt.datetime.now(tz=dt.UTC).date().isoformat()
        named = ", ".join(f"{name} {versions[name]}" for name in VERSIONS)
        return (
            f"searched: hunt {self.hunt.name} against {self.assignment.subject}, seed {self.round.seed}, "
            f"round {self.round.number}, {date}; {named}"
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
        self.pipe.send(Report(self.tally, tuple(self.failures), done=done))
        self.tally, self.failures = Tally(), []
        self.last_cpu, self.last_report = cpu, time.monotonic()

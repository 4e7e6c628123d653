"""Workers on a Ray cluster: Ray starts them, ships the code, moves orders and reports, and notices who is gone.

Records travel in a Ray queue and are written by the campaign's own machine, so that its directory holds everything.
"""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuzz.store import Store
from fuzz.worker import Report, Worker, serve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fuzz.case import Case
    from fuzz.worker import Assignment

ROOT = Path(__file__).resolve().parent.parent
LEFT_BEHIND = (".git", ".venv", "out", "dist", "docs", "**/__pycache__", "verify/compiled/data")
"""Not shipped to the nodes."""

POLL_SECONDS = 0.1
CANCEL_SECONDS = 10.0


class ClusterError(RuntimeError):
    """A cluster that cannot be used."""


def _ray() -> Any:  # noqa: ANN401  the module
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        message = f"--ray needs Ray (uv sync --group cluster): {error}"
        raise ClusterError(message) from error


class RemoteStore(Store):
    """A worker's view of the campaign's directory from another machine: what it would write, it sends."""

    def __init__(self, scratch: Path, reports: Any, remote: Path) -> None:  # noqa: ANN401  a Ray queue
        super().__init__(scratch)
        self.prepare()
        self.records = remote / self.records.name
        self.sent = reports

    def append(self, record: dict[str, Any]) -> None:
        """Send a record; it is in the queue when this returns."""
        self.sent.put(("append", record))

    def start(self, worker: int, spec: dict[str, Any]) -> None:
        """Say which case is about to run."""
        self.sent.put(("start", worker, spec))

    def finish(self, worker: int) -> None:
        """Say that it has been judged."""
        self.sent.put(("finish", worker))

    def save_failure(self, operation: str, root: str, case: Case, *, final: bool) -> Path:
        """Send a failing case, and keep it here so that a smaller one is known by its size."""
        self.sent.put(("failure", operation, root, case.to_json(), case.provenance, final))
        return super().save_failure(operation, root, case, final=final)


class _RemotePipe:
    """The worker's end: orders from one queue, reports into another."""

    def __init__(self, orders: Any, reports: Any) -> None:  # noqa: ANN401  Ray queues
        self.orders, self.reports = orders, reports

    def send(self, report: Report) -> None:
        self.reports.put(("report", report))

    def poll(self) -> bool:
        return not self.orders.empty()

    def recv(self) -> Any:  # noqa: ANN401  any order
        return self.orders.get()


def _work(orders: Any, reports: Any, assignment: Assignment) -> None:  # noqa: ANN401  Ray queues
    """What runs on a node."""
    import tempfile  # noqa: PLC0415  needed there alone

    with tempfile.TemporaryDirectory() as scratch:
        store = RemoteStore(Path(scratch), reports, assignment.directory)
        pipe = _RemotePipe(orders, reports)
        serve(pipe, lambda: Worker(pipe, assignment, store))  # type: ignore[arg-type]  all of a pipe that is used


class RayHand:
    """A `fuzz.crew.Hand`: a Ray task and its queues."""

    def __init__(self, task: Any, orders: Any, reports: Any, store: Store) -> None:  # noqa: ANN401
        self.task, self.orders, self.reports, self.store = task, orders, reports, store
        self.waiting: list[Report] = []
        self.gone = ""

    def send(self, order: Any) -> None:  # noqa: ANN401
        """See `fuzz.crew.Hand`."""
        self.orders.put(order)

    def look(self) -> bool:
        """Take what has come: write what is to be written; whether a report, or an end, can be received."""
        ray = _ray()
        done, _ = ray.wait([self.task], timeout=0)
        while (count := self.reports.qsize()) > 0:
            for kind, *rest in self.reports.get_nowait_batch(count):
                self._take(kind, rest)
        if done and not self.gone:
            try:
                ray.get(self.task)
                self.gone = "it ended"
            except ray.exceptions.RayError as error:
                self.gone = f"Ray lost it: {type(error).__name__}"
        return bool(self.waiting or self.gone)

    def _take(self, kind: str, rest: list[Any]) -> None:
        if kind == "report":
            self.waiting.append(rest[0])
        elif kind == "append":
            self.store.append(rest[0])
        elif kind == "start":
            self.store.start(rest[0], rest[1])
        elif kind == "finish":
            self.store.finish(rest[0])
        else:
            from fuzz.case import Case  # noqa: PLC0415  in the order of the module graph

            operation, root, body, provenance, final = rest
            self.store.save_failure(operation, root, Case.from_json(body).renamed(provenance), final=final)

    def receive(self) -> Report:
        """See `fuzz.crew.Hand`."""
        if not self.waiting:
            raise EOFError
        return self.waiting.pop(0)

    def epitaph(self) -> tuple[str, str]:
        """See `fuzz.crew.Hand`."""
        return "crash", f"the worker that ran it is gone ({self.gone}), and so was the one before"

    def megabytes(self) -> float | None:
        """Ray's own memory monitor watches the nodes."""
        return None

    def end(self, patience: float) -> None:
        """See `fuzz.crew.Hand`."""
        ray = _ray()
        self.orders.put(None)
        done, _ = ray.wait([self.task], timeout=patience)
        if not done:
            ray.cancel(self.task, force=True)
            ray.wait([self.task], timeout=CANCEL_SECONDS)
        self.look()  # Whatever it had sent is written, before the queue goes.
        for queue in (self.orders, self.reports):
            queue.shutdown(force=True)


class RayCrew:
    """A `fuzz.crew.Crew` on the cluster at an address (`auto`, `host:port`, `ray://...`, or `local`)."""

    may_vanish = True

    def __init__(self, address: str, store: Store) -> None:
        self.ray, self.store = _ray(), store
        environment = {
            "working_dir": str(ROOT),
            "excludes": list(LEFT_BEHIND),
            "env_vars": {"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"},
        }
        if not self.ray.is_initialized():
            of_our_own: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
            self.ray.init(address, runtime_env=environment, log_to_driver=False, configure_logging=False, **of_our_own)

    def hire(self, assignment: Assignment) -> RayHand:
        """See `fuzz.crew.Crew`."""
        new_queue: Any = importlib.import_module("ray.util.queue").Queue
        light = {"num_cpus": 0}
        orders, reports = new_queue(actor_options=light), new_queue(actor_options=light)
        # A second try is the campaign's business, not Ray's.  Spread: one per node first.
        task = self.ray.remote(num_cpus=1, max_retries=0, scheduling_strategy="SPREAD")(_work)
        return RayHand(task.remote(orders, reports, assignment), orders, reports, self.store)

    def ready(self, hands: Sequence[RayHand], seconds: float) -> list[RayHand]:
        """See `fuzz.crew.Crew`."""
        until = time.monotonic() + seconds
        while not (found := [hand for hand in hands if hand.look()]) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        return found

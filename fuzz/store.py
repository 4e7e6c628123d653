"""The directory of a campaign.

    campaign.json     hunts, subject, seed, next round, totals that no record holds
    records.jsonl     one record per judged case (`verify.records`), appended as soon as it is judged
    index.sqlite      the same by case, hunt and root (`fuzz.index`); made again from the records if it is lost
    running/          the case that each worker is running: what is left there was cut off, and is run first next time
    failures/         one minimal case per root, `python -m fuzz replay FILE` judges it again
    worst/            the case with the largest share of the bound per class
    examples/         Hypothesis' database, of rounds that draw without climbing
    compiled/         JAX's cache of compiled kernels, which workers share

Everything is written so that a process may be killed at any moment: whole files appear by renaming, and a record is
written, whole, before the next case is begun.  Records are synced to the disk with each report, a few times a second: a
loss of power, and nothing less, may cost the cases of that moment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import fcntl
import hashlib
import importlib.util
import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuzz.case import Case, case_key, load_case, save_case
from fuzz.index import Index
from fuzz.outcome import Outcome
from fuzz.tally import Elite, Tally
from verify import records
from verify.attention.cases import CaseError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

FORMAT = "flywheel-campaign/2"
SHRUNK, REDUCED = "shrunk by Hypothesis", "made smaller by leaving out"
NOT_SHRUNK = "not yet shrunk"
MOST_KNOWN = 100_000
"""Judged cases that a resumed campaign remembers, to run none of them twice."""

_ROOT = Path(__file__).resolve().parent.parent


class StoreError(ValueError):
    """A campaign directory that cannot be used as asked."""


@dataclasses.dataclass
class State:
    """What campaign.json holds."""

    hunts: list[str]
    subject: str | None
    buckets: list[str]
    seed: int
    code: str
    next_round: int = 0
    repeats: int = 0
    rejected: int = 0
    cpu: float = 0.0
    compiling: float = 0.0
    format: str = FORMAT


class Store:
    """Paths and files of one campaign."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.records = directory / "records.jsonl"
        self.failures = directory / "failures"
        self.worst = directory / "worst"
        self.examples = directory / "examples"
        self.compiled = directory / "compiled"
        self.index = directory / "index.sqlite"
        self._running = directory / "running"
        self._state = directory / "campaign.json"
        self._unsynced = False

    def prepare(self) -> None:
        """Make the directories."""
        for path in (self.directory, self.failures, self.worst, self._running):
            path.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def owned(self) -> Generator[None]:
        """Keep the directory to one campaign at a time.

        Raises:
            StoreError: another campaign is running in it.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "campaign.lock").open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = f"{self.directory}: another campaign is running here"
                raise StoreError(message) from None
            yield

    @contextlib.contextmanager
    def at_work(self) -> Generator[None]:
        """Held by a worker as long as it lives."""
        with (self.directory / "workers.lock").open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH)
            yield

    def wait_for_orphans(self, seconds: float = 10.0) -> bool:
        """Wait until the workers of a killed campaign have noticed; False if one is still there."""
        until = time.monotonic() + seconds
        with (self.directory / "workers.lock").open("w") as handle:
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() >= until:
                        return False
                    time.sleep(0.1)
                else:
                    return True

    def load_state(self) -> State | None:
        """The campaign that the directory holds, if any.

        Raises:
            StoreError: campaign.json is not one of ours.
        """
        if not self._state.exists():
            return None
        try:
            return State(**json.loads(self._state.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            message = f"{self._state}: not a {FORMAT}: {error}"
            raise StoreError(message) from error

    def save_state(self, state: State) -> None:
        """Write campaign.json, whole."""
        partial = self._state.with_suffix(".partial")
        partial.write_text(json.dumps(dataclasses.asdict(state), indent=1) + "\n", encoding="utf-8")
        partial.replace(self._state)

    def append(self, record: dict[str, Any]) -> None:
        """Add a record; a line that a killed process has left torn is cut off first."""
        records.append(self.records, record, synced=False)
        self._unsynced = True

    def sync(self) -> None:
        """Bring the records that were added here to the disk."""
        if self._unsynced:
            records.sync(self.records)
            self._unsynced = False

    def known(self) -> tuple[Tally, dict[bytes, Outcome]]:
        """Totals of the records, and what the latest of them have shown, by `case_key`.

        Raises:
            verify.records.RecordError: a line that is no record.
        """
        tally, outcomes = Tally(), dict[bytes, Outcome]()
        if self.records.exists():
            for record in records.read(self.records):
                tally.add(record)
                _learn(outcomes, record)
        return tally, outcomes

    def update_index(self) -> None:
        """Take what has been appended since the last time into the index."""
        with Index(self.index) as index:
            index.catch_up(self.records)

    def unreported(self, token: str, reported: int) -> tuple[Tally, dict[bytes, Outcome]]:
        """What a process that is gone has judged beyond the cases it had reported, and what is known by now."""
        tally, outcomes = Tally(), dict[bytes, Outcome]()
        seen = 0
        if self.records.exists():
            for record in records.read(self.records):
                _learn(outcomes, record)
                seen += (mine := record.get("process") == token)
                if mine and seen > reported:
                    tally.add(record)
        return tally, outcomes

    def set_aside(self) -> Path | None:
        """Rename the records, since the code that they are about has changed."""
        if not self.records.exists():
            return None
        stamp = dt.datetime.now(tz=dt.UTC).strftime("%Y%m%dT%H%M%S.%f")
        aside = self.directory / f"records-until-{stamp}.jsonl"
        self.records.rename(aside)
        self.index.unlink(missing_ok=True)
        return aside

    def start(self, worker: int, spec: dict[str, Any]) -> None:
        """Note the case that a worker is about to run."""
        (self._running / f"worker-{worker}.json").write_text(json.dumps(spec), encoding="utf-8")

    def finish(self, worker: int) -> None:
        """The case has been judged, and its record written."""
        (self._running / f"worker-{worker}.json").unlink(missing_ok=True)

    def running(self, worker: int) -> Case | None:
        """The case that a worker was running when it ended."""
        return _case_or_none(self._running / f"worker-{worker}.json")

    def take_left_over(self) -> list[Case]:
        """Cases that were running when an earlier campaign was cut off."""
        found = [_case_or_none(path) for path in sorted(self._running.glob("*.json"))]
        return [case for case in found if case is not None]

    def clear_running(self) -> None:
        """Forget the cases of workers that are gone."""
        for path in self._running.glob("*.json"):
            path.unlink()

    def failure_path(self, operation: str, root: str) -> Path:
        """Where the minimal case of a root lies; hunts of one operation share it."""
        return self.failures / f"{operation}-{re.sub(r'[^A-Za-z0-9.-]+', '-', root)}.json"

    def is_shrunk(self, operation: str, root: str) -> bool:
        """Whether a root has its minimal case already."""
        return self.is_small(self.failure_path(operation, root))

    def is_small(self, path: Path) -> bool:
        """Whether a saved case has been made small."""
        return path.exists() and NOT_SHRUNK not in load_case(path).provenance

    def take_failures(self) -> list[Case]:
        """Set every saved failure aside, to be judged again: what fails no more stays in failures/earlier."""
        earlier = self.failures / "earlier"
        found: list[Case] = []
        for path in sorted(self.failures.glob("*.json")):
            case = _case_or_none(path)
            if case is not None:
                found.append(case)
            earlier.mkdir(exist_ok=True)
            path.replace(earlier / path.name)
        return found

    def save_failure(self, operation: str, root: str, case: Case, *, final: bool) -> Path:
        """Save a failing case: a shrunk one replaces one that is not, otherwise the smaller one stays."""
        path = self.failure_path(operation, root)
        better = not path.exists() or case.size < load_case(path).size
        if better or (final and not self.is_shrunk(operation, root)):
            save_case(case, path)
        return path

    def save_worst(self, key: str, elite: Elite, provenance: str) -> None:
        """Save the worst case of a class."""
        path = self.worst / f"{key.replace(' ', '-')}.json"
        partial = path.with_suffix(".partial")
        inputs = elite.spec["inputs"] | {"provenance": provenance}
        partial.write_text(json.dumps(elite.spec | {"inputs": inputs}, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)


def _learn(outcomes: dict[bytes, Outcome], record: dict[str, Any]) -> None:
    outcomes[case_key(record["case_spec"])] = Outcome.of(record)
    if len(outcomes) > MOST_KNOWN:
        outcomes.pop(next(iter(outcomes)))


def code_digest(subject: str | None, rooms: Sequence[str] = ("flywheel", "verify")) -> str:
    """SHA-256 of the sources on which a verdict depends: the kernels, the judge, and a user's own module."""
    paths = [path for room in rooms for path in (_ROOT / room).rglob("*.py")]
    paths = [path for path in paths if "tests" not in path.relative_to(_ROOT).parts]
    module = (subject or "").partition(":")[0]
    if ":" in (subject or "") and (spec := importlib.util.find_spec(module)) and spec.origin:
        paths.append(Path(spec.origin))
    h = hashlib.sha256()
    for path in sorted(paths):
        h.update(path.name.encode() + b"\0" + path.read_bytes())
    return h.hexdigest()


def _case_or_none(path: Path) -> Case | None:
    """A case file, or None if it was torn (the case had not been started then)."""
    try:
        return load_case(path)
    except CaseError:
        return None

"""The files of a site.

    index.html            the latest verdict, trends, the latest runs; the only file that changes
    archive-N.html        runs that no longer stand in the index, CHUNK a page; written once
    history.jsonl         a line per run, from which the index is made
    runs/ID/index.html    a run's report, for ever under that address
    runs/ID/changes.html  what changed since every run that was published before
    runs/ID/run.json      what comparisons need of it
    runs/ID/records.jsonl.gz, cases/

A run appears by renaming a directory that is complete; then the history, then the index are replaced, each by renaming
a file.  Killed in between, the index is the old one, and everything that it links to is as it was: a run's files never
change.  What a killed publisher left is removed or finished by the next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
from typing import TYPE_CHECKING, Any

from reports.compare import Run
from reports.resume import write_whole

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

FORMAT = "flywheel-site/1"
PARTIAL = ".partial-"


class PublishError(ValueError):
    """A site or a run that cannot be used."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A published run, as the history has it.

    Attributes:
        number: from 1, in order of publication.
        id: names it for ever: date and digest.
        date: of its last record.
        verdict: of the kernels that it answers for.
        kernels: figures for the trends, see `reports.compare.Run`.
        versions: what it ran with.
        since: counts of what changed since the run published before; empty for the first.
    """

    number: int
    id: str
    date: str
    verdict: str
    kernels: tuple[dict[str, Any], ...]
    versions: dict[str, str]
    since: dict[str, int]


class Site:
    """Paths and files of one site."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.runs = directory / "runs"
        self.history = directory / "history.jsonl"
        self.index = directory / "index.html"

    @contextlib.contextmanager
    def owned(self) -> Generator[None]:
        """Keep the site to one publisher, and clear what a killed one left.

        Raises:
            PublishError: another one is at work, or the directory holds something else.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.index.exists() and not self.history.exists():
            message = f"--site must be a site of this program or an empty directory, got {self.directory}"
            raise PublishError(message)
        with (self.directory / ".lock").open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = f"{self.directory}: another publisher is at work"
                raise PublishError(message) from None
            self.runs.mkdir(exist_ok=True)
            for left in self.runs.glob(f"{PARTIAL}*"):
                shutil.rmtree(left)
            yield

    def entries(self) -> list[Entry]:
        """All published runs, in order.

        Raises:
            PublishError: the history is not one of ours.
        """
        if not self.history.exists():
            return []
        found = []
        for number, line in enumerate(self.history.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                body = json.loads(line)
                if body.pop("format") != FORMAT or body["number"] != number:
                    raise ValueError  # noqa: TRY301  said below
                found.append(Entry(**body | {"kernels": tuple(body["kernels"])}))
            except (ValueError, KeyError, TypeError) as error:
                message = f"{self.history}, line {number}: no entry of a {FORMAT}"
                raise PublishError(message) from error
        return found

    def save(self, entries: list[Entry]) -> None:
        """Replace the history."""
        lines = [
            json.dumps({"format": FORMAT} | dataclasses.asdict(entry), allow_nan=False) + "\n" for entry in entries
        ]
        write_whole(self.history, "".join(lines))

    def run(self, name: str) -> Run:
        """What is kept of a published run."""
        return Run.from_json(json.loads((self.runs / name / "run.json").read_text(encoding="utf-8")))

    @contextlib.contextmanager
    def new_run(self, name: str) -> Generator[Path]:
        """A directory to fill, which takes its place when it is complete."""
        partial = self.runs / f"{PARTIAL}{os.getpid()}"
        partial.mkdir()
        try:
            yield partial
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        place = self.runs / name
        if place.exists():  # finished by a publisher that was killed before it told anyone
            shutil.rmtree(place)
        partial.rename(place)

"""A progress display of compilations: what is running, what has finished, how long is left."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from collections.abc import Generator

    from rich.console import Console

    from verify.compiled.compile import Job


@dataclasses.dataclass
class Step:
    """What a loop over compilations tells the display."""

    bar: Progress
    task: TaskID

    def started(self, job: Job) -> None:
        """A compilation begins."""
        self.bar.update(
            self.task, description=f"compiling {job.target.reference.rpartition(':')[2]} for {job.generation}"
        )

    def finished(self, name: str) -> None:
        """A result is there."""
        self.bar.advance(self.task)
        if not self.bar.console.is_terminal:
            done = self.bar.tasks[0]
            self.bar.console.print(f"{done.completed:.0f}/{done.total:.0f} {name}")


@contextlib.contextmanager
def progress(console: Console, total: int) -> Generator[Step]:
    """Show the progress of `total` compilations; one line for each where the output is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        yield Step(bar, bar.add_task("starting", total=total))

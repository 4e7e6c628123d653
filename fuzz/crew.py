"""Worker processes on this machine: one spawned, single-threaded process each, with a pipe."""

from __future__ import annotations

import contextlib
import multiprocessing
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fuzz.worker import work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fuzz.worker import Assignment, Report

_PAGE = 4096


class Hand(Protocol):
    """One worker, wherever it runs."""

    def send(self, order: Any) -> None:  # noqa: ANN401  a Round, a Case, a word, or None to leave
        """Give an order; one who has died does not hear it."""
        ...

    def receive(self) -> Report:
        """The next report.

        Raises:
            EOFError: the worker is gone.
        """
        ...

    def epitaph(self) -> tuple[str, str]:
        """How it ended, as a root and in words."""
        ...

    def megabytes(self) -> float | None:
        """Memory that it holds; None if that cannot be told."""
        ...

    def end(self, patience: float) -> None:
        """Wait so many seconds, then kill it."""
        ...


class Crew(Protocol):
    """Where workers come from.

    Attributes:
        may_vanish: a worker may be lost through no fault of its case, so that the case gets a second try.
    """

    may_vanish: bool

    def hire(self, assignment: Assignment) -> Any:  # noqa: ANN401  a Hand
        """Start a worker."""
        ...

    def ready(self, hands: Sequence[Any], seconds: float) -> list[Any]:
        """Those of whom something can be received, waiting so long for the first."""
        ...


class LocalHand:
    """A process and its pipe."""

    def __init__(self, process: Any, pipe: Any) -> None:  # noqa: ANN401  of whatever kind the system has
        self.process, self.pipe = process, pipe

    def send(self, order: Any) -> None:  # noqa: ANN401
        """See `Hand`."""
        with contextlib.suppress(OSError):  # It has died: receiving says so.
            self.pipe.send(order)

    def receive(self) -> Report:
        """See `Hand`."""
        try:
            return self.pipe.recv()
        except OSError as error:
            raise EOFError from error

    def epitaph(self) -> tuple[str, str]:
        """See `Hand`."""
        self.process.join()
        code = self.process.exitcode or 0
        root = f"crash-signal-{-code}" if code < 0 else f"crash-exit-{code}"
        return root, f"the process that ran it ended with exit code {code}"

    def megabytes(self) -> float | None:
        """See `Hand`."""
        try:
            pages = int(Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()[1])
        except (OSError, IndexError, ValueError):
            return None
        return pages * _PAGE / 2**20

    def end(self, patience: float) -> None:
        """See `Hand`."""
        self.send(None)
        with contextlib.suppress(OSError):
            self.pipe.close()
        self.process.join(patience)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class LocalCrew:
    """Processes of this machine."""

    may_vanish = False

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("spawn")

    def hire(self, assignment: Assignment) -> LocalHand:
        """See `Crew`."""
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=work, args=(theirs, assignment), daemon=True)
        process.start()
        theirs.close()
        return LocalHand(process, ours)

    def ready(self, hands: Sequence[LocalHand], seconds: float) -> list[LocalHand]:
        """See `Crew`."""
        found = connection.wait([hand.pipe for hand in hands], timeout=seconds)
        return [hand for hand in hands if hand.pipe in found]

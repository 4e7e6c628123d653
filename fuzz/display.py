"""What a campaign shows while it runs: a live table on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from rich.live import Live
from rich.table import Table

if TYPE_CHECKING:
    from rich.console import Console

    from fuzz.tally import Tally

LINE_SECONDS = 10.0


class Display:
    """A `fuzz.campaign.Watcher`."""

    def __init__(self, console: Console, title: str, *, minutes: float | None, examples: int | None) -> None:
        self.console, self.title = console, title
        self.minutes, self.examples = minutes, examples
        self.began = self.last_line = time.monotonic()
        self.live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def note(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, markup=False)

    def refresh(self, tally: Tally, new: int) -> None:
        """Show the totals."""
        if self.live is not None:
            self.live.update(self._table(tally, new))
        elif time.monotonic() - self.last_line >= LINE_SECONDS:
            self.last_line = time.monotonic()
            self.note(f"{self._progress(tally, new)}; {summary(tally)}")

    def _progress(self, tally: Tally, new: int) -> str:
        seconds = time.monotonic() - self.began
        text = f"{seconds / 60:.1f} min, {new} new cases ({new / max(seconds, 1e-9):.1f}/s)"
        if self.minutes is not None:
            text += f", {max(self.minutes - seconds / 60, 0.0):.1f} min left"
        if self.examples is not None:
            text += f", {max(self.examples - tally.cases, 0)} cases left"
        return text

    def _table(self, tally: Tally, new: int) -> Table:
        table = Table(title=self.title, show_header=False, box=None)
        table.add_row("run", self._progress(tally, new))
        for name, value in rows(tally):
            table.add_row(name, value)
        return table


def rows(tally: Tally) -> list[tuple[str, str]]:
    """Name and value of everything that a summary tells."""
    worst = tally.worst
    share = "none judged" if worst is None else f"{worst.share:.4g} of the bound (searched): {worst.spec['name']}"
    return [
        ("cases", f"{tally.cases} judged, {tally.rejected} draws outside the domain, {tally.repeats} drawn again"),
        ("violations", f"{tally.violations} cases, those of shrinking included" if tally.violations else "0"),
        ("worst share", share),
        ("worst of each hunt", "; ".join(f"{hunt} {elite.share:.4g}" for hunt, elite in tally.worst_of_hunts.items())),
        ("coverage", f"{len(tally.cells)} cells; {tally.replays} of {tally.blocks} query blocks replayed"),
        (
            "rate",
            f"{tally.rate:.1f} cases per CPU-second, compilation apart ({tally.compiling:.0f} of {tally.cpu:.0f} s)",
        ),
    ]


def summary(tally: Tally) -> str:
    """The totals in one line."""
    return "; ".join(f"{name}: {value}" for name, value in rows(tally))

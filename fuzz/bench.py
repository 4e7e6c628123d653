"""How fast a campaign runs: cases per CPU-second, and two workers against one, measured in turns."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from fuzz.campaign import Campaign, Plan

if TYPE_CHECKING:
    import argparse

    from fuzz.tally import Tally

HUNT, BUCKET = "anchor", "256x256-d128"
"""2 heads, 256 tokens, head_dim 128: judged componentwise, with a case file and a record each."""

WARM_CASES = 30
"""Cases that every worker has judged, its kernel compiled, before the clock starts."""


@dataclasses.dataclass(frozen=True)
class Rate:
    """Cases per second and per CPU-second of the workers."""

    per_second: float
    per_cpu_second: float


class _Clock:
    """A watcher that takes the time once all workers are warm, and interrupts when it is up."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.campaign: Campaign | None = None
        self.start: tuple[float, int, float] | None = None
        self.rate: Rate | None = None

    def note(self, text: str) -> None:
        """Nothing worth a line."""

    def refresh(self, tally: Tally, new: int) -> None:
        """Start, and stop."""
        assert self.campaign is not None  # noqa: S101  set before it runs
        now = time.monotonic()
        used = tally.cpu - tally.compiling
        if self.start is None:
            if all(worker.reported >= WARM_CASES for worker in self.campaign.workers):
                self.start = now, new, used
            return
        began, before, used_before = self.start
        if now - began >= self.seconds:
            cases = new - before
            self.rate = Rate(cases / (now - began), cases / max(used - used_before, 1e-9))
            raise KeyboardInterrupt


def measured(workers: int, seconds: float, *, hunt: str = HUNT, bucket: str = BUCKET, seed: int = 1) -> Rate:
    """The rate of a fresh campaign against our kernel, once it is warm."""
    with tempfile.TemporaryDirectory() as directory:
        clock = _Clock(seconds)
        plan = Plan((hunt,), Path(directory), buckets=(bucket,), seed=seed, workers=workers)
        clock.campaign = Campaign(plan, clock)
        clock.campaign.run()
    if clock.rate is None:
        message = "the campaign ended before its time was taken"
        raise RuntimeError(message)
    return clock.rate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "--seconds", type=float, default=30.0, metavar="S", help="per measurement (default: %(default)g)"
    )
    parser.add_argument("--pairs", type=int, default=3, metavar="N", help="one worker, then two (default: %(default)s)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    console = Console(highlight=False, soft_wrap=True)
    ratios, rates = [], []
    for seed in range(1, options.pairs + 1):
        one, two = (measured(workers, options.seconds, seed=seed) for workers in (1, 2))
        ratios.append(two.per_second / one.per_second)
        rates += [one.per_cpu_second, two.per_cpu_second]
        console.print(
            f"one worker {one.per_second:.1f} cases per second ({one.per_cpu_second:.1f} per CPU-second), "
            f"two {two.per_second:.1f} ({two.per_cpu_second:.1f}): {ratios[-1]:.2f} times",
            markup=False,
        )
    console.print(
        f"median: {statistics.median(rates):.1f} cases per CPU-second; two workers judge "
        f"{statistics.median(ratios):.2f} times as many as one ({HUNT}, {BUCKET}; measured)",
        markup=False,
    )
    return 0

"""What each ingredient of the search is worth: a fixed budget, several seeds, one table."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

import fuzz.hunts
from fuzz.kinds import BITS, EVOLVE, GRADIENT, RANDOM, TARGET
from fuzz.outcome import goal_of
from fuzz.search import starts
from fuzz.store import Store
from fuzz.tally import Tally
from fuzz.worker import EXAMPLES_PER_ROUND, SLOW_ROUND, STOP, Assignment, Report, Round, Worker, seed_of
from verify import records

if TYPE_CHECKING:
    import argparse

RECIPES = {
    "plain random": (RANDOM,),
    "with target()": (TARGET,),
    "with the archive of elites": (RANDOM, EVOLVE),
    "with bit flips": (RANDOM, BITS),
    "with the gradient": (RANDOM, GRADIENT),
    "all together": (TARGET, GRADIENT, EVOLVE, BITS),
}
"""Each ingredient against plain random: kinds of rounds that take turns."""


class _Budget:
    """The parent's end of a worker in this process: adds up, and says stop once the CPU-seconds are used up.

    All recipes share one process, so that kernels are compiled once; compilation is no part of the budget.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.tally = seconds, Tally()
        self.worker: Worker | None = None
        self.began = time.process_time()

    @property
    def over(self) -> bool:
        """Whether nothing is left."""
        assert self.worker is not None  # noqa: S101  set at once
        compiling = self.tally.compiling + self.worker.tally.compiling
        return time.process_time() - self.began - compiling >= self.seconds

    def poll(self) -> bool:
        """Whether an order waits."""
        return self.over and self.worker is not None and self.worker.order is None

    def recv(self) -> str:
        """The order."""
        return STOP

    def send(self, report: Report) -> None:
        """Take a report."""
        self.tally.merge(report.tally)


@dataclasses.dataclass(frozen=True)
class Row:
    """What one recipe has found: per seed the worst goal, the cells covered, the cases judged."""

    recipe: str
    goals: tuple[float, ...]
    cells: tuple[int, ...]
    cases: tuple[int, ...]

    @property
    def median(self) -> float:
        """Of the worst goals."""
        return statistics.median(self.goals)


def measured(
    hunt: str, bucket: str | None, seconds: float, seeds: int, recipes: dict[str, tuple[str, ...]]
) -> list[Row]:
    """Run every recipe with every seed for so many CPU-seconds each; recipes take turns, since machines drift."""
    found: dict[str, list[tuple[float, int, int]]] = {recipe: [] for recipe in recipes}
    _one(hunt, bucket, 1.0, 0, (RANDOM,))  # compiles
    for seed in range(1, seeds + 1):
        for recipe, kinds in recipes.items():
            found[recipe].append(_one(hunt, bucket, seconds, seed, kinds))
    return [Row(recipe, *zip(*runs, strict=True)) for recipe, runs in found.items()]


def _one(hunt: str, bucket: str | None, seconds: float, seed: int, kinds: tuple[str, ...]) -> tuple[float, int, int]:
    """Worst goal, cells and cases of one run."""
    with tempfile.TemporaryDirectory() as directory:
        Store(Path(directory)).prepare()
        budget = _Budget(seconds)
        buckets = () if bucket is None else (bucket,)
        worker = budget.worker = Worker(budget, Assignment(Path(directory), 0, "experiment", buckets, None, {}))  # type: ignore[arg-type]  all of a pipe that is used
        asked = fuzz.hunts.find(hunt)
        if (moves := asked.moved()) is not None:
            moves.forget()
        for number in itertools.count():
            if budget.over:
                break
            kind = kinds[number % len(kinds)]
            cases = SLOW_ROUND if kind in asked.slow_kinds else EXAMPLES_PER_ROUND
            elites = starts(budget.tally.archive.get(hunt, {}), (seed, number))
            worker.carry_out(Round(number, seed_of(seed, number), cases, hunt, kind, elites))
        goals = [goal_of(record) for record in records.read(worker.store.records)]
    return max(goals), len(budget.tally.cells), len(goals)


def table(rows: list[Row]) -> str:
    """The rows as Markdown; the gain is against the first."""
    lines = ["| search | worst of each seed | median | against plain random | cells (median) | cases (median) |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        goals = ", ".join(f"{goal:.3g}" for goal in sorted(row.goals))
        gain = row.median / rows[0].median if rows[0].median > 0 else float("nan")
        counts = f"{statistics.median(row.cells):g} | {statistics.median(row.cases):g}"
        lines.append(f"| {row.recipe} | {goals} | {row.median:.3g} | {gain:.2f} | {counts} |")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("hunt", nargs="?", default="anchor", metavar="HUNT")
    parser.add_argument("--bucket", metavar="NAME", help="one shape")
    parser.add_argument(
        "--seconds",
        type=float,
        default=12.0,
        metavar="S",
        help="CPU-seconds per recipe and seed (default: %(default)g)",
    )
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="seeds 1 .. N (default: %(default)s)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    rows = measured(options.hunt, options.bucket, options.seconds, options.seeds, RECIPES)
    Console(highlight=False, soft_wrap=True).print(table(rows), markup=False)
    return 0

"""What each ingredient of the search is worth: a fixed budget, several seeds, one table."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from fuzz.campaign import Campaign, Plan
from fuzz.kinds import BITS, EVOLVE, GRADIENT, RANDOM, TARGET
from fuzz.outcome import goal_of
from verify import records

if TYPE_CHECKING:
    import argparse

    from fuzz.tally import Tally

RECIPES = {
    "plain random": (RANDOM,),
    "with target()": (TARGET,),
    "with the archive of elites": (RANDOM, EVOLVE),
    "with bit flips": (RANDOM, BITS),
    "with the gradient": (RANDOM, GRADIENT),
    "all together": (TARGET, GRADIENT, EVOLVE, BITS),
}
"""Each ingredient against plain random: kinds of rounds that take turns."""


class _Silent:
    """A watcher that says nothing."""

    def note(self, text: str) -> None:
        del text

    def refresh(self, tally: Tally, new: int) -> None:
        del tally, new


@dataclasses.dataclass(frozen=True)
class Row:
    """What one recipe has found: the worst goal of each seed, and the cells that were covered."""

    recipe: str
    goals: tuple[float, ...]
    cells: tuple[int, ...]

    @property
    def median(self) -> float:
        """Of the worst goals."""
        return statistics.median(self.goals)


def measured(hunt: str, bucket: str | None, budget: int, seeds: int, recipes: dict[str, tuple[str, ...]]) -> list[Row]:
    """Run every recipe with every seed for so many cases each."""
    found = []
    for recipe, kinds in recipes.items():
        goals, cells = [], []
        for seed in range(1, seeds + 1):
            with tempfile.TemporaryDirectory() as directory:
                plan = Plan(
                    (hunt,), Path(directory), buckets=() if bucket is None else (bucket,), seed=seed, examples=budget,
                    kinds=kinds,
                )  # fmt: skip
                tally = Campaign(plan, _Silent()).run()
                goals.append(max(goal_of(record) for record in records.read(Path(directory) / "records.jsonl")))
            cells.append(len(tally.cells))
        found.append(Row(recipe, tuple(goals), tuple(cells)))
    return found


def table(rows: list[Row]) -> str:
    """The rows as Markdown; the gain is against the first."""
    lines = ["| search | worst of each seed | median | against plain random | cells (median) |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for row in rows:
        goals = ", ".join(f"{goal:.3g}" for goal in sorted(row.goals))
        gain = row.median / rows[0].median if rows[0].median > 0 else float("nan")
        cells = f"{statistics.median(row.cells):g}"
        lines.append(f"| {row.recipe} | {goals} | {row.median:.3g} | {gain:.2f} | {cells} |")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("hunt", nargs="?", default="anchor", metavar="HUNT")
    parser.add_argument("--bucket", metavar="NAME", help="one shape")
    parser.add_argument("--budget", type=int, default=1000, metavar="N", help="cases per seed (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="seeds 1 .. N (default: %(default)s)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    rows = measured(options.hunt, options.bucket, options.budget, options.seeds, RECIPES)
    Console(highlight=False, soft_wrap=True).print(table(rows), markup=False)
    return 0

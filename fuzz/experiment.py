"""What each ingredient of the search is worth: a fixed budget, several seeds, one table.

A run is a line in a file before the next one starts, so that a comparison that was stopped goes on where it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

import fuzz.hunts
from fuzz.kinds import BITS, EVOLVE, GRADIENT, RANDOM, TARGET
from fuzz.outcome import goal_of
from fuzz.search import starts
from fuzz.store import Store, code_digest
from fuzz.tally import Tally
from fuzz.worker import EXAMPLES_PER_ROUND, SLOW_ROUND, STOP, Assignment, Report, Round, Worker, seed_of
from verify import records

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

RECIPES = {
    "plain random": (RANDOM,),
    "with target()": (TARGET,),
    "with the archive of elites": (RANDOM, EVOLVE),
    "with bit flips": (RANDOM, BITS),
    "with the gradient": (RANDOM, GRADIENT),
    "all together": (TARGET, GRADIENT, EVOLVE, BITS),
}
"""Each ingredient against plain random: kinds of rounds that take turns."""


ROOMS = ("flywheel", "verify", "fuzz")
"""Whose sources a run depends on."""


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
class Comparison:
    """What is compared: a hunt's recipes, for so many CPU-seconds each, in one shape (None: all of the hunt's)."""

    hunt: str
    bucket: str | None
    seconds: float

    @property
    def name(self) -> str:
        """For a file."""
        return f"{self.hunt}-{self.bucket or 'all'}"


@dataclasses.dataclass(frozen=True)
class Found:
    """What one run has found: the worst goal, the cells covered, the cases judged."""

    goal: float
    cells: int
    cases: int


@dataclasses.dataclass(frozen=True)
class Row:
    """What one recipe has found, run by run."""

    recipe: str
    runs: tuple[Found, ...]

    def median(self, field: str) -> float:
        """Of one number of the runs."""
        return statistics.median(getattr(run, field) for run in self.runs)


def measured(
    asked: Comparison, seeds: int, recipes: dict[str, tuple[str, ...]], path: Path, done: Callable[[], None]
) -> list[Row]:
    """Run every recipe with every seed; recipes take turns, since machines drift.

    Runs that `path` holds of the same comparison and code are not repeated; `done` is called after each.
    """
    code = code_digest(None, ROOMS)
    kept = {(line["recipe"], line["seed"]): line for line in _lines(path) if _same(line, asked, code)}
    if len(kept) < seeds * len(recipes):
        _one(dataclasses.replace(asked, seconds=1.0), 0, (RANDOM,))  # compiles
    rows: dict[str, list[Found]] = {recipe: [] for recipe in recipes}
    for seed, (recipe, kinds) in itertools.product(range(1, seeds + 1), recipes.items()):
        line = kept.get((recipe, seed))
        found = _one(asked, seed, kinds) if line is None else _found(line)
        if line is None:
            run = {"recipe": recipe, "seed": seed, "code": code} | dataclasses.asdict(asked) | dataclasses.asdict(found)
            records.append_line(path, json.dumps(run | {"goal": records.encode_number(found.goal)}, allow_nan=False))
        rows[recipe].append(found)
        done()
    return [Row(recipe, tuple(runs)) for recipe, runs in rows.items()]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The runs in a file; a line that was torn when the writer was killed is none."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


def _found(line: dict[str, Any]) -> Found:
    return Found(float(line["goal"]), line["cells"], line["cases"])


def _same(line: dict[str, Any], asked: Comparison, code: str) -> bool:
    return line["code"] == code and all(line[name] == value for name, value in dataclasses.asdict(asked).items())


def _one(asked: Comparison, seed: int, kinds: tuple[str, ...]) -> Found:
    """One run."""
    with tempfile.TemporaryDirectory() as directory:
        Store(Path(directory)).prepare()
        budget = _Budget(asked.seconds)
        buckets = () if asked.bucket is None else (asked.bucket,)
        worker = budget.worker = Worker(budget, Assignment(Path(directory), 0, "experiment", buckets, None, {}))  # type: ignore[arg-type]  all of a pipe that is used
        hunt = fuzz.hunts.find(asked.hunt)
        if (moves := hunt.moved()) is not None:
            moves.forget()
        for number in itertools.count():
            if budget.over:
                break
            kind = kinds[number % len(kinds)]
            cases = SLOW_ROUND if kind in hunt.slow_kinds else EXAMPLES_PER_ROUND
            elites = starts(budget.tally.archive.get(asked.hunt, {}), (seed, number))
            worker.carry_out(Round(number, seed_of(seed, number), cases, asked.hunt, kind, elites))
        goals = [goal_of(record) for record in records.read(worker.store.records)]
    return Found(max(goals), len(budget.tally.cells), len(goals))


def table(rows: list[Row]) -> str:
    """The rows as Markdown; the gain is against the first."""
    lines = ["| search | worst of each seed | median | against plain random | cells (median) | cases (median) |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    plain = rows[0].median("goal")
    for row in rows:
        goals = ", ".join(f"{goal:.3g}" for goal in sorted(run.goal for run in row.runs))
        gain = row.median("goal") / plain if plain > 0 else float("nan")
        counts = f"{row.median('cells'):g} | {row.median('cases'):g}"
        lines.append(f"| {row.recipe} | {goals} | {row.median('goal'):.3g} | {gain:.2f} | {counts} |")
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
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/experiments"),
        metavar="DIR",
        help="where runs are kept, one line each; the same command goes on from there (default: %(default)s)",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    asked = Comparison(options.hunt, options.bucket, options.seconds)
    path = options.out / f"{asked.name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, soft_wrap=True)
    with Progress(*Progress.get_default_columns(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(asked.name, total=options.seeds * len(RECIPES))
        rows = measured(asked, options.seeds, RECIPES, path, lambda: bar.advance(task))
    console.print(table(rows), markup=False)
    return 0

"""Comparisons of searches: what is kept of them, and that a stopped one goes on."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from fuzz import experiment
from fuzz.experiment import Comparison, Found, measured, table

if TYPE_CHECKING:
    from pathlib import Path

ASKED = Comparison("anchor", "256x256-d128", 1.0)
RECIPES = {"plain random": ("random",), "with target()": ("target",)}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[str, ...]]]:
    """Seeds and kinds of the runs that were made, each of which finds something else."""
    made: list[tuple[int, tuple[str, ...]]] = []

    def one(_asked: Comparison, seed: int, kinds: tuple[str, ...]) -> Found:
        made.append((seed, kinds))
        return Found(float("inf") if seed == 2 else 0.25 * len(made), len(made), 10 * len(made))

    monkeypatch.setattr(experiment, "_one", one)
    monkeypatch.setattr(experiment, "code_digest", lambda *_: "same")
    return made


def nothing() -> None:
    """No display."""


def test_a_stopped_comparison_goes_on_where_it_was(tmp_path: Path, runs: list[tuple[int, tuple[str, ...]]]) -> None:
    """Runs that are in the file are not made again, a torn last line is, and the rows are those of one go."""
    path = tmp_path / "runs.jsonl"

    def killed(at: int) -> None:
        counted = itertools.count(1)

        def done() -> None:
            if next(counted) == at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            measured(ASKED, 2, RECIPES, path, done)

    killed(3)
    path.write_text(path.read_text(encoding="utf-8")[:-9], encoding="utf-8")
    runs.clear()
    rows = measured(ASKED, 2, RECIPES, path, nothing)
    assert [run for run in runs if run[0] > 0] == [(2, ("random",)), (2, ("target",))]
    assert [len(row.runs) for row in rows] == [2, 2]
    runs.clear()
    assert measured(ASKED, 2, RECIPES, path, nothing) == rows
    assert not runs


def test_runs_of_other_code_or_other_budgets_do_not_count(
    tmp_path: Path, runs: list[tuple[int, tuple[str, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is no reason to leave out a run of another budget, or of code that has changed."""
    path = tmp_path / "runs.jsonl"
    measured(ASKED, 1, RECIPES, path, nothing)
    runs.clear()
    measured(Comparison(ASKED.hunt, ASKED.bucket, 2.0), 1, RECIPES, path, nothing)
    assert len([run for run in runs if run[0] > 0]) == 2
    runs.clear()
    monkeypatch.setattr(experiment, "code_digest", lambda *_: "changed")
    measured(ASKED, 1, RECIPES, path, nothing)
    assert len([run for run in runs if run[0] > 0]) == 2


def test_the_table_compares_medians_with_plain_random(tmp_path: Path, runs: list[tuple[int, tuple[str, ...]]]) -> None:
    """Per search the worst of each seed, their median, and how much worse that is than plain random draws."""
    text = table(measured(ASKED, 1, RECIPES, tmp_path / "runs.jsonl", nothing))
    assert runs
    assert text.splitlines()[2:] == [
        "| plain random | 0.5 | 0.5 | 1.00 | 2 | 20 |",
        "| with target() | 0.75 | 0.75 | 1.50 | 3 | 30 |",
    ]

"""Running totals of a campaign: what a worker reports, what the display shows, what a resumed campaign starts from."""

from __future__ import annotations

import dataclasses
from typing import Any

from fuzz.outcome import goal_of, severity, shares

MOST_CELLS = 4096
"""Cells that an archive keeps an elite for; coverage itself has no limit."""

ERROR = " error"
"""Ends the name of a class in which absolute errors compete, not shares of a bound."""


@dataclasses.dataclass(frozen=True)
class Elite:
    """The worst case of a class: the largest share of the bound, or the highest goal of its cell."""

    share: float
    spec: dict[str, Any]

    def beats(self, other: Elite | None) -> bool:
        """Whether it is worse, in the hunter's favour."""
        return other is None or severity(self.share) > severity(other.share)


@dataclasses.dataclass
class Tally:
    """Totals.

    Attributes:
        cases: cases judged, each once.
        repeats: draws of a case that had been judged before.
        rejected: draws outside the domain.
        violations: judged cases that failed, shrinking included.
        blocks: query blocks run; replays: those that were replayed.
        cpu: CPU-seconds of the workers; compiling: the part that JAX spent on compiling.
        cells: coverage seen.
        archive: the elite of each cell, per hunt.
        elites: worst case per class (hunt, shape, compared array, with or without a replay).
        of_hunt: cases per hunt.
    """

    cases: int = 0
    repeats: int = 0
    rejected: int = 0
    violations: int = 0
    blocks: int = 0
    replays: int = 0
    cpu: float = 0.0
    compiling: float = 0.0
    cells: set[str] = dataclasses.field(default_factory=set)
    archive: dict[str, dict[str, Elite]] = dataclasses.field(default_factory=dict)
    elites: dict[str, Elite] = dataclasses.field(default_factory=dict)
    of_hunt: dict[str, int] = dataclasses.field(default_factory=dict)

    COUNTS = ("cases", "repeats", "rejected", "violations", "blocks", "replays", "cpu", "compiling")

    def add(self, record: dict[str, Any]) -> None:
        """Count a record that a hunt has written."""
        hunt = record["hunt"]
        self.cases += 1
        self.of_hunt[hunt] = self.of_hunt.get(hunt, 0) + 1
        self.violations += record["root"] is not None
        self.blocks += record["query_blocks"] or 0
        self.replays += record["replays"] or 0
        self.cells.update(f"{hunt}: {cell}" for cell in record["cells"])
        for name, share in classes(record).items():
            _offer(self.elites, name, Elite(share, record["case_spec"]))
        if record["root"] is None:
            goal = Elite(goal_of(record), record["case_spec"])
            cells = self.archive.setdefault(hunt, {})
            for cell in record["cells"] or ("everywhere",):
                if cell in cells or len(cells) < MOST_CELLS:
                    _offer(cells, cell, goal)

    def merge(self, other: Tally) -> None:
        """Add what another tally has counted."""
        for name in self.COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.cells |= other.cells
        for key, elite in other.elites.items():
            _offer(self.elites, key, elite)
        for hunt, cells in other.archive.items():
            mine = self.archive.setdefault(hunt, {})
            for cell, elite in cells.items():
                _offer(mine, cell, elite)
        for hunt, count in other.of_hunt.items():
            self.of_hunt[hunt] = self.of_hunt.get(hunt, 0) + count

    @property
    def worst(self) -> Elite | None:
        """The case that uses the largest share of its bound."""
        shares = [elite for key, elite in self.elites.items() if not key.endswith(ERROR)]
        return max(shares, key=lambda elite: severity(elite.share), default=None)

    @property
    def worst_of_hunts(self) -> dict[str, Elite]:
        """The same per hunt; where a class is about the error itself, per class."""
        found: dict[str, Elite] = {}
        for key, elite in self.elites.items():
            _offer(found, key if key.endswith(ERROR) else key.split(" ", 1)[0], elite)
        return found

    @property
    def rate(self) -> float:
        """Cases per CPU-second, compilation apart."""
        return self.cases / max(self.cpu - self.compiling, 1e-9)


def classes(record: dict[str, Any]) -> dict[str, float]:
    """The classes in which a record competes, and its share of the bound in each."""
    if "classes" in record:  # an operation with classes of its own
        return {f"{record['hunt']} {name}": float(value) for name, value in record["classes"].items()}
    path = "" if record["replays"] is None else " with replays" if record["replays"] else " without replays"
    shape = record["shape"]
    where = f"{shape['q_len']}x{shape['kv_len']}-d{shape['head_dim']}"
    return {f"{record['hunt']} {where} {part}{path}": share for part, share in shares(record).items()}


def _offer(into: dict[str, Elite], key: str, elite: Elite) -> None:
    if elite.beats(into.get(key)):
        into[key] = elite

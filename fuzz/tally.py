"""Running totals of a campaign: what a worker reports, what the display shows, what a resumed campaign starts from."""

from __future__ import annotations

import dataclasses
from typing import Any

from fuzz.outcome import severity, shares


@dataclasses.dataclass(frozen=True)
class Elite:
    """The case that uses the largest share of the bound in its class."""

    share: float
    spec: dict[str, Any]

    def beats(self, other: Elite | None) -> bool:
        """Whether it uses more of the bound."""
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
        cpu: CPU-seconds of the workers; compiling: the part spent on the first case of each compiled kernel.
        cells: coverage seen.
        elites: worst case per class (shape, compared array, with or without a replay).
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
    elites: dict[str, Elite] = dataclasses.field(default_factory=dict)

    COUNTS = ("cases", "repeats", "rejected", "violations", "blocks", "replays", "cpu", "compiling")

    def add(self, record: dict[str, Any]) -> None:
        """Count a record that a hunt has written."""
        self.cases += 1
        self.violations += record["root"] is not None
        self.blocks += record["query_blocks"] or 0
        self.replays += record["replays"] or 0
        self.cells.update(record["cells"])
        path = "with replays" if record["replays"] else "without replays"
        shape = record["shape"]
        where = f"{shape['q_len']}x{shape['kv_len']}-d{shape['head_dim']}"
        for part, share in shares(record).items():
            self._offer(f"{where} {part} {path}", Elite(share, record["case_spec"]))

    def merge(self, other: Tally) -> None:
        """Add what another tally has counted."""
        for name in self.COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.cells |= other.cells
        for key, elite in other.elites.items():
            self._offer(key, elite)

    def _offer(self, key: str, elite: Elite) -> None:
        if elite.beats(self.elites.get(key)):
            self.elites[key] = elite

    @property
    def worst(self) -> Elite | None:
        """The case that uses the largest share of its bound."""
        return max(self.elites.values(), key=lambda elite: severity(elite.share), default=None)

    @property
    def rate(self) -> float:
        """Cases per CPU-second, compilation apart."""
        return self.cases / max(self.cpu - self.compiling, 1e-9)

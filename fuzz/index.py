"""The records of a campaign by case, hunt and root, in SQLite: which failures there are, how often, where the first is.

The index is derived: every row comes from a line of records.jsonl, and how far the file has been taken in stands in
the same transaction, so that a kill at any moment leaves it behind but never wrong.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from typing import TYPE_CHECKING, Self

from fuzz.case import case_key
from fuzz.outcome import goal_of

if TYPE_CHECKING:
    from pathlib import Path

_TABLES = """
create table if not exists progress (id integer primary key check (id = 0), bytes integer not null);
create table if not exists cases (
    key blob primary key, hunt text not null, subject text not null, verdict text not null, root text, goal real,
    reason text not null, at integer not null
);
create index if not exists by_root on cases (root, hunt);
"""


@dataclasses.dataclass(frozen=True)
class Found:
    """Failures of one root: how many cases, by which hunts, and what the first one says."""

    root: str
    hunts: tuple[str, ...]
    cases: int
    reason: str


class Index:
    """An open index; a context manager."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path)
        self.connection.executescript(_TABLES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def catch_up(self, path: Path) -> int:
        """Take in the whole lines that have been appended; returns how many."""
        if not path.exists():
            return 0
        row = self.connection.execute("select bytes from progress").fetchone()
        start = 0 if row is None else int(row[0])
        with path.open("rb") as file:
            file.seek(start)
            text = file.read()
        end = text.rfind(b"\n") + 1
        rows, at = [], start
        for line in text[:end].splitlines(keepends=True):
            rows.append(_row(line, at))
            at += len(line)
        with self.connection:
            self.connection.executemany("insert or ignore into cases values (?, ?, ?, ?, ?, ?, ?, ?)", rows)
            self.connection.execute("insert or replace into progress values (0, ?)", (at,))
        return len(rows)

    def count(self) -> int:
        """How many cases it holds."""
        return int(self.connection.execute("select count(*) from cases").fetchone()[0])

    def roots(self) -> list[Found]:
        """Failures by root, the most frequent first."""
        query = (
            "select root, group_concat(distinct hunt), count(*), reason, min(at) from cases where root is not null "
            "group by root order by count(*) desc, root"
        )
        return [
            Found(root, tuple(sorted(hunts.split(","))), count, reason)
            for root, hunts, count, reason, _ in self.connection.execute(query)
        ]

    def worst(self, hunt: str, count: int = 1) -> list[int]:
        """Where in records.jsonl the cases with the highest goals of a hunt stand."""
        query = "select at from cases where hunt = ? order by goal desc limit ?"
        return [int(at) for (at,) in self.connection.execute(query, (hunt, count))]


def _row(line: bytes, at: int) -> tuple[object, ...]:
    record = json.loads(line)
    goal = max(min(goal_of(record), 1e300), -1e300)
    reason = record["reason"] if record["root"] else ""
    key = case_key(record["case_spec"])
    return key, record["hunt"], record["subject"], record["verdict"], record["root"], goal, reason, at

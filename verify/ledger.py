"""The ledger: the few numbers that decide something and are no bound, each with its derivation.

A tolerance is computed from a bound.  Where a decision needs a number that no bound gives (a false-alarm rate, how far
a hint reaches), it is a named constant, and it stands here with the reason for its size.  A test compares the ledger
with the code, and refuses numbers that are compared with errors anywhere else.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path

LEDGER = Path(__file__).parent / "data" / "ledger.json"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One number.

    Attributes:
        where: `package.module:CONSTANT`.
        value: what the constant is.
        decides: what depends on it.
        derivation: why it has this size.
    """

    where: str
    value: float
    decides: str
    derivation: str

    def found(self) -> float:
        """The constant's value in the code.

        Raises:
            AttributeError: there is no such constant.
        """
        module, _, name = self.where.partition(":")
        return float(getattr(importlib.import_module(module), name))


def entries(path: Path = LEDGER) -> list[Entry]:
    """The ledger as it stands."""
    return [Entry(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]

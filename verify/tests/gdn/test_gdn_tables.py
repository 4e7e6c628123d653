"""The tables of cost and tightness: made by one command, without a violation in them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import verify
from verify.gdn import tables

PAGE = Path(verify.__file__).parent.parent / "docs" / "gdn-tables.md"


def rows(heading: str) -> list[list[str]]:
    """The cells of the table whose first column has that heading and that has a column of violations."""
    found: list[list[str]] = []
    inside = False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == heading and cells[-1] == "violations":
            inside = True
        elif inside and not line.startswith("|"):
            inside = False
        elif inside and not set(line) <= set("| -"):
            found.append(cells)
    return found


def test_the_page_holds_every_family_and_no_violation() -> None:
    """Eight families of keys, two ranges of beta, two modes, three of the chain: no contract broke."""
    found = rows("keys")
    assert len(found) == 8 * 2 * 2 + 8 * 2 * 3 * 2
    assert {cells[-1] for cells in found} == {"0"}


def test_the_oracle_is_fast_enough() -> None:
    """4096 tokens with a 128 x 128 state were measured at half a CPU-second or less, in both forms."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if "4096 tokens" in line]
    assert len(lines) == 2
    for line in lines:
        assert float(line.strip("| ").split("|")[-1]) <= 0.5


def test_shares_of_a_matrix() -> None:
    """The comparison behind the table, on one matrix."""
    error, bound, share, wrong = tables._compared(tables.matrix("random", "1", "mild", 0), tables.InverseSteps())
    assert 0.0 < error <= bound
    assert 0.5 < share <= 1.0
    assert wrong == 0


@pytest.mark.deep
def test_growth_over_tokens() -> None:
    """The bound of a decaying recurrence stops growing: at 1024 tokens it is not far above what it is at 256."""
    found = {token: bound for token, _, bound in tables.growth_over_tokens(tables.SPLIT_STEPS)}
    assert found[1024] <= 4.0 * found[256]
    assert np.isfinite(list(found.values())).all()

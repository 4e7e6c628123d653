"""The tables of oracle cost and bound tightness come from one command and stand in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from verify.attention import tables

DOCUMENT = Path(__file__).parents[3] / "docs" / "oracle-tables.md"


def names(text: str) -> list[str]:
    """First cells of all rows of tables."""
    return re.findall(r"^\| ([^|]+) \|", text, flags=re.MULTILINE)


@pytest.mark.smoke
def test_document_has_both_tables() -> None:
    """The committed document is the command's, with a row for every oracle and family."""
    text = DOCUMENT.read_text(encoding="utf-8")
    assert "python -m verify.attention.tables" in text
    assert {"float64, every element", "ball arithmetic, a row", "mpmath, a row", "float64 gradients"} <= set(
        names(text)
    )
    assert {"ordinary", "adversarial", "dq", "dk", "dv", "base 10000", "base 1e+07"} <= set(names(text))


@pytest.mark.deep
def test_command_writes_the_same_rows(tmp_path: Path) -> None:
    """Running the command again gives the same rows, whatever the figures."""
    out = tmp_path / "tables.md"
    assert tables.main(["--out", str(out)]) == 0
    assert names(out.read_text(encoding="utf-8")) == names(DOCUMENT.read_text(encoding="utf-8"))

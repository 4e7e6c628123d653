"""The widths of enclosures, by command."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from verify.devices import CPU_INTERPRET
from verify.enclosure import __main__ as tables

if TYPE_CHECKING:
    from pathlib import Path


def test_widths_cover_what_is_found() -> None:
    """A radius is at least half of the worst error found, and nothing lies outside."""
    width = next(tables.attention_widths(CPU_INTERPRET, draws=2))
    assert width.outside == 0
    assert width.wide >= width.found / 2
    assert width.tight <= width.wide <= width.contract


def test_the_command_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row per family and array; the exit code says whether anything lies outside."""
    row = tables.Width("random", "bf16, out", 1e-3, 1e-2, 5e-3, 1e-3, outside=0)
    monkeypatch.setattr(tables, "attention_widths", lambda *_: iter([row]))
    monkeypatch.setattr(tables, "gdn_widths", lambda *_: iter([row]))
    page = tmp_path / "widths.md"
    assert tables.main(["--draws", "3", "--out", str(page)]) == 0
    assert "| random | bf16, out | 1.0e-03 | 1.0e-02 | 5.0e-03 | 1.0e-03 | 5 | 0 |" in page.read_text(encoding="utf-8")
    broken = tables.Width("random", "bf16, out", 1e-2, 1e-2, 5e-3, 1e-3, outside=7)
    monkeypatch.setattr(tables, "gdn_widths", lambda *_: iter([broken]))
    assert tables.main(["--out", str(page)]) == 1
    with pytest.raises(SystemExit):
        tables.main(["--draws", "0"])
    assert "--draws must be at least 1, got 0" in capsys.readouterr().err

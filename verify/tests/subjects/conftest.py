"""The subjects of this folder, and the documentation's example, are importable by name, as a user's own module is."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[2] / "docs" / "examples"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """`user_kernels:...` and `my_attention:...` can be named, here and in processes that a test starts."""
    for folder in (HERE, EXAMPLES):
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{EXAMPLES}")

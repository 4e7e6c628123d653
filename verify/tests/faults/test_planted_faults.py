"""Planted faults: each breaks the kernel in one way, and some test of the suite must notice.

`pytest verify -m deep -k planted -rP` prints which test notices which fault.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from verify.faults import FAULTS, HOME, Fault

ROOT = Path(__file__).parents[3]
# The quickest first: a run ends at the first test that fails.
SUITE = (
    "verify/tests/kernels/attention/test_tile.py",
    "verify/tests/kernels/attention/test_contract.py",
    "verify/tests/kernels/attention",
    "verify/tests/cases",
)
TESTS_FAILED = 1


def planted(fault: Fault, into: Path) -> None:
    """A copy of the checkout's kernels and suite, with the fault in it."""
    for name in ("flywheel", "verify", "fuzz"):
        shutil.copytree(ROOT / name, into / name, ignore=shutil.ignore_patterns("__pycache__", "out"))
    shutil.copy(ROOT / "pyproject.toml", into)
    fault.plant(into)


@pytest.mark.deep
@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_planted_fault_is_noticed(fault: Fault, tmp_path: Path) -> None:
    """The suite fails on a kernel with the fault, by a test's assertion and not by a crash of the run."""
    planted(fault, tmp_path)
    options = ["-x", "-q", "-n0", "-p", "no:randomly", "-p", "no:cacheprovider", "--tb=no"]
    command = [sys.executable, "-m", "pytest", *SUITE, *options]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    noticed = re.findall(r"^FAILED (\S+)", run.stdout, flags=re.MULTILINE)
    print(f"{fault.name}: noticed by {', '.join(noticed)}")
    assert run.returncode == TESTS_FAILED, f"not noticed:\n{run.stdout[-2000:]}{run.stderr[-2000:]}"
    assert noticed


@pytest.mark.smoke
def test_faults_can_still_be_planted() -> None:
    """Each fault's text occurs in the code exactly as often as it says, so that none is silently no fault any more."""
    for fault in FAULTS:
        text = (ROOT / HOME / fault.file).read_text(encoding="utf-8")
        assert text.count(fault.before) == fault.times, fault.name

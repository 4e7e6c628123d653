"""Planted faults: each breaks the kernel in one way, and some test of the suite must notice.

`pytest verify -m deep -k planted -rP` prints which test notices which fault.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# The quickest first: a run ends at the first test that fails.
SUITE = (
    "verify/tests/kernels/attention/test_tile.py",
    "verify/tests/kernels/attention/test_contract.py",
    "verify/tests/kernels/attention",
    "verify/tests/cases",
)
TESTS_FAILED = 1


@dataclasses.dataclass(frozen=True)
class Fault:
    """One textual change of one file; `before` must occur exactly `times` times."""

    name: str
    file: str
    before: str
    after: str
    times: int = 1


FAULTS = (
    Fault("replay dropped", "kernel.py", "@pl.when(refs.flag[0] != 0)", "@pl.when(refs.flag[0] == 77)"),
    Fault("final check of o dropped", "kernel.py", "refs.flag[0] = unsound.astype(jnp.int32)", "refs.flag[0] = 0"),
    Fault(
        "l compared with > instead of not <=",
        "tile.py",
        "jnp.where(lane_sums <= LANE_LIMIT, 0.0, 1.0)",
        "jnp.where(lane_sums > LANE_LIMIT, 1.0, 0.0)",
    ),
    Fault(
        "stale l on replay",
        "kernel.py",
        "    refs.lane_sums[...] = jnp.zeros_like(refs.lane_sums)\n    refs.marks",
        "    refs.marks",
    ),
    Fault(
        "stale o on replay",
        "kernel.py",
        "    refs.acc[...] = jnp.zeros_like(refs.acc)\n"
        "    refs.lane_sums[...] = jnp.zeros_like(refs.lane_sums)\n    refs.marks",
        "    refs.lane_sums[...] = jnp.zeros_like(refs.lane_sums)\n    refs.marks",
    ),
    Fault("anchor from a masked key", "kernel.py", "tile.choose_anchor(s, visible)", "tile.choose_anchor(s, None)"),
    Fault(
        "scale in BF16",
        "tile.py",
        "    return dot * jnp.float32(log2_scale)",
        "    q = (q.astype(jnp.float32) * log2_scale).astype(jnp.bfloat16)\n"
        "    return lax.dot_general(q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)",
    ),
    Fault(
        "heads mapped by tile instead of repeat",
        "kernel.py",
        "return b, lax.div(h, jnp.int32(spec.group)), ",
        "return b, lax.rem(h, jnp.int32(k.shape[1])), ",
    ),
    Fault(
        "replay reads another head",
        "kernel.py",
        "kv_head = lax.div(step.h, jnp.int32(step.spec.group))",
        "kv_head = step.h * 0",
    ),
    Fault("replay reads another batch entry", "kernel.py", "hbm.at[step.b, kv_head", "hbm.at[step.b * 0, kv_head"),
    Fault("mask off by one", "kernel.py", "(first + kind.delta)", "(first + kind.delta + 1)"),
    Fault(
        "mask of the replay off by one",
        "kernel.py",
        "visible &= column <= step.row_ids",
        "visible &= column < step.row_ids",
    ),
    Fault(
        "P not masked after exp2",
        "tile.py",
        "head = jnp.where(visible[:, lanes], p[:masked], 0.0)",
        "head = p[:masked]",
    ),
    Fault("values beyond the last key not cleared", "kernel.py", "if keys_left < size:", "if keys_left < 0:"),
    Fault("LSE in log2 units", "tile.py", "anchor * LN2 + jnp.log(l)", "anchor + jnp.log2(l)"),
    Fault(
        "accumulator rounded to BF16",
        "kernel.py",
        "+ tile.weighted_values(p, v)",
        "+ tile.weighted_values(p, v).astype(jnp.bfloat16)",
    ),
    Fault("floor not checked", "tile.py", "jnp.where(l >= SUM_FLOOR, 0.0, 1.0)", "jnp.zeros_like(l)"),
    Fault(
        "last fragment dropped",
        "kernel.py",
        "    if pending is not None:\n        add_values(*pending)\n\n\n",
        "\n\n",
    ),
    Fault("non-finite values not restored", "tile.py", "jnp.where((marks == 0) | (out != out), out, special)", "out"),
    Fault("clamp dropped", "tile.py", "half = jnp.where(half > HALF_BF16_MAX, HALF_BF16_MAX, half)", "half = half"),
)


def planted(fault: Fault, into: Path) -> None:
    """A copy of the checkout's kernels and suite, with the fault in it."""
    for name in ("flywheel", "verify", "fuzz"):
        shutil.copytree(ROOT / name, into / name, ignore=shutil.ignore_patterns("__pycache__", "out"))
    shutil.copy(ROOT / "pyproject.toml", into)
    target = into / "flywheel" / "attention" / fault.file
    text = target.read_text(encoding="utf-8")
    assert text.count(fault.before) == fault.times, f"{fault.name}: the code has changed, plant the fault anew"
    target.write_text(text.replace(fault.before, fault.after), encoding="utf-8")


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
        text = (ROOT / "flywheel" / "attention" / fault.file).read_text(encoding="utf-8")
        assert text.count(fault.before) == fault.times, fault.name

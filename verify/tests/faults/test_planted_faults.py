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
    Fault(
        "replay dropped",
        "kernel.py",
        "@pl.when(refs.control[FLAG] != 0)",
        "@pl.when(refs.control[FLAG] == 77)",
    ),
    Fault(
        "final check of o dropped",
        "finish.py",
        "jnp.maximum(tile.denominator_unsound(l), tile.overflow_marks(o))",
        "tile.denominator_unsound(l)",
    ),
    Fault(
        "sums compared with > instead of not <=",
        "tile.py",
        "jnp.where(sums <= LANE_LIMIT, 0.0, 1.0)",
        "jnp.where(sums > LANE_LIMIT, 1.0, 0.0)",
    ),
    Fault("sums not checked between blocks", "block.py", "        block.check_sums()", "        pass"),
    Fault("stale l on replay", "replay.py", "(refs.acc, refs.sums, refs.marks)", "(refs.acc, refs.marks)"),
    Fault("stale o on replay", "replay.py", "(refs.acc, refs.sums, refs.marks)", "(refs.sums, refs.marks)"),
    Fault(
        "state not cleared for the next query block",
        "kernel.py",
        "    refs.sums[...] = jnp.zeros_like(refs.sums)\n",
        "",
    ),
    Fault("anchor from a masked key", "kernel.py", "tile.choose_anchor(s, visible)", "tile.choose_anchor(s, None)"),
    Fault(
        "anchor moves after it was chosen",
        "tile.py",
        "jnp.where((anchor == UNSET) & some,",
        "jnp.where(some,",
    ),
    Fault(
        "scale in BF16",
        "tile.py",
        "            return dot * jnp.float32(self.scale * LOG2_E)",
        "            return dot.astype(jnp.bfloat16).astype(jnp.float32) * jnp.float32(self.scale * LOG2_E)",
    ),
    Fault(
        "soft cap after the mask's units", "tile.py", "jnp.float32(self.softcap * LOG2_E)", "jnp.float32(self.softcap)"
    ),
    Fault(
        "heads mapped by tile instead of repeat",
        "kernel.py",
        'return b, lax.div(h, jnp.int32(spec.group)), unpack_field(steps[n], "j"), 0',
        'return b, lax.rem(h, jnp.int32(operands.k.shape[1])), unpack_field(steps[n], "j"), 0',
    ),
    Fault(
        "replay reads another head",
        "replay.py",
        "kv_head = lax.div(site.h, jnp.int32(site.spec.group))",
        "kv_head = site.h * 0",
    ),
    Fault(
        "replay reads another batch entry",
        "replay.py",
        "refs.k_hbm.at[site.b, kv_head",
        "refs.k_hbm.at[site.b * 0, kv_head",
    ),
    Fault(
        "replay skips the first visited block",
        "replay.py",
        "lax.fori_loop(refs.control[FIRST_BLOCK] * per_block,",
        "lax.fori_loop((refs.control[FIRST_BLOCK] + 1) * per_block,",
    ),
    Fault(
        "mask off by one", "spec.py", "visible = keys <= rows + band.upper", "visible = keys <= rows + band.upper + 1"
    ),
    Fault("window one too wide", "spec.py", "keys >= rows + band.lower", "keys >= rows + band.lower - 1"),
    Fault(
        "segments ignored in the replay",
        "replay.py",
        "            visible &= key_ids_on_sublanes(refs.k_ids_stage[...], count) == refs.q_ids[0, :, queries]\n",
        "",
    ),
    Fault(
        "P not masked after exp2",
        "tile.py",
        "    return p if visible is None else jnp.where(visible, p, 0.0)\n\n\ndef partial_sums",
        "    return p\n\n\ndef partial_sums",
    ),
    Fault(
        "values beyond the last key not cleared",
        "block.py",
        "if keys_left < cell.fragment.size:",
        "if keys_left < 0:",
    ),
    Fault(
        "sink left out of the sum",
        "finish.py",
        "    if site.spec.sinks:\n        l = l",
        "    if site.spec.sinks:\n        l = 0 * l",
    ),
    Fault("LSE in log2 units", "tile.py", "shift * LN2 + jnp.log(l)", "shift + jnp.log2(l)"),
    Fault(
        "accumulator rounded to BF16",
        "block.py",
        "        refs.acc[:, cell.queries] = product\n",
        "        refs.acc[:, cell.queries] = product.astype(jnp.bfloat16).astype(jnp.float32)\n",
    ),
    Fault("floor not checked", "tile.py", "(l >= SUM_FLOOR) & (l <= LANES * LANE_LIMIT)", "l <= LANES * LANE_LIMIT"),
    Fault(
        "last fragments dropped",
        "block.py",
        "    if pending is not None:\n        block.drain(pending)\n    elif",
        "    if",
    ),
    Fault(
        "queries finished before their last product",
        "schedule.py",
        "begins = [0, *(fragment.first for fragment in fragments[1:]), self.block_q]",
        "begins = [0, *(fragment.stop for fragment in fragments[:-1]), self.block_q]",
    ),
    Fault("non-finite values not restored", "tile.py", "jnp.where((marks == 0) | (out != out), out, special)", "out"),
    Fault(
        "clamp dropped",
        "tile.py",
        "jnp.minimum(jnp.maximum(o * (0.5 / l), -HALF_BF16_MAX), HALF_BF16_MAX)",
        "o * (0.5 / l)",
    ),
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

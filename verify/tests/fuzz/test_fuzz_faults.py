"""Planted faults: the hunt that is made for each finds it, and shrinks it, within five minutes.

`pytest verify -m deep -k hunt_finds -rP` prints how long each took and what the minimal case says.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fuzz.case import load_case
from fuzz.cli import VIOLATED
from fuzz.describe import sentence
from fuzz.store import NOT_SHRUNK

ROOT = Path(__file__).resolve().parents[3]
MINUTES = 5


@dataclasses.dataclass(frozen=True)
class Change:
    """`before` becomes `after` in one file of `flywheel`, where it occurs exactly once."""

    file: str
    before: str
    after: str


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, and the hunt that must find it."""

    name: str
    hunt: str
    changes: tuple[Change, ...]


FAULTS = (
    Fault(
        "limit on l raised by 2^20, no final check of o",
        "anchor",
        (
            Change("attention/budget.py", "LANE_LIMIT: Final = 2.0**117", "LANE_LIMIT: Final = 2.0**137"),
            Change(
                "attention/finish.py",
                "jnp.maximum(tile.denominator_unsound(l), tile.overflow_marks(o))",
                "tile.denominator_unsound(l)",
            ),
        ),
    ),
    Fault(
        "replay clears l but not o",
        "replays",
        (Change("attention/replay.py", "(refs.acc, refs.sums, refs.marks)", "(refs.sums, refs.marks)"),),
    ),
    Fault(
        "a block's last products are left out",
        "anchor",
        (
            Change(
                "attention/block.py",
                "    while pending:\n        block.add_values(pending.popleft())\n",
                "",
            ),
        ),
    ),
    Fault(
        "queries finished before their last product",
        "anchor",
        (
            Change(
                "attention/schedule.py",
                "begins = [0, *(fragment.first for fragment in fragments[1:]), self.block_q]",
                "begins = [0, *(fragment.stop for fragment in fragments[:-1]), self.block_q]",
            ),
        ),
    ),
    Fault(
        "check of o before the last product",
        "anchor",
        (
            Change(
                "attention/block.py",
                "            before = acc[:, queries]\n",
                "            before = acc[:, queries]\n"
                "            if self.body.last:\n"
                "                self.failures.append(tile.overflow_marks(before))\n",
            ),
            Change(
                "attention/finish.py",
                "jnp.maximum(tile.denominator_unsound(l), tile.overflow_marks(o))",
                "tile.denominator_unsound(l)",
            ),
        ),
    ),
    Fault(
        "rows of the previous sequence put back one row off",
        "ragged",
        (
            Change(
                "ragged/results.py",
                "kept = jnp.concatenate([before, before], axis=0)",
                "kept = jnp.roll(jnp.concatenate([before, before], axis=0), 1, axis=0)",
            ),
        ),
    ),
    Fault(
        "rows of the previous sequence put back one row off, Gated DeltaNet",
        "state",
        (
            Change(
                "gdn/edges.py",
                "earlier = jnp.concatenate([refs.tail[...]] * 2, axis=0)",
                "earlier = jnp.roll(jnp.concatenate([refs.tail[...]] * 2, axis=0), 1, axis=0)",
            ),
        ),
    ),
    Fault(
        "window one too wide",
        "masks",
        (Change("attention/spec.py", "keys >= rows + band.lower", "keys >= rows + band.lower - 1"),),
    ),
    Fault(
        "P not masked after exp2",
        "masks",
        (
            Change(
                "attention/tile.py",
                "    return p if visible is None else jnp.where(visible, p, 0.0)\n\n\ndef partial_sums",
                "    return p\n\n\ndef partial_sums",
            ),
        ),
    ),
    Fault(
        "KV head by tile",
        "masks",
        (
            Change(
                "attention/kernel.py",
                'return b, lax.div(h, jnp.int32(spec.group)), unpack_field(steps[n], "j"), 0',
                'return b, lax.rem(h, jnp.int32(operands.k.shape[1])), unpack_field(steps[n], "j"), 0',
            ),
        ),
    ),
    Fault(
        "LSE in log2 units", "anchor", (Change("attention/tile.py", "shift * LN2 + jnp.log(l)", "shift + jnp.log2(l)"),)
    ),
    Fault(
        "accumulator rounded to BF16 per fragment",
        "accumulation",
        (
            Change(
                "attention/block.py",
                "        acc[:, queries] = product\n",
                "        acc[:, queries] = product.astype(jnp.bfloat16).astype(jnp.float32)\n",
            ),
        ),
    ),
    Fault(
        "exp of gate differences before their mask",
        "gates",
        (
            Change(
                "gdn/tile.py",
                "    d = jnp.exp(segments)\n",
                "    row, column = places(TILE)\n"
                "    ends = jnp.where(first_chunk(), segments[:, :1], segments[:, CHUNK : CHUNK + 1])\n"
                "    since = jnp.concatenate([segments[:, :1], segments[:, CHUNK : CHUNK + 1]], axis=0).T\n"
                "    d = jnp.exp(jnp.where(row >= column, segments, ends - since))\n",
            ),
        ),
    ),
    Fault(
        "cumulative gate not restarted at the chunk",
        "gates",
        (Change("gdn/tile.py", "(_same_chunk(row, column) & (row <= column))", "(row <= column)"),),
    ),
    Fault(
        "convolution state shifted by one",
        "state",
        (
            Change(
                "gdn/edges.py",
                "pl.ds(HISTORY + stop - before, before)",
                "pl.ds(HISTORY + stop - before - 1, before)",
            ),
        ),
    ),
    Fault(
        "inverse by the whole-chunk product",
        "inverse",
        (
            Change(
                "gdn/inverse.py",
                "jnp.where(_level(row, column, size), lower, zero) for size in LEVELS)",
                "jnp.where(row > column, lower, zero) for size in LEVELS)",
            ),
            Change(
                "gdn/inverse.py",
                "    for size, part in zip(LEVELS[1:], lower.added, strict=True):\n",
                "    for _ in range(4):\n"
                "        of_power = parts(power, precision)\n"
                "        power = product(of_power, of_power)\n"
                "        yield\n"
                "        x = x + product(parts(x, precision), parts(power, precision))\n"
                "    for size, part in ():\n",
            ),
        ),
    ),
)


def planted(fault: Fault, into: Path) -> None:
    """A copy of the checkout's kernels, suite and hunts, with the fault in it."""
    for room in ("flywheel", "verify", "fuzz"):
        shutil.copytree(ROOT / room, into / room, ignore=shutil.ignore_patterns("__pycache__", "out", "tests"))
    shutil.copy(ROOT / "pyproject.toml", into)
    for change in fault.changes:
        path = into / "flywheel" / change.file
        text = path.read_text(encoding="utf-8")
        assert text.count(change.before) == 1, f"{fault.name}: the code has changed, plant the fault anew"
        path.write_text(text.replace(change.before, change.after), encoding="utf-8")


@pytest.mark.deep
@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_hunt_finds_and_shrinks(fault: Fault, tmp_path: Path) -> None:
    """The fault's hunt ends with a violation, a minimal case in a file, and a sentence about it."""
    planted(fault, tmp_path)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "fuzz", "run", fault.hunt, "--fail-fast", "--minutes", str(MINUTES)]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    began = time.monotonic()
    run = subprocess.run(
        [*command, "--seed", "1", "--workers", "1", "--out", str(out)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == VIOLATED, f"not found:\n{run.stdout[-3000:]}{run.stderr[-2000:]}"
    small = [
        case for path in (out / "failures").glob("*.json") if NOT_SHRUNK not in (case := load_case(path)).provenance
    ]
    assert small, f"found, not shrunk:\n{run.stdout[-3000:]}"
    print(f"{fault.name}: hunt {fault.hunt}, {time.monotonic() - began:.0f} s: {sentence(small[0])}")


@pytest.mark.smoke
def test_hunted_faults_can_still_be_planted() -> None:
    """Each change's text occurs in the code exactly once, so that none is silently no fault any more."""
    for fault in FAULTS:
        for change in fault.changes:
            text = (ROOT / "flywheel" / change.file).read_text(encoding="utf-8")
            assert text.count(change.before) == 1, (fault.name, change.file)

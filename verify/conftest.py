"""Pytest set-up of the whole suite: the checks without which no verdict counts.

Pytest imports this file as `verify.conftest`, and with it the package `verify`, which sets JAX's flags: before any test
module imports jax.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from verify.attention import health
from verify.attention.gradients import health as gradient_health
from verify.backend import device_model
from verify.memory import forget_kernels
from verify.rotary import health as rotary_health
from verify.runtime import tpu_present


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the suite."""
    group = parser.getgroup("flywheel")
    group.addoption(
        "--tensors",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="judge the kernel on your own tensors too: an .npz or .safetensors file (see verify/traces/README.md)",
    )
    group.addoption(
        "--subject",
        action="append",
        default=[],
        metavar="NAME",
        help="judge this kernel instead of running the suite: package.module:object (see docs/judge-your-kernel.md)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """A subject may stand in the directory that pytest was started in."""
    if config.getoption("--subject"):
        sys.path.append(str(Path.cwd()))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `--subject` the tests of the given subject alone, without it all but those."""
    if not collection_path.name.startswith("test_"):
        return None
    given = bool(config.getoption("--subject"))
    return True if given != (collection_path.name == "test_given_subject.py") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a TPU, with the reason."""
    if not tpu_present():
        skip = pytest.mark.skip(reason="no TPU on this machine: neither /dev/accel* nor /dev/vfio/* exists")
        for item in items:
            if "tpu" in item.keywords:
                item.add_marker(skip)


TESTS_BETWEEN = 25
"""Tests between two looks at what compiled kernels hold: no test compiles hundreds without looking itself."""

_done = itertools.count(1)


def pytest_runtest_teardown() -> None:
    """A process that compiles a thousand kernels would end without a word."""
    if next(_done) % TESTS_BETWEEN == 0:
        forget_kernels()


@pytest.fixture(scope="session", autouse=True)
def sound_instruments() -> None:
    """Nothing is judged before the backend and the oracles have been probed."""
    device_model()
    for oracles in (health, gradient_health, rotary_health):
        oracles.check_oracles()

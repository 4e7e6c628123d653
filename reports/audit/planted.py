"""Kernels of the audit with a fault of `verify.faults` planted in them."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import verify
from reports.audit import attention
from reports.audit.answers import Kernel
from verify.attention import subjects

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import ModuleType

    from reports.audit.answers import Arrays, Asked
    from verify.faults import Fault

ROOT = Path(verify.__file__).parent.parent
PACKAGE = "flywheel"


@contextlib.contextmanager
def kernel_with(fault: Fault) -> Generator[ModuleType]:
    """The package with the fault in it, imported beside the one in use.

    Raises:
        FaultError: the text to change does not occur as often as the fault says.
    """
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == PACKAGE}
    with tempfile.TemporaryDirectory() as directory:
        shutil.copytree(ROOT / PACKAGE, Path(directory) / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
        fault.plant(Path(directory))
        sys.path.insert(0, directory)
        try:
            yield importlib.import_module(PACKAGE)
        finally:
            sys.path.remove(directory)
            for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
                del sys.modules[name]
            sys.modules.update(kept)


def planted_kernel(fault: Fault, package: ModuleType) -> Kernel:
    """The kernel of that package; an exception of it is a result of nothing but NaN."""

    def answer(asked: Asked) -> Arrays:
        with mock.patch.object(subjects, PACKAGE, package):
            return attention.run(asked)

    return Kernel("attention", fault.name, False, "planted", fault.file, answer, attention.run)  # noqa: FBT003


def usual_answers(asked: Asked, kept: dict[str, Any]) -> Arrays:
    """What the kernel without a fault gives, once per input."""
    if asked.name not in kept:
        kept[asked.name] = attention.run(asked)
    return kept[asked.name]

"""Faults planted in the attention kernel itself, one textual change each.

The list stands with the test that plants them and asks whether the suite notices; it is read there as data.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
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

ROOT = Path(verify.__file__).parent.parent
LIST = ROOT / "verify" / "tests" / "faults" / "test_planted_faults.py"
PACKAGE = "flywheel"


@dataclasses.dataclass(frozen=True)
class Fault:
    """One textual change of one file of the attention kernel."""

    name: str
    file: str
    before: str
    after: str
    times: int = 1


class FaultsError(ValueError):
    """The list of faults cannot be read, or a fault cannot be planted."""


def faults(path: Path = LIST) -> list[Fault]:
    """The planted faults.

    Raises:
        FaultsError: the file has no list of literal faults.
    """
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        named = isinstance(statement, ast.Assign) and [getattr(target, "id", "") for target in statement.targets]
        if named == ["FAULTS"] and isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Tuple):
            return [_fault(call, path) for call in statement.value.elts]
    message = f"{path}: no FAULTS"
    raise FaultsError(message)


def _fault(call: ast.expr, path: Path) -> Fault:
    if not isinstance(call, ast.Call):
        message = f"{path}, line {call.lineno}: FAULTS must hold literal Fault(...)"
        raise FaultsError(message)
    values = [ast.literal_eval(argument) for argument in call.args]
    return Fault(*values, **{key.arg: ast.literal_eval(key.value) for key in call.keywords if key.arg})


@contextlib.contextmanager
def kernel_with(fault: Fault) -> Generator[ModuleType]:
    """The package with the fault in it, imported beside the one in use.

    Raises:
        FaultsError: the text to change does not occur as often as the fault says.
    """
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == PACKAGE}
    with tempfile.TemporaryDirectory() as directory:
        shutil.copytree(ROOT / PACKAGE, Path(directory) / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
        target = Path(directory) / PACKAGE / "attention" / fault.file
        text = target.read_text(encoding="utf-8")
        if text.count(fault.before) != fault.times:
            message = f"{fault.name}: the text to change occurs {text.count(fault.before)} times in {fault.file}"
            raise FaultsError(message)
        target.write_text(text.replace(fault.before, fault.after), encoding="utf-8")
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

"""Why a target could not be compiled, and which of the user's lines is to blame."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

WORKER_NAME = "worker.py"


class CompileError(Exception):
    """The target could not be compiled."""


class CompilerMissingError(CompileError):
    """There is no libtpu in the interpreter that is to compile."""


class TimeLimitError(CompileError):
    """The compiler was stopped at its time limit."""


class RefusedError(CompileError):
    """The target, JAX or the compiler raised.

    Attributes:
        stage: import, topology, arguments, trace, lower or compile.
        kind: name of the exception.
        message: what it says.
        line: `file:line: code` of the kernel line it points at, or None.
    """

    def __init__(self, stage: str, kind: str, message: str, line: str | None) -> None:
        where = f"\n  at {line}" if line else ""
        super().__init__(f"{stage} failed with {kind}: {message}{where}")
        self.stage, self.kind, self.message, self.line = stage, kind, message, line


_LOCATION = re.compile(r"([\w./\-]+\.py):(\d+)")
_SITE = re.compile(r"/(?:jax|jaxlib)/")


def kernel_line(error: dict[str, Any]) -> str | None:
    """The user's line that an error points at: the one the compiler names, else the innermost frame outside JAX."""
    for file, number in _LOCATION.findall(error["message"]):
        path = Path(file)
        if path.is_file() and not _SITE.search(file):
            lines = path.read_text(errors="replace").splitlines()
            code = lines[int(number) - 1].strip() if int(number) <= len(lines) else ""
            return f"{file}:{number}: {code}"
    for file, number, code in reversed(error["frames"]):
        if (
            not _SITE.search(file)
            and Path(file).name != WORKER_NAME
            and "/lib/python" not in file.split("site-packages")[0]
        ):
            return f"{file}:{number}: {code}"
    return None

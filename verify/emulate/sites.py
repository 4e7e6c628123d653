"""Equations of a jaxpr as places: what each computes, and which line of source wrote it."""

from __future__ import annotations

import dataclasses
import linecache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.extend.core as jex

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
_JAX = Path(jax.__file__).resolve().parent
_TRACER = Path(__file__).with_name("interpreter.py")
_SKIPPED = ("jaxtyping", "contextlib.py", "functools.py")
UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class Site:
    """One equation.

    Attributes:
        path: its number, after those of the equations around it: "3/0/12" stands within a loop or a call.
        primitive: JAX's name.
        dtype: of its first result.
        shape: of its first result.
        file: of the source line, relative to the checkout where it lies there; `UNKNOWN` if JAX kept none.
        line: in that file, from 1; 0 if unknown.
        function: around that line.
        callers: file:line of the frames around it, innermost first, up to the traced function's.
    """

    path: str
    primitive: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    line: int
    function: str
    callers: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """file:line."""
        return f"{self.file}:{self.line}"

    @property
    def text(self) -> str:
        """The source line itself; empty if it cannot be read."""
        path = Path(self.file)
        return linecache.getline(str(path if path.is_absolute() else ROOT / path), self.line).strip()


def site_of(path: str, eqn: jex.JaxprEqn) -> Site:
    """The place of an equation."""
    first: Any = eqn.outvars[0].aval if eqn.outvars else None
    dtype, shape = getattr(first, "dtype", None), getattr(first, "shape", ())
    frames = list(_frames(eqn))
    file, line, function = frames[0] if frames else (UNKNOWN, 0, UNKNOWN)
    callers = tuple(f"{at}:{number}" for at, number, _ in frames[1:])
    return Site(path, eqn.primitive.name, str(dtype), tuple(int(n) for n in shape), file, line, function, callers)


def source(eqn: jex.JaxprEqn) -> str:
    """file:line of an equation."""
    file, line, _ = next(_frames(eqn), (UNKNOWN, 0, UNKNOWN))
    return f"{file}:{line}"


def _frames(eqn: jex.JaxprEqn) -> Iterator[tuple[str, int, str]]:
    """File, line and function of the frames outside JAX, innermost first, within the traced function."""
    trace = eqn.source_info.traceback
    for frame in () if trace is None else trace.frames:
        path = Path(frame.file_name)
        if path == _TRACER and frame.function_name.endswith("trace"):
            return
        if _JAX in path.parents or any(name in frame.file_name for name in _SKIPPED) or frame.file_name[:1] == "<":
            continue
        resolved = path.resolve()
        name = str(resolved.relative_to(ROOT)) if ROOT in resolved.parents else path.name
        yield name, int(frame.line_num), frame.function_name.rsplit(".", maxsplit=1)[-1]


def inner_jaxprs(eqn: jex.JaxprEqn) -> Iterator[Any]:
    """Jaxprs in an equation's parameters."""
    for value in eqn.params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(each, "eqns") or hasattr(getattr(each, "jaxpr", None), "eqns"):
                yield each


def opened(jaxpr: Any) -> tuple[jex.Jaxpr, list[Any]]:  # noqa: ANN401  closed or open
    """The jaxpr and its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr), list(getattr(jaxpr, "consts", ()))


def all_sites(jaxpr: Any, before: str = "") -> Iterator[Site]:  # noqa: ANN401  closed or open
    """Every equation, those of loops and calls included, in the order of evaluation."""
    for number, eqn in enumerate(opened(jaxpr)[0].eqns):
        path = f"{before}{number}"
        yield site_of(path, eqn)
        for branch, inner in enumerate(inner_jaxprs(eqn)):
            yield from all_sites(inner, f"{path}/{branch}/")

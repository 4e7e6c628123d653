"""What a hunt attacks: a kernel behind one call, named `package.module:object`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from verify.attention.problem import AttentionProblem
    from verify.attention.subjects import SubjectResult

DEFAULT = "flywheel.attention"
_RUNNERS = {DEFAULT: "verify.attention.subjects:run_flywheel"}


class SubjectError(ValueError):
    """A subject that cannot be loaded."""


class Subject(Protocol):
    """A kernel that computes dense attention."""

    def __call__(self, problem: AttentionProblem, *, config: tuple[int, int, int]) -> SubjectResult:
        """Run the kernel; `config` is (block_q, block_kv, fragment), which it may ignore."""
        ...


def load(name: str) -> Subject:
    """The subject of that name: `flywheel.attention`, or `package.module:object` of a callable like `Subject`.

    Raises:
        SubjectError: the name has another form, or nothing callable stands there.
    """
    return resolve(_RUNNERS.get(name, name))


def resolve(path: str) -> Any:  # noqa: ANN401  whatever stands there
    """The callable at `package.module:object`.

    Raises:
        SubjectError: the path has another form, or nothing callable stands there.
    """
    module, colon, attribute = path.partition(":")
    if not (module and colon and attribute):
        message = f"subject must be {DEFAULT} or package.module:object, got {path!r}"
        raise SubjectError(message)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        message = f"subject {path!r} cannot be loaded: {error}"
        raise SubjectError(message) from error
    if not callable(found):
        message = f"subject {path!r} must be callable, got {type(found).__name__}"
        raise SubjectError(message)
    return found

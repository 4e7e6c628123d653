"""Kernels for the chunk's inverse and for whole layers by name, and any at `package.module:object`."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from typing import TYPE_CHECKING

import numpy as np

from verify.gdn.inverse_steps import InverseSteps
from verify.subjects import gdn
from verify.subjects.gdn import GdnSubject, GdnSubjectError
from verify.subjects.lookup import find

if TYPE_CHECKING:
    from collections.abc import Callable

    from fuzz.gdn.inverse_case import InverseProblem
    from verify.gdn.judge import GdnResult
    from verify.gdn.problem import GdnProblem

OURS = "flywheel.gdn.triangular_inverse"


@dataclasses.dataclass(frozen=True)
class InverseSubject:
    """A kernel for (I + L)^-1.

    Attributes:
        name: shown in verdicts and records.
        call: `call(lower, precision)` on an FP32 matrix, returns FP32 `[64, 64]`; NotImplementedError if it has no such
            precision.
        finish: how its last products round (`verify.gdn.inverse_steps.InverseSteps`).
        modules: what must be importable.
        contract: what its documentation promises.
    """

    name: str
    call: Callable[[np.ndarray, str], np.ndarray]
    finish: str = "add"
    modules: tuple[str, ...] = ()
    contract: str = ""

    def steps(self, precision: str) -> InverseSteps:
        """The contract's roundings."""
        return InverseSteps(precision, self.finish)

    def missing(self) -> str | None:
        """Why it cannot run here."""
        absent = [module for module in self.modules if importlib.util.find_spec(module) is None]
        return f"{', '.join(absent)} is not installed" if absent else None

    def invert(self, problem: InverseProblem, precision: str) -> np.ndarray:
        """Its inverse."""
        return np.asarray(self.call(problem.lower, precision))


def _ours(lower: np.ndarray, precision: str) -> np.ndarray:
    import jax.numpy as jnp  # noqa: PLC0415  starts JAX

    from flywheel.gdn import triangular_inverse  # noqa: PLC0415

    return np.asarray(triangular_inverse(jnp.asarray(lower), precision=precision, interpret=True))  # type: ignore[arg-type]


FLYWHEEL = InverseSubject(OURS, _ours, contract="docs/gdn-inverse-contract.md")


def names() -> tuple[str, ...]:
    """The names that are known."""
    return (OURS,)


def load(name: str) -> InverseSubject:
    """The subject of that name, or what stands at `package.module:object`: an `InverseSubject`, or a function.

    Raises:
        GdnSubjectError: no such name, or nothing callable stands there.
    """
    if name == OURS:
        return FLYWHEEL
    path, found = find(name, InverseSubject, {OURS: OURS}, GdnSubjectError)
    return found if isinstance(found, InverseSubject) else InverseSubject(path, found)  # type: ignore[arg-type]


LAYER_OURS = "flywheel.gdn.fused_conv1d_gdn"


@dataclasses.dataclass(frozen=True)
class LayerSubject:
    """A kernel for a layer.

    Attributes:
        name: shown in verdicts and records.
        in_precision: from the precision that a case asks for to what runs it; a kernel that has one ignores it.
        simulate: a call in that precision, in an interpreter by name (`verify.attention.subjects.INTERPRET`); None: it
            has no say there.
    """

    name: str
    in_precision: Callable[[str], GdnSubject]
    simulate: Callable[[GdnProblem, str, str], GdnResult] | None = None


def _simulated_layer(problem: GdnProblem, precision: str, interpreter: str) -> GdnResult:
    from verify.subjects.gdn_ours import run_flywheel_gdn  # noqa: PLC0415  starts JAX

    return run_flywheel_gdn(problem, precision=precision, interpret=interpreter)


def layer_names() -> tuple[str, ...]:
    """The names that are known."""
    return (LAYER_OURS, *gdn.names())


def load_layer(name: str) -> LayerSubject:
    """Our kernel in the precision that each case asks for, or a subject of `verify.subjects.gdn.load` as it is.

    Raises:
        GdnSubjectError: no such name, or nothing callable stands there.
    """
    if name == LAYER_OURS:
        return LayerSubject(
            name, functools.cache(lambda precision: gdn.load(f"{LAYER_OURS}[{precision}]")), _simulated_layer
        )
    found = gdn.load(name)
    return LayerSubject(name, lambda _: found)

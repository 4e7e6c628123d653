"""A lint over what a kernel computes, read from its jaxpr: roundings that no contract allows for.

Two rules, whose figures come from the device models (`verify.devices`):

- no product of FP32 matrices at default precision: a TPU multiplies BF16 operands then, and the CPU does not;
- no elementwise BF16 chain longer than `bf16_roundings`: how many roundings it has depends on the machine and on the
  compiler.  Operations that are exact (negation, maximum, selection, products with powers of two) are free; a constant
  that is no power of two counts as rounded, since its BF16 word does not tell; so does what a loop or a scratch buffer
  carries along.  A BF16 function that a model gives more than one ulp is refused on its own.

The walk enters everything inside: jit, scan, while, cond, custom derivatives and Pallas kernels.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from verify.devices import MODELS, V6E

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from verify.devices import DeviceModel

DEFAULT_DOT = "FP32 matrix product at default precision"
BF16_CHAIN = "elementwise BF16 chain"
BF16_FUNCTION = "BF16 function"

_ROUNDING = ("add", "sub", "mul", "div", "add_any", "integer_pow", "pow", "square", "sqrt", "cumsum", "reduce_sum")
_FUNCTIONS = {
    "exp2": "exp2",
    "exp": "exp",
    "log": "log",
    "tanh": "tanh",
    "rsqrt": "rsqrt",
    "logistic": "sigmoid",
}
WORST_BF16_ULP = 1.0


@dataclasses.dataclass(frozen=True)
class Finding:
    """One place that breaks a rule.

    Attributes:
        rule: DEFAULT_DOT, BF16_CHAIN or BF16_FUNCTION.
        message: what is wrong there.
        where: source file, line and function, as far as JAX kept them.
    """

    rule: str
    message: str
    where: str

    def __str__(self) -> str:
        return f"{self.where}: {self.rule}: {self.message}"


def lint(function: Callable[..., Any], *arguments: Any, model: DeviceModel = V6E) -> list[Finding]:  # noqa: ANN401
    """Findings of a function at arguments of some shapes (arrays or `jax.ShapeDtypeStruct`); nothing is computed."""
    closed = jax.make_jaxpr(function)(*arguments)
    walk = _Walk(model)
    walk.jaxpr(closed.jaxpr, [0] * len(closed.jaxpr.invars))
    return list(dict.fromkeys(walk.findings))


class _Walk:
    """How many roundings each BF16 value has behind it, equation by equation."""

    def __init__(self, model: DeviceModel) -> None:
        self.model = model
        self.findings: list[Finding] = []

    def jaxpr(self, jaxpr: Any, depths: Iterable[int]) -> list[int]:  # noqa: ANN401
        """Depths of the outputs, given those of the inputs."""
        known: dict[Any, int] = dict.fromkeys(jaxpr.constvars, 0)
        known.update(zip(jaxpr.invars, depths, strict=True))
        for equation in jaxpr.eqns:
            found = self.equation(equation, [_depth(atom, known) for atom in equation.invars])
            known.update(zip(equation.outvars, found, strict=True))
        return [_depth(atom, known) for atom in jaxpr.outvars]

    def equation(self, equation: Any, depths: list[int]) -> list[int]:  # noqa: ANN401, PLR0911  one per kind
        """Depths of an equation's results."""
        name = equation.primitive.name
        inner = list(_inner(equation.params))
        if inner:
            return self.enter(equation, inner, depths)
        if name == "dot_general":
            self.dot(equation)
        if not any(_is_bf16(atom.aval) for atom in equation.outvars):
            return [0] * len(equation.outvars)
        if name == "convert_element_type":
            source = equation.invars[0].aval.dtype
            return [depths[0] if source == jnp.bfloat16 else int(jnp.issubdtype(source, jnp.floating))]
        if name == "dot_general":
            return [1]
        if name in ("get", "masked_load", "load"):
            return [depths[0]] * len(equation.outvars)
        if name in _FUNCTIONS:
            return [self.function(equation, name, depths)]
        if name in _ROUNDING and not _exact(equation):
            return [self.rounded(equation, name, depths)] * len(equation.outvars)
        return [max(depths, default=0)] * len(equation.outvars)

    def dot(self, equation: Any) -> None:  # noqa: ANN401
        """Refuse FP32 operands at default precision."""
        precision = equation.params.get("precision")
        chosen = precision if isinstance(precision, tuple) else (precision, precision)
        default = all(p is None or p == lax.Precision.DEFAULT for p in chosen)
        if default and all(atom.aval.dtype == jnp.float32 for atom in equation.invars):
            shapes = " x ".join(str(list(atom.aval.shape)) for atom in equation.invars)
            message = f"{shapes}; operands are {self.model.default_dot} on {self.model.name}: cast them, or say HIGHEST"
            self.report(equation, DEFAULT_DOT, message)

    def function(self, equation: Any, name: str, depths: list[int]) -> int:  # noqa: ANN401
        """A transcendental function in BF16."""
        known = _FUNCTIONS[name]
        ulps = {m.name: m.bf16_ulp[known] for m in MODELS.values()}
        worst = max(ulps, key=lambda model: ulps[model])
        if ulps[worst] > WORST_BF16_ULP:
            self.report(equation, BF16_FUNCTION, f"{name} in BF16 errs by up to {ulps[worst]:g} ulp on {worst}")
        return self.rounded(equation, name, depths)

    def rounded(self, equation: Any, name: str, depths: list[int]) -> int:  # noqa: ANN401
        """One rounding more."""
        depth = max(depths, default=0) + 1
        if depth > self.model.bf16_roundings:
            message = (
                f"{name} makes rounding {depth} in a row, {self.model.bf16_roundings} is the same on every machine"
            )
            self.report(equation, BF16_CHAIN, message)
            return self.model.bf16_roundings  # one finding per step is enough
        return depth

    def enter(self, equation: Any, inner: list[Any], depths: list[int]) -> list[int]:  # noqa: ANN401
        """Walk the jaxprs inside an equation."""
        outs = len(equation.outvars)
        results = [self.jaxpr(jaxpr, self._given(equation, jaxpr, depths)) for jaxpr in inner]
        usable = [found for found in results if len(found) == outs]
        return [max(column) for column in zip(*usable, strict=True)] if usable else [1] * outs

    def _given(self, equation: Any, jaxpr: Any, depths: list[int]) -> list[int]:  # noqa: ANN401
        """Depths of an inner jaxpr's inputs: what a loop carries or a kernel keeps in a buffer was rounded before."""
        count, params = len(jaxpr.invars), equation.params
        outer = (depths[-count:] if count <= len(depths) else depths + [0] * (count - len(depths))) if count else []
        first, last = count, count
        if equation.primitive.name == "pallas_call":
            mapping = params["grid_mapping"]
            first = mapping.num_index_operands + mapping.num_inputs
            outer = (depths + [0] * count)[:count]
        elif equation.primitive.name == "scan":
            # What is carried keeps its shape; what is scanned loses an axis inside.
            last = sum(_alike(o, i) for o, i in zip(equation.invars, jaxpr.invars, strict=True))
            first = last - sum(_alike(o, i) for o, i in zip(equation.outvars, jaxpr.outvars, strict=True))
        elif equation.primitive.name == "while":
            first = count - len(equation.outvars)
        elif equation.primitive.name == "run_scoped":
            first = 0
        return [
            max(depth, 1) if first <= position < last and _is_bf16(variable.aval) else depth
            for position, (depth, variable) in enumerate(zip(outer, jaxpr.invars, strict=True))
        ]

    def report(self, equation: Any, rule: str, message: str) -> None:  # noqa: ANN401
        """Note a finding at the equation's source line."""
        where = jex.source_info_util.summarize(equation.source_info)
        self.findings.append(Finding(rule, message, where))


def _alike(one: Any, other: Any) -> bool:  # noqa: ANN401
    return getattr(one.aval, "shape", None) == getattr(other.aval, "shape", None)


def _depth(atom: Any, known: Mapping[Any, int]) -> int:  # noqa: ANN401
    if isinstance(atom, jex.core.Literal):
        return 0 if not _is_bf16(atom.aval) or _power_of_two(atom.val) else 1
    return known.get(atom, 0)


def _exact(equation: Any) -> bool:  # noqa: ANN401
    """A product with, or a quotient by, a power of two."""
    literals = [atom for atom in equation.invars if isinstance(atom, jex.core.Literal)]
    return equation.primitive.name in ("mul", "div") and any(_power_of_two(atom.val) for atom in literals)


def _power_of_two(value: Any) -> bool:  # noqa: ANN401
    number = float(np.asarray(value).astype(np.float64).reshape(-1)[0]) if np.size(value) == 1 else math.nan
    return not math.isfinite(number) or number == 0.0 or abs(math.frexp(number)[0]) == 0.5


def _is_bf16(aval: Any) -> bool:  # noqa: ANN401
    inner = getattr(aval, "inner_aval", aval)
    return getattr(inner, "dtype", None) == jnp.bfloat16


def _inner(params: Mapping[str, Any]) -> Iterator[Any]:
    """Jaxprs among an equation's parameters."""
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, jex.core.ClosedJaxpr):  # pyright: ignore[reportPrivateImportUsage]
                yield item.jaxpr
            elif isinstance(item, jex.core.Jaxpr):
                yield item

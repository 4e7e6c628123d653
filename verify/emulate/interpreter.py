"""An interpreter of jaxprs in numpy, with the arithmetic as an argument.

It takes pure functions: tile maths, not kernels (a `pallas_call` has references and copies, which are the interpreter's
of JAX).  Calls, scans, loops and conditions are entered; their predicates and indices are computed from the emulated
values, as a device would.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.extend.core as jex
import numpy as np

from verify.emulate.arithmetic import EmulationError, Exact
from verify.emulate.primitives import EXACT, ROUNDED, SUMS, held, is_float, summed
from verify.emulate.sites import all_sites, opened, source
from verify.rounding import FORMATS, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from verify.emulate.arithmetic import Arithmetic
    from verify.emulate.sites import Site

CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "run_state": "jaxpr",
}
LOOPS = ("scan", "while", "cond")
MOST_STEPS = 1 << 20
"""Steps of one `while` after which it counts as endless."""


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A traced function.

    Attributes:
        name: what it is called.
        closed: its jaxpr with constants.
        sites: all equations.
    """

    name: str
    closed: Any
    sites: tuple[Site, ...]

    def run(self, arguments: Sequence[Any], arithmetic: Arithmetic | None = None) -> list[np.ndarray]:
        """Evaluate it; results in the order of the flattened outputs, floating-point ones in float64.

        Args:
            arguments: flattened, of the shapes and dtypes that it was traced with.
            arithmetic: `Exact()` if None.

        Raises:
            EmulationError: an equation cannot be emulated.
            ValueError: another number of arguments, or other shapes.
        """
        jaxpr, constants = opened(self.closed)
        if len(arguments) != len(jaxpr.invars):
            message = f"{self.name} takes {len(jaxpr.invars)} arrays, got {len(arguments)}"
            raise ValueError(message)
        values: list[np.ndarray] = []
        for number, (var, x) in enumerate(zip(jaxpr.invars, arguments, strict=True)):
            shape, dtype = _shape(var), _dtype(var)
            if np.shape(x) != shape:
                message = f"argument {number} of {self.name} must have shape {shape}, got {np.shape(x)}"
                raise ValueError(message)
            values.append(held(x, dtype))
        with np.errstate(all="ignore"):
            machine = _Machine(arithmetic or Exact(), {site.path: site for site in self.sites})
            return machine.run(jaxpr, constants, values, "")


def trace(function: Callable[..., Any], *arguments: Any, name: str | None = None) -> Program:  # noqa: ANN401
    """Trace a function at arguments (arrays, or `jax.ShapeDtypeStruct`).

    Raises:
        EmulationError: it contains an equation that cannot be emulated; all of them are named, with source lines.
    """
    closed = jax.make_jaxpr(function)(*arguments)
    sites = tuple(all_sites(closed))
    known = {*EXACT, *ROUNDED, *SUMS, *CALLS, *LOOPS, *_PLAIN}
    missing = {f"{site.primitive} ({site.source})": None for site in sites if site.primitive not in known}
    if missing:
        message = f"cannot emulate: {', '.join(missing)}"
        raise EmulationError(message)
    return Program(name or getattr(function, "__name__", "function"), closed, sites)


def _dtype(atom: Any) -> Any:  # noqa: ANN401  Var or Literal; its aval has no static type
    return atom.aval.dtype


def _shape(atom: Any) -> tuple[int, ...]:  # noqa: ANN401
    return tuple(atom.aval.shape)


class _Machine:
    """One evaluation of a program."""

    def __init__(self, arithmetic: Arithmetic, sites: dict[str, Site]) -> None:
        self.arithmetic = arithmetic
        self.sites = sites

    def run(self, jaxpr: jex.Jaxpr, constants: list[Any], values: list[np.ndarray], before: str) -> list[np.ndarray]:
        """One jaxpr; `before` is the path of the equation around it."""
        known: dict[Any, np.ndarray] = {}

        def read(atom: Any) -> np.ndarray:  # noqa: ANN401  Var or Literal
            return held(atom.val, _dtype(atom)) if isinstance(atom, jex.Literal) else known[atom]

        for var, value in zip(jaxpr.constvars, constants, strict=True):
            known[var] = held(value, _dtype(var))
        known.update(zip(jaxpr.invars, values, strict=True))
        for number, eqn in enumerate(jaxpr.eqns):
            results = self.equation(eqn, f"{before}{number}", tuple(read(x) for x in eqn.invars))
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def equation(  # noqa: PLR0911  one per kind
        self, eqn: jex.JaxprEqn, path: str, args: tuple[np.ndarray, ...]
    ) -> list[np.ndarray]:
        """Results of one equation."""
        name = eqn.primitive.name
        if name in CALLS:
            jaxpr, constants = opened(eqn.params[CALLS[name]])
            return self.run(jaxpr, constants, list(args), f"{path}/0/")
        if name in LOOPS:
            return getattr(self, f"_{name}")(eqn, path, args)
        if name in _PLAIN:
            return _PLAIN[name](eqn, args)
        rounds = is_float(_dtype(eqn.outvars[0]))
        if name in SUMS:
            exact, terms = summed(eqn, args)
            if rounds:
                return [self.arithmetic.rounded(self.sites[path], exact, args, terms)]
            return [exact.astype(_dtype(eqn.outvars[0]))]
        if name in EXACT:
            return [EXACT[name](eqn.params, args)]
        if name not in ROUNDED:
            message = f"cannot emulate {name} ({source(eqn)})"
            raise EmulationError(message)
        found = ROUNDED[name](eqn.params, args)
        return [self.arithmetic.rounded(self.sites[path], found, args, None) if rounds else found]

    def _scan(self, eqn: jex.JaxprEqn, path: str, args: tuple[np.ndarray, ...]) -> list[np.ndarray]:
        params = eqn.params
        jaxpr, constants = opened(params["jaxpr"])
        groups = _scan_groups(params, args)
        fixed, carry, along = groups
        kept: list[list[np.ndarray]] = [[] for _ in range(len(eqn.outvars) - len(carry))]
        steps = range(params["length"])
        for t in reversed(steps) if params["reverse"] else steps:
            found = self.run(jaxpr, constants, [*fixed, *carry, *(x[t] for x in along)], f"{path}/0/")
            carry = found[: len(carry)]
            for rows, row in zip(kept, found[len(carry) :], strict=True):
                rows.append(row)
        stacked: list[np.ndarray] = []
        for var, rows in zip(eqn.outvars[len(carry) :], kept, strict=True):
            ordered = rows[::-1] if params["reverse"] else rows
            stacked.append(np.stack(ordered) if rows else held(np.zeros(_shape(var)), _dtype(var)))
        return [*carry, *stacked]

    def _while(self, eqn: jex.JaxprEqn, path: str, args: tuple[np.ndarray, ...]) -> list[np.ndarray]:
        params = eqn.params
        (test, test_consts), (body, body_consts) = opened(params["cond_jaxpr"]), opened(params["body_jaxpr"])
        of_test, of_body = params["cond_nconsts"], params["body_nconsts"]
        outer, inner, carry = args[:of_test], args[of_test : of_test + of_body], list(args[of_test + of_body :])
        for _ in range(MOST_STEPS):
            if not bool(self.run(test, test_consts, [*outer, *carry], f"{path}/0/")[0]):
                return carry
            carry = self.run(body, body_consts, [*inner, *carry], f"{path}/1/")
        message = f"{source(eqn)}: a loop of more than {MOST_STEPS} steps"
        raise EmulationError(message)

    def _cond(self, eqn: jex.JaxprEqn, path: str, args: tuple[np.ndarray, ...]) -> list[np.ndarray]:
        branches = eqn.params["branches"]
        chosen = min(max(int(args[0]), 0), len(branches) - 1)
        jaxpr, constants = opened(branches[chosen])
        return self.run(jaxpr, constants, list(args[1:]), f"{path}/{chosen}/")


def _scan_groups(
    params: Any,  # noqa: ANN401
    args: tuple[np.ndarray, ...],
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """What stays, what is carried, what is gone through."""
    if "num_consts" in params:
        consts, carries = params["num_consts"], params["num_carry"]
    else:
        fixed, carried = params["ft_in"].unpack()[:2]
        consts, carries = len(fixed), len(carried)
    return list(args[:consts]), list(args[consts : consts + carries]), list(args[consts + carries :])


def _bitcast(eqn: jex.JaxprEqn, args: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    """The words of the operand's own format, read as another one."""
    narrow, target = np.dtype(_dtype(eqn.invars[0])), np.dtype(eqn.params["new_dtype"])
    if narrow.itemsize != target.itemsize:
        message = f"{source(eqn)}: bitcast from {narrow} to {target} changes the shape"
        raise EmulationError(message)
    words = nearest(args[0], FORMATS[narrow.name]) if is_float(narrow) else args[0]
    return [held(words.astype(narrow).view(target), target)]


def _split(eqn: jex.JaxprEqn, args: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    ends = np.cumsum(eqn.params["sizes"])[:-1]
    return list(np.split(args[0], ends, axis=eqn.params["axis"]))


def _sort(eqn: jex.JaxprEqn, args: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    axis, keys = eqn.params["dimension"], eqn.params["num_keys"]
    order = np.lexsort(args[:keys][::-1], axis=axis)
    return [np.take_along_axis(x, order, axis=axis) for x in args]


_PLAIN: dict[str, Any] = {"bitcast_convert_type": _bitcast, "split": _split, "sort": _sort}
"""Equations that round nothing and are no function of one result."""

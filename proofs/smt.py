"""Questions to an SMT solver, and running plain integer code on symbols.

`require_always` proves a formula for all values of its variables, machine words included.  `paths` runs a Python
function whose arguments are `Symbol`s once for each way in which its comparisons can come out, so that what is proved
is proved of the code itself and not of a copy.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import z3

from proofs.lemma import LemmaRefuted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MILLISECONDS = 120_000

FP32 = z3.FPSort(8, 24)
BF16 = z3.FPSort(8, 8)
NEAREST = z3.RNE()


def require_always(claim: Any, otherwise: str, *, given: Any = True) -> None:  # noqa: ANN401  z3's expressions carry no types
    """Refute the lemma unless the claim holds for all values that satisfy `given`; undecided is refuted too."""
    solver = z3.Solver()
    solver.set("timeout", _MILLISECONDS)
    solver.add(given, z3.Not(claim))
    answer = solver.check()
    if answer == z3.unsat:
        return
    example = f", for example {_written(solver.model())}" if answer == z3.sat else " (undecided)"
    raise LemmaRefuted(otherwise + example)


def _written(model: Any) -> str:  # noqa: ANN401
    return ", ".join(sorted(f"{name} = {model[name]}" for name in model))[:200]


def possible(*conditions: Any) -> bool:  # noqa: ANN401
    """Whether some values satisfy all conditions; undecided counts as possible."""
    solver = z3.Solver()
    solver.set("timeout", _MILLISECONDS)
    solver.add(*conditions)
    return solver.check() != z3.unsat


class Symbol:
    """An integer that is not known: arithmetic gives symbols, comparisons ask the current path."""

    def __init__(self, expression: Any, path: Path) -> None:  # noqa: ANN401
        self.expression = expression
        self.path = path

    def _other(self, other: Any) -> Any:  # noqa: ANN401
        return other.expression if isinstance(other, Symbol) else other

    def _made(self, expression: Any) -> Symbol:  # noqa: ANN401
        return Symbol(expression, self.path)

    def __add__(self, other: Any) -> Symbol:  # noqa: ANN401
        return self._made(self.expression + self._other(other))

    def __sub__(self, other: Any) -> Symbol:  # noqa: ANN401
        return self._made(self.expression - self._other(other))

    def __rsub__(self, other: Any) -> Symbol:  # noqa: ANN401
        return self._made(self._other(other) - self.expression)

    def __mul__(self, other: Any) -> Symbol:  # noqa: ANN401
        return self._made(self.expression * self._other(other))

    def __floordiv__(self, other: Symbol | int) -> Symbol:
        """The quotient rounded down, as an integer of its own: z3 knows no division by what is not a number."""
        divisor = self._other(other)
        quotient = z3.FreshInt("quotient")
        if self.path.possible(divisor <= 0):
            message = f"division of a symbol by {divisor}, which may not be positive"
            raise ValueError(message)
        self.path.given += [quotient * divisor <= self.expression, self.expression < quotient * divisor + divisor]
        return self._made(quotient)

    def __rfloordiv__(self, other: int) -> Symbol:
        return self._made(z3.IntVal(other)) // self

    def __neg__(self) -> Symbol:
        return self._made(-self.expression)

    __radd__ = __add__
    __rmul__ = __mul__

    def __lt__(self, other: Any) -> bool:  # noqa: ANN401
        return self.path.decide(self.expression < self._other(other))

    def __le__(self, other: Any) -> bool:  # noqa: ANN401
        return self.path.decide(self.expression <= self._other(other))

    def __gt__(self, other: Any) -> bool:  # noqa: ANN401
        return self.path.decide(self.expression > self._other(other))

    def __ge__(self, other: Any) -> bool:  # noqa: ANN401
        return self.path.decide(self.expression >= self._other(other))

    def __eq__(self, other: object) -> bool:
        return self.path.decide(self.expression == self._other(other))

    def __bool__(self) -> bool:
        return self.path.decide(self.expression != 0)

    __hash__ = None  # type: ignore[assignment]  # a symbol has no value to be hashed


@dataclasses.dataclass
class Path:
    """One way through the code: what has been decided, and what still has to be tried."""

    given: list[Any]
    decisions: list[bool]
    taken: int = 0

    def possible(self, condition: Any) -> bool:  # noqa: ANN401
        """Whether the condition may hold on this path."""
        return possible(*self.given, condition)

    def decide(self, condition: Any) -> bool:  # noqa: ANN401
        """Which way a comparison goes here; the other way, if possible, is left for a later run."""
        if self.taken == len(self.decisions):
            # False is the later run's choice, so that the list counts down like a binary number.
            self.decisions.append(self.possible(condition))
        outcome = self.decisions[self.taken]
        self.taken += 1
        self.given.append(condition if outcome else z3.Not(condition))
        return outcome


def paths(given: list[Any], run: Callable[[Path], Any]) -> Iterator[tuple[list[Any], Any]]:
    """Every path of `run` that some values satisfying `given` take: its condition, and what it returns."""
    decisions: list[bool] = []
    while True:
        path = Path(list(given), decisions)
        result = run(path)
        if possible(*path.given):
            yield path.given, result
        decisions = path.decisions[: path.taken]
        while decisions and not decisions[-1]:
            decisions.pop()
        if not decisions:
            return
        decisions[-1] = False


def expression(value: Any) -> Any:  # noqa: ANN401
    """The formula behind a symbol; anything else is itself."""
    return value.expression if isinstance(value, Symbol) else value

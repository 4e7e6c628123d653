"""The hunts by name: a search space, the shapes it runs at, the judge of one case, and how a case is varied."""

from __future__ import annotations

import dataclasses
import pkgutil
from typing import TYPE_CHECKING, Any, Protocol

from fuzz.operations import OPERATIONS, Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hypothesis.strategies import SearchStrategy
    from numpy.random import Generator

    from fuzz.case import Case
    from fuzz.outcome import Outcome


class HuntError(ValueError):
    """A hunt or a shape bucket that does not exist."""


class Shape(Protocol):
    """A shape with everything else that selects a compiled kernel."""

    @property
    def name(self) -> str:
        """What the command line calls it."""
        ...

    @property
    def why(self) -> str:
        """Which paths of the kernel it reaches."""
        ...


class Moves(Protocol):
    """How cases of an operation are varied by the searches that are not Hypothesis'."""

    def vary(self, case: Case, other: Case, rng: Generator) -> Case:
        """A structural change: other plants, other places, a part of another case."""
        ...

    def climb(self, case: Case, outcome: Outcome, rng: Generator, ways: Sequence[str]) -> Case:
        """A local change that may use more of the bound; `ways` are some of `WAYS`."""
        ...

    def simpler(self, case: Case) -> Iterator[Case]:
        """Smaller cases, the boldest first."""
        ...

    def forget(self) -> None:
        """Drop what earlier searches have left behind, so that an experiment starts from nothing."""
        ...


WAYS = ("bits", "gradient")
"""How `Moves.climb` may go: flipping bits of words; along the gradient of a smooth bound."""


@dataclasses.dataclass(frozen=True)
class Hunt:
    """One hunt.

    Attributes:
        name: what the command line calls it.
        summary: what it is after.
        operation: which kernels it attacks.
        buckets: shapes by name.
        cases: the search space over some of these shapes.
        evaluator: `module:function` of the judge of one case; by name, since it starts JAX, which only workers need.
        moves: `module:object`, a `Moves`; empty if Hypothesis alone searches.
        slow_kinds: kinds of rounds whose cases take so long that the rounds must be short.
    """

    name: str
    summary: str
    operation: str
    buckets: Mapping[str, Any]
    cases: Callable[[Sequence[Any]], SearchStrategy[Case]]
    evaluator: str
    moves: str = ""
    slow_kinds: tuple[str, ...] = ()

    def chosen(self, names: Sequence[str]) -> tuple[Any, ...]:
        """Buckets by name; none named means all.

        Raises:
            HuntError: there is no such bucket.
        """
        unknown = [name for name in names if name not in self.buckets]
        if unknown:
            message = f"hunt {self.name} has no bucket {', '.join(unknown)}; it has {', '.join(self.buckets)}"
            raise HuntError(message)
        return tuple(self.buckets[name] for name in names or self.buckets)

    @property
    def attacks(self) -> Operation:
        """The operation."""
        return OPERATIONS[self.operation]

    def evaluate(self) -> Callable[..., dict[str, Any] | None]:
        """The judge of one case (starts JAX)."""
        return pkgutil.resolve_name(self.evaluator)

    def moved(self) -> Moves | None:
        """How cases are varied."""
        return pkgutil.resolve_name(self.moves) if self.moves else None


def _all() -> dict[str, Hunt]:
    from fuzz.attention.hunts import HUNTS as ATTENTION_HUNTS  # noqa: PLC0415  they are made of this module's classes
    from fuzz.gdn.hunts import HUNTS as GDN_HUNTS  # noqa: PLC0415

    return {hunt.name: hunt for hunt in (*ATTENTION_HUNTS, *GDN_HUNTS)}


def hunts() -> dict[str, Hunt]:
    """Every hunt."""
    return _all()


def find(name: str) -> Hunt:
    """A hunt by name.

    Raises:
        HuntError: there is no such hunt.
    """
    known = hunts()
    if name not in known:
        message = f"there is no hunt {name!r}; there are {', '.join(known)}"
        raise HuntError(message)
    return known[name]

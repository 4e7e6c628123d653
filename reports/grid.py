"""The cases that a report measures: few distinct shapes, since each costs a compilation, and many data in each."""

from __future__ import annotations

import dataclasses
import shlex
from typing import TYPE_CHECKING

from verify.attention.adversarial import families
from verify.attention.cases import AttentionCase
from verify.traces.load import committed_trace, load_trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

GRIDS = ("quick", "standard")
HEAD_DIMS = (64, 128, 256)
LENGTHS = (1, 2, 7, 64, 128, 300, 512, 1024, 2048)
FULL_LENGTHS = (2, 64, 300, 1024)
QUICK_LENGTHS = (1, 7, 128, 300)
QUICK_HEAD_DIMS = (64, 128)
SPREADS = (0, 2, 4)
"""log2 of the scores' standard deviation in nats: flat, everyday and peaked softmax."""

GQA_SHAPES = ((8, 2), (24, 4), (28, 4), (6, 2), (8, 1))
GQA_LENGTH = 128

RACE_SAMPLE = ("jump-limit+1ulp-middle", "jumps-in-consecutive-blocks", "nan-in-v-middle")
"""Adversarial and non-finite cases that also run in the interpreter that simulates DMA and finds races."""


@dataclasses.dataclass(frozen=True)
class Item:
    """One thing to judge.

    Attributes:
        family: see `verify.records`.
        name: the case's name, or the trace problem's.
        interpret: which interpret mode of Pallas, "fast" or "tpu".
        case: what to build; None for a problem of the committed trace.
        group: items of one group share their compiled kernel.
    """

    family: str
    name: str
    interpret: str
    case: AttentionCase | None
    group: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Names the item in a plan and in its record."""
        return (self.family, self.name, self.interpret)

    @property
    def reproduce(self) -> str:
        """The command that judges it again."""
        mode = "" if self.interpret == "fast" else f"--interpret {self.interpret} "
        end_of_options = "-- " if self.name.startswith("-") else ""
        return f"uv run python -m reports case {mode}{end_of_options}{shlex.quote(self.name)}"


def plan(grid: str) -> list[Item]:
    """Everything that a grid judges, in the order of a page.

    Raises:
        ValueError: no such grid.
    """
    if grid not in GRIDS:
        message = f"grid must be one of {', '.join(GRIDS)}, got {grid!r}"
        raise ValueError(message)
    quick = grid == "quick"
    named = families()
    items = [of_case("ordinary", case) for case in _ordinary(quick=quick)]
    for family, cases in named.items():
        if quick and family == "ordinary":
            continue
        items += [of_case(family, case) for case in cases]
    items += traced()
    if not quick:
        sample = [(family, case) for family, cases in named.items() for case in cases if case.name in RACE_SAMPLE]
        items += [of_case(family, case, interpret="tpu") for family, case in sample]
    return items


def of_case(family: str, case: AttentionCase, *, interpret: str = "fast") -> Item:
    """A case as an item; its group is what the kernel is compiled for."""
    group = f"{case.shape} {case.causal} {case.scale_value.hex()} {case.config} {interpret}"
    return Item(family, case.name, interpret, case, group)


def traced() -> list[Item]:
    """The problems of the committed trace."""
    problems = load_trace(committed_trace()).problems()
    return [
        Item("trace", name, "fast", None, f"trace {problem.q.shape} {problem.k.shape} {problem.causal} {problem.scale}")
        for name, problem in problems
    ]


def find(name: str, *, interpret: str = "fast") -> Item:
    """The item of that name.

    Raises:
        KeyError: no grid has it.
    """
    for item in plan("standard") + plan("quick"):
        if item.name == name:
            return item if item.case is None else of_case(item.family, item.case, interpret=interpret)
    message = f"no case is called {name!r}; `python -m reports cases` lists them"
    raise KeyError(message)


def groups(items: Iterable[Item]) -> list[list[Item]]:
    """Items that share a compiled kernel, the costliest group first, so that workers finish together."""
    found: dict[str, list[Item]] = {}
    for item in items:
        found.setdefault(item.group, []).append(item)
    return sorted(found.values(), key=_cost, reverse=True)


COMPILATION = 2.0**31
"""What a compilation costs, in multiply-adds of an interpreted kernel and its oracle (seconds against gigaflops)."""


def _cost(group: Sequence[Item]) -> float:
    work = COMPILATION
    for item in group:
        _, heads, _, q_len, kv_len, head_dim = item.case.shape if item.case else (1, 9, 3, 512, 512, 64)
        work += heads * q_len * kv_len * head_dim * (100.0 if item.interpret == "tpu" else 10.0)
    return work


def _ordinary(*, quick: bool) -> list[AttentionCase]:
    head_dims, lengths = (QUICK_HEAD_DIMS, QUICK_LENGTHS) if quick else (HEAD_DIMS, LENGTHS)
    cases = [_bell(n, head_dim, spread, causal=True) for head_dim in head_dims for n in lengths for spread in SPREADS]
    if quick:
        return cases
    cases += [_bell(n, d, spread, causal=False) for d in HEAD_DIMS for n in FULL_LENGTHS for spread in SPREADS]
    return cases + [
        AttentionCase(
            f"gqa-{heads}-{kv_heads}-length-{GQA_LENGTH}", (1, heads, kv_heads, GQA_LENGTH, GQA_LENGTH, 64), seed=heads
        )
        for heads, kv_heads in GQA_SHAPES
    ]


def _bell(length: int, head_dim: int, spread: int, *, causal: bool) -> AttentionCase:
    """Bell-shaped q, k, v; with scale 1 / sqrt(head_dim) the scores have standard deviation 2**spread nats."""
    mask = "causal" if causal else "full"
    return AttentionCase(
        f"{mask}-length-{length}-d{head_dim}-spread-{2**spread}",
        (1, 2, 1, length, length, head_dim),
        causal=causal,
        seed=1000 * spread + length,
        exponents=(spread, 0, 0),
    )

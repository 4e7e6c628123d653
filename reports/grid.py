"""The cases that a report measures: few distinct shapes, since each costs a compilation, and many data in each."""

from __future__ import annotations

import dataclasses
import json
import shlex
from typing import TYPE_CHECKING

from reports.resume import ROOT
from verify.attention.adversarial import families
from verify.attention.cases import FORMAT, AttentionCase, load_case
from verify.traces.load import committed_trace, load_trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FLYWHEEL = "flywheel.attention"
"""As in `verify.subjects.registry`, which imports JAX: the process that plans does not need it."""

CORPUS = ROOT / "fuzz" / "corpus"
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

OTHERS_LENGTHS = (128, 300, 512)
OTHERS_HEAD_DIMS = (64, 128)
OTHERS_SAMPLE = (
    "jump-60-nats-middle",
    "jump-2000-nats-last",
    "v-largest-equal-logits",
    "v-2^118-jump-60-nats",
    "all-logits-minus-2^126",
    "bell-logits-2^6",
    "near-duplicate-keys",
    "nan-in-v-last",
    "inf-in-v-middle",
)
"""Named cases of one shape that they are asked for too."""


@dataclasses.dataclass(frozen=True)
class Item:
    """One thing to judge.

    Attributes:
        family: see `verify.records`.
        name: the case's name, or the trace problem's.
        interpret: which interpret mode of Pallas, "fast" or "tpu".
        case: what to build; None for a problem of the committed trace.
        group: items of one group share their compiled kernel.
        subject: name of the kernel that is asked.
    """

    family: str
    name: str
    interpret: str
    case: AttentionCase | None
    group: str
    subject: str = FLYWHEEL

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Names the item in a plan and in its record."""
        return (self.subject, self.family, self.name, self.interpret)

    @property
    def reproduce(self) -> str:
        """The command that judges it again."""
        mode = "" if self.interpret == "fast" else f"--interpret {self.interpret} "
        subject = "" if self.subject == FLYWHEEL else f"--subject {shlex.quote(self.subject)} "
        end_of_options = "-- " if self.name.startswith("-") else ""
        return f"uv run python -m reports case {mode}{subject}{end_of_options}{shlex.quote(self.name)}"


def others() -> tuple[str, ...]:
    """What is measured beside the kernel: its other softmax, and other people's kernels."""
    from verify.subjects.registry import BUILT_IN, PEERS  # noqa: PLC0415  see FLYWHEEL

    return (*(name for name in BUILT_IN if name != FLYWHEEL and "gradients" not in name), *PEERS)


def plan(grid: str, subjects: Sequence[str] = ()) -> list[Item]:
    """Everything that a grid judges, in the order of a page.

    Args:
        grid: a name in GRIDS.
        subjects: further subjects, which are asked for a part of the standard grid.

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
        items += corpus()
        sample = [(family, case) for family, cases in named.items() for case in cases if case.name in RACE_SAMPLE]
        items += [of_case(family, case, interpret="tpu") for family, case in sample]
    return items + [item for subject in subjects for item in _sample(subject)]


def _sample(subject: str) -> list[Item]:
    """What a further subject is asked."""
    cases = [
        ("ordinary", _bell(n, d, s, causal=True)) for d in OTHERS_HEAD_DIMS for n in OTHERS_LENGTHS for s in SPREADS
    ]
    cases += [(family, case) for family, found in families().items() for case in found if case.name in OTHERS_SAMPLE]
    return [of_case(family, case, subject=subject) for family, case in cases]


def of_case(family: str, case: AttentionCase, *, interpret: str = "fast", subject: str = FLYWHEEL) -> Item:
    """A case as an item; its group is what the kernel is compiled for."""
    group = f"{subject} {case.shape} {case.causal} {case.scale_value.hex()} {case.config} {interpret}"
    return Item(family, case.name, interpret, case, group, subject)


def corpus() -> list[Item]:
    """The worst cases that searches have found."""
    files = [path for path in sorted(CORPUS.glob("*.json")) if json.loads(path.read_text("utf-8"))["format"] == FORMAT]
    return [of_case("corpus", dataclasses.replace(load_case(path), name=path.stem)) for path in files]


def traced() -> list[Item]:
    """The problems of the committed trace."""
    problems = load_trace(committed_trace()).problems()
    return [
        Item("trace", name, "fast", None, f"trace {problem.q.shape} {problem.k.shape} {problem.causal} {problem.scale}")
        for name, problem in problems
    ]


def find(name: str, *, interpret: str = "fast", subject: str = FLYWHEEL) -> Item:
    """The item of that name.

    Raises:
        KeyError: no grid has it.
    """
    for item in plan("standard") + plan("quick"):
        if item.name == name:
            if item.case is None:
                return dataclasses.replace(item, subject=subject)
            return of_case(item.family, item.case, interpret=interpret, subject=subject)
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

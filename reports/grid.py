"""The cases that a report measures: few distinct shapes, since each costs a compilation, and many data in each."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from fuzz.case import PLAIN_HUNT
from fuzz.case import load_case as load_inputs
from fuzz.gdn.inverse_case import InverseCase
from reports.grid_gdn import INVERSE_SUBJECT, LAYER_SUBJECT, PRECISIONS, inverse_items, layer_items, layer_sample
from reports.grid_ragged import RAGGED, ragged_items
from reports.item import FLYWHEEL, INVERSE, LAYER, Item
from reports.resume import ROOT
from verify.attention.adversarial import families
from verify.attention.cases import FORMAT, AttentionCase, CaseError, load_case
from verify.traces.load import committed_trace, load_trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

CORPUS = ROOT / "fuzz" / "corpus"
GRIDS = ("quick", "standard")
HEAD_DIMS = (64, 128, 256)
LENGTHS = (1, 2, 7, 64, 128, 300, 512, 1024, 2048)
FULL_LENGTHS = (2, 64, 300, 1024)
ALL_SPREADS_BELOW = 1024
"""From this length on only everyday scores: interpreting one call takes seconds."""

QUICK_LENGTHS = (1, 7, 128, 300)
QUICK_HEAD_DIMS = (64, 128)
SPREADS = (0, 2, 4)
"""log2 of the scores' standard deviation in nats: flat, everyday and peaked softmax."""

EVERYDAY = 2

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


def others() -> tuple[str, ...]:
    """What is measured beside the kernel: its other softmax, and other people's kernels."""
    from verify.subjects import gdn  # noqa: PLC0415  see FLYWHEEL
    from verify.subjects.registry import BUILT_IN, PEERS  # noqa: PLC0415

    return (*(name for name in BUILT_IN if name != FLYWHEEL and "gradients" not in name), *PEERS, *gdn.PEERS)


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
        items += ragged_items() + layer_items() + inverse_items()
    return items + [item for subject in subjects for item in _sample(subject)]


def _sample(subject: str) -> list[Item]:
    """What a further subject is asked."""
    from verify.subjects import gdn  # noqa: PLC0415  see FLYWHEEL

    if subject in gdn.names():
        return layer_sample(subject)
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


def find(name: str, *, interpret: str = "fast", subject: str | None = None) -> Item:
    """The item of that name.

    Args:
        name: of the case.
        interpret: which interpret mode of Pallas.
        subject: the kernel that is asked, of the same operation; None: the one that the grid asks.

    Raises:
        KeyError: no grid has it.
    """
    named = [item for item in plan("standard") + plan("quick") if item.name == name]
    if not named:
        message = f"no case is called {name!r}; `python -m reports cases` lists them"
        raise KeyError(message)
    item = next((item for item in named if item.subject == subject), named[0])
    return dataclasses.replace(item, interpret=interpret, subject=subject or item.subject)


def of_file(path: Path, *, interpret: str = "fast", subject: str | None = None) -> Item:
    """The item of a case file: plain inputs of any operation.

    Raises:
        CaseError: no such file, no case, or one that asks more than the contract (`python -m fuzz replay` judges it).
    """
    case = load_inputs(path)
    if case.hunt != PLAIN_HUNT:
        message = f"{path}: a case of the hunt {case.hunt}: python -m fuzz replay judges it"
        raise CaseError(message)
    inputs = case.inputs
    if isinstance(inputs, AttentionCase):
        packed = inputs.cu_seqlens_q is not None
        return of_case("corpus", inputs, interpret=interpret, subject=subject or (RAGGED if packed else FLYWHEEL))
    operation, ours = (INVERSE, INVERSE_SUBJECT) if isinstance(inputs, InverseCase) else (LAYER, LAYER_SUBJECT)
    return Item("corpus", inputs.name, interpret, inputs, "", subject or f"{ours}[{PRECISIONS[0]}]", operation)


def groups(items: Iterable[Item]) -> list[list[Item]]:
    """Items that share a compiled kernel, the costliest group first, so that workers finish together."""
    found: dict[str, list[Item]] = {}
    for item in items:
        found.setdefault(item.group, []).append(item)
    return sorted(found.values(), key=_cost, reverse=True)


COMPILATION = 2.0**31
"""What a compilation costs, in multiply-adds of an interpreted kernel and its oracle (seconds against gigaflops)."""

TRACE = AttentionCase("the trace", (1, 9, 3, 512, 512, 64))
"""As large as its problems."""


def _cost(group: Sequence[Item]) -> float:
    work = COMPILATION * group[0].weight
    for item in group:
        case = item.case or TRACE
        if isinstance(case, AttentionCase):
            _, heads, _, q_len, kv_len, head_dim = case.shape
            work += heads * q_len * kv_len * head_dim * (100.0 if item.interpret == "tpu" else 10.0)
    return work


def _ordinary(*, quick: bool) -> list[AttentionCase]:
    head_dims, lengths = (QUICK_HEAD_DIMS, QUICK_LENGTHS) if quick else (HEAD_DIMS, LENGTHS)
    cases = [_bell(n, d, spread, causal=True) for d in head_dims for n in lengths for spread in _spreads(n)]
    if quick:
        return cases
    cases += [_bell(n, d, spread, causal=False) for d in HEAD_DIMS for n in FULL_LENGTHS for spread in _spreads(n)]
    return cases + [
        AttentionCase(
            f"gqa-{heads}-{kv_heads}-length-{GQA_LENGTH}", (1, heads, kv_heads, GQA_LENGTH, GQA_LENGTH, 64), seed=heads
        )
        for heads, kv_heads in GQA_SHAPES
    ]


def _spreads(length: int) -> Sequence[int]:
    return SPREADS if length < ALL_SPREADS_BELOW else (EVERYDAY,)


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

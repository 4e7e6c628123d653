"""Small problems and comparisons that several tests of Gated DeltaNet share."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from verify.gdn.cases import GdnCase, every_family

if TYPE_CHECKING:
    from collections.abc import Iterator

    from verify.gdn.problem import Problem
    from verify.gdn.reference import GdnReference

SIZES = (((5,), (1, 1, 4, 3)), ((3, 0, 6), (1, 2, 4, 2)), ((20,), (1, 1, 6, 2)))
PROJECTION_SIZES = (1.0, 2.0**-10, 30.0, 1e4)
WIDTHS = (4, 1, 3, 2)


def drawn(rounds: int, *, stride: int = 1, first: int = 0) -> Iterator[tuple[str, Problem]]:
    """Every combination of families, as delta rule and as layer, in small sizes that change from case to case."""
    for number in range(first, first + rounds):
        for i, family in enumerate(every_family(seed=1000 * number)):
            if (i + number) % stride:
                continue
            turn = i + number
            lengths, heads = SIZES[turn % 3]
            case = dataclasses.replace(
                family, lengths=lengths, heads=heads, per_channel=turn % 4 == 0, initial=turn % 5 != 0
            )
            yield case.name, case.rule()
            yield (
                f"layer of {case.name}",
                case.layer(
                    size=PROJECTION_SIZES[turn % 4],
                    negative=case.beta in ("2", "1 to 2"),
                    biased=i % 2 == 0,
                    width=WIDTHS[(i // 7 + number) % 4],
                ),
            )


def violations(found: GdnReference, other: GdnReference) -> int:
    """Numbers that differ by more than the sum of two references' errors, or in class."""
    total = 0
    for name in ("out", "state"):
        got, want = getattr(found, name), getattr(other, name)
        room = getattr(found, f"{name}_error") + getattr(other, f"{name}_error")
        with np.errstate(invalid="ignore"):
            same = (np.abs(got - want) <= room) | (np.isnan(got) & np.isnan(want))
        total += int(np.count_nonzero(~same))
    return total


def small_case(**changes: object) -> GdnCase:
    """A packed case with grouped heads."""
    case = GdnCase("random", "up to 1", "mild", seed=4, lengths=(3, 5), heads=(1, 2, 4, 3))
    return dataclasses.replace(case, **changes)  # type: ignore[arg-type]

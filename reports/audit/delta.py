"""The gated delta rule in the audit: the chain as emulated in numpy, and the exact result of wrong recurrences."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import numpy as np

from reports.audit.answers import Arrays, Asked, Due, Kernel
from verify.devices import CPU_INTERPRET
from verify.gdn import oracle_float64
from verify.gdn.cases import GdnCase
from verify.gdn.contract import contract_bound
from verify.gdn.problem import BF16
from verify.gdn.steps import BF16_STEPS, SPLIT_STEPS, run

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.gdn.problem import DeltaRuleProblem
    from verify.gdn.steps import ChunkSteps

HEADS = (2, 4, 32, 16)
INPUTS = {
    "ordinary": (GdnCase("random", "up to 1", "mild", 1, (96,), HEADS), True),
    "ordinary, packed": (GdnCase("random", "up to 1", "mild", 2, (40, 3, 85), HEADS), True),
    "near-duplicate keys": (GdnCase("near-duplicate", "up to 1", "mild", 3, (96,), HEADS), False),
    "periodic keys, beta 1": (GdnCase("periodic", "1", "0", 4, (96,), HEADS), False),
    "resets": (GdnCase("random", "up to 1", "resets", 5, (96,), HEADS), False),
    "strong decay": (GdnCase("random", "up to 1", "strong", 6, (96,), HEADS), False),
    "long memory": (GdnCase("random", "tiny or 1", "partly 0", 7, (192,), HEADS), False),
}


@functools.cache
def inputs() -> tuple[Asked, ...]:
    """Every input, with its exact result and bound."""
    return tuple(_asked(name, case, ordinary) for name, (case, ordinary) in INPUTS.items())


def _asked(name: str, case: GdnCase, ordinary: bool) -> Asked:  # noqa: FBT001  a table's column
    problem = case.rule()
    reference = oracle_float64.gdn_chunked(problem)
    bound = contract_bound(problem, BF16_STEPS, CPU_INTERPRET)
    plain = run(problem, BF16_STEPS)
    due = {
        array: Due(
            getattr(reference, array),
            getattr(reference, f"{array}_error"),
            getattr(bound, array),
            getattr(plain, array),
        )
        for array in ("out", "state")
    }
    return Asked("delta rule", name, case.name, ordinary, problem, due)


def exact(problem: DeltaRuleProblem) -> Arrays:
    """The exact result, rounded to the formats of a kernel."""
    reference = oracle_float64.gdn_chunked(problem)
    return {"out": reference.out.astype(BF16), "state": reference.state.astype(np.float32)}


def _chain(steps: ChunkSteps) -> Callable[[Asked], Arrays]:
    def found(asked: Asked) -> Arrays:
        result = run(asked.problem, steps)
        return {"out": result.out, "state": result.state}

    return found


def right_kernels() -> list[Kernel]:
    """Right by construction."""
    sorts: tuple[tuple[str, str, Callable[[Asked], Arrays]], ...] = (
        ("the exact result", "rounded once", lambda asked: exact(asked.problem)),
        ("chunks of 64, BF16 operands", "the kernel's algorithm (emulated)", _chain(BF16_STEPS)),
        ("chunks of 64, hi/lo operands", "the same, split", _chain(SPLIT_STEPS)),
    )
    return [Kernel("delta rule", name, True, "right", words, answer) for name, words, answer in sorts]  # noqa: FBT003


def wrong_kernels() -> list[Kernel]:
    """The exact result of another recurrence, rounded."""

    def answer(change: Callable[[DeltaRuleProblem], DeltaRuleProblem]) -> Callable[[Asked], Arrays]:
        return lambda asked: exact(change(asked.problem))

    return [Kernel("delta rule", name, False, "recurrences", words, answer(change)) for name, words, change in WRONG]  # noqa: FBT003


def _gates(problem: DeltaRuleProblem) -> np.ndarray:
    return np.zeros_like(problem.beta) if problem.g is None else problem.g


def _decay_late(problem: DeltaRuleProblem) -> DeltaRuleProblem:
    return dataclasses.replace(problem, g=np.roll(_gates(problem), 1, axis=0))


def _decay_in_log2(problem: DeltaRuleProblem) -> DeltaRuleProblem:
    return dataclasses.replace(problem, g=_gates(problem) * np.float32(np.log(2.0)))


def _heads_tiled(problem: DeltaRuleProblem) -> DeltaRuleProblem:
    heads = np.arange(problem.beta.shape[1]) % problem.q.shape[1]
    return dataclasses.replace(problem, q=problem.q[:, heads], k=problem.k[:, heads])


def _initial_state_dropped(problem: DeltaRuleProblem) -> DeltaRuleProblem:
    sequences = dataclasses.replace(problem.sequences, has_initial=np.zeros(problem.sequences.count, dtype=bool))
    return dataclasses.replace(problem, sequences=sequences)


WRONG = (
    ("decay ignored", "g = 0", lambda p: dataclasses.replace(p, g=np.zeros_like(p.beta))),
    ("decay one token late", "each token decays by its predecessor's gate", _decay_late),
    ("decay in log2 units", "2^g in place of e^g", _decay_in_log2),
    ("write strength ignored", "beta = 1", lambda p: dataclasses.replace(p, beta=np.ones_like(p.beta))),
    ("write strength 1 % off", "beta times 0.99", lambda p: dataclasses.replace(p, beta=p.beta * np.float32(0.99))),
    ("initial state dropped", "each sequence starts from 0", _initial_state_dropped),
    ("queries unscaled", "scale 1", lambda p: dataclasses.replace(p, scale=1.0)),
    ("values one token late", "", lambda p: dataclasses.replace(p, v=np.roll(p.v, 1, axis=0))),
    ("heads mapped by remainder", "value head h reads key head h mod n", _heads_tiled),
)

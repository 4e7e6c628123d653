"""The inverse of I + L in the audit: families of keys, right inverses, wrong ones, and a peer's."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import TYPE_CHECKING

import numpy as np

from reports.audit.answers import Arrays, Asked, Due, Kernel
from verify.devices import CPU_INTERPRET
from verify.gdn import inverse
from verify.gdn.cases import KEYS
from verify.gdn.inverse_contract import inverse_bound
from verify.gdn.inverse_judge import judge_inverse
from verify.gdn.inverse_steps import InverseSteps, invert, part, to_bf16
from verify.gdn.tables import matrix
from verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

BETAS = {"up to 1": "beta up to 1", "1": "beta 1", "1 to 2": "beta 1 to 2"}
PEER = "flywheel_tpu"


@functools.cache
def inputs() -> tuple[Asked, ...]:
    """One matrix per family of keys and write strengths."""
    return tuple(_asked(keys, beta, words) for keys in KEYS for beta, words in BETAS.items())


def _asked(keys: str, beta: str, words: str) -> Asked:
    lower = matrix(keys, beta, "mild", 0)
    want = inverse.exact(lower.astype(np.float64))
    limit = inverse_bound(lower, InverseSteps(), CPU_INTERPRET).bound
    due = Due(want.value, want.error, limit, substitution(lower, to_bf16))
    ordinary = (keys, beta) == ("random", "up to 1")
    unit = np.eye(len(lower)) + lower
    return Asked("inverse", f"{keys}, {words}", f"64 {keys} keys, {words}", ordinary, lower, {"inverse": due}, unit)


def powerless() -> list[str]:
    """Inputs on which the contract says of itself that it cannot acquit."""
    found = []
    for asked in inputs():
        judged = judge_inverse(asked.problem, invert(asked.problem, InverseSteps()), InverseSteps(), CPU_INTERPRET)
        if judged.judgement.verdict is Verdict.NO_POWER:
            found.append(asked.name)
    return found


def substitution(lower: np.ndarray, rounded: Callable[[np.ndarray], np.ndarray] = lambda x: x) -> np.ndarray:
    """Forward substitution in FP32, operands of products rounded as asked: the plain implementation."""
    x = np.eye(len(lower), dtype=np.float32)
    for i in range(1, len(lower)):
        x[i, :i] = -(rounded(lower[i, :i]) @ rounded(x[:i, :i]))
    return x


def _whole_chunk(lower: np.ndarray) -> np.ndarray:
    identity = np.eye(len(lower), dtype=np.float32)
    x, power = identity - lower, lower @ lower
    for _ in range(5):
        x, power = x @ (identity + power), power @ power
    return x


def _without_last_merge(lower: np.ndarray) -> np.ndarray:
    return invert(part(lower, 4) + part(lower, 16), InverseSteps())


def _last_merge_with_signs_lost(lower: np.ndarray) -> np.ndarray:
    block = _without_last_merge(lower)
    return 2.0 * block - invert(lower, InverseSteps())


def _entry_wrong(lower: np.ndarray) -> np.ndarray:
    x = invert(lower, InverseSteps())
    x[len(x) // 2, 0] += 0.25
    return x


def right_kernels() -> list[Kernel]:
    """Right by construction."""
    sorts: tuple[tuple[str, str, Callable[[np.ndarray], np.ndarray]], ...] = (
        ("the exact inverse", "rounded once to FP32", lambda x: inverse.exact(x.astype(np.float64)).value),
        ("forward substitution, FP32", "the textbook algorithm (numpy)", substitution),
        ("eight products, BF16 operands", "the kernel's algorithm (emulated)", lambda x: invert(x, InverseSteps())),
        ("eight products, hi/lo operands", "the same, split", lambda x: invert(x, InverseSteps("bf16x3"))),
    )
    kernels = [Kernel("inverse", name, True, "right", words, _answer(run)) for name, words, run in sorts]  # noqa: FBT003
    if importlib.util.find_spec(PEER) is not None:
        run = importlib.import_module("verify.subjects.peers.gdn_layers").flywheel_inverse
        words = "eight products in BF16; its source states 9e-3 as the largest error on repeated keys"
        kernels.append(Kernel("inverse", "flywheel_tpu.invert_triangular_matrix", True, "right", words, _answer(run)))  # noqa: FBT003
    return kernels


def wrong_kernels() -> list[Kernel]:
    """Each with one mistake, of which three are no inverse at all."""
    sorts: tuple[tuple[str, str, Callable[[np.ndarray], np.ndarray]], ...] = (
        ("X = I", "does nothing", lambda x: np.eye(len(x))),
        ("X = T", "returns its input", lambda x: np.eye(len(x)) + x),
        ("X = I - L", "the first term of the series", lambda x: np.eye(len(x)) - x),
        ("signs flipped", "below the diagonal", lambda x: 2 * np.eye(len(x)) - inverse.float64(x).value),
        ("last merge left out", "the diagonal blocks of 16 alone", _without_last_merge),
        ("last merge with its signs lost", "right within the blocks of 16", _last_merge_with_signs_lost),
        ("the whole chunk at once", "(I - L)(I + L^2)(I + L^4) ... (I + L^32) in FP32", _whole_chunk),
        ("one entry off by 1/4", "the rest as the kernel's", _entry_wrong),
        ("L rounded to eighths", "before anything else", lambda x: substitution(np.round(x * 8) / 8)),
        ("write strength forgotten", "the inverse for twice the L", lambda x: inverse.float64(2 * x).value),
    )
    return [Kernel("inverse", name, False, "inverses", words, _answer(run)) for name, words, run in sorts]  # noqa: FBT003


def _answer(run: Callable[[np.ndarray], np.ndarray]) -> Callable[[Asked], Arrays]:
    def found(asked: Asked) -> Arrays:
        with np.errstate(all="ignore"):
            return {"inverse": np.asarray(run(asked.problem)).astype(np.float32)}

    return found

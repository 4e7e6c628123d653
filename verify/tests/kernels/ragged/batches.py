"""Ragged batches of one shape, so that one compilation serves them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from verify.attention.contract import reference_and_bound
from verify.attention.judge import judge
from verify.attention.ragged import RaggedProblem
from verify.attention.subjects import INTERPRET, SubjectResult, run_ragged
from verify.backend import device_model
from verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

PAIR = 40
"""Tokens of a pair of sequences and the guard after them."""

PAIRS = [(a, b) for a in range(1, 18) for b in range(1, 18)]
PER_LAUNCH = 17
SEQUENCES, TOKENS = 3 * PER_LAUNCH, PAIR * PER_LAUNCH
BLOCK = 128

FEATURES = {
    "full": {"causal": False},
    "window": {"window": (40, None)},
    "narrow-window": {"window": (3, 0)},
    "two-sided-window": {"causal": False, "window": (70, 33)},
    "right-window": {"causal": False, "window": (None, 20)},
    "left-window": {"causal": False, "window": (150, None)},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": np.array([0.5, -np.inf], np.float32)},
    "online": {"softmax": "online"},
    "online-full": {"causal": False, "softmax": "online"},
}
"""Options of a batch by name; `softmax` is the kernel's."""


def cumulative(lengths: Sequence[int], sequences: int = SEQUENCES) -> np.ndarray:
    """Cumulative lengths of a batch, empty sequences after the last to make up the number."""
    return np.cumsum([0, *lengths, *[0] * (sequences - len(lengths))]).astype(np.int32)


def batch(
    q_lengths: Sequence[int],
    k_lengths: Sequence[int] | None = None,
    *,
    seed: int = 0,
    tokens: tuple[int, int] = (TOKENS, TOKENS),
    sequences: int = SEQUENCES,
    heads: tuple[int, int] = (2, 1),
    head_dim: int = 64,
    **options: Any,
) -> RaggedProblem:
    """Normal values in every row, padding included."""
    rng = np.random.default_rng(seed)
    shapes = [(heads[0], tokens[0], head_dim), *[(heads[1], tokens[1], head_dim)] * 2]
    q, k, v = (rng.standard_normal(shape).astype(jnp.bfloat16) for shape in shapes)
    cu = [cumulative(x, sequences) for x in (q_lengths, q_lengths if k_lengths is None else k_lengths)]
    return RaggedProblem(q, k, v, *cu, **({"causal": True, "scale": head_dim**-0.5} | options))


def run(problem: RaggedProblem, *, interpret: str = "fast", **options: Any) -> SubjectResult:
    """The kernel on a batch, in blocks of 128."""
    return run_ragged(problem, **({"block": BLOCK, "interpret": INTERPRET[interpret]} | options))


def assert_within_contract(problem: RaggedProblem, result: SubjectResult) -> None:
    """Output, LSE and maximum logit within the contract's bound, class included."""
    dense = problem.dense()
    reference, bound = reference_and_bound(dense, device_model())
    judgement = judge(dense, result.out, result.lse, bound, got_max_logit=result.max_logit, reference=reference)
    assert judgement.verdict is Verdict.PASS, judgement.reason


def launches() -> list[list[int]]:
    """Every pair of lengths from 1 to 17 with its guard, `PER_LAUNCH` pairs to a batch."""
    return [[n for a, b in chunk for n in (a, b, PAIR - a - b)] for chunk in itertools.batched(PAIRS, PER_LAUNCH)]


def sequence(problem: RaggedProblem, number: int) -> tuple[slice, slice]:
    """The rows and keys of a sequence."""
    q, k = problem.cu_seqlens_q, problem.cu_seqlens_k
    return slice(int(q[number]), int(q[number + 1])), slice(int(k[number]), int(k[number + 1]))


def arranged(problem: RaggedProblem, order: Sequence[int], *, before: int = 0) -> RaggedProblem:
    """The same sequences in another order, after one of `before` tokens of other values."""
    rng = np.random.default_rng(1)
    arrays, lengths = [], []
    for x, which in ((problem.q, 0), (problem.k, 1), (problem.v, 1)):
        parts = [x[:, sequence(problem, n)[which]] for n in order]
        other = (4 * rng.standard_normal((x.shape[0], x.shape[1], x.shape[2]))).astype(jnp.bfloat16)
        used = before + sum(part.shape[1] for part in parts)
        arrays.append(np.concatenate([other[:, :before], *parts, other[:, used:]], axis=1))
    for which in (0, 1):
        sizes = [part.stop - part.start for part in (sequence(problem, n)[which] for n in order)]
        lengths.append(cumulative([before, *sizes] if before else sizes, len(problem.cu_seqlens_q) - 1))
    q, k, v = arrays
    return dataclasses.replace(problem, q=q, k=k, v=v, cu_seqlens_q=lengths[0], cu_seqlens_k=lengths[1])

"""f written a second time, to check the oracles by: the standard library's decimal arithmetic and plain loops.

Nothing here asks a problem what a row sees or which head it reads: mask, windows, segments, head map, sinks, ragged and
paged layouts are decided here again, from the definition, pair by pair.  Inputs are finite.
"""

from __future__ import annotations

import dataclasses
import decimal
import itertools
from decimal import Decimal
from typing import TYPE_CHECKING

import numpy as np

from verify.attention.reference import Reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.attention.paged import PagedProblem
    from verify.attention.problem import AttentionProblem, Window
    from verify.attention.ragged import RaggedProblem

DIGITS = 60

Pair = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Known:
    """A problem with its answer."""

    name: str
    problem: AttentionProblem
    answer: Reference


def exact(out: object, lse: object, max_logit: object | None = None) -> Reference:
    """An answer that is exact but for the rounding of its numbers to float64."""
    wide, narrow = np.asarray(out, dtype=np.float64), np.asarray(lse, dtype=np.float64)
    answer = Reference(wide, _two_ulps(wide), narrow, _two_ulps(narrow), "known")
    if max_logit is None:
        return answer
    largest = np.asarray(max_logit, dtype=np.float64)
    return dataclasses.replace(answer, max_logit=largest, max_logit_error=_two_ulps(largest))


def _two_ulps(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x), 2.0 * np.spacing(np.abs(np.where(np.isfinite(x), x, 0.0))), 0.0)


@dataclasses.dataclass(frozen=True)
class _Rule:
    """What the definition needs besides queries, keys and values."""

    causal: bool
    scale: float
    window: Window | None
    softcap: float | None
    sinks: list[float] | None

    @classmethod
    def of(cls, problem: AttentionProblem | RaggedProblem | PagedProblem) -> _Rule:
        sinks = None if problem.sinks is None else problem.sinks.astype(np.float64).tolist()
        return cls(problem.causal, problem.scale, problem.window, problem.softcap, sinks)

    def sees(self, key: int, aligned: int) -> bool:
        """Whether a row aligned with key `aligned` sees key `key`."""
        if self.causal and key > aligned:
            return False
        left, right = self.window or (None, None)
        if left is not None and key < aligned - left:
            return False
        return right is None or key <= aligned + right


def by_decimal(problem: AttentionProblem) -> Reference:
    """f of a dense problem."""
    rule = _Rule.of(problem)
    q, k, v = (x.astype(np.float64) for x in (problem.q, problem.k, problem.v))
    answer = _Answer.blank(q.shape[:3], v.shape[3])
    q_ids, k_ids = (np.zeros((1, 1)) if x is None else x for x in (problem.q_segments, problem.k_segments))
    segmented = problem.q_segments is not None
    for batch, head, row in np.ndindex(*q.shape[:3]):
        kv_head = head * k.shape[1] // q.shape[1]
        aligned = row + k.shape[2] - q.shape[2]
        if problem.q_positions is not None:
            aligned = int(problem.q_positions[batch, row])
        pairs: list[Pair] = []
        for j in range(k.shape[2]):
            apart = segmented and q_ids[batch, row] != k_ids[batch, j]
            if rule.sees(j, aligned) and not apart:
                pairs.append((k[batch, kv_head, j], v[batch, kv_head, j]))
        answer.put((batch, head, row), q[batch, head, row], pairs, rule)
    return answer.reference()


def ragged_by_decimal(ragged: RaggedProblem) -> Reference:
    """f of a ragged batch in the layout of `RaggedProblem.dense`, sequence by sequence from the ragged arrays."""
    cu = ragged.cu_seqlens_k.tolist()
    k, v = (x.astype(np.float64) for x in (ragged.k, ragged.v))

    def sequence_keys(sequence: int, kv_head: int) -> list[Pair]:
        return [(k[kv_head, j], v[kv_head, j]) for j in range(cu[sequence], cu[sequence + 1])]

    return _sequences(ragged, [b - a for a, b in itertools.pairwise(cu)], k.shape[0], v.shape[2], sequence_keys)


def paged_by_decimal(paged: PagedProblem) -> Reference:
    """f of a paged call in the layout of `PagedProblem.dense`, straight from the pages."""
    k, v = (x.astype(np.float64) for x in (paged.k_pages, paged.v_pages))
    size = k.shape[2]

    def sequence_keys(sequence: int, kv_head: int) -> list[Pair]:
        places = [divmod(j, size) for j in range(int(paged.lengths[sequence]))]
        found = [(int(paged.page_table[sequence, page]), slot) for page, slot in places]
        return [(k[page, kv_head, slot], v[page, kv_head, slot]) for page, slot in found]

    return _sequences(paged, paged.lengths.tolist(), k.shape[1], v.shape[3], sequence_keys)


def _sequences(
    problem: RaggedProblem | PagedProblem,
    lengths: list[int],
    kv_heads: int,
    v_dim: int,
    sequence_keys: Callable[[int, int], list[Pair]],
) -> Reference:
    rule = _Rule.of(problem)
    q = problem.q.astype(np.float64)
    cu_q = problem.cu_seqlens_q.tolist()
    answer = _Answer.blank((1, q.shape[0], cu_q[-1]), v_dim)
    for sequence, length in enumerate(lengths):
        first, last = cu_q[sequence], cu_q[sequence + 1]
        for head in range(q.shape[0]):
            pairs = sequence_keys(sequence, head * kv_heads // q.shape[0])
            for row in range(first, last):
                # The last query of a sequence meets its last key.
                aligned = length - (last - row)
                seen = [pair for j, pair in enumerate(pairs) if rule.sees(j, aligned)]
                answer.put((0, head, row), q[head, row], seen, rule)
    return answer.reference()


@dataclasses.dataclass(frozen=True, eq=False)
class _Answer:
    out: np.ndarray
    lse: np.ndarray
    max_logit: np.ndarray

    @classmethod
    def blank(cls, shape: tuple[int, ...], v_dim: int) -> _Answer:
        return cls(np.zeros((*shape, v_dim)), np.zeros(shape), np.zeros(shape))

    def put(self, at: tuple[int, int, int], q: np.ndarray, pairs: list[Pair], rule: _Rule) -> None:
        sink = None if rule.sinks is None else rule.sinks[at[1]]
        with decimal.localcontext(decimal.Context(prec=DIGITS, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)):
            logits = [_logit(q, key, rule) for key, _ in pairs]
            weights = [z.exp() for z in logits]
            total = sum(weights, Decimal(0)) + (Decimal(0) if sink is None else Decimal(sink).exp())
            self.max_logit[at] = float(max(logits, default=Decimal("-inf")))
            self.lse[at] = float(total.ln()) if total else -np.inf
            for lane in range(self.out.shape[-1]):
                terms = [w * Decimal(value[lane]) for w, (_, value) in zip(weights, pairs, strict=True)]
                self.out[(*at, lane)] = float(sum(terms, Decimal(0)) / total) if total else 0.0

    def reference(self) -> Reference:
        return exact(self.out, self.lse, self.max_logit)


def _logit(q: np.ndarray, key: np.ndarray, rule: _Rule) -> Decimal:
    score = Decimal(rule.scale) * sum((Decimal(a) * Decimal(b) for a, b in zip(q, key, strict=True)), Decimal(0))
    if rule.softcap is None:
        return score
    cap = Decimal(rule.softcap)
    grown = (2 * abs(score) / cap).exp()
    return (cap * (grown - 1) / (grown + 1)).copy_sign(score)

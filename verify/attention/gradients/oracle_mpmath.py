"""The gradients as their definition reads: exact rational logits and dP, then mpmath; for tiny problems."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import mpmath
import numpy as np

from verify.attention.gradients.reference import Gradients
from verify.attention.oracle_mpmath import DPS, to_float64

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verify.attention.gradients.problem import GradientProblem, Head
    from verify.attention.gradients.reference import Bounded

Real = Any  # mpmath's numbers carry no types


@dataclasses.dataclass(frozen=True, eq=False)
class RowShares:
    """What one row adds to the derivatives.

    Attributes:
        weights: P_k of each key that the row sees, by index.
        ds: derivative of the loss with respect to the scaled score s_k, by index.
        dsink: derivative with respect to the sink.
        reach: at least |dP_k - delta + d_lse| for every visible key.
    """

    weights: dict[int, Real]
    ds: dict[int, Real]
    dsink: Real
    reach: Real


def row_shares(head: Head, row: int) -> RowShares:
    """One row, at mpmath's present precision."""
    keys = np.flatnonzero(head.seen(slice(row, row + 1))[0]).tolist()
    d_lse = mpmath.mpf(float(head.d_lse[row]))
    has_sink = head.sink > -math.inf
    if not keys and not has_sink:
        return RowShares({}, {}, mpmath.mpf(0), mpmath.mpf(0))
    logits = {j: _capped(head, Fraction(head.scale) * _dot(head.q[row], head.k[j])) for j in keys}
    candidates: list[Fraction] = [*logits.values(), *([Fraction(head.sink)] if has_sink else [])]
    top: Fraction = max(candidates)
    weights = {j: mpmath.exp(_real(z - top)) for j, z in logits.items()}
    sink = mpmath.exp(_real(Fraction(head.sink) - top)) if has_sink else mpmath.mpf(0)
    total: Any = mpmath.fsum(weights.values()) + sink
    shares = {j: w / total for j, w in weights.items()}
    d_weights = {j: _real(_dot(head.d_out[row], head.v[j])) for j in keys}
    delta: Any = mpmath.fsum(shares[j] * d_weights[j] for j in keys)
    ds = {j: shares[j] * (d_weights[j] - delta + d_lse) * _slope(head, logits[j]) for j in keys}
    reach = 2 * max((abs(x) for x in d_weights.values()), default=mpmath.mpf(0)) + abs(d_lse)
    return RowShares(shares, ds, sink / total * (d_lse - delta), reach)


def _capped(head: Head, score: Fraction) -> Fraction:
    """The logit, as a rational so that differences are exact; the cap alone rounds."""
    if head.softcap is None:
        return score
    return Fraction(head.softcap) * _fraction(mpmath.tanh(_real(score / Fraction(head.softcap))))


def _slope(head: Head, logit: Fraction) -> Real:
    """d(capped logit) / d(score)."""
    return mpmath.mpf(1) if head.softcap is None else _real(1 - (logit / Fraction(head.softcap)) ** 2)


def _dot(a: np.ndarray, b: np.ndarray) -> Fraction:
    return sum((Fraction(x) * Fraction(y) for x, y in zip(a.tolist(), b.tolist(), strict=True)), Fraction(0))


def _real(x: Fraction) -> Real:
    return mpmath.mpf(x.numerator) / x.denominator


def _fraction(x: Real) -> Fraction:
    mantissa, exponent = mpmath.frexp(x)
    bits: Any = mpmath.mp.prec
    return Fraction(int(mpmath.ldexp(mantissa, bits))) * Fraction(2) ** (int(exponent) - bits)


def gradients(problem: GradientProblem, *, dps: int = DPS) -> Gradients:
    """Every derivative of a tiny problem, with `dps` decimal digits (lemma G9 of docs/oracle-bounds-gradients.md)."""
    result = Gradients.blank(problem, "mpmath")
    with mpmath.workdps(dps):
        doubt = _relative_error(problem)
        sinks = [_Sum(1) for _ in range(problem.heads)]
        for batch, kv_head in np.ndindex(problem.batch, problem.kv_heads):
            _one_kv_head(problem, (batch, kv_head), result, sinks, doubt)
        if result.dsinks is not None:
            for head, total in enumerate(sinks):
                total.put(result.dsinks, (head,), doubt)
    return result.mark_undefined(problem)


def _relative_error(problem: GradientProblem) -> Real:
    """Error of a derivative relative to the sum of its terms with P_k = 1 and |dP - delta + d_lse| = reach."""
    cap = 0.0 if problem.softcap is None else problem.softcap
    bits: Any = mpmath.mp.prec
    return (problem.kv_len + 4) * (2.0**20 + problem.kv_len + 16.0 * mpmath.mpf(cap)) * mpmath.mpf(2) ** (4 - bits)


class _Sum:
    """A vector of sums with, beside each, the sum of sizes that its error is relative to."""

    def __init__(self, lanes: int) -> None:
        self.values: list[Real] = [mpmath.mpf(0)] * lanes
        self.sizes: list[Real] = [mpmath.mpf(0)] * lanes

    def add(self, factor: Real, size: Real, vector: Sequence[float]) -> None:
        for lane, x in enumerate(vector):
            self.values[lane] += factor * x
            self.sizes[lane] += size * abs(x)

    def put(self, part: Bounded, index: tuple[int, ...], doubt: Real) -> None:
        pairs = [to_float64(x, float(doubt * size)) for x, size in zip(self.values, self.sizes, strict=True)]
        part.value[index], part.error[index] = (
            zip(*pairs, strict=True) if len(pairs) > 1 or part.value.ndim > 1 else pairs[0]
        )


def _one_kv_head(
    problem: GradientProblem, at: tuple[int, int], result: Gradients, sinks: list[_Sum], doubt: Real
) -> None:
    batch, kv_head = at
    dk = [_Sum(problem.k.shape[3]) for _ in range(problem.kv_len)]
    dv = [_Sum(problem.v_dim) for _ in range(problem.kv_len)]
    for query_head in problem.group(kv_head):
        head = problem.head(batch, query_head)
        scale = mpmath.mpf(problem.scale)
        for row in range(problem.q_len):
            shares = row_shares(head, row)
            dq, size = _Sum(problem.q.shape[3]), abs(scale) * shares.reach
            for key, weight in shares.weights.items():
                dq.add(scale * shares.ds[key], size, head.k[key].tolist())
                dk[key].add(scale * shares.ds[key], size, head.q[row].tolist())
                dv[key].add(weight, mpmath.mpf(1), head.d_out[row].tolist())
            dq.put(result.dq, (batch, query_head, row), doubt)
            sinks[query_head].add(shares.dsink, shares.reach, [1.0])
    for key in range(problem.kv_len):
        dk[key].put(result.dk, (batch, kv_head, key), doubt)
        dv[key].put(result.dv, (batch, kv_head, key), doubt)

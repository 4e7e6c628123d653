"""f as its definition reads: exact rational logits, then mpmath; for single rows and tiny problems."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import mpmath
import numpy as np

from verify.attention.problem import widen
from verify.attention.reference import Reference

if TYPE_CHECKING:
    from verify.attention.problem import AttentionProblem

DPS = 60


def attention_row(
    problem: AttentionProblem, batch: int, head: int, row: int, *, dps: int = DPS
) -> tuple[list[mpmath.mpf], mpmath.mpf]:
    """One row of f: output (head_dim numbers) and log-sum-exp, computed with `dps` decimal digits.

    Logits are exact whatever their size, so the result is good to almost `dps` digits of sum_k P_k |v_k|.
    """
    count = problem.visible(row)
    q = widen(problem.q[batch, head, row]).tolist()
    keys = widen(problem.k[batch, problem.kv_head(head), :count]).tolist()
    values = widen(problem.v[batch, problem.kv_head(head), :count]).tolist()
    with mpmath.workdps(dps):
        if count == 0:
            return [mpmath.mpf(0)] * problem.head_dim, mpmath.mpf("-inf")
        logits = [logit(q, key, problem.scale) for key in keys]
        seen = [(z, value) for z, value in zip(logits, values, strict=True) if isinstance(z, Fraction)]
        if not seen or any(isinstance(z, float) and z != -math.inf for z in logits):
            return [mpmath.mpf("nan")] * problem.head_dim, mpmath.mpf("nan")
        largest = max(z for z, _ in seen)
        weights = [mpmath.exp(_real(z - largest)) for z, _ in seen]
        total: Any = mpmath.fsum(weights)
        out = [_mean(weights, [value[lane] for _, value in seen], total) for lane in range(problem.head_dim)]
        return out, _real(largest) + mpmath.log(total)


def logit(q: list[float], key: list[float], scale: float) -> Fraction | float:
    """The logit scale * sum_d q_d k_d: an exact rational, or NaN or an infinity by the rules of IEEE arithmetic."""
    if all(math.isfinite(x) for x in (*q, *key)):
        return Fraction(scale) * sum((Fraction(a) * Fraction(b) for a, b in zip(q, key, strict=True)), Fraction(0))
    return sum((a * b for a, b in zip(q, key, strict=True)), 0.0) * scale


def _mean(weights: list[mpmath.mpf], values: list[float], total: mpmath.mpf) -> mpmath.mpf:
    """sum_k P_k v_k; a value that is not finite decides the class (every weight is positive)."""
    odd = sum((value for value in values if not math.isfinite(value)), 0.0)
    if odd != 0.0:
        return mpmath.mpf(odd)
    return mpmath.fdot(zip(weights, map(mpmath.mpf, values), strict=True)) / total


def _real(x: Fraction) -> mpmath.mpf:
    return mpmath.mpf(x.numerator) / x.denominator


def attention(problem: AttentionProblem, *, dps: int = DPS) -> Reference:
    """Compute f of every element of a tiny problem.

    The error follows from mpmath's functions being right within one unit in the last place (mpmath's own claim), see
    lemma 8 of docs/oracle-bounds.md.
    """
    shape = (problem.batch, problem.heads, problem.q_len)
    out, lse = np.zeros((*shape, problem.head_dim)), np.zeros(shape)
    out_error, lse_error = np.zeros_like(out), np.zeros_like(lse)
    for batch, head, row in np.ndindex(*shape):
        exact_out, exact_lse = attention_row(problem, batch, head, row, dps=dps)
        count = problem.visible(row)
        values = np.abs(widen(problem.v[batch, problem.kv_head(head), :count]))
        doubt = relative_error(count, dps)
        largest = np.max(np.where(np.isfinite(values), values, 0.0), axis=0, initial=0.0)
        for lane, x in enumerate(exact_out):
            out[batch, head, row, lane], out_error[batch, head, row, lane] = to_float64(x, doubt * largest[lane])
        lse[batch, head, row], lse_error[batch, head, row] = to_float64(exact_lse, doubt * float(1 + abs(exact_lse)))
    return Reference(out, out_error, lse, lse_error, "mpmath")


def relative_error(count: int, dps: int) -> float:
    """Error of an output relative to the largest |v| of its lane, of a log-sum-exp relative to 1 + |lse| (lemma 8)."""
    with mpmath.workdps(dps):
        bits: Any = mpmath.mp.prec
        return (count + 2.0**21) * 2.0 ** (3 - bits)


def to_float64(x: mpmath.mpf, error: float) -> tuple[float, float]:
    """The number rounded to float64, and a bound of the distance to f, given one of |x - f|."""
    value = float(x)
    if not math.isfinite(value):
        return value, 0.0 if not mpmath.isfinite(x) else math.inf
    exact = x == 0 and error == 0.0
    return value, 0.0 if exact else float(np.nextafter(error + math.ulp(value), math.inf))

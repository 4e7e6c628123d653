"""f as its definition reads: exact rational logits, then mpmath; for single rows and tiny problems."""

from __future__ import annotations

import dataclasses
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
# Beyond the working precision: argument and result of the hyperbolic tangent are rounded a few times.
CAP_GUARD_BITS = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """One row of f (LSE and maximum in nats)."""

    out: list[mpmath.mpf]
    lse: mpmath.mpf
    max_logit: mpmath.mpf


def attention_row(
    problem: AttentionProblem, batch: int, head: int, row: int, *, dps: int = DPS
) -> tuple[list[mpmath.mpf], mpmath.mpf]:
    """One row of f: output (v_dim numbers) and log-sum-exp, computed with `dps` decimal digits.

    Logits are exact whatever their size (with a soft cap: to an absolute error below 10^-dps), so the result is good
    to almost `dps` digits of sum_k P_k |v_k|.
    """
    answer = evaluate_row(problem, batch, head, row, dps=dps)
    return answer.out, answer.lse


def evaluate_row(problem: AttentionProblem, batch: int, head: int, row: int, *, dps: int = DPS) -> Row:
    """One row of f with its maximum logit; otherwise as `attention_row`."""
    keys = problem.seen(batch, row)
    kv_head = problem.kv_head(head)
    q = widen(problem.q[batch, head, row]).tolist()
    values = widen(problem.v[batch, kv_head, keys]).tolist()
    with mpmath.workdps(dps):
        logits = [
            _final(logit(q, key, problem.scale), problem.softcap) for key in _rows(problem.k, batch, kv_head, keys)
        ]
        largest = _largest(logits)
        sink = problem.sink(head)
        if sink is not None:  # a null key
            logits.append(Fraction(sink) if math.isfinite(sink) else sink)
            values.append([0.0] * problem.v_dim)
        if not logits:
            return Row([mpmath.mpf(0)] * problem.v_dim, mpmath.mpf("-inf"), largest)
        seen = [(z, value) for z, value in zip(logits, values, strict=True) if isinstance(z, Fraction)]
        if not seen or any(isinstance(z, float) and z != -math.inf for z in logits):
            return Row([mpmath.mpf("nan")] * problem.v_dim, mpmath.mpf("nan"), largest)
        top = max(z for z, _ in seen)
        weights: list[Any] = [mpmath.exp(_real(z - top)) for z, _ in seen]
        total: Any = mpmath.fsum(weights)
        out = [_mean(weights, [value[lane] for _, value in seen], total) for lane in range(problem.v_dim)]
        return Row(out, _real(top) + mpmath.log(total), largest)


def _rows(x: np.ndarray, batch: int, head: int, tokens: np.ndarray) -> list[list[float]]:
    return widen(x[batch, head, tokens]).tolist()


def _final(score: Fraction | float, softcap: float | None) -> Fraction | float:
    """The soft cap in extended arithmetic; the error of a capped logit is below the working precision, absolutely."""
    if softcap is None or math.isnan(score):
        return score
    cap = Fraction(softcap)
    if isinstance(score, float):
        return cap if score > 0 else -cap
    with mpmath.workprec(_bits() + max(math.frexp(softcap)[1], 0) + CAP_GUARD_BITS):
        ratio = mpmath.tanh(_real(score / cap))
    sign, mantissa, exponent, _ = ratio._mpf_
    return cap * (-1 if sign else 1) * Fraction(int(mantissa)) * Fraction(2) ** int(exponent)


def _bits() -> int:
    precision: Any = mpmath.mp.prec
    return precision


def _largest(logits: list[Fraction | float]) -> mpmath.mpf:
    """Maximum in extended arithmetic: NaN if one is NaN, -inf of none."""
    odd = [z for z in logits if isinstance(z, float)]
    if any(math.isnan(z) for z in odd):
        return mpmath.mpf("nan")
    if math.inf in odd:
        return mpmath.mpf("inf")
    exact = [z for z in logits if isinstance(z, Fraction)]
    return _real(max(exact)) if exact else mpmath.mpf("-inf")


def logit(q: list[float], key: list[float], scale: float) -> Fraction | float:
    """The score scale * sum_d q_d k_d: an exact rational, or NaN or an infinity by the rules of IEEE arithmetic."""
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
    out, lse, largest = np.zeros((*shape, problem.v_dim)), np.zeros(shape), np.zeros(shape)
    out_error, lse_error, largest_error = (np.zeros_like(x) for x in (out, lse, largest))
    for at in np.ndindex(*shape):
        batch, head, row = at
        exact = evaluate_row(problem, batch, head, row, dps=dps)
        keys = problem.seen(batch, row)
        values = np.abs(widen(problem.v[batch, problem.kv_head(head), keys]))
        doubt = relative_error(len(keys) + 1, dps)
        sizes = np.max(np.where(np.isfinite(values), values, 0.0), axis=0, initial=0.0)
        for lane, x in enumerate(exact.out):
            out[(*at, lane)], out_error[(*at, lane)] = to_float64(x, doubt * sizes[lane])
        lse[at], lse_error[at] = to_float64(exact.lse, doubt * _size(exact.lse))
        largest[at], largest_error[at] = to_float64(exact.max_logit, doubt * _size(exact.max_logit))
    return Reference(out, out_error, lse, lse_error, "mpmath", max_logit=largest, max_logit_error=largest_error)


def _size(x: mpmath.mpf) -> float:
    return float(1 + abs(x)) if mpmath.isfinite(x) else 0.0


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

"""Every derivative in float64, each with a proved bound, in blocks of rows.

The derivation is docs/oracle-bounds-gradients.md, whose lemma numbers (G1, G2, ...) stand below; it builds on
docs/oracle-bounds.md and its assumptions, and on numpy's tanh erring by at most `TANH_ULPS` ulp (tested).

Rows whose weights float64 cannot tell (logits beyond about 10^6) are computed by ball arithmetic instead.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from verify.attention.gradients import oracle_arb
from verify.attention.gradients.reference import Gradients
from verify.attention.oracle_float64 import EXP_RANGE, FUNCTION_ERROR, LARGEST_LOGIT, LOOSE, TINY, UNIT, gamma

if TYPE_CHECKING:
    from jaxtyping import Bool, Float64

    from verify.attention.gradients.problem import GradientProblem, Head

TANH_ULPS = 4.0
TANH_ERROR = 2.0 * TANH_ULPS * UNIT * 1.001
# Rows with a weight known no better than this go to ball arithmetic: 2^10 times better than FP32 can hold it.
WEAK = 2.0**-34
BLOCK_ELEMENTS = 1 << 18
ROUNDING = 1.01 * UNIT


@dataclasses.dataclass(frozen=True, eq=False)
class _Shares:
    """What a block of rows adds, over the keys `first` .. `last` - 1: numbers and errors, exactly 0 where masked."""

    first: int
    last: int
    rows_touched: Bool[np.ndarray, " rows"]
    keys_touched: Bool[np.ndarray, " width"]
    weights: Float64[np.ndarray, "rows width"]
    weights_error: Float64[np.ndarray, "rows width"]
    ds: Float64[np.ndarray, "rows width"]
    ds_error: Float64[np.ndarray, "rows width"]
    dsink: Float64[np.ndarray, " rows"]
    dsink_error: Float64[np.ndarray, " rows"]


@dataclasses.dataclass(frozen=True, eq=False)
class _Softmax:
    """Weights of a block: P and the sink's share with their errors, and the slope of the soft cap with its error."""

    weights: Float64[np.ndarray, "rows width"]
    error: Float64[np.ndarray, "rows width"]
    sink: Float64[np.ndarray, " rows"]
    sink_error: Float64[np.ndarray, " rows"]
    slope: Float64[np.ndarray, "rows width"] | None
    slope_error: Float64[np.ndarray, "rows width"] | float


def gradients(
    problem: GradientProblem,
    *,
    rows_per_block: int | None = None,
    weak: float | None = WEAK,
    dtype: type[np.floating] = np.float64,
) -> Gradients:
    """Every derivative with a proved error.

    Args:
        problem: the inputs.
        rows_per_block: query rows handled at a time (memory is about ten arrays `[rows_per_block, kv_len]`); None picks
            it.
        weak: rows of which a weight P_k has an error above this are computed by ball arithmetic (about 15 ms per 1000
            visible keys); None for never.
        dtype: working precision.  Anything but float64 voids the bound; it exists so that the health check can be shown
            to notice.

    Raises:
        ValueError: rows_per_block is not positive.
        OracleUnsound: ball arithmetic does not reach its precision on an escalated row.
    """
    if rows_per_block is None:
        rows_per_block = min(max(BLOCK_ELEMENTS // max(problem.kv_len, 1), 16), 512)
    if rows_per_block < 1:
        message = f"rows_per_block must be at least 1, got {rows_per_block}"
        raise ValueError(message)
    result = Gradients.blank(problem, "float64")
    # Lemma G7: terms of the longest sum, whatever its order.
    terms = max(problem.kv_len, problem.q_len * (problem.heads // problem.kv_heads), problem.q_len * problem.batch) + 2
    slack = 1.0 + 4.0 * (terms + problem.kv_len + problem.head_dim + problem.v_dim + 64) * UNIT
    escalated = 0
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for batch, head in np.ndindex(problem.batch, problem.heads):
            inputs = _cast(problem.head(batch, head), dtype)
            at = _Place(batch, head, problem.kv_head(head))
            for start in range(0, problem.q_len, rows_per_block):
                rows = slice(start, min(start + rows_per_block, problem.q_len))
                shares, count = _shares(inputs, rows, slack, weak)
                escalated += count
                if shares is not None:
                    _add(result, inputs, rows, shares, at, terms)
        _finish(result, problem, slack)
    tier = "float64+arb" if escalated else "float64"
    return dataclasses.replace(result.mark_undefined(problem), tier=tier, escalated=escalated)


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """P of some rows of a head: |weights - P| <= error, P <= most; and the sink's share at most.

    Attributes:
        weights: `[rows, kv_len]`, 0 where masked.
        error: the same shape.
        most: the same shape.
        sink: `[rows]`, 0 without a sink.
        lse: nats, to within the errors of the largest share; 0 for a row that sees nothing.
    """

    weights: Float64[np.ndarray, "rows kv_len"]
    error: Float64[np.ndarray, "rows kv_len"]
    most: Float64[np.ndarray, "rows kv_len"]
    sink: Float64[np.ndarray, " rows"]
    lse: Float64[np.ndarray, " rows"]


def largest_weights(head: Head, rows: slice) -> Weights:
    """P of some rows with its proved error, for bounds that need no more."""
    keys = slice(0, len(head.k))
    slack = 1.0 + 4.0 * (len(head.k) + head.q.shape[1] + 64) * UNIT
    found = _softmax(head, rows, keys, head.seen(rows), slack)
    most = np.minimum(found.weights + found.error, 1.0)
    lse, share = np.zeros(len(most)), np.zeros(len(most))
    if most.shape[1]:
        best = found.weights.argmax(axis=1)[:, None]
        share = np.take_along_axis(found.weights, best, axis=1)[:, 0]
        logit = np.take_along_axis(_logits(head, rows, keys, slack)[0], best, axis=1)[:, 0]
        lse = np.where(share > 0.0, logit - np.log(np.maximum(share, TINY)), 0.0)
    if head.sink > -math.inf:
        largest = found.sink > share
        lse = np.where(largest, head.sink - np.log(np.maximum(found.sink, TINY)), lse)
    return Weights(found.weights, found.error, most, np.minimum(found.sink + found.sink_error, 1.0), lse)


@dataclasses.dataclass(frozen=True)
class _Place:
    batch: int
    head: int
    kv_head: int


def _cast(head: Head, dtype: type[np.floating]) -> Head:
    arrays = {name: getattr(head, name).astype(dtype) for name in ("q", "k", "v", "d_out", "d_lse")}
    return dataclasses.replace(head, **arrays)


def _shares(head: Head, rows: slice, slack: float, weak: float | None) -> tuple[_Shares | None, int]:
    """Weights and score derivatives of a block of rows, and how many of them went to ball arithmetic."""
    seen = head.seen(rows)
    columns = np.flatnonzero(seen.any(axis=0))
    if not columns.size and head.sink == -math.inf:
        return None, 0
    first, last = (int(columns[0]), int(columns[-1]) + 1) if columns.size else (0, 0)
    seen = seen[:, first:last]
    softmax = _softmax(head, rows, slice(first, last), seen, slack)
    shares = _derive(head, rows, softmax, seen, (first, last), slack)
    if weak is None:
        return shares, 0
    worst = np.maximum(softmax.error.max(axis=1, initial=0.0), softmax.sink_error)
    escalated = np.flatnonzero(~(worst <= weak))
    if escalated.size:
        _escalate(head, rows, shares, escalated)
    return shares, int(escalated.size)


def _norms(x: np.ndarray) -> np.ndarray:
    return np.sqrt(np.einsum("nd,nd->n", x, x))


def _logits(
    head: Head, rows: slice, keys: slice, slack: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | float]:
    """Logits and their errors (lemmas G1, G2), and the slope of the soft cap with its error."""
    q, k = head.q[rows], head.k[keys]
    reach = np.outer(abs(head.scale) * _norms(q) * slack, _norms(k))
    logits = q @ k.T
    logits *= head.scale
    beyond = ~(reach < LARGEST_LOGIT)
    shift = reach * gamma(q.shape[1] + 1) + TINY
    if beyond.any():
        logits[beyond] = 0.0
        shift[beyond] = np.inf
    if head.softcap is None:
        return logits, shift, None, 0.0
    t = np.clip(np.tanh(logits / head.softcap), -1.0, 1.0)
    slope = 1.0 - t * t
    slope_error = np.minimum(0.78 * shift / head.softcap + (2.0 * TANH_ERROR + 5.0 * UNIT), 1.0)
    shift = np.minimum(shift, 2.0 * head.softcap) + head.softcap * (TANH_ERROR + 4.0 * UNIT + TINY) + TINY
    return head.softcap * t, shift, slope, slope_error


def _softmax(head: Head, rows: slice, keys: slice, seen: Bool[np.ndarray, "rows width"], slack: float) -> _Softmax:
    """Lemmas G3 and G4: weights relative to the largest logit or the sink, and their quotients by the sum."""
    logits, shift, slope, slope_error = _logits(head, rows, keys, slack)
    count, width = logits.shape
    logits[~seen] = -np.inf
    index = np.arange(count)
    if width:
        anchor = logits.argmax(axis=1)
        largest = logits[index, anchor]
    else:
        anchor, largest = np.zeros(count, dtype=np.int64), np.full(count, -np.inf)
    by_key = (largest >= head.sink) & (largest > -np.inf)
    top = np.where(by_key, largest, max(head.sink, -np.finfo(np.float64).max))
    anchor_shift = np.where(by_key, shift[index, anchor], 0.0) if width else np.zeros(count)
    gap = logits - top[:, None]
    weights, deviation = _weights(gap, shift + anchor_shift[:, None], slack)
    deviation[~seen] = 0.0
    held = np.flatnonzero(by_key)
    deviation[held, anchor[held]] = 0.0  # both are exactly 1
    if head.sink > -math.inf:
        sink, sink_deviation = _weights(head.sink - top, anchor_shift, slack)
        sink_deviation[~by_key] = 0.0
    else:
        sink, sink_deviation = np.zeros(count), np.zeros(count)
    total = weights.sum(axis=1) + sink
    total_error = (deviation.sum(axis=1) + sink_deviation + gamma(width + 1) * total + width * TINY) * slack
    least = np.maximum(total - total_error, 1.0)
    total = np.maximum(total, 1.0)  # below 1 only for a row with neither key nor sink
    shares, error = _quotient(weights, deviation, total[:, None], total_error[:, None], least[:, None], slack)
    error[~seen] = 0.0
    sink_share, sink_error = _quotient(sink, sink_deviation, total, total_error, least, slack)
    if head.sink == -math.inf:
        sink_error[:] = 0.0
    return _Softmax(shares, error, sink_share, sink_error, slope, slope_error)


def _weights(gap: np.ndarray, doubt: np.ndarray, slack: float) -> tuple[np.ndarray, np.ndarray]:
    """Lemma G3: exp(gap) and its error, where the exact gap is within `doubt` of gap plus its rounding."""
    size = np.minimum(-gap, EXP_RANGE)
    h = doubt + ROUNDING * size + TINY
    h *= slack
    weights = np.exp(gap)
    deviation = weights * (h * (1.0 + h) + FUNCTION_ERROR * (1.0 + 2.0 * h)) + TINY
    loose = (~(h <= LOOSE)) & (gap > -np.inf)
    if loose.any():
        h = (doubt[loose] + ROUNDING * np.minimum(-gap[loose], LARGEST_LOGIT) + TINY) * slack
        deviation[loose] = np.exp(gap[loose] + h) * (1.0 + 2.0**-40) - weights[loose] + TINY
    return weights, deviation


def _quotient(
    weights: np.ndarray,
    deviation: np.ndarray,
    total: np.ndarray,
    total_error: np.ndarray,
    least: np.ndarray,
    slack: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Lemma G4: P = w / l, which lies between 0 and 1."""
    shares = weights / total
    error = (deviation + shares * total_error) / least
    error += 2.0 * UNIT * shares + TINY
    error *= slack
    return shares, np.fmin(error, np.maximum(shares, 1.0 - shares) * (1.0 + 4.0 * UNIT))


def _derive(
    head: Head,
    rows: slice,
    softmax: _Softmax,
    seen: Bool[np.ndarray, "rows width"],
    columns: tuple[int, int],
    slack: float,
) -> _Shares:
    """Lemmas G5 and G6: dP, delta, and the derivatives with respect to scores and sink."""
    weights, error = softmax.weights, softmax.error
    d_out, v, d_lse = head.d_out[rows], head.v[columns[0] : columns[1]], head.d_lse[rows]
    d_weights = d_out @ v.T
    doubt = np.outer(_norms(d_out) * (gamma(v.shape[1]) * slack), _norms(v)) + TINY
    most = np.minimum(weights + error, 1.0)
    delta, delta_error = _delta(head, softmax, d_weights, doubt, seen, slack)
    middle = delta - d_lse
    middle_error = delta_error + ROUNDING * np.abs(middle)
    difference = d_weights - middle[:, None]
    size = np.abs(difference)
    ds = weights * difference
    doubt += middle_error[:, None]
    doubt += ROUNDING * size
    doubt *= most
    doubt += error * size
    doubt += ROUNDING * np.abs(ds) + TINY
    if softmax.slope is not None:
        doubt *= np.minimum(softmax.slope + softmax.slope_error, 1.0)
        doubt += np.abs(ds) * softmax.slope_error + TINY
        ds *= softmax.slope
        doubt += ROUNDING * np.abs(ds)
    doubt *= slack
    doubt[~seen] = 0.0
    dsink = -softmax.sink * middle
    dsink_error = softmax.sink_error * np.abs(middle) + (softmax.sink + softmax.sink_error) * middle_error
    dsink_error = (dsink_error + ROUNDING * np.abs(dsink) + TINY) * slack
    if head.sink == -math.inf:
        dsink_error[:] = 0.0
    return _Shares(*columns, seen.any(axis=1), seen.any(axis=0), weights, error, ds, doubt, dsink, dsink_error)


def _delta(
    head: Head,
    softmax: _Softmax,
    d_weights: np.ndarray,
    doubt: np.ndarray,
    seen: Bool[np.ndarray, "rows width"],
    slack: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Lemma G5: delta = sum_k P_k dP_k, which lies in the range of dP (and 0 with a sink)."""
    width = seen.shape[1]
    size = np.abs(d_weights)
    weights, error = softmax.weights, softmax.error
    delta = np.einsum("rk,rk->r", weights, d_weights)
    inexact = np.einsum("rk,rk->r", error + gamma(width + 1) * weights, size)
    inexact += np.einsum("rk,rk->r", weights + error, doubt)
    inexact += width * TINY * (1.0 + size.max(axis=1, initial=0.0))
    inexact *= slack
    edge = 0.0 if head.sink > -math.inf else np.inf
    low = np.min(d_weights - doubt, axis=1, where=seen, initial=edge)
    high = np.max(d_weights + doubt, axis=1, where=seen, initial=-edge)
    empty = low > high
    low, high = np.where(empty, 0.0, low), np.where(empty, 0.0, high)
    delta = np.clip(delta, low, high)
    farthest = np.maximum(delta - low, high - delta) + 4.0 * UNIT * np.maximum(np.abs(low), np.abs(high))
    return delta, np.fmin(inexact, farthest)


def _escalate(head: Head, rows: slice, shares: _Shares, members: np.ndarray) -> None:
    """Lemma G8: put the certified weights and score derivatives of some rows in the place of those in float64."""
    for start in range(0, len(members), oracle_arb.ROWS_AT_ONCE):
        part = members[start : start + oracle_arb.ROWS_AT_ONCE].tolist()
        balls = oracle_arb.row_shares(head, [rows.start + row for row in part])
        keys = range(shares.first, shares.last)
        for index, row in enumerate(part):
            for name in ("weights", "ds"):
                matrix = getattr(balls, name)
                numbers = [oracle_arb.to_float64(matrix[index, key]) for key in keys]
                getattr(shares, name)[row] = [value for value, _ in numbers]
                getattr(shares, f"{name}_error")[row] = [error for _, error in numbers]
            shares.dsink[row], shares.dsink_error[row] = oracle_arb.to_float64(balls.dsink[index])


def _add(result: Gradients, head: Head, rows: slice, shares: _Shares, at: _Place, terms: int) -> None:
    """Lemma G7: add a block's terms; errors still lack the factor |scale| and the slack."""
    keys = slice(shares.first, shares.last)
    q, k, d_out = head.q[rows], head.k[keys], head.d_out[rows]
    result.dq.value[at.batch, at.head, rows] = shares.ds @ k
    result.dk.value[at.batch, at.kv_head, keys] += shares.ds.T @ q
    result.dv.value[at.batch, at.kv_head, keys] += shares.weights.T @ d_out
    ds_error = shares.ds_error + gamma(terms) * np.abs(shares.ds)
    weights_error = shares.weights_error + gamma(terms) * shares.weights
    # What underflow may cost, so that only what nothing was added to is exact.
    lost_rows, lost_keys = (
        (touched * (terms * TINY))[:, None] for touched in (shares.rows_touched, shares.keys_touched)
    )
    result.dq.error[at.batch, at.head, rows] = ds_error @ np.abs(k) + lost_rows
    result.dk.error[at.batch, at.kv_head, keys] += ds_error.T @ np.abs(q) + lost_keys
    result.dv.error[at.batch, at.kv_head, keys] += weights_error.T @ np.abs(d_out) + lost_keys
    if result.dsinks is not None:
        result.dsinks.value[at.head] += shares.dsink.sum()
        result.dsinks.error[at.head] += (shares.dsink_error + gamma(terms) * np.abs(shares.dsink)).sum()


def _finish(result: Gradients, problem: GradientProblem, slack: float) -> None:
    """The factor `scale`, what underflow may have cost, and the rounding of the bound itself."""
    for name, part in result.parts():
        scale = problem.scale if name in {"dq", "dk"} else 1.0
        part.value[...] *= scale
        lost = TINY * (part.error > 0.0)
        part.error[...] = (part.error * abs(scale) + 2.0 * UNIT * np.abs(part.value) + lost) * slack
        part.settle()

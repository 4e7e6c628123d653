"""Every element of f in float64, each with a proved bound.

The derivation is docs/oracle-bounds.md, whose lemma numbers stand below.

Holds for any summation order with or without fused multiply-add (so for any BLAS that multiplies matrices the
conventional way), with or without flush-to-zero.  Two assumptions about numpy, tested in
`verify/tests/judge/test_numpy_functions.py`: exp and log err by at most `FUNCTION_ULPS` ulp of float64 (an exp below
2^-1022 by at most 2^-1022), and exp(0) is 1.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from verify.attention import oracle_arb
from verify.attention.problem import widen
from verify.attention.reference import Reference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Float64, Int

    from verify.attention.problem import AttentionProblem

UNIT = 2.0**-53
FUNCTION_ULPS = 2.0
# Relative error of numpy's exp and log: an ulp is at most 2 UNIT; the excess covers dividing by 1 - error.
FUNCTION_ERROR = 2.0 * FUNCTION_ULPS * UNIT * 1.001
# Absolute error of one underflowing operation, generously: 2^-1022 is enough (lemma 1).
TINY = 2.0**-1020
# exp(x) is below 2^-1022 from here on, so that the rounding of x - max no longer matters (lemma 3).
EXP_RANGE = 745.0
# Above this relative error of a weight, a row is bounded key by key (lemma 6) rather than as a whole (lemma 5).
# It decides which proof is used, never whether the bound holds.
LOOSE = 2.0**-20
# Logits beyond this size are left to ball arithmetic, since sums of them could overflow.
LARGEST_LOGIT = 2.0**1020
BLOCK_ELEMENTS = 1 << 19
# A reference has to be this much better than what is judged by it; rows that are not go to ball arithmetic.
SHARE_OF_TOLERANCE = 0.01


def gamma(terms: int) -> float:
    """Higham's gamma_n = n u / (1 - n u): relative error of `terms` successive roundings."""
    return terms * UNIT / (1.0 - terms * UNIT)


@dataclasses.dataclass(frozen=True, eq=False)
class _KVHead:
    """One KV head: its finite part (non-finite entries as 0), and running maxima over its first 1, 2, ... keys."""

    keys: Float64[np.ndarray, "kv_len head_dim"]
    values: Float64[np.ndarray, "kv_len head_dim"]
    raw_keys: Float64[np.ndarray, "kv_len head_dim"]
    raw_values: Float64[np.ndarray, "kv_len head_dim"]
    sizes: Float64[np.ndarray, "kv_len head_dim"]
    norms: Float64[np.ndarray, " kv_len"]
    low: Float64[np.ndarray, "kv_len head_dim"]
    high: Float64[np.ndarray, "kv_len head_dim"]
    odd_keys: Int[np.ndarray, " odd"]
    odd_values: Int[np.ndarray, " odd"]

    @classmethod
    def of(cls, raw_keys: np.ndarray, raw_values: np.ndarray) -> _KVHead:
        odd_keys, keys = _split(raw_keys)
        odd_values, values = _split(raw_values)
        return cls(
            keys=keys,
            values=values,
            raw_keys=raw_keys,
            raw_values=raw_values,
            sizes=np.abs(values),
            norms=np.maximum.accumulate(_norms(keys)),
            low=_running(np.minimum, values),
            high=_running(np.maximum, values),
            odd_keys=odd_keys,
            odd_values=odd_values,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class _Block:
    """Rows of one query head, with their logits."""

    q: Float64[np.ndarray, "rows head_dim"]
    head: _KVHead
    counts: Int[np.ndarray, " rows"]
    scale: float

    @property
    def width(self) -> int:
        return int(self.counts.max())


@dataclasses.dataclass(frozen=True, eq=False)
class _Bounded:
    out: Float64[np.ndarray, "rows head_dim"]
    out_error: Float64[np.ndarray, "rows head_dim"]
    lse: Float64[np.ndarray, " rows"]
    lse_error: Float64[np.ndarray, " rows"]

    def put(self, rows: slice | np.ndarray | tuple[int, int, slice], other: _Bounded) -> None:
        for field in dataclasses.fields(self):
            getattr(self, field.name)[rows] = getattr(other, field.name)


def attention(
    problem: AttentionProblem,
    *,
    rows_per_block: int | None = None,
    visible: Int[np.ndarray, " q_len"] | None = None,
    dtype: type[np.floating] = np.float64,
) -> Reference:
    """Compute f of every element with a proved error.

    Args:
        problem: the inputs.
        rows_per_block: query rows handled at a time (memory is a few arrays `[rows_per_block, kv_len]`); None picks it.
        visible: how many keys each row sees, instead of `problem.visible` (for answers to a wrong mask).
        dtype: working precision.  Anything but float64 voids the bound; it exists so that `verify.attention.health` can
            show that it would notice.

    Raises:
        ValueError: rows_per_block is not positive, or visible is not a count per row.
    """
    if rows_per_block is None:
        rows_per_block = min(max(BLOCK_ELEMENTS // max(problem.kv_len, 1), 16), 512)
    if rows_per_block < 1:
        message = f"rows_per_block must be at least 1, got {rows_per_block}"
        raise ValueError(message)
    counts = _counts(problem, visible)
    shape = (problem.batch, problem.heads, problem.q_len)
    out = _Bounded(*(np.zeros(s) for s in ((*shape, problem.head_dim), (*shape, problem.head_dim), shape, shape)))
    for batch in range(problem.batch):
        for kv_head in range(problem.kv_heads):
            head = _KVHead.of(*(widen(x[batch, kv_head]).astype(dtype) for x in (problem.k, problem.v)))
            for query_head in _group(problem, kv_head):
                q = widen(problem.q[batch, query_head]).astype(dtype)
                for rows in _row_blocks(counts, rows_per_block):
                    block = _Block(q[rows], head, counts[rows], problem.scale)
                    out.put((batch, query_head, rows), _attend(block))
    return Reference(out.out, out.out_error, out.lse, out.lse_error, "float64")


def refine(
    reference: Reference,
    problem: AttentionProblem,
    tolerance_out: Float64[np.ndarray, "batch heads q_len head_dim"],
    tolerance_lse: Float64[np.ndarray, "batch heads q_len"] | None = None,
) -> Reference:
    """Recompute by ball arithmetic the rows whose error exceeds a hundredth of a tolerance somewhere.

    Args:
        reference: what `attention` gave for the problem.
        problem: the inputs.
        tolerance_out: what the output will be judged by, elementwise; NaN where nothing will be judged.
        tolerance_lse: the same for the log-sum-exp (nats); None if it will not be judged.

    Returns:
        A copy with those rows replaced, of tier "float64+arb", with their number in `escalated`; the reference itself
        if there are none.

    Raises:
        ValueError: a tolerance has the wrong shape.
        OracleUnsound: ball arithmetic does not reach the precision.
    """
    rows = np.zeros(reference.lse.shape, dtype=bool)
    pairs = [("tolerance_out", reference.out_error, tolerance_out)]
    if tolerance_lse is not None:
        pairs.append(("tolerance_lse", reference.lse_error, tolerance_lse))
    for name, error, tolerance in pairs:
        if np.shape(tolerance) != error.shape:
            message = f"{name} must have shape {error.shape}, got {np.shape(tolerance)}"
            raise ValueError(message)
        weak = error > SHARE_OF_TOLERANCE * tolerance
        rows |= weak.any(axis=3) if weak.ndim == rows.ndim + 1 else weak
    if not rows.any():
        return reference
    better = oracle_arb.replace_rows(reference, problem, np.argwhere(rows).tolist())
    return dataclasses.replace(better, tier="float64+arb")


def _counts(problem: AttentionProblem, visible: np.ndarray | None) -> np.ndarray:
    if visible is None:
        return np.array([problem.visible(row) for row in range(problem.q_len)], dtype=np.int64)
    visible = np.asarray(visible, dtype=np.int64)
    if visible.shape != (problem.q_len,) or np.any((visible < 0) | (visible > problem.kv_len)):
        message = f"visible must give a count in 0..{problem.kv_len} for each of {problem.q_len} rows, got {visible}"
        raise ValueError(message)
    return visible


def _group(problem: AttentionProblem, kv_head: int) -> list[int]:
    return [head for head in range(problem.heads) if problem.kv_head(head) == kv_head]


def _row_blocks(counts: np.ndarray, rows_per_block: int) -> Iterator[slice]:
    for start in range(0, len(counts), rows_per_block):
        yield slice(start, min(start + rows_per_block, len(counts)))


def _split(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the rows that hold a non-finite entry, and the array with those entries as 0."""
    finite = np.isfinite(raw)
    if finite.all():
        return np.empty(0, dtype=np.int64), raw
    return np.flatnonzero(~finite.all(axis=1)), np.where(finite, raw, raw.dtype.type(0))


def _running(ufunc: np.ufunc, x: np.ndarray) -> np.ndarray:
    """Minimum or maximum over the first 1, 2, ... rows; doubling is several times faster than `accumulate`."""
    step = 1
    while step < len(x):
        x = np.concatenate([x[:step], ufunc(x[step:], x[:-step])])
        step *= 2
    return x


def _norms(x: np.ndarray) -> np.ndarray:
    return np.sqrt(np.einsum("nd,nd->n", x, x))


def _attend(block: _Block) -> _Bounded:
    """One block of rows: values, bounds, and the classes of what is not finite."""
    rows, dims = block.q.shape
    result = _Bounded(np.zeros((rows, dims)), np.zeros((rows, dims)), np.full(rows, -np.inf), np.zeros(rows))
    if block.width == 0:
        return result
    odd_rows, q = _split(block.q)
    finite = dataclasses.replace(block, q=q)
    reach = _reach(finite)
    beyond = ~(reach < LARGEST_LOGIT)
    logits, floor = _logits(finite, block.q, odd_rows, beyond)
    top = logits.max(axis=1)
    empty = block.counts == 0
    undefined = ~np.isfinite(top) & ~empty  # NaN, +inf, or nothing but -inf
    alive = (logits > -np.inf) if block.head.odd_values.size else None
    skip = undefined | empty | beyond
    if skip.any():
        logits[skip] = 0.0
        top = np.where(skip, 0.0, top)
        floor = np.where(skip, 0.0, floor)
    loose, whole = _whole_rows(finite, logits, top, floor, np.where(skip, 0.0, reach))
    result.put(slice(None), whole)
    tight = np.flatnonzero(loose & ~skip)
    if tight.size:
        part = _Block(q[tight], block.head, block.counts[tight], block.scale)
        result.put(tight, _key_by_key(part, block.q[tight]))
    if skip.any():
        _unreached(result, block, beyond & ~empty)
        _set_class(result, undefined, np.nan, np.nan)
        _set_class(result, empty, 0.0, -np.inf)
    if alive is not None:
        _set_value_classes(result, block, alive, ~undefined & ~empty)
    return result


def _logits(
    block: _Block, raw_q: np.ndarray, odd_rows: np.ndarray, beyond: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Scaled scores with -inf where masked, and per row a lower bound of its finite ones (lemma 2).

    Rows `beyond` the range of float64 get logits of 0, so that only what the inputs force is NaN or infinite.
    """
    width = block.width
    logits = block.q @ block.head.keys[:width].T
    logits[beyond] = 0.0
    logits *= block.scale
    floor = logits.min(axis=1)
    with np.errstate(invalid="ignore"):
        for row in odd_rows:
            logits[row] = (raw_q[row] * block.head.raw_keys[:width]).sum(axis=1) * block.scale
        for key in block.head.odd_keys[block.head.odd_keys < width]:
            logits[:, key] = (raw_q * block.head.raw_keys[key]).sum(axis=1) * block.scale
    first = int(block.counts.min())
    if first < width:
        hidden = np.arange(first, width)[None, :] >= block.counts[:, None]
        logits[:, first:][hidden] = -np.inf
    return logits, floor


def _reach(block: _Block) -> np.ndarray:
    """Per row an upper bound of |scale| sum_d |q_d k_d| over its visible keys (Cauchy-Schwarz)."""
    norms = block.head.norms[np.maximum(block.counts, 1) - 1]
    with np.errstate(over="ignore"):
        return (abs(block.scale) * (_norms(block.q) * norms) * _slack(block)).astype(np.float64)


def _slack(block: _Block) -> float:
    """Covers the rounding of the bound itself: fewer than 4 (width + head_dim + 64) relative roundings (lemma 4)."""
    return 1.0 + 4.0 * (block.width + block.q.shape[1] + 64) * UNIT


def _whole_rows(
    block: _Block, logits: np.ndarray, top: np.ndarray, floor: np.ndarray, reach: np.ndarray
) -> tuple[np.ndarray, _Bounded]:
    """Lemma 5: one relative error for all weights of a row.  Overwrites `logits`; tells which rows need lemma 6."""
    width, dims = block.width, block.q.shape[1]
    shift = reach * gamma(dims + 1) + TINY
    relative = 2.0 * shift + 1.01 * UNIT * np.minimum(top - floor, EXP_RANGE) + TINY
    loose = ~(relative <= LOOSE)
    relative = np.where(loose, LOOSE, relative)
    weight_error = relative * (1.0 + relative) + FUNCTION_ERROR * (1.0 + 2.0 * relative) + gamma(width)

    logits -= top[:, None]
    weights = np.exp(logits, out=logits)
    total = weights.sum(axis=1)
    total_error = weight_error * total + width * TINY
    product_error = weights @ block.head.sizes[:width]
    product_error *= weight_error[:, None]
    product_error += width * TINY * (1.0 + block.head.sizes[:width].max(initial=0.0))
    least = np.maximum(1.0, total - total_error)
    out, out_error = _quotient(block, _Sums(weights, total, total_error, product_error, least))
    lse, lse_error = _log_sum(block, top, total, shift + total_error / least)
    return loose, _Bounded(out, out_error, lse, lse_error)


@dataclasses.dataclass(frozen=True, eq=False)
class _Sums:
    """Weights of a block with their sum: errors of both sums of products, and a lower bound of the exact sum."""

    weights: Float64[np.ndarray, "rows width"]
    total: Float64[np.ndarray, " rows"]
    total_error: Float64[np.ndarray, " rows"]
    product_error: Float64[np.ndarray, "rows head_dim"]
    least: Float64[np.ndarray, " rows"]


def _quotient(block: _Block, sums: _Sums) -> tuple[np.ndarray, np.ndarray]:
    """Lemma 4: the division, and the fact that f is a weighted mean of the visible values."""
    out = sums.weights @ block.head.values[: block.width]
    out /= sums.total[:, None]
    size = np.abs(out)
    error = size * sums.total_error[:, None]
    error += sums.product_error
    error /= sums.least[:, None]
    error += 2.0 * UNIT * size
    error += TINY
    error *= _slack(block)
    last = np.maximum(block.counts, 1) - 1
    low, high = block.head.low[last], block.head.high[last]
    np.clip(out, low, high, out=out)
    farthest = np.maximum(out - low, high - out)
    farthest *= 1.0 + 4.0 * UNIT
    return out, np.fmin(error, farthest)  # fmin: an infinite error times a zero value is NaN


def _log_sum(block: _Block, top: np.ndarray, total: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sum top + ln(total), with `error` the part that stems from top and total (lemma 7)."""
    logarithm = np.log(total)
    lse = top + logarithm
    return lse, (error + FUNCTION_ERROR * logarithm + 1.01 * UNIT * np.abs(lse) + TINY) * _slack(block)


def _key_by_key(block: _Block, raw_q: np.ndarray) -> _Bounded:
    """Lemma 6: each weight with its own error, for rows with logits so large that one error for all says nothing."""
    width, dims = block.width, block.q.shape[1]
    odd_rows, _ = _split(raw_q)
    logits, _ = _logits(block, raw_q, odd_rows, np.zeros(len(raw_q), dtype=bool))
    slack = _slack(block)
    shift = np.abs(block.q) @ np.abs(block.head.keys[:width]).T
    shift *= abs(block.scale) * gamma(dims + 1)
    shift += TINY
    shift *= slack
    rows = np.arange(len(logits))
    anchor = logits.argmax(axis=1)
    top = logits[rows, anchor]
    gap = logits - top[:, None]
    doubt = shift + shift[rows, anchor][:, None] + 1.01 * UNIT * np.minimum(-gap, LARGEST_LOGIT) + TINY
    doubt *= slack
    doubt[rows, anchor] = 0.0
    weights = np.exp(gap)
    with np.errstate(over="ignore", invalid="ignore"):
        most = np.exp(gap + doubt) * (1.0 + 2.0**-40)
        fewest = np.exp(gap - doubt) * (1.0 - 2.0**-40)
        deviation = most - weights + TINY  # e^h - 1 >= 1 - e^-h: the upper side is the wider one
        deviation[rows, anchor] = 0.0
        total = weights.sum(axis=1)
        total_error = deviation.sum(axis=1) + gamma(width) * total + width * TINY
        sizes = block.head.sizes[:width]
        product_error = deviation @ sizes + gamma(width) * (weights @ sizes)
        product_error += width * TINY * (1.0 + sizes.max(initial=0.0))
        least = np.maximum(1.0, fewest.sum(axis=1) * (1.0 - 2.0**-40))
        out, out_error = _quotient(block, _Sums(weights, total, total_error, product_error, least))
        lse, lse_error = _log_sum(block, top, total, shift[rows, anchor] + total_error / least)
        # max_k z_k <= lse <= max_k z_k + ln(count), whatever the weights.
        below = (logits - shift).max(axis=1)
        above = (logits + shift).max(axis=1) + np.log(np.maximum(block.counts, 1))
        widest = np.maximum(above - lse, lse - below) + 8.0 * UNIT * (np.abs(above) + np.abs(below))
    return _Bounded(out, out_error, lse, np.fmin(lse_error, widest))


def _unreached(result: _Bounded, block: _Block, rows: np.ndarray) -> None:
    """Rows whose logits may overflow float64: any visible value is as good as another, and the LSE is not known."""
    last = np.maximum(block.counts, 1) - 1
    low, high = block.head.low[last], block.head.high[last]
    result.out[rows] = low[rows]
    result.out_error[rows] = ((high - low) * (1.0 + 4.0 * UNIT))[rows]
    result.lse[rows] = 0.0
    result.lse_error[rows] = np.inf


def _set_class(result: _Bounded, rows: np.ndarray, out: float, lse: float) -> None:
    result.out[rows] = out
    result.out_error[rows] = 0.0
    result.lse[rows] = lse
    result.lse_error[rows] = 0.0


def _set_value_classes(result: _Bounded, block: _Block, alive: np.ndarray, rows: np.ndarray) -> None:
    """NaN or an infinity where a value that is seen with a score above -inf is not finite."""
    odd = block.head.odd_values[block.head.odd_values < block.width]
    seen = alive[:, odd].astype(np.float64)
    values = block.head.raw_values[odd]
    plus, minus, nan = (
        seen @ kind.astype(np.float64) > 0 for kind in (values == np.inf, values == -np.inf, np.isnan(values))
    )
    for kind, value in ((plus, np.inf), (minus, -np.inf), (nan | (plus & minus), np.nan)):
        where = kind & rows[:, None]
        result.out[where] = value
        result.out_error[where] = 0.0

"""f by ball arithmetic (FLINT's arb through python-flint): every result is an interval that certainly contains f.

Precision rises until the balls are as small as asked, or `OracleUnsound` is raised.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import flint
import numpy as np
from flint import arb, arb_mat

from verify.attention.problem import SMALLEST_NORMAL, widen
from verify.attention.reference import OracleUnsound, Reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from verify.attention.problem import AttentionProblem

RELATIVE = 2.0**-60
MAX_PRECISION = 1 << 14
# Working bits beyond those asked for: roundings of the sums, and the exponential's own.
GUARD_BITS = 40
# Rows whose balls are held at a time.
ROWS_AT_ONCE = 32

Row = tuple[list[arb], arb]


def attention_row(
    problem: AttentionProblem,
    batch: int,
    head: int,
    row: int,
    *,
    relative: float = RELATIVE,
    precision: int | None = None,
    max_precision: int = MAX_PRECISION,
) -> Row:
    """One row of f: output (v_dim balls) and log-sum-exp.

    Args:
        problem: the inputs.
        batch: index of the batch entry.
        head: index of the query head.
        row: index of the query.
        relative: radii are at most this times sum_k P_k |v_k| (output) and |lse|, each floored at 2^-126.
        precision: bits to start with; None estimates them from the inputs.
        max_precision: bits at which to give up.

    Raises:
        OracleUnsound: max_precision bits do not give the radii asked for.
    """
    [answer] = attention_rows(
        problem, batch, head, [row], relative=relative, precision=precision, max_precision=max_precision
    )
    return answer


def attention_rows(
    problem: AttentionProblem,
    batch: int,
    head: int,
    rows: Sequence[int],
    *,
    relative: float = RELATIVE,
    precision: int | None = None,
    max_precision: int = MAX_PRECISION,
) -> list[Row]:
    """Several rows of one query head (cheaper than one at a time); otherwise as `attention_row`."""
    answers = _evaluate(problem, (batch, head), rows, relative, precision, max_precision)
    return [(row.out, row.lse) for row in answers]


def max_logits(
    problem: AttentionProblem, batch: int, head: int, rows: Sequence[int], *, relative: float = RELATIVE
) -> list[arb]:
    """The largest logit of several rows of one query head, each to `relative` of its own size (nats).

    Raises:
        OracleUnsound: MAX_PRECISION bits do not give the radii asked for.
    """
    answers = _evaluate(problem, (batch, head), rows, relative, None, MAX_PRECISION, _Rows.maxima)
    return [row.max_logit for row in answers]


def _evaluate(
    problem: AttentionProblem,
    at: tuple[int, int],
    rows: Sequence[int],
    relative: float,
    precision: int | None,
    max_precision: int,
    compute: Callable[[_Rows], list[_Answer]] | None = None,
) -> list[_Answer]:
    """Answers of some rows, all of each unless `compute` says otherwise, at a precision that makes them narrow."""
    compute = _Rows.evaluate if compute is None else compute
    answers: list[_Answer] = []
    for together in _batches(problem, rows):
        part = _Rows.of(problem, *at, together)
        bits = part.first_precision(relative) if precision is None else precision
        while True:
            with flint.ctx.workprec(bits):
                answer = compute(part)
            if all(_narrow(ball, size, relative) for row in answer for ball, size in row.numbers):
                break
            bits *= 2
            if bits > max_precision:
                message = (
                    f"ball arithmetic with {bits // 2} bits does not reach a relative radius of {relative:.3g} "
                    f"(limit {max_precision} bits): batch {at[0]}, head {at[1]}, rows {list(rows)}"
                )
                raise OracleUnsound(message)
        answers.extend(answer)
    return answers


def _batches(problem: AttentionProblem, rows: Sequence[int]) -> Iterator[Sequence[int]]:
    """Rows to be computed together: few, and near each other where far ones see other keys."""
    if problem.window is None and problem.q_segments is None:
        for start in range(0, len(rows), ROWS_AT_ONCE):
            yield rows[start : start + ROWS_AT_ONCE]
        return
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or end - start == ROWS_AT_ONCE or abs(rows[end] - rows[start]) > ROWS_AT_ONCE:
            yield rows[start:end]
            start = end


def attention(problem: AttentionProblem, *, relative: float = RELATIVE) -> Reference:
    """Compute f of every element; for small problems (about 0.1 s per row at 4096 keys)."""
    return replace_rows(_blank(problem), problem, np.ndindex(problem.batch, problem.heads, problem.q_len), relative)


def replace_rows(
    reference: Reference, problem: AttentionProblem, rows: Iterable[Sequence[int]], relative: float = RELATIVE
) -> Reference:
    """A copy of `reference` whose given (batch, head, row) rows are replaced by ball arithmetic."""
    names = ["out", "out_error", "lse", "lse_error"]
    if reference.max_logit is not None:
        names += ["max_logit", "max_logit_error"]
    fields = {name: getattr(reference, name).copy() for name in names}
    by_head: dict[tuple[int, int], list[int]] = {}
    for batch, head, row in rows:
        by_head.setdefault((int(batch), int(head)), []).append(int(row))
    for (batch, head), members in by_head.items():
        answers = _evaluate(problem, (batch, head), members, relative, None, MAX_PRECISION)
        for row, answer in zip(members, answers, strict=True):
            at = (batch, head, row)
            for lane, ball in enumerate(answer.out):
                fields["out"][(*at, lane)], fields["out_error"][(*at, lane)] = to_float64(ball)
            fields["lse"][at], fields["lse_error"][at] = to_float64(answer.lse)
            if reference.max_logit is not None:
                fields["max_logit"][at], fields["max_logit_error"][at] = to_float64(answer.max_logit)
    escalated = reference.escalated + sum(len(members) for members in by_head.values())
    return dataclasses.replace(reference, **fields, escalated=escalated)


def to_float64(ball: arb) -> tuple[float, float]:
    """A float64 in or near a ball, and a bound of its distance to every point of it, also where that underflows."""
    value = float(ball.mid())
    if not ball.is_finite():
        return value, 0.0  # what the inputs force; wide balls do not get here
    if math.isinf(value):
        return math.copysign(np.finfo(np.float64).max, value), math.inf
    distance = float((ball - arb(value)).abs_upper())
    if distance == 0.0 and ball.is_exact() and ball == arb(value):
        return value, 0.0
    return value, float(np.nextafter(distance, math.inf))


def _blank(problem: AttentionProblem) -> Reference:
    shape = (problem.batch, problem.heads, problem.q_len)
    wide = (*shape, problem.v_dim)
    out, out_error, lse, lse_error, largest, largest_error = (
        np.zeros(s) for s in (wide, wide, shape, shape, shape, shape)
    )
    return Reference(out, out_error, lse, lse_error, "arb", max_logit=largest, max_logit_error=largest_error)


@dataclasses.dataclass(frozen=True, eq=False)
class _Answer:
    """One row, and those of its balls that stand for numbers, each with the size against which its radius is measured.

    Infinities and NaN that follow from the inputs are no such balls; one that stems from a wide ball is.
    """

    out: list[arb]
    lse: arb
    max_logit: arb
    numbers: list[tuple[arb, float]]


def _narrow(ball: arb, size: float, relative: float) -> bool:
    """Whether a ball is small enough."""
    return bool(ball.is_finite()) and bool(ball.rad() <= arb(relative) * arb(max(size, SMALLEST_NORMAL)))


@dataclasses.dataclass(frozen=True, eq=False)
class _Rows:
    """Inputs of some rows of one head as float64 (exact), with the keys that any of them sees."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mask: np.ndarray
    scale: float
    softcap: float | None
    sink: float | None

    @classmethod
    def of(cls, problem: AttentionProblem, batch: int, head: int, rows: Sequence[int]) -> _Rows:
        kv_head = problem.kv_head(head)
        mask = problem.mask(batch, rows)
        keys = np.flatnonzero(mask.any(axis=0))
        return cls(
            q=widen(problem.q[batch, head, list(rows)]),
            k=widen(problem.k[batch, kv_head, keys]),
            v=widen(problem.v[batch, kv_head, keys]),
            mask=mask[:, keys],
            scale=problem.scale,
            softcap=problem.softcap,
            sink=problem.sink(head),
        )

    def first_precision(self, relative: float) -> int:
        """Bits that suffice unless weights cancel: logits lose log2 |z| bits when subtracted."""
        largest = [float(np.max(np.abs(x[np.isfinite(x)]), initial=0.0)) for x in (self.q, self.k)]
        logits = sum(math.log2(x) for x in (*largest, abs(self.scale)) if x > 0.0)
        size = self.k.size + 1
        return GUARD_BITS + int(max(-math.log2(relative), 0.0) + max(logits, 0.0) + 2 * math.log2(size))

    def evaluate(self) -> list[_Answer]:
        """All rows at the present precision."""
        scores = self._scores()
        rows = [self._weigh(index, scores) for index in range(len(self.q))]
        if not len(self.k) or all(isinstance(row, _Answer) for row in rows):
            return [row if isinstance(row, _Answer) else self._sink_only(row) for row in rows]
        width = len(self.k)
        mixed = _mix([[None] * width if isinstance(row, _Answer) else row.weights for row in rows], _finite(self.v))
        return [row if isinstance(row, _Answer) else self._mean(index, row, mixed) for index, row in enumerate(rows)]

    def maxima(self) -> list[_Answer]:
        """The largest logit of each row alone, with neither weights nor output."""
        scores = self._scores()
        rows = ([z for z in self._logits(index, scores) if z is not None] for index in range(len(self.q)))
        return [_Answer([], arb("nan"), largest, _size_of(largest)) for largest in map(_maximum, rows)]

    def _scores(self) -> arb_mat:
        """Products of rows and keys, neither scaled nor capped."""
        return _product(_finite(self.q), _finite(self.k).T) if len(self.k) else arb_mat(len(self.q), 0)

    def _weigh(self, index: int, scores: arb_mat) -> _Answer | _Weighed:
        """The weights of a row, or its answer if no weights are needed."""
        logits = self._logits(index, scores)
        seen = [z for z in logits if z is not None]
        sink = [] if self.sink is None else [arb(self.sink)]
        largest = _maximum(seen)
        if not seen and not sink:
            return self._constant(arb(0), arb.neg_inf(), largest)
        finite = [z for z in (*seen, *sink) if z.is_finite()]
        if not finite or any(z.is_nan() or z == arb.pos_inf() for z in (*seen, *sink)):
            return self._constant(arb("nan"), arb("nan"), largest)
        top = max(finite, key=_middle)
        weights = [self._weight(z, top) for z in logits]
        extra = [self._weight(z, top) for z in sink]
        total = sum((weight for weight in (*weights, *extra) if weight is not None), arb(0))
        return _Weighed(weights, total, top + total.log(), largest)

    @staticmethod
    def _weight(z: arb | None, top: arb) -> arb | None:
        if z is None or z == arb.neg_inf():
            return None
        return arb(1) if z is top else (z - top).exp()

    def _logits(self, index: int, scores: arb_mat) -> list[arb | None]:
        """Final logit of each key, None where the row does not see it."""
        scale, cap = arb(self.scale), None if self.softcap is None else arb(self.softcap)
        logits: list[arb | None] = []
        for key, (seen, odd) in enumerate(zip(self.mask[index].tolist(), self._classes(index), strict=True)):
            if not seen:
                logits.append(None)
                continue
            z = scores[index, key] * scale if odd == 0.0 else arb(odd)
            if cap is not None and not math.isnan(odd):
                z = cap * ((z / cap).tanh() if odd == 0.0 else arb(math.copysign(1.0, odd)))
            logits.append(z)
        return logits

    def _classes(self, index: int) -> list[float]:
        """Per key NaN, +inf or -inf if its score is that, else 0."""
        classes = np.zeros(len(self.k))
        odd = ~np.isfinite(self.q[index]).all() | ~np.isfinite(self.k).all(axis=1)
        with np.errstate(invalid="ignore"):
            classes[odd] = (self.q[index] * self.k[odd]).sum(axis=1) * self.scale
        return classes.tolist()

    def _mean(self, index: int, row: _Weighed, mixed: arb_mat) -> _Answer:
        """The mean of the values by weight, lane by lane; values that are not finite decide the class of their lane."""
        alive = [(weight, value) for weight, value in zip(row.weights, self.v, strict=True) if weight is not None]
        values = np.array([value for _, value in alive]).reshape(len(alive), self.v.shape[1])
        with np.errstate(invalid="ignore"):
            odd = np.where(np.isfinite(values), 0.0, values).sum(axis=0)
        out = [arb(c) if c != 0.0 else mixed[index, lane] / row.total for lane, c in enumerate(odd.tolist())]
        approximate = np.array([float(weight.mid()) for weight, _ in alive]) / max(float(row.total.mid()), 1.0)
        sizes = (approximate @ np.abs(_finite(values))).tolist()
        numbers = [(ball, size) for ball, size, c in zip(out, sizes, odd, strict=True) if c == 0.0]
        return _Answer(out, row.lse, row.max_logit, [*numbers, *row.numbers])

    def _sink_only(self, row: _Weighed) -> _Answer:
        """No key at all, but a sink."""
        return _Answer([arb(0)] * self.v.shape[1], row.lse, row.max_logit, row.numbers)

    def _constant(self, out: arb, lse: arb, max_logit: arb) -> _Answer:
        return _Answer([out] * self.v.shape[1], lse, max_logit, _size_of(max_logit))


@dataclasses.dataclass(frozen=True, eq=False)
class _Weighed:
    """Weights of a row relative to about its largest logit (None: 0), their sum with the sink's, LSE and maximum."""

    weights: list[arb | None]
    total: arb
    lse: arb
    max_logit: arb

    @property
    def numbers(self) -> list[tuple[arb, float]]:
        size = abs(float(self.lse.mid()))
        if not self.max_logit.is_finite():
            return [(self.lse, size)]
        return [(self.lse, size), (self.max_logit, max(size, abs(float(self.max_logit.mid()))))]


def _size_of(ball: arb) -> list[tuple[arb, float]]:
    """A ball with its own size, unless it is infinite or NaN."""
    return [(ball, abs(float(ball.mid())))] if ball.is_finite() else []


def _maximum(logits: list[arb]) -> arb:
    """A ball around the largest logit: NaN if one is NaN, -inf of none.

    A ball that overlaps the largest only widens it; precision rises until the ball is narrow.
    """
    if not all(z.is_finite() for z in logits):
        if any(z.is_nan() for z in logits):
            return arb("nan")
        if any(z == arb.pos_inf() for z in logits):
            return arb.pos_inf()
        logits = [z for z in logits if z != arb.neg_inf()]
    return functools.reduce(arb.max, logits) if logits else arb.neg_inf()


def _middle(ball: arb) -> flint.fmpq:
    mantissa, exponent = ball.mid().man_exp()
    return flint.fmpq(mantissa) * flint.fmpq(2) ** int(exponent)


def _finite(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x), x, 0.0)


def _product(left: np.ndarray, right: np.ndarray) -> arb_mat:
    return _matrix(left) * _matrix(right)


def _matrix(x: np.ndarray) -> arb_mat:
    return arb_mat(x.shape[0], x.shape[1], x.ravel().tolist())


def _mix(weights: list[list[arb | None]], values: np.ndarray) -> arb_mat:
    """Weights times values for all rows at once, unseen keys with weight 0."""
    nothing = arb(0)
    return arb_mat([[nothing if w is None else w for w in row] for row in weights]) * _matrix(values)

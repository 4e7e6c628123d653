"""f by ball arithmetic (FLINT's arb through python-flint): every result is an interval that certainly contains f.

Precision rises until the balls are as small as asked, or `OracleUnsound` is raised.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import flint
import numpy as np
from flint import arb, arb_mat

from verify.attention.problem import SMALLEST_NORMAL, widen
from verify.attention.reference import OracleUnsound, Reference

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
    """One row of f: output (head_dim balls) and log-sum-exp.

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
    answers: list[Row] = []
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = _Rows.of(problem, batch, head, rows[start : start + ROWS_AT_ONCE])
        bits = part.first_precision(relative) if precision is None else precision
        while True:
            with flint.ctx.workprec(bits):
                answer = part.evaluate()
            if all(_narrow(ball, size, relative) for row in answer for ball, size in row.numbers):
                break
            bits *= 2
            if bits > max_precision:
                message = (
                    f"ball arithmetic with {bits // 2} bits does not reach a relative radius of {relative:.3g} "
                    f"(limit {max_precision} bits): batch {batch}, head {head}, rows {list(rows)}"
                )
                raise OracleUnsound(message)
        answers.extend((row.out, row.lse) for row in answer)
    return answers


def attention(problem: AttentionProblem, *, relative: float = RELATIVE) -> Reference:
    """Compute f of every element; for small problems (about 0.1 s per row at 4096 keys)."""
    return replace_rows(_blank(problem), problem, np.ndindex(problem.batch, problem.heads, problem.q_len), relative)


def replace_rows(
    reference: Reference, problem: AttentionProblem, rows: Iterable[Sequence[int]], relative: float = RELATIVE
) -> Reference:
    """A copy of `reference` whose given (batch, head, row) rows are replaced by ball arithmetic."""
    fields = {name: getattr(reference, name).copy() for name in ("out", "out_error", "lse", "lse_error")}
    by_head: dict[tuple[int, int], list[int]] = {}
    for batch, head, row in rows:
        by_head.setdefault((int(batch), int(head)), []).append(int(row))
    for (batch, head), members in by_head.items():
        for row, (out, lse) in zip(
            members, attention_rows(problem, batch, head, members, relative=relative), strict=True
        ):
            for lane, ball in enumerate(out):
                fields["out"][batch, head, row, lane], fields["out_error"][batch, head, row, lane] = to_float64(ball)
            fields["lse"][batch, head, row], fields["lse_error"][batch, head, row] = to_float64(lse)
    escalated = reference.escalated + sum(len(members) for members in by_head.values())
    return dataclasses.replace(reference, **fields, escalated=escalated)


def to_float64(ball: arb) -> tuple[float, float]:
    """A float64 in or near a ball, and a bound of its distance to every point of the ball."""
    value = float(ball.mid())
    if not ball.is_finite():
        return value, 0.0  # what the inputs force; wide balls do not get here
    if math.isinf(value):
        return math.copysign(np.finfo(np.float64).max, value), math.inf
    distance = float((ball - arb(value)).abs_upper())
    return value, 0.0 if distance == 0.0 else float(np.nextafter(distance, math.inf))


def _blank(problem: AttentionProblem) -> Reference:
    shape = (problem.batch, problem.heads, problem.q_len)
    wide = (*shape, problem.head_dim)
    return Reference(np.zeros(wide), np.zeros(wide), np.zeros(shape), np.zeros(shape), "arb", escalated=0)


@dataclasses.dataclass(frozen=True, eq=False)
class _Answer:
    """One row, and those of its balls that stand for numbers, each with the size against which its radius is measured.

    Infinities and NaN that follow from the inputs are no such balls; one that stems from a wide ball is.
    """

    out: list[arb]
    lse: arb
    numbers: list[tuple[arb, float]]


def _narrow(ball: arb, size: float, relative: float) -> bool:
    """Whether a ball is small enough."""
    return bool(ball.is_finite()) and bool(ball.rad() <= arb(relative) * arb(max(size, SMALLEST_NORMAL)))


@dataclasses.dataclass(frozen=True, eq=False)
class _Rows:
    """Inputs of some rows of one head as float64 (exact), with as many keys as any of them sees."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    counts: list[int]
    scale: float

    @classmethod
    def of(cls, problem: AttentionProblem, batch: int, head: int, rows: Sequence[int]) -> _Rows:
        kv_head = problem.kv_head(head)
        counts = [problem.visible(row) for row in rows]
        width = max(counts)
        return cls(
            q=widen(problem.q[batch, head, list(rows)]),
            k=widen(problem.k[batch, kv_head, :width]),
            v=widen(problem.v[batch, kv_head, :width]),
            counts=counts,
            scale=problem.scale,
        )

    def first_precision(self, relative: float) -> int:
        """Bits that suffice unless weights cancel: logits lose log2 |z| bits when subtracted."""
        largest = [float(np.max(np.abs(x[np.isfinite(x)]), initial=0.0)) for x in (self.q, self.k)]
        logits = sum(math.log2(x) for x in (*largest, abs(self.scale)) if x > 0.0)
        size = self.k.size + 1
        return GUARD_BITS + int(max(-math.log2(relative), 0.0) + max(logits, 0.0) + 2 * math.log2(size))

    def evaluate(self) -> list[_Answer]:
        """All rows at the present precision."""
        if not len(self.k):
            return [self._constant(arb(0), arb.neg_inf()) for _ in self.counts]
        scores = _product(_finite(self.q), _finite(self.k).T)
        rows = [self._weigh(index, count, scores) for index, count in enumerate(self.counts)]
        mixed = _mix([[] if isinstance(row, _Answer) else row.weights for row in rows], _finite(self.v))
        return [row if isinstance(row, _Answer) else self._mean(index, row, mixed) for index, row in enumerate(rows)]

    def _weigh(self, index: int, count: int, scores: arb_mat) -> _Answer | _Weighed:
        """The weights of a row, or its answer if no weights are needed."""
        if count == 0:
            return self._constant(arb(0), arb.neg_inf())
        classes = self._classes(index, count)
        if any(math.isnan(c) or c == math.inf for c in classes) or all(c == -math.inf for c in classes):
            return self._constant(arb("nan"), arb("nan"))
        scale = arb(self.scale)
        logits = [scores[index, key] * scale if c == 0.0 else None for key, c in enumerate(classes)]
        top = max((z for z in logits if z is not None), key=_middle)
        weights = [None if z is None else arb(1) if z is top else (z - top).exp() for z in logits]
        total = sum((weight for weight in weights if weight is not None), arb(0))
        return _Weighed(weights, total, top + total.log())

    def _classes(self, index: int, count: int) -> list[float]:
        """Per visible key NaN, +inf or -inf if its score is that, else 0."""
        classes = np.zeros(count)
        odd = ~np.isfinite(self.q[index]).all() | ~np.isfinite(self.k[:count]).all(axis=1)
        with np.errstate(invalid="ignore"):
            classes[odd] = (self.q[index] * self.k[:count][odd]).sum(axis=1) * self.scale
        return classes.tolist()

    def _mean(self, index: int, row: _Weighed, mixed: arb_mat) -> _Answer:
        """The mean of the values by weight, lane by lane; values that are not finite decide the class of their lane."""
        alive = [(weight, value) for weight, value in zip(row.weights, self.v, strict=False) if weight is not None]
        values = np.array([value for _, value in alive])
        with np.errstate(invalid="ignore"):
            odd = np.where(np.isfinite(values), 0.0, values).sum(axis=0)
        out = [arb(c) if c != 0.0 else mixed[index, lane] / row.total for lane, c in enumerate(odd.tolist())]
        approximate = np.array([float(weight.mid()) for weight, _ in alive]) / max(float(row.total.mid()), 1.0)
        sizes = (approximate @ np.abs(_finite(values))).tolist()
        numbers = [(ball, size) for ball, size, c in zip(out, sizes, odd, strict=True) if c == 0.0]
        return _Answer(out, row.lse, [*numbers, (row.lse, abs(float(row.lse.mid())))])

    def _constant(self, out: arb, lse: arb) -> _Answer:
        return _Answer([out] * self.v.shape[1], lse, [])


@dataclasses.dataclass(frozen=True, eq=False)
class _Weighed:
    """Weights of a row relative to about its largest logit (None where the score is -inf), their sum, and the LSE."""

    weights: list[arb | None]
    total: arb
    lse: arb


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
    width, nothing = len(values), arb(0)
    padded = [[*(nothing if w is None else w for w in row), *([nothing] * (width - len(row)))] for row in weights]
    return arb_mat(padded) * _matrix(values)

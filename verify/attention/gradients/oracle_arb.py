"""The gradients by ball arithmetic (FLINT's arb through python-flint): intervals that certainly contain them.

Precision rises until the balls of every weight and of every score's derivative are as small as asked, or
`OracleUnsound` is raised.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import flint
import numpy as np
from flint import arb, arb_mat

from verify.attention.gradients.reference import Gradients
from verify.attention.oracle_arb import GUARD_BITS, MAX_PRECISION, RELATIVE, to_float64
from verify.attention.reference import OracleUnsound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verify.attention.gradients.problem import GradientProblem, Head
    from verify.attention.gradients.reference import Bounded

ROWS_AT_ONCE = 32
FLOOR = 2.0**-300
"""Sizes below it are not asked to be known relatively: products with BF16 numbers stay below 2^-126 by far."""


@dataclasses.dataclass(frozen=True, eq=False)
class Shares:
    """What some rows of one query head add to the derivatives.

    Attributes:
        weights: P `[rows, kv_len]`, 0 where masked.
        ds: derivative with respect to the scaled scores s `[rows, kv_len]`, 0 where masked.
        dsink: derivative with respect to the sink, one ball per row (0 without a sink).
        precision: the working precision in bits.
    """

    weights: arb_mat
    ds: arb_mat
    dsink: list[arb]
    precision: int


def row_shares(
    head: Head,
    rows: Sequence[int],
    *,
    relative: float = RELATIVE,
    precision: int | None = None,
    max_precision: int = MAX_PRECISION,
) -> Shares:
    """Weights and score derivatives of some rows, with radii of at most `relative` times their size.

    The size of a weight is itself, that of a derivative P_k (|dP_k| + sum_j P_j |dP_j| + |d_lse|), each at least FLOOR.

    Args:
        head: inputs of the query head.
        rows: indices of the rows.
        relative: radii are at most this times the size.
        precision: bits to start with; None estimates them from the inputs.
        max_precision: bits at which to give up.

    Raises:
        OracleUnsound: max_precision bits do not give the radii asked for.
    """
    bits = _first_precision(head, rows, relative) if precision is None else precision
    while True:
        with flint.ctx.workprec(bits):
            shares = _evaluate(head, rows, relative, bits)
        if shares is not None:
            return shares
        bits *= 2
        if bits > max_precision:
            message = (
                f"ball arithmetic with {bits // 2} bits does not reach a relative radius of {relative:.3g} "
                f"(limit {max_precision} bits): rows {list(rows)}"
            )
            raise OracleUnsound(message)


def _first_precision(head: Head, rows: Sequence[int], relative: float) -> int:
    """Bits that suffice unless terms cancel: logits lose log2 |z| bits when subtracted."""
    sizes = [float(np.max(np.abs(x), initial=0.0)) for x in (head.q[list(rows)], head.k)]
    logits = sum(math.log2(x) for x in (*sizes, abs(head.scale)) if x > 0.0)
    return GUARD_BITS + int(max(-math.log2(relative), 0.0) + max(logits, 0.0) + 2 * math.log2(head.k.size + 1))


def _evaluate(head: Head, rows: Sequence[int], relative: float, bits: int) -> Shares | None:
    """All rows at the present precision; None if a ball is too wide."""
    seen = [head.seen(slice(row, row + 1))[0] for row in rows]
    scores = _matrix(head.q[list(rows)]) * _matrix(head.k.T)
    d_weights = _matrix(head.d_out[list(rows)]) * _matrix(head.v.T)
    width = len(head.k)
    answers: list[_Row] = []
    for index, row in enumerate(rows):
        keys = np.flatnonzero(seen[index]).tolist()
        answer = _one_row(
            head,
            {j: scores[index, j] * arb(head.scale) for j in keys},
            {j: d_weights[index, j] for j in keys},
            arb(float(head.d_lse[row])),
            relative,
        )
        if answer is None:
            return None
        answers.append(answer)
    nothing = arb(0)
    weights, ds = (
        arb_mat(len(rows), width, [getattr(answer, name).get(j, nothing) for answer in answers for j in range(width)])
        for name in ("weights", "ds")
    )
    return Shares(weights, ds, [answer.dsink for answer in answers], bits)


@dataclasses.dataclass(frozen=True, eq=False)
class _Row:
    weights: dict[int, arb]
    ds: dict[int, arb]
    dsink: arb


def _one_row(head: Head, scores: dict[int, arb], d_weights: dict[int, arb], d_lse: arb, relative: float) -> _Row | None:
    has_sink = head.sink > -math.inf
    if not scores and not has_sink:
        return _Row({}, {}, arb(0))
    tanhs = {} if head.softcap is None else {j: (s / arb(head.softcap)).tanh() for j, s in scores.items()}
    logits = scores if head.softcap is None else {j: arb(head.softcap) * t for j, t in tanhs.items()}
    # Any anchor is right; one near the largest logit keeps the balls small.
    candidates = [*logits.values(), *([arb(head.sink)] if has_sink else [])]
    top = max(candidates, key=_middle)
    weights = {j: arb(1) if z is top else (z - top).exp() for j, z in logits.items()}
    sink = (arb(head.sink) - top).exp() if has_sink else arb(0)
    total = sum(weights.values(), sink)
    shares = {j: w / total for j, w in weights.items()}
    delta = sum((shares[j] * d_weights[j] for j in scores), arb(0))
    size = sum((shares[j] * abs(d_weights[j]) for j in scores), abs(d_lse))
    ds = {j: share * (d_weights[j] - delta + d_lse) for j, share in shares.items()}
    if tanhs:
        ds = {j: x * (1 - tanhs[j]) * (1 + tanhs[j]) for j, x in ds.items()}
    dsink = sink / total * (d_lse - delta)
    pairs = [(share, share) for share in shares.values()]
    pairs += [(ds[j], share * (abs(d_weights[j]) + size)) for j, share in shares.items()]
    pairs.append((dsink, sink / total * size))
    if not all(_narrow(ball, scope, relative) for ball, scope in pairs):
        return None
    return _Row(shares, ds, dsink)


def _narrow(ball: arb, size: arb, relative: float) -> bool:
    if not (ball.is_finite() and size.is_finite()):
        return False
    return bool(ball.rad() <= arb(relative) * arb.max(size.mid(), arb(FLOOR)))


def _middle(ball: arb) -> flint.fmpq:
    mantissa, exponent = ball.mid().man_exp()
    return flint.fmpq(mantissa) * flint.fmpq(2) ** int(exponent)


def _matrix(x: np.ndarray) -> arb_mat:
    return arb_mat(x.shape[0], x.shape[1], x.ravel().tolist())


def gradients(problem: GradientProblem, *, relative: float = RELATIVE, precision: int | None = None) -> Gradients:
    """Every derivative as a float64 number with a certified error; arguments as for `row_shares`."""
    result = Gradients.blank(problem, "arb")
    sinks = [arb(0)] * problem.heads
    for batch, kv_head in np.ndindex(problem.batch, problem.kv_heads):
        balls = kv_head_balls(problem, batch, kv_head, relative=relative, precision=precision)
        for head, matrix in balls.dq.items():
            _put(result.dq, (batch, head), matrix)
        _put(result.dk, (batch, kv_head), balls.dk)
        _put(result.dv, (batch, kv_head), balls.dv)
        with flint.ctx.workprec(GUARD_BITS + 64):
            for head, ball in balls.dsink.items():
                sinks[head] += ball
    if result.dsinks is not None:
        for head, ball in enumerate(sinks):
            result.dsinks.value[head], result.dsinks.error[head] = to_float64(ball)
    return result.mark_undefined(problem)


@dataclasses.dataclass(frozen=True, eq=False)
class Balls:
    """Derivatives of one KV head and its query heads: dq by query head, dk, dv, and the sinks' by query head."""

    dq: dict[int, arb_mat]
    dk: arb_mat
    dv: arb_mat
    dsink: dict[int, arb]


def kv_head_balls(
    problem: GradientProblem, batch: int, kv_head: int, *, relative: float = RELATIVE, precision: int | None = None
) -> Balls:
    """Certified balls of everything that one KV head takes part in; undefined rows add nothing to them."""
    dk, dv = (arb_mat(x.shape[2], x.shape[3]) for x in (problem.k, problem.v))
    dq: dict[int, arb_mat] = {}
    dsink: dict[int, arb] = {}
    scale = arb(problem.scale)
    for query_head in problem.group(kv_head):
        head = problem.head(batch, query_head)
        parts: list[list[arb]] = []
        dsink[query_head] = arb(0)
        for start in range(0, problem.q_len, ROWS_AT_ONCE):
            rows = list(range(start, min(start + ROWS_AT_ONCE, problem.q_len)))
            shares = row_shares(head, rows, relative=relative, precision=precision)
            with flint.ctx.workprec(shares.precision):
                parts += (shares.ds * _matrix(head.k) * scale).tolist()
                dk += shares.ds.transpose() * _matrix(head.q[rows]) * scale
                dv += shares.weights.transpose() * _matrix(head.d_out[rows])
                dsink[query_head] = sum(shares.dsink, dsink[query_head])
        dq[query_head] = arb_mat(parts)
    return Balls(dq, dk, dv, dsink)


def _put(part: Bounded, index: tuple[int, int], matrix: arb_mat) -> None:
    rows, lanes = matrix.nrows(), matrix.ncols()
    for row in range(rows):
        for lane in range(lanes):
            part.value[(*index, row, lane)], part.error[(*index, row, lane)] = to_float64(matrix[row, lane])

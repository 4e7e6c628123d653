"""f by ball arithmetic (FLINT's arb through python-flint): every result is an interval that certainly contains f.

Two ways: token by token (`gdn`), and in chunks, through the inverse of a unit lower triangular matrix (`gdn_chunked`).
Precision starts at 106 + 0.4 T bits, which is what naive ball arithmetic on the recurrence needs, and rises until the
balls are as small as asked, or `OracleUnsound` is raised.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import flint
import numpy as np
from flint import arb, arb_mat

from verify.gdn.layout import SequenceResult, collect, convolved_rows, finite, initial_state, key_head, numeric
from verify.gdn.problem import DeltaRuleProblem, GdnProblem, shapes
from verify.gdn.reference import OracleUnsound

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.gdn.problem import Problem
    from verify.gdn.reference import GdnReference

RELATIVE = 2.0**-60
"""Radii asked for, relative to the largest number of the sequence's outputs and states (floored at 2**-126)."""
MAX_PRECISION = 1 << 14
FIRST_BITS = 106
BITS_PER_TOKEN = 0.4
CHUNK = 64

Row = list[arb]
Rows = list[Row]


def gdn(problem: Problem, *, relative: float = RELATIVE) -> GdnReference:
    """Every element of f, token by token; for small problems."""
    return collect(problem, "arb", lambda sequence: _refined(problem, sequence, _recur, relative))


def gdn_chunked(problem: Problem, *, chunk: int = CHUNK, relative: float = RELATIVE) -> GdnReference:
    """Every element of f, `chunk` tokens at a time."""
    run = functools.partial(_chunks, chunk=chunk)
    return collect(problem, "arb chunked", lambda sequence: _refined(problem, sequence, run, relative))


class _Head:
    """What one head of a sequence reads, as balls: rows of q, k, v, then beta and the log-decays (None: a reset)."""

    def __init__(self, inputs: _Inputs, problem: Problem, sequence: int, head: int) -> None:
        key = key_head(problem, head)
        self.q = [row[key] for row in inputs.q]
        self.k = [row[key] for row in inputs.k]
        self.v = [row[head] for row in inputs.v]
        self.beta = [row[head] for row in inputs.beta]
        self.g = [row[head] for row in inputs.g]
        self.state = _matrix(initial_state(problem, sequence)[head])
        self.scale = arb(problem.scale)
        self.taken = problem.sequences.taken(sequence)


class _Inputs:
    """What the delta rule reads for one sequence, as nested lists of balls: token, head, channel.

    A log-decay is a list of one ball, or one per key channel; None stands for -inf.
    """

    def __init__(self, problem: Problem, sequence: int) -> None:
        span = problem.sequences.span(sequence)
        if isinstance(problem, DeltaRuleProblem):
            self.q, self.k, self.v = (_balls3(finite(x[span])) for x in (problem.q, problem.k, problem.v))
            self.beta = [[arb(x) for x in row] for row in finite(problem.beta[span]).tolist()]
            tokens = span.stop - span.start
            g = np.zeros((tokens, problem.n_v)) if problem.g is None else numeric(problem.g[span])
            channels = g if g.ndim == 3 else g[:, :, None]
            self.g = [[[_decay_logarithm(float(x)) for x in c] for c in row] for row in channels]
            return
        self.q, self.k, self.v = _mixed(problem, sequence)
        scale = arb(problem.beta_scale)
        self.beta = [[scale * _sigmoid(x) for x in row] for row in numeric(problem.b[span]).tolist()]
        self.g = _log_decays(problem, span)


def _decay_logarithm(x: float) -> arb | None:
    return None if np.isneginf(x) else arb(x)


def _balls3(x: np.ndarray) -> list[Rows]:
    return [[[arb(c) for c in row] for row in token] for token in x.tolist()]


def _mixed(problem: GdnProblem, sequence: int) -> tuple[list[Rows], list[Rows], list[Rows]]:
    """Convolution, activation and norms."""
    rows = convolved_rows(problem, sequence).tolist()
    taps = finite(problem.taps).T.tolist()
    dim = len(taps)
    bias = [0.0] * dim if problem.bias is None else finite(problem.bias).tolist()
    n_kq, n_v, d_k, d_v = problem.heads
    found: tuple[list[Rows], list[Rows], list[Rows]] = ([], [], [])
    for t in range(len(rows) - problem.width + 1):
        z: Row = []
        for c in range(dim):
            total = sum((arb(w) * arb(rows[t + j][c]) for j, w in enumerate(taps[c])), arb(bias[c]))
            z.append(total * _sigmoid_ball(total) if problem.activation == "silu" else total)
        width = n_kq * d_k
        parts = (z[:width], z[width : 2 * width], z[2 * width :])
        q, k = ([_normed(part[h * d_k : (h + 1) * d_k], problem.norm_eps) for h in range(n_kq)] for part in parts[:2])
        v = [parts[2][h * d_v : (h + 1) * d_v] for h in range(n_v)]
        for where, what in zip(found, (q, k, v), strict=True):
            where.append(what)
    return found


def _normed(z: Row, eps: float | None) -> Row:
    if eps is None:
        return z
    squares = sum((x * x for x in z), arb(eps))
    if squares == 0:
        return z
    root = squares.sqrt()
    return [x / root for x in z]


def _sigmoid(x: float) -> arb:
    if np.isinf(x):
        return arb(1 if x > 0 else 0)
    return _sigmoid_ball(arb(x))


def _sigmoid_ball(x: arb) -> arb:
    return 1 / (1 + (-x).exp())


def _log_decays(problem: GdnProblem, span: slice) -> list[list[list[arb | None]]]:
    a_log, bias = finite(problem.a_log).tolist(), finite(problem.dt_bias).tolist()
    found: list[list[list[arb | None]]] = []
    for row in numeric(problem.a[span]).tolist():
        heads: list[list[arb | None]] = []
        for head, given in enumerate(row):
            channels = given if isinstance(given, list) else [given]
            biases = bias[head] if isinstance(bias[head], list) else [bias[head]]
            heads.append([_log_decay(a_log[head], x, dt) for x, dt in zip(channels, biases, strict=True)])
        found.append(heads)
    return found


def _log_decay(a_log: float, x: float, dt: float) -> arb | None:
    if np.isinf(x):
        return None if x > 0 else arb(0)
    softplus = (arb(x) + arb(dt)).exp().log1p()
    return -arb(a_log).exp() * softplus


def _refined(
    problem: Problem, sequence: int, run: Callable[[_Head], tuple[arb_mat, arb_mat]], relative: float
) -> SequenceResult:
    """Raise the precision until all balls are narrow."""
    tokens = int(problem.sequences.lengths[sequence])
    bits = FIRST_BITS + int(BITS_PER_TOKEN * tokens)
    _, n_v, _, _ = shapes(problem)
    while True:
        with flint.ctx.workprec(bits):
            inputs = _Inputs(problem, sequence)
            found = [run(_Head(inputs, problem, sequence, head)) for head in range(n_v)]
        if _narrow(found, relative):
            return _result(found, problem, tokens)
        bits *= 2
        if bits > MAX_PRECISION:
            message = (
                f"ball arithmetic with {bits // 2} bits does not reach a relative radius of {relative:.3g}: "
                f"sequence {sequence}"
            )
            raise OracleUnsound(message)


def _narrow(found: list[tuple[arb_mat, arb_mat]], relative: float) -> bool:
    for pair in found:
        balls = [ball for matrix in pair for ball in matrix.entries()]
        if not all(ball.is_finite() for ball in balls):
            return False
        size = max((float(abs(ball).upper()) for ball in balls), default=0.0)
        limit = arb(relative) * arb(max(min(size, np.finfo(np.float64).max), 2.0**-126))
        if not all(bool(ball.rad() <= limit) for ball in balls):
            return False
    return True


def _result(found: list[tuple[arb_mat, arb_mat]], problem: Problem, tokens: int) -> SequenceResult:
    _, n_v, d_k, d_v = shapes(problem)
    out, state = np.zeros((tokens, n_v, d_v)), np.zeros((n_v, d_k, d_v))
    out_error, state_error = np.zeros_like(out), np.zeros_like(state)
    for head, (outputs, final) in enumerate(found):
        pairs = [to_float64(ball) for ball in outputs.entries()]
        out[:, head], out_error[:, head] = (np.array(x).reshape(tokens, d_v) for x in _columns(pairs))
        pairs = [to_float64(ball) for ball in final.entries()]
        state[head], state_error[head] = (np.array(x).reshape(d_k, d_v) for x in _columns(pairs))
    return SequenceResult(out, out_error, state, state_error)


def _columns(pairs: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [value for value, _ in pairs], [error for _, error in pairs]


def to_float64(ball: arb) -> tuple[float, float]:
    """A float64 in or near a ball, and a bound of its distance to every point of it, also where that underflows."""
    value = float(ball.mid())
    if np.isinf(value):
        return float(np.copysign(np.finfo(np.float64).max, value)), np.inf
    distance = float((ball - arb(value)).abs_upper())
    if distance == 0.0 and ball == arb(value):
        return value, 0.0
    return value, float(np.nextafter(distance, np.inf))


def _matrix(x: np.ndarray) -> arb_mat:
    return arb_mat(x.shape[0], x.shape[1], x.ravel().tolist())


def _row(x: Row) -> arb_mat:
    return arb_mat(1, len(x), x)


def _decayed(state: arb_mat, g: list[arb | None]) -> arb_mat:
    """exp(g) times the state, row by row where each channel decays on its own."""
    factors = [arb(0) if x is None else x.exp() for x in g]
    if len(factors) == 1:
        return state * factors[0]
    rows = [[state[c, j] * factor for j in range(state.ncols())] for c, factor in enumerate(factors)]
    return arb_mat(rows)


def _recur(head: _Head) -> tuple[arb_mat, arb_mat]:
    """The definition."""
    state, taken = head.state, head.state
    out: Rows = []
    for t in range(len(head.q)):
        state = _decayed(state, head.g[t])
        key = _row(head.k[t])
        update = (_row(head.v[t]) - key * state) * head.beta[t]
        state = state + key.transpose() * update
        out.append((_row(head.q[t]) * state * head.scale).entries())
        if t + 1 == head.taken:
            taken = state
    return _tall(out, head.state.ncols()), taken


def _tall(rows: Rows, width: int) -> arb_mat:
    return arb_mat(len(rows), width, [ball for row in rows for ball in row])


def _chunks(head: _Head, chunk: int) -> tuple[arb_mat, arb_mat]:
    """The chunked form; a chunk ends where the state is taken, too."""
    state, taken = head.state, head.state
    tokens = len(head.q)
    out: Rows = []
    start = 0
    while start < tokens:
        stop = min(start + chunk, tokens)
        if start < head.taken < stop:
            stop = head.taken
        rows, state = _chunk(head, slice(start, stop), state)
        out.extend(rows)
        if stop == head.taken:
            taken = state
        start = stop
    return _tall(out, head.state.ncols()), taken


def _chunk(head: _Head, span: slice, state: arb_mat) -> tuple[Rows, arb_mat]:
    """(I + L) U = beta (v - k exp(G) S), o = q exp(G) S + tril(q k^T D) U, S' = exp(G_C) S + (k exp(G_C - G))^T U."""
    q, k, v, beta, g = head.q[span], head.k[span], head.v[span], head.beta[span], head.g[span]
    n, d_k = len(q), state.nrows()
    channels = len(g[0])
    # Segment sums: the log-decay from token j (before it decays anything: j = 0) to token i, per channel.
    decays = [[_segment(g, j, i, channels) for j in range(i + 2)] for i in range(n)]

    def across(left: Row, right: Row, factors: Row) -> arb:
        if channels == 1:
            return factors[0] * sum((a * b for a, b in zip(left, right, strict=True)), arb(0))
        return sum((a * f * b for a, f, b in zip(left, factors, right, strict=True)), arb(0))

    unit, scores = arb_mat(n, n), arb_mat(n, n)
    for i in range(n):
        unit[i, i] = 1
        for j in range(i + 1):
            if j < i:
                unit[i, j] = beta[i] * across(k[i], k[j], decays[i][j + 1])
            scores[i, j] = across(q[i], k[j], decays[i][j + 1])
    keys, queries, values = arb_mat(n, d_k), arb_mat(n, d_k), arb_mat(n, state.ncols())
    last = arb_mat(d_k, n)
    for i in range(n):
        from_start = decays[i][0]
        for c in range(d_k):
            keys[i, c] = k[i][c] * from_start[c % channels] * beta[i]
            queries[i, c] = q[i][c] * from_start[c % channels]
            last[c, i] = k[i][c] * decays[n - 1][i + 1][c % channels]
        for lane in range(state.ncols()):
            values[i, lane] = v[i][lane] * beta[i]
    update = _forward(unit, values - keys * state)
    out = (queries * state + scores * update) * head.scale
    whole = decays[n - 1][0]
    kept = arb_mat([[state[c, j] * whole[c % channels] for j in range(state.ncols())] for c in range(d_k)])
    return [out.entries()[i * out.ncols() : (i + 1) * out.ncols()] for i in range(n)], kept + last * update


def _segment(g: list[list[arb | None]], start: int, last: int, channels: int) -> Row:
    """exp of the sum of g over tokens start..last, per channel; a reset anywhere in it gives 0."""
    found: Row = []
    for c in range(channels):
        terms = [g[t][c] for t in range(start, last + 1)]
        present = [x for x in terms if x is not None]
        found.append(arb(0) if len(present) < len(terms) else sum(present, arb(0)).exp())
    return found


def _forward(unit: arb_mat, right: arb_mat) -> arb_mat:
    """Solve a unit lower triangular system by forward substitution."""
    rows: list[arb_mat] = []
    n, width = right.nrows(), right.ncols()
    for i in range(n):
        row = arb_mat(1, width, [right[i, j] for j in range(width)])
        for j in range(i):
            row = row - rows[j] * unit[i, j]
        rows.append(row)
    return arb_mat(n, width, [ball for row in rows for ball in row.entries()])

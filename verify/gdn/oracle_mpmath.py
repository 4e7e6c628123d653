"""f as its definition reads, in mpmath's interval arithmetic: plain loops over rows and columns, for tiny problems.

Every number is an interval that contains the exact one (mpmath rounds its endpoints outwards), so that the width of the
result is its proved error.  Nothing but the layout of the inputs is shared with the other tiers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import mpmath
import numpy as np

from verify.gdn.layout import SequenceResult, collect, convolved_rows, finite, initial_state, key_head, numeric
from verify.gdn.problem import DeltaRuleProblem, GdnProblem, shapes

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.gdn.problem import Problem
    from verify.gdn.reference import GdnReference

DIGITS = 60

Interval = Any
"""mpmath carries no types."""


def gdn(problem: Problem, *, digits: int = DIGITS) -> GdnReference:
    """Every element of f, with `digits` decimal digits and as many more as the tokens may cost."""
    iv = mpmath.iv
    before = iv.dps
    try:
        iv.dps = digits + int(problem.tokens)
        return collect(problem, "mpmath", lambda sequence: _sequence(problem, sequence, iv))
    finally:
        iv.dps = before


def _sequence(problem: Problem, sequence: int, iv: Interval) -> SequenceResult:
    _, n_v, d_k, d_v = shapes(problem)
    span = problem.sequences.span(sequence)
    tokens = span.stop - span.start
    taken = problem.sequences.taken(sequence)
    q, k, v, beta, decay = _read(problem, sequence, iv)
    state = _map(initial_state(problem, sequence), iv.mpf)
    scale = iv.mpf(problem.scale)
    out = np.zeros((tokens, n_v, d_v), dtype=object)
    final = state.copy()
    for h in range(n_v):
        key = key_head(problem, h)
        for t in range(tokens):
            for lane in range(d_v):
                column = [decay[t, h, c] * state[h, c, lane] for c in range(d_k)]
                read = _dot(k[t, key], column, iv)
                update = beta[t, h] * (v[t, h, lane] - read)
                for c in range(d_k):
                    state[h, c, lane] = column[c] + k[t, key, c] * update
                out[t, h, lane] = scale * _dot(q[t, key], state[h, :, lane], iv)
            if t + 1 == taken:
                final[h] = state[h].copy()
    values, errors = numbers(out)
    states, state_errors = numbers(final)
    return SequenceResult(values, errors, states, state_errors)


def _dot(left: np.ndarray, right: list[Interval] | np.ndarray, iv: Interval) -> Interval:
    total = iv.mpf(0)
    for a, b in zip(left, right, strict=True):
        total += a * b
    return total


def _map(x: np.ndarray, function: Callable[[float], Interval]) -> np.ndarray:
    """An array of intervals."""
    found = np.empty(x.shape, dtype=object)
    for at in np.ndindex(*x.shape):
        found[at] = function(float(x[at]))
    return found


def _read(problem: Problem, sequence: int, iv: Interval) -> tuple[np.ndarray, ...]:
    """q, k, v, beta and exp(g) (per key channel, always) of one sequence."""
    span = problem.sequences.span(sequence)
    _, _, d_k, _ = shapes(problem)
    if isinstance(problem, DeltaRuleProblem):
        arrays = [_map(finite(x[span]), iv.mpf) for x in (problem.q, problem.k, problem.v, problem.beta)]
        shape = (span.stop - span.start, problem.n_v)
        g = np.zeros(shape) if problem.g is None else numeric(problem.g[span])
        decay = _map(g, lambda x: iv.mpf(0) if math.isinf(x) else iv.exp(iv.mpf(x)))
        return (*arrays, _channels(decay, d_k))
    z = _convolved(problem, sequence, iv)
    q, k, v = problem.split(z)
    if problem.norm_eps is not None:
        q, k = (_normed(x, problem.norm_eps, iv) for x in (q, k))
    scale = iv.mpf(problem.beta_scale)
    beta = _map(numeric(problem.b[span]), lambda x: scale * _logistic(x, iv))
    return q, k, v, beta, _channels(_decays(problem, span, iv), d_k)


def _channels(decay: np.ndarray, d_k: int) -> np.ndarray:
    return decay if decay.ndim == 3 else np.repeat(decay[:, :, None], d_k, axis=2)


def _logistic(x: float, iv: Interval) -> Interval:
    if math.isinf(x):
        return iv.mpf(1 if x > 0 else 0)
    return 1 / (1 + iv.exp(-iv.mpf(x)))


def _convolved(problem: GdnProblem, sequence: int, iv: Interval) -> np.ndarray:
    rows, taps = convolved_rows(problem, sequence), finite(problem.taps)
    width, dim = taps.shape
    z = np.empty((len(rows) - width + 1, dim), dtype=object)
    for t, c in np.ndindex(*z.shape):
        y = iv.mpf(0.0 if problem.bias is None else float(finite(problem.bias)[c]))
        for j in range(width):
            y += iv.mpf(float(taps[j, c])) * iv.mpf(float(rows[t + j, c]))
        z[t, c] = y / (1 + iv.exp(-y)) if problem.activation == "silu" else y
    return z


def _normed(x: np.ndarray, eps: float, iv: Interval) -> np.ndarray:
    found = x.copy()
    for token, head in np.ndindex(*x.shape[:2]):
        squares = iv.mpf(eps)
        for entry in x[token, head]:
            squares += entry**2
        if squares.b > 0:
            for c, entry in enumerate(x[token, head]):
                found[token, head, c] = entry / iv.sqrt(squares)
    return found


def _decays(problem: GdnProblem, span: slice, iv: Interval) -> np.ndarray:
    a, a_log, dt = numeric(problem.a[span]), finite(problem.a_log), finite(problem.dt_bias)
    found = np.empty(a.shape, dtype=object)
    for at in np.ndindex(*a.shape):
        x = float(a[at])
        if math.isinf(x):
            found[at] = iv.mpf(0 if x > 0 else 1)
            continue
        softplus = iv.log(1 + iv.exp(iv.mpf(x) + iv.mpf(float(dt[at[1:]]))))
        found[at] = iv.exp(-iv.exp(iv.mpf(float(a_log[at[1]]))) * softplus)
    return found


def numbers(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The midpoint of each interval in float64, and a bound of its distance to every point of the interval."""
    values, errors = np.zeros(x.shape), np.zeros(x.shape)
    for at in np.ndindex(*x.shape):
        interval: Interval = x[at]
        low, high = (mpmath.mp.make_mpf(end) for end in interval._mpi_)  # as they are, unrounded
        with mpmath.workprec(WIDE):
            value = float((low + high) / 2)
            distance = max(abs(high - value), abs(low - value))
        values[at] = value
        errors[at] = 0.0 if distance == 0 else float(np.nextafter(float(distance), np.inf))
    return values, errors


WIDE = 4096

"""Derivatives as their definition reads: one forward pass with a tangent per input number, in mpmath's intervals.

Nothing is transposed here: d out / d x and d state / d x are propagated token by token for each input number x in turn,
and contracted with d_out and d_state.  Cost grows with the square of the size: for tiny problems.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import mpmath
import numpy as np

from verify.gdn.gradients.problem import NAMES, GradientReference
from verify.gdn.layout import finite, initial_state, key_head, numeric
from verify.gdn.oracle_mpmath import numbers

if TYPE_CHECKING:
    from verify.gdn.gradients.problem import GradientProblem

DIGITS = 60

Interval = Any
"""mpmath carries no types."""


def gradients(problem: GradientProblem, *, digits: int = DIGITS) -> GradientReference:
    """All derivatives, with `digits` decimal digits and as many more as the tokens may cost."""
    iv = mpmath.iv
    before = iv.dps
    try:
        iv.dps = digits + 2 * problem.rule.tokens
        return _all(problem, iv)
    finally:
        iv.dps = before


def _all(problem: GradientProblem, iv: Interval) -> GradientReference:
    result = GradientReference.blank(problem, "mpmath")
    found = {name: np.full(result.value[name].shape, iv.mpf(0), dtype=object) for name in NAMES}
    rule = problem.rule
    for sequence in range(rule.sequences.count):
        span = rule.sequences.span(sequence)
        for head in range(rule.n_v):
            key = key_head(rule, head)
            inputs = _inputs(problem, sequence, head, iv)
            for name in NAMES:
                for at in np.ndindex(*inputs[name].shape):
                    slope = _slope(inputs, name, at, iv)
                    if name == "initial":
                        found[name][(sequence, head, *at)] += slope
                    else:
                        where = key if name in ("q", "k") else head
                        found[name][(span.start + at[0], where, *at[1:])] += slope
    for name in NAMES:
        result.value[name][...], result.error[name][...] = numbers(found[name])
    return result


def _inputs(problem: GradientProblem, sequence: int, head: int, iv: Interval) -> dict[str, Any]:
    """All numbers of one head as intervals; g stays a float, with exp(g) in `decay`."""
    rule, span = problem.rule, problem.rule.sequences.span(sequence)
    key = key_head(rule, head)
    arrays = {
        "q": finite(rule.q[span, key]),
        "k": finite(rule.k[span, key]),
        "v": finite(rule.v[span, head]),
        "beta": finite(rule.beta[span, head]),
        "initial": initial_state(rule, sequence)[head],
        "d_out": finite(problem.d_out[span, head]),
        "d_state": finite(problem.d_state[sequence, head]),
    }
    found: dict[str, Any] = {name: _intervals(x, iv) for name, x in arrays.items()}
    g = np.zeros(len(arrays["beta"])) if rule.g is None else numeric(rule.g[span, head])
    found["g"] = g
    found["decay"] = np.empty(g.shape, dtype=object)
    for at in np.ndindex(*g.shape):
        found["decay"][at] = iv.mpf(0) if math.isinf(g[at]) else iv.exp(iv.mpf(float(g[at])))
    found["scale"] = iv.mpf(rule.scale)
    return found


def _intervals(x: np.ndarray, iv: Interval) -> np.ndarray:
    array = np.empty(x.shape, dtype=object)
    for at in np.ndindex(*x.shape):
        array[at] = iv.mpf(float(x[at]))
    return array


@dataclasses.dataclass(frozen=True)
class _Direction:
    """The one input number by which is differentiated."""

    name: str
    at: tuple[int, ...]
    zero: Interval
    one: Interval

    def varied(self, name: str, *index: int) -> Interval:
        """Its own tangent: 1 for that number, 0 for every other."""
        return self.one if self.name == name and self.at == index else self.zero


def _slope(inputs: dict[str, Any], name: str, at: tuple[int, ...], iv: Interval) -> Interval:
    """dL by one input number: states and their tangents, side by side."""
    along = _Direction(name, at, iv.mpf(0), iv.mpf(1))
    state = inputs["initial"].copy()
    tangent = np.full(state.shape, along.zero, dtype=object)
    if name == "initial":
        tangent[at] = along.one
    total = along.zero
    for t in range(len(inputs["q"])):
        for j in range(state.shape[1]):
            read = _lane(inputs, along, (t, j), state, tangent)
            total += inputs["d_out"][t, j] * inputs["scale"] * read
    for c, j in np.ndindex(*state.shape):
        total += inputs["d_state"][c, j] * tangent[c, j]
    return total


def _lane(
    inputs: dict[str, Any], along: _Direction, at: tuple[int, int], state: np.ndarray, tangent: np.ndarray
) -> Interval:
    """One token and lane: state and tangent go on; returns the tangent of S^T q."""
    t, j = at
    q, k, v, beta, decay = (inputs[n] for n in ("q", "k", "v", "beta", "decay"))
    channels = range(len(state))
    column, slopes = [], []
    for c in channels:
        place = (t, c) if decay.ndim == 2 else (t,)
        column.append(decay[place] * state[c, j])
        # d exp(g) = exp(g) dg; at g = -inf that is 0.
        slopes.append(decay[place] * (tangent[c, j] + along.varied("g", *place) * state[c, j]))
    read = slope = along.zero
    for c in channels:
        read += k[t, c] * column[c]
        slope += along.varied("k", t, c) * column[c] + k[t, c] * slopes[c]
    missing, d_missing = v[t, j] - read, along.varied("v", t, j) - slope
    update = beta[t] * missing
    d_update = along.varied("beta", t) * missing + beta[t] * d_missing
    d_read = along.zero
    for c in channels:
        state[c, j] = column[c] + k[t, c] * update
        tangent[c, j] = slopes[c] + along.varied("k", t, c) * update + k[t, c] * d_update
        d_read += along.varied("q", t, c) * state[c, j] + q[t, c] * tangent[c, j]
    return d_read

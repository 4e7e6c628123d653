"""Derivatives by ball arithmetic: the backward pass, on balls that contain the exact numbers; for small problems."""

from __future__ import annotations

from typing import TYPE_CHECKING

import flint
import numpy as np
from flint import arb, arb_mat

from verify.gdn.gradients.problem import NAMES, GradientReference
from verify.gdn.layout import finite, initial_state, key_head, numeric
from verify.gdn.oracle_arb import MAX_PRECISION, to_float64
from verify.gdn.reference import OracleUnsound

if TYPE_CHECKING:
    from verify.gdn.gradients.problem import GradientProblem

RELATIVE = 2.0**-60
FIRST_BITS = 160
BITS_PER_TOKEN = 1

Arrays = dict[str, np.ndarray]
"""Object arrays of balls."""


def gradients(problem: GradientProblem, *, relative: float = RELATIVE) -> GradientReference:
    """All derivatives.

    Raises:
        OracleUnsound: the balls do not become narrow.
    """
    bits = FIRST_BITS + BITS_PER_TOKEN * problem.rule.tokens
    while bits <= MAX_PRECISION:
        with flint.ctx.workprec(bits):
            found = _all(problem)
            narrow = all(_narrow(array, relative) for array in found.values())
        if narrow:
            return _reference(problem, found)
        bits *= 2
    message = f"ball arithmetic with {MAX_PRECISION} bits does not reach a relative radius of {relative:.3g}"
    raise OracleUnsound(message)


def _narrow(balls: np.ndarray, relative: float) -> bool:
    largest = max((float(abs(x).upper()) for x in balls.ravel()), default=0.0)
    limit = arb(relative) * arb(max(largest, 2.0**-126))
    return all(bool(x.is_finite()) and bool(x.rad() <= limit) for x in balls.ravel())


def _reference(problem: GradientProblem, found: Arrays) -> GradientReference:
    result = GradientReference.blank(problem, "arb")
    for name in NAMES:
        for at in np.ndindex(*found[name].shape):
            ball: arb = found[name][at]  # type: ignore[assignment]
            result.value[name][at], result.error[name][at] = to_float64(ball)
    return result


def _zeros(shape: tuple[int, ...]) -> np.ndarray:
    array = np.empty(shape, dtype=object)
    for at in np.ndindex(*shape):
        array[at] = arb(0)
    return array


def _row(x: np.ndarray) -> arb_mat:
    return arb_mat(1, len(x), x.tolist())


def _all(problem: GradientProblem) -> Arrays:
    rule = problem.rule
    blank = GradientReference.blank(problem, "arb")
    found = {name: _zeros(blank.value[name].shape) for name in NAMES}
    for sequence in range(rule.sequences.count):
        for head in range(rule.n_v):
            _head(problem, sequence, head, found)
    return found


def _head(problem: GradientProblem, sequence: int, head: int, found: Arrays) -> None:
    rule, span = problem.rule, problem.rule.sequences.span(sequence)
    key = key_head(rule, head)
    q, k = (finite(x[span, key]) for x in (rule.q, rule.k))
    v, beta, d_out = (finite(x[span, head]) for x in (rule.v, rule.beta, problem.d_out))
    tokens, d_k, lanes = len(q), q.shape[1], v.shape[1]
    g = (
        np.zeros((tokens, 1))
        if rule.g is None
        else numeric(rule.g[span, head]).reshape(tokens, d_k if rule.per_channel else 1)
    )
    decays = [[arb(0) if np.isneginf(x) else arb(x).exp() for x in row] for row in g.tolist()]
    state = arb_mat(d_k, lanes, initial_state(rule, sequence)[head].ravel().tolist())
    decayed: list[arb_mat] = []
    states: list[arb_mat] = []
    for t in range(tokens):
        before = arb_mat([[state[c, j] * decays[t][c % len(decays[t])] for j in range(lanes)] for c in range(d_k)])
        state = before + _row(k[t]).transpose() * (_row(v[t]) - _row(k[t]) * before) * arb(beta[t])
        decayed.append(before)
        states.append(state)
    adjoint = arb_mat(d_k, lanes, finite(problem.d_state[sequence, head]).ravel().tolist())
    scale = arb(rule.scale)
    for t in range(tokens - 1, -1, -1):
        at, b = span.start + t, arb(beta[t])
        _add(found["q"], (at, key), states[t] * _row(d_out[t]).transpose() * scale)
        adjoint = adjoint + _row(q[t]).transpose() * _row(d_out[t]) * scale
        down = _row(k[t]) * adjoint
        residual = _row(v[t]) - _row(k[t]) * decayed[t]
        _add(found["v"], (at, head), down * b)
        found["beta"][at, head] += (down * residual.transpose())[0, 0]
        _add(found["k"], (at, key), adjoint * residual.transpose() * b - decayed[t] * down.transpose() * b)
        adjoint = adjoint - _row(k[t]).transpose() * down * b
        by_channel = [sum((adjoint[c, j] * decayed[t][c, j] for j in range(lanes)), arb(0)) for c in range(d_k)]
        if rule.per_channel:
            for c, ball in enumerate(by_channel):
                found["g"][at, head, c] += ball
        else:
            found["g"][at, head] += sum(by_channel, arb(0))
        adjoint = arb_mat([[adjoint[c, j] * decays[t][c % len(decays[t])] for j in range(lanes)] for c in range(d_k)])
    for c, j in np.ndindex(d_k, lanes):
        found["initial"][sequence, head, c, j] = adjoint[c, j]


def _add(array: np.ndarray, at: tuple[int, int], vector: arb_mat) -> None:
    for position, ball in enumerate(vector.entries()):
        array[(*at, position)] += ball

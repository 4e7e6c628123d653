"""Derivatives in float64 by one backward pass, with proved bounds (docs/gdn-oracle-bounds-gradients.md).

The adjoint of each value lane obeys the transposed recurrence, whose steps have the same norms as the forward one's.
States are recomputed from checkpoints, so that memory does not grow with the tokens.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from verify.gdn.float64_rule import norm_growth, recur, scan, steps_of, vector_norms
from verify.gdn.float64_stages import SLACK, TINY, UNIT, decay_of, gamma, norms, rule_inputs
from verify.gdn.gradients.problem import GradientReference
from verify.gdn.layout import finite, key_head
from verify.gdn.oracle_float64 import head_inputs

if TYPE_CHECKING:
    from verify.gdn.float64_rule import HeadInputs
    from verify.gdn.gradients.problem import GradientProblem

CHECKPOINT = 64


def gradients(problem: GradientProblem) -> GradientReference:
    """All derivatives."""
    rule = problem.rule
    found = GradientReference.blank(problem, "float64")
    d_out, d_state = finite(problem.d_out), finite(problem.d_state)
    for sequence in range(rule.sequences.count):
        span = rule.sequences.span(sequence)
        inputs = rule_inputs(rule, sequence)
        decay = decay_of(inputs.g)
        for head in range(rule.n_v):
            lane = head_inputs(rule, sequence, inputs, decay, head)
            with np.errstate(over="ignore", invalid="ignore"):
                part = _backward(lane, d_out[span, head], d_state[sequence, head])
            key = key_head(rule, head)
            for name, where in (("q", key), ("k", key), ("v", head), ("beta", head), ("g", head)):
                value, error = part[name]
                found.value[name][span, where] += value.reshape(found.value[name][span, where].shape)
                rounding = 2 * UNIT * np.abs(found.value[name][span, where]) if name in ("q", "k") else 0.0
                found.error[name][span, where] += error.reshape(found.error[name][span, where].shape) + rounding
            found.value["initial"][sequence, head], found.error["initial"][sequence, head] = part["initial"]
    for name, error in found.error.items():
        found.error[name] = np.where(np.isnan(error), np.inf, error) * SLACK
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class _Forward:
    """Of the forward pass: checkpoints, residuals, norms per lane and errors.

    Attributes:
        checkpoints: states before every CHECKPOINT-th token.
        residual: v - S'^T k.
        before: norms of S' per lane, `[tokens, d_v]`.
        after: norms of S.
        error_before: bounds of the norms of the errors of S' ...
        error_after: ... and of S.
        error_residual: bound of the residual's error.
    """

    checkpoints: list[np.ndarray]
    residual: np.ndarray
    before: np.ndarray
    after: np.ndarray
    error_before: np.ndarray
    error_after: np.ndarray
    error_residual: np.ndarray


def _forward(head: HeadInputs) -> _Forward:
    tokens = len(head.v.value)
    checkpoints, state = [], head.state
    for start in range(0, tokens, CHECKPOINT):
        checkpoints.append(state)
        state = _states(head, state, start, min(start + CHECKPOINT, tokens))[-1][1]
    trace = recur(head)
    steps = steps_of(head, trace)
    errors = scan(steps.factor, steps.local)
    decay, of_decay = (x.reshape(tokens, -1).max(axis=1)[:, None] for x in (head.decay.value, head.decay.error))
    keys = vector_norms(head.k.value)
    before = decay * trace.norms[:-1] * (1.0 + 2 * UNIT) + TINY
    error_before = (decay + of_decay) * errors[:-1] + of_decay * trace.norms[:-1] + UNIT * before + TINY
    error_residual = (
        gamma(head.k.value.shape[1] + 2) * (np.abs(head.v.value) + keys * before) + keys * error_before + TINY
    )
    return _Forward(checkpoints, trace.residual, before, trace.norms[1:], error_before, errors[1:], error_residual)


def _states(head: HeadInputs, state: np.ndarray, start: int, stop: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(S'_t, S_t) of tokens start .. stop - 1, from the state before."""
    found: list[tuple[np.ndarray, np.ndarray]] = []
    k, v, beta, decay = head.k.value, head.v.value, head.beta.value, head.decay.value
    for t in range(start, stop):
        decayed = decay[t][:, None] * state if decay.ndim == 2 else decay[t] * state
        state = decayed + np.outer(k[t], beta[t] * (v[t] - k[t] @ decayed))
        found.append((decayed, state))
    return found


def _backward(head: HeadInputs, d_out: np.ndarray, d_state: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Per input the derivatives and their bounds, by lemmas G1 to G4."""
    q, k, beta, decay = head.q.value, head.k.value, head.beta.value, head.decay.value
    tokens, d_k, lanes = len(q), q.shape[1], d_out.shape[1]
    channels = decay.shape[1] if decay.ndim == 2 else 1
    if tokens == 0:
        nothing = {name: (np.zeros(0), np.zeros(0)) for name in ("q", "k", "v", "beta", "g")}
        return nothing | {"initial": (d_state, np.zeros_like(d_state))}
    forward = _forward(head)
    shapes = {"q": (tokens, d_k), "k": (tokens, d_k), "v": (tokens, lanes), "beta": (tokens,), "g": (tokens, channels)}
    value, error = ({n: np.zeros(s) for n, s in shapes.items()} for _ in range(2))
    keys, queries = vector_norms(k)[:, 0], vector_norms(q)[:, 0]
    growth = norm_growth(head.beta, keys[:, None], unit_keys=False)[:, 0]
    scale = head.scale
    adjoint, doubt = d_state.copy(), np.zeros(lanes)  # dL/dS_t and, per lane, a bound of the norm of its error
    for block in range(len(forward.checkpoints) - 1, -1, -1):
        start = block * CHECKPOINT
        stop = min(start + CHECKPOINT, tokens)
        states = _states(head, forward.checkpoints[block], start, stop)
        for t in range(stop - 1, start - 1, -1):
            decayed, state = states[t - start]
            size_o, b = np.abs(d_out[t]), abs(beta[t])
            # G1: dq = scale S do; the adjoint takes scale q do^T.
            value["q"][t] = scale * (state @ d_out[t])
            error["q"][t] = abs(scale) * (size_o @ (forward.error_after[t] + gamma(lanes + 1) * forward.after[t]))
            adjoint = adjoint + np.outer(scale * q[t], d_out[t])
            size = norms(adjoint, 0)
            doubt = doubt + 3 * UNIT * abs(scale) * queries[t] * size_o + UNIT * size + TINY
            # G2: through u = beta r and S = S' + k u^T.
            down = k[t] @ adjoint
            doubt_down = keys[t] * (doubt + gamma(d_k) * size) + TINY
            size_down = np.abs(down) + doubt_down
            r, doubt_r = forward.residual[t], forward.error_residual[t]
            value["v"][t], error["v"][t] = beta[t] * down, b * doubt_down + UNIT * b * size_down
            value["beta"][t] = down @ r
            error["beta"][t] = doubt_down @ (np.abs(r) + doubt_r) + size_down @ doubt_r
            error["beta"][t] += gamma(lanes) * (size_down @ (np.abs(r) + doubt_r))
            u, size_u, doubt_u = beta[t] * r, b * np.abs(r), b * doubt_r + UNIT * b * np.abs(r)
            value["k"][t] = adjoint @ u - decayed @ (beta[t] * down)
            error["k"][t] = doubt @ (size_u + doubt_u) + size @ doubt_u + b * (forward.error_before[t] @ size_down)
            error["k"][t] += b * (forward.before[t] @ doubt_down)
            error["k"][t] += gamma(lanes + 3) * (size @ size_u + b * (forward.before[t] @ size_down))
            # G3: to S' and through the decay.
            adjoint = adjoint - np.outer(k[t], beta[t] * down)
            doubt = growth[t] * doubt + keys[t] * b * (gamma(d_k) * keys[t] * size + 3 * UNIT * size_down)
            size = norms(adjoint, 0)
            doubt = doubt + UNIT * size + TINY
            products = adjoint * decayed
            value["g"][t] = products.sum(axis=1) if channels > 1 else products.sum()
            error["g"][t] = doubt @ forward.before[t] + (size + doubt) @ forward.error_before[t]
            error["g"][t] += gamma(d_k * lanes) * (size @ forward.before[t])
            factor = decay[t][:, None] if channels > 1 else decay[t]
            largest, of_largest = np.max(decay[t]), np.max(head.decay.error[t])
            doubt = (largest + of_largest) * doubt + of_largest * size + UNIT * largest * size + TINY
            adjoint = adjoint * factor
    found = {name: (value[name], error[name] + TINY) for name in shapes}
    return found | {"initial": (adjoint, np.broadcast_to(doubt, adjoint.shape))}

"""The gated delta rule of one head, token by token in float64, with a proved error (docs/gdn-oracle-bounds.md).

Every value lane is a linear recurrence of its own, s_t = a_t (I - beta_t k_t k_t^T) s_(t-1) + beta_t v_t k_t, so the
error of a lane's state is bounded by its Euclidean norm: what a step adds, times the norms of all later steps.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from verify.gdn.float64_stages import SLACK, TINY, UNIT, Approx, gamma, norms, roots

if TYPE_CHECKING:
    from jaxtyping import Float64


@dataclasses.dataclass(frozen=True, eq=False)
class HeadInputs:
    """What one head of one sequence reads.

    Attributes:
        q, k: `[tokens, d_k]`.
        v: `[tokens, d_v]`.
        beta: `[tokens]`.
        decay: exp(g), `[tokens]` or `[tokens, d_k]`.
        state: the initial state, exact, `[d_k, d_v]`.
        scale: factor of the output.
        unit_keys: the exact keys have norms of at most 1 and beta lies in [0, 2].
        taken: after how many tokens the state is taken.
    """

    q: Approx
    k: Approx
    v: Approx
    beta: Approx
    decay: Approx
    state: Float64[np.ndarray, "d_k d_v"]
    scale: float
    unit_keys: bool
    taken: int


@dataclasses.dataclass(frozen=True, eq=False)
class HeadResult:
    """Outputs of one head and its state where it is taken, with bounds of their errors."""

    out: Float64[np.ndarray, "tokens d_v"]
    out_error: Float64[np.ndarray, "tokens d_v"]
    state: Float64[np.ndarray, "d_k d_v"]
    state_error: Float64[np.ndarray, "d_k d_v"]


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """What the recurrence leaves behind for its error analysis: norms of states per lane, residuals v - S'^T k."""

    out: np.ndarray
    state: np.ndarray
    norms: np.ndarray
    residual: np.ndarray


def rule(head: HeadInputs) -> HeadResult:
    """All tokens of one head."""
    trace = recur(head)
    with np.errstate(over="ignore", invalid="ignore"):
        steps = steps_of(head, trace)
        error = scan(steps.factor, steps.local)
        out_error = _out_error(head, trace, error)
        state_error = np.minimum(error[head.taken], _entry_errors(head, steps, error))
    return HeadResult(trace.out, _usable(out_error), trace.state, _usable(state_error))


def _usable(error: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(error), np.inf, error)


def recur(head: HeadInputs) -> Trace:
    """The recurrence itself."""
    q, k, v, beta, decay = (x.value for x in (head.q, head.k, head.v, head.beta, head.decay))
    tokens, lanes = v.shape
    state, added = head.state.copy(), np.empty_like(head.state)
    out, residual, squares = np.zeros((tokens, lanes)), np.empty((tokens, lanes)), np.empty((tokens + 1, lanes))
    taken = state.copy()
    columns = decay[:, :, None] if decay.ndim == 2 else decay
    np.einsum("ij,ij->j", state, state, out=squares[0])
    with np.errstate(over="ignore", invalid="ignore"):
        for t in range(tokens):
            state *= columns[t]
            read = k[t] @ state
            np.subtract(v[t], read, out=residual[t])
            np.multiply(k[t][:, None], beta[t] * residual[t], out=added)
            state += added
            np.matmul(q[t], state, out=out[t])
            np.einsum("ij,ij->j", state, state, out=squares[t + 1])
            if t + 1 == head.taken:
                taken = state.copy()
        out *= head.scale
    return Trace(out, taken, roots(squares), residual)


@dataclasses.dataclass(frozen=True, eq=False)
class Steps:
    """What each token does to the error of a lane's state.

    Attributes:
        factor: by which the norm of the error grows, `[tokens, 1]`.
        local: what is added to it, `[tokens, d_v]`.
        update: bound of |u^ - u| but for the state's own error, `[tokens, d_v]`.
        size: bound of |u^|, `[tokens, d_v]`.
        reach: bound of beta times the key's norm, through which an error of the state reaches u, `[tokens, 1]`.
    """

    factor: np.ndarray
    local: np.ndarray
    update: np.ndarray
    size: np.ndarray
    reach: np.ndarray


def steps_of(head: HeadInputs, trace: Trace) -> Steps:
    """Lemma 8: per token and lane, for the Euclidean norm of the state's error."""
    d_k = head.k.value.shape[1]
    keys, of_keys = vector_norms(head.k.value), vector_norms(head.k.error)
    beta, of_beta = np.abs(head.beta.value)[:, None], head.beta.error[:, None]
    decay, of_decay = (_largest(x)[:, None] for x in (head.decay.value, head.decay.error))
    before, after = trace.norms[:-1], trace.norms[1:]
    exact_keys = np.minimum(keys + of_keys, 1.0) if head.unit_keys else keys + of_keys
    growth = norm_growth(head.beta, exact_keys, unit_keys=head.unit_keys)
    decayed = decay * before * (1.0 + 2 * UNIT) + TINY
    of_state = of_decay * before + UNIT * decayed + TINY * (1.0 + before)
    residual = np.abs(trace.residual)
    of_residual = gamma(d_k + 2) * (np.abs(head.v.value) + keys * decayed) + TINY
    size = beta * (residual + of_residual)
    most = beta + of_beta
    local = (of_beta * keys + most * of_keys) * (residual + of_residual)
    local += most * exact_keys * (head.v.error + of_keys * decayed)
    local += keys * (beta * of_residual + 3 * UNIT * size) + 1.01 * UNIT * after + TINY * (1.0 + keys)
    local += growth * of_state
    update = of_beta * (residual + of_residual) + most * (head.v.error + of_keys * decayed + exact_keys * of_state)
    update += beta * of_residual + UNIT * size + TINY
    factor = growth * (decay + of_decay) * (1.0 + 2.0**-45)
    reach = most * exact_keys * (decay + of_decay)
    return Steps(factor, local * SLACK, update * SLACK, size, reach * SLACK)


def _entry_errors(head: HeadInputs, steps: Steps, error: np.ndarray) -> Float64[np.ndarray, "d_k d_v"]:
    """Lemma 9: entry by entry where the state is taken; rows that the keys never touch are exact."""
    taken = head.taken
    if taken == 0:
        return np.zeros_like(head.state)
    update = (steps.update + steps.reach * error[:-1])[:taken]
    size = steps.size[:taken]
    own = head.decay.error[:taken].reshape(taken, -1)
    decay = np.minimum(head.decay.value[:taken].reshape(taken, -1) + own, 1.0)
    relative = np.divide(own, decay, out=np.ones_like(decay), where=decay > 0.0) + 4 * UNIT
    # From after token s to the end: products of decays, and their relative errors with the roundings of each step.
    end = np.ones_like(decay[:1])
    onward = np.concatenate([np.cumprod(decay[::-1], axis=0)[::-1], end])
    doubt = np.concatenate([np.cumsum(relative[::-1], axis=0)[::-1], 0.0 * end])
    keys, of_keys = np.abs(head.k.value[:taken]), head.k.error[:taken]
    total = (onward[1:] * keys).T @ update + (onward[1:] * of_keys).T @ (size + update)
    total += (onward[1:] * (doubt[1:] + 4 * UNIT) * keys).T @ size
    total += (onward[0] * doubt[0])[:, None] * np.abs(head.state)
    touched = (keys + of_keys).any(axis=0)[:, None] | (head.state != 0.0)
    total += np.where(touched, TINY * taken, 0.0)
    return total * SLACK


def vector_norms(x: np.ndarray) -> np.ndarray:
    """At least the norm of each row, `[tokens, 1]`; 0 for a zero row."""
    return np.where(x.any(axis=1), norms(x, 1), 0.0)[:, None]


def _largest(x: np.ndarray) -> np.ndarray:
    return x.max(axis=1, initial=0.0) if x.ndim == 2 else x


def norm_growth(beta: Approx, exact_keys: np.ndarray, *, unit_keys: bool) -> np.ndarray:
    """The norm of I - beta k k^T, `[tokens, 1]`: max(1, |1 - beta |k|^2|); `exact_keys` bounds the keys' norms."""
    if unit_keys:
        return np.ones_like(exact_keys)
    value, error = beta.value[:, None], beta.error[:, None]
    reach = (np.abs(value) + error) * exact_keys**2 * (1.0 + 4 * UNIT)
    return np.where(value >= error, np.maximum(1.0, reach - 1.0), 1.0 + reach)


def scan(factor: np.ndarray, local: np.ndarray) -> np.ndarray:
    """e_t = factor_t e_(t-1) + local_t from e_0 = 0."""
    errors = np.zeros((len(local) + 1, local.shape[1]))
    for t in range(len(local)):
        np.multiply(errors[t], factor[t], out=errors[t + 1])
        errors[t + 1] += local[t]
    return errors


def _out_error(head: HeadInputs, trace: Trace, error: np.ndarray) -> np.ndarray:
    """Lemma 10."""
    d_k = head.k.value.shape[1]
    queries, of_queries = vector_norms(head.q.value), vector_norms(head.q.error)
    after = trace.norms[1:]
    moved = (queries + of_queries) * error[1:] + of_queries * after + gamma(d_k + 1) * queries * after
    return (abs(head.scale) * (moved + TINY * (1.0 + queries)) + 2 * UNIT * np.abs(trace.out) + TINY) * SLACK

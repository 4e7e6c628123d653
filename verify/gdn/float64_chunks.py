"""The gated delta rule of one head in chunks, in float64, with a proved error (docs/gdn-oracle-bounds.md, lemma 11).

A chunk's updates u solve a unit lower triangular system.  What they miss of the recurrence's own u_t is a residual, and
a residual is nothing but one more input to the recurrence: so the error obeys the same scalar recursion as token by
token, whatever the inverse's condition.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
from scipy.linalg import solve_triangular

from verify.gdn.float64_rule import HeadResult, norm_growth, vector_norms
from verify.gdn.float64_stages import SLACK, TINY, UNIT, Approx, decay_of, gamma, norms

if TYPE_CHECKING:
    from jaxtyping import Float64

    from verify.gdn.float64_rule import HeadInputs

CHUNK = 64


@dataclasses.dataclass(frozen=True, eq=False)
class _Chunk:
    """Tokens of a head between two states.

    Attributes:
        q, k, v, beta: as in `HeadInputs`.
        decay: from after token j to token i included, `[tokens, 1 + tokens, channels]`; column 0 is the whole way from
            the chunk's start; 0 above the diagonal.
    """

    q: Approx
    k: Approx
    v: Approx
    beta: Approx
    decay: Approx


def chunked_rule(head: HeadInputs, g: Approx, chunk: int = CHUNK) -> HeadResult:
    """All tokens of one head.

    Args:
        head: what it reads; its `decay` is not used.
        g: log-decays in nats, `[tokens]` or `[tokens, d_k]`.
        chunk: tokens at a time; a chunk ends where the state is taken, too.
    """
    tokens, lanes = head.v.value.shape
    out, out_error = np.zeros((tokens, lanes)), np.zeros((tokens, lanes))
    state, error = head.state.copy(), _StateError(np.zeros(lanes), np.zeros_like(head.state))
    taken, taken_error = state, error
    with np.errstate(over="ignore", invalid="ignore"):
        for start, stop in _cuts(tokens, chunk, head.taken):
            span = slice(start, stop)
            parts = (Approx(x.value[span], x.error[span]) for x in (head.q, head.k, head.v, head.beta))
            part = _Chunk(*parts, decay=segments(Approx(g.value[span], g.error[span])))
            out[span], out_error[span], state, error = _step(part, head, state, error)
            if stop == head.taken:
                taken, taken_error = state, error
    return HeadResult(out, _usable(out_error), taken, _usable(taken_error.entries))


@dataclasses.dataclass(frozen=True, eq=False)
class _StateError:
    """How far a state may be from the exact one: Euclidean norm per lane, and entry by entry."""

    norms: Float64[np.ndarray, " d_v"]
    entries: Float64[np.ndarray, "d_k d_v"]


def _usable(error: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(error), np.inf, error)


def _cuts(tokens: int, chunk: int, taken: int) -> list[tuple[int, int]]:
    ends = sorted({*range(chunk, tokens, chunk), tokens, taken} - {0})
    return list(zip([0, *ends[:-1]], ends, strict=True)) if tokens else []


def segments(g: Approx) -> Approx:
    """exp of sums of log-decays over segments; sums, not differences of sums, so that one huge |g| spoils nothing."""
    values, errors = (x.reshape(len(x), -1) for x in (g.value, g.error))
    n = len(values)
    # Row t adds g_t to every segment that starts before it: column 0 from the start, column 1 + j from after token j.
    open_at = np.arange(n)[:, None] >= np.arange(n + 1)[None, :]
    terms = np.where(open_at[:, :, None], values[:, None, :], 0.0)
    doubts = np.where(open_at[:, :, None], errors[:, None, :], 0.0)
    sums = np.cumsum(terms, axis=0)
    reset = np.isneginf(sums)
    sizes = np.where(reset, 0.0, np.abs(sums))
    doubt = np.where(reset, 0.0, np.cumsum(doubts, axis=0) + gamma(n) * sizes)
    decay = decay_of(Approx(sums, doubt * SLACK))
    seen = np.arange(n)[:, None] + 1 >= np.arange(n + 1)[None, :]
    return Approx(*(np.where(seen[:, :, None], x, 0.0) for x in (decay.value, decay.error)))


def _scores(left: np.ndarray, right: np.ndarray, decay: np.ndarray) -> np.ndarray:
    """sum_c left_ic decay_ijc right_jc."""
    if decay.shape[2] == 1:
        return (left @ right.T) * decay[:, :, 0]
    return np.einsum("ic,ijc,jc->ij", left, decay, right, optimize=False)


def _step(
    part: _Chunk, head: HeadInputs, state: np.ndarray, error: _StateError
) -> tuple[np.ndarray, np.ndarray, np.ndarray, _StateError]:
    """Outputs with their bounds, then the state with its own."""
    q, k, v = part.q.value, part.k.value, part.v.value
    beta, of_beta = part.beta.value[:, None], part.beta.error[:, None]
    n, d_k = k.shape
    decay, from_start = part.decay.value[:, 1:], part.decay.value[:, 0]
    lower = np.tril(np.ones((n, n), dtype=bool), -1)
    system = np.where(lower, beta * _scores(k, k, decay), 0.0)
    right = beta * (v - (k * from_start) @ state)
    update = solve_triangular(system + np.eye(n), right, lower=True, unit_diagonal=True, check_finite=False)
    out = (q * from_start) @ state + np.where(lower | np.eye(n, dtype=bool), _scores(q, k, decay), 0.0) @ update
    out *= head.scale
    final = state * from_start[-1][:, None] + (k * decay[-1]).T @ update

    keys, of_keys, queries, of_queries = (vector_norms(x) for x in (k, part.k.error, q, part.q.error))
    sizes, before = np.abs(update), norms(state, 0)
    reach, of_decay = (x.max(axis=2) for x in (part.decay.value, part.decay.error))
    # Per token and lane: how large the terms of the state are, and what of them is not known, with and without token i.
    spread = [(reach[:, 1:] * own) @ (keys * sizes) + reach[:, :1] * before for own in (lower, 1.0)]
    missed = [
        (reach[:, 1:] * own) @ (of_keys * sizes) + (of_decay[:, 1:] * own) @ (keys * sizes) + of_decay[:, :1] * before
        for own in (lower, 1.0)
    ]
    rounding = gamma(d_k + n + 6)
    exact_keys = np.minimum(keys + of_keys, 1.0) if head.unit_keys else keys + of_keys
    most = np.abs(beta) + of_beta
    residual = np.abs(right - update - system @ update)
    residual += rounding * (np.abs(beta * v) + np.abs(beta) * keys * spread[0] + sizes)
    residual += most * part.v.error + of_beta * np.abs(v) + most * keys * missed[0]
    residual += (most * of_keys + of_beta * keys) * spread[0] + TINY * (1.0 + keys)
    growth = norm_growth(part.beta, exact_keys, unit_keys=head.unit_keys)
    step = _step_decay(part)
    errors = np.empty((n + 1, v.shape[1]))
    errors[0] = error.norms
    local = exact_keys * residual * SLACK
    for t in range(n):
        errors[t + 1] = errors[t] * (growth[t] * step[t] * (1.0 + 2.0**-45)) + local[t]
    local_state = missed[1] + rounding * spread[1] + TINY * (1.0 + keys)
    moved = (
        (queries + of_queries) * (errors[1:] + local_state) + of_queries * spread[1] + rounding * queries * spread[1]
    )
    out_error = (abs(head.scale) * (moved + TINY) + 2 * UNIT * np.abs(out) + TINY) * SLACK
    whole = (errors[-1] + local_state[-1]) * SLACK
    # Entry by entry: what each key may have written wrongly, decayed to the end.
    update_error = residual + most * exact_keys * step[:, None] * errors[:-1]
    last, of_last = part.decay.value[-1], part.decay.error[-1]
    key_size, key_error = np.abs(k), part.k.error
    entries = ((last[1:] + of_last[1:]) * key_size).T @ update_error
    entries += ((last[1:] * key_error + of_last[1:] * key_size) + rounding * last[1:] * key_size).T @ sizes
    entries += (last[:1] + of_last[:1]).T * error.entries + (of_last[:1] + rounding * last[:1]).T * np.abs(state)
    touched = (key_size + key_error).any(axis=0)[:, None] | (state != 0.0) | (error.entries > 0.0)
    entries = entries * SLACK + np.where(touched, TINY, 0.0)
    return out, out_error, final, _StateError(whole, np.minimum(entries, whole))


def _step_decay(part: _Chunk) -> np.ndarray:
    """An upper bound of each token's own decay: from after its predecessor to itself."""
    n = len(part.k.value)
    own = part.decay.value[np.arange(n), np.arange(n)] + part.decay.error[np.arange(n), np.arange(n)]
    return own.max(axis=1)

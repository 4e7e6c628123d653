"""f written a second time, to check the oracles by: the standard library's decimal arithmetic and plain loops.

Nothing here asks a problem how its tokens, heads or slots are laid out: boundaries, slots, flags, the split of the
projection, the head map and the convolution's history are decided here again, from the definition.  Inputs are finite
but for gates.  Results are exact but for the rounding of their numbers to float64.
"""

from __future__ import annotations

import dataclasses
import decimal
import math
from decimal import Decimal
from typing import TYPE_CHECKING

import numpy as np

from verify.gdn.problem import DeltaRuleProblem, GdnProblem
from verify.gdn.reference import GdnReference

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.gdn.problem import Problem

DIGITS = 80


@dataclasses.dataclass(frozen=True, eq=False)
class Known:
    """A problem with its answer."""

    name: str
    problem: Problem
    answer: GdnReference


def answer(out: object, state: object, tier: str = "known") -> GdnReference:
    """An answer that is exact but for the rounding of its numbers to float64."""
    wide, states = np.asarray(out, dtype=np.float64), np.asarray(state, dtype=np.float64)
    return GdnReference(wide, _two_ulps(wide), states, _two_ulps(states), tier)


def _two_ulps(x: np.ndarray) -> np.ndarray:
    return 2.0 * np.spacing(np.abs(np.where(np.isfinite(x), x, 0.0)))


def by_decimal(problem: Problem) -> GdnReference:
    """f of a problem."""
    with decimal.localcontext() as context:
        context.prec = DIGITS
        context.Emin, context.Emax = decimal.MIN_EMIN, decimal.MAX_EMAX
        return _all_sequences(problem)


def _all_sequences(problem: Problem) -> GdnReference:
    layout = problem.sequences
    state = problem.state.astype(np.float64)
    n_v, d_k, d_v = state.shape[1:]
    tokens = (problem.q if isinstance(problem, DeltaRuleProblem) else problem.qkv).shape[0]
    out = np.zeros((tokens, n_v, d_v))
    finals: list[tuple[int, np.ndarray]] = []
    for number in range(len(layout.boundaries) - 1):
        first, last = int(layout.boundaries[number]), int(layout.boundaries[number + 1])
        read, write = int(layout.read_slots[number]), int(layout.write_slots[number])
        fresh = read == -1 or not layout.has_initial[number]
        taken = last - first if layout.accepted is None else int(layout.accepted[number])
        row = _tokens(problem, first, None if fresh else read)
        for head in range(n_v):
            s = [
                [Decimal(0 if fresh else float(problem.state[read, head, c, j])) for j in range(d_v)]
                for c in range(d_k)
            ]
            final = [line.copy() for line in s]
            for t in range(first, last):
                q, k, v, beta, decay = row(t, head)
                s = [[decay[c] * x for x in s[c]] for c in range(d_k)]
                for j in range(d_v):
                    missing = v[j] - sum((k[c] * s[c][j] for c in range(d_k)), Decimal(0))
                    for c in range(d_k):
                        s[c][j] += beta * missing * k[c]
                    read_out = sum((q[c] * s[c][j] for c in range(d_k)), Decimal(0))
                    out[t, head, j] = float(Decimal(problem.scale) * read_out)
                if t - first + 1 == taken:
                    final = [line.copy() for line in s]
            if write != -1:
                finals.append((write * n_v + head, np.array([[float(x) for x in line] for line in final])))
    flat = state.reshape(-1, d_k, d_v)
    for position, values in finals:
        flat[position] = values
    return answer(out, flat.reshape(state.shape), "decimal")


Token = tuple[list[Decimal], list[Decimal], list[Decimal], Decimal, list[Decimal]]


def _tokens(problem: Problem, first: int, slot: int | None) -> Callable[[int, int], Token]:
    """A function of token and value head: q, k, v, beta, and exp(g) per key channel."""
    if isinstance(problem, DeltaRuleProblem):
        group = problem.v.shape[1] // problem.k.shape[1]

        def given(t: int, head: int) -> Token:
            q, k, v = (
                [Decimal(float(x)) for x in a]
                for a in (problem.q[t, head // group], problem.k[t, head // group], problem.v[t, head])
            )
            decays = [Decimal(1)] * len(k)
            if problem.g is not None:
                logs = np.broadcast_to(problem.g[t, head], (len(k),))
                decays = [_exp(float(x)) for x in logs]
            return q, k, v, Decimal(float(problem.beta[t, head])), decays

        return given
    return lambda t, head: _layer_token(problem, first, slot, t, head)


def _exp(x: float) -> Decimal:
    return Decimal(0) if x == -math.inf else Decimal(x).exp()


def _logistic(x: Decimal) -> Decimal:
    return 1 / (1 + (-x).exp())


def _layer_token(problem: GdnProblem, first: int, slot: int | None, t: int, head: int) -> Token:
    n_kq, n_v, d_k, d_v = problem.heads
    taps = problem.taps.shape[0]

    def activated(channel: int) -> Decimal:
        total = Decimal(0) if problem.bias is None else Decimal(float(problem.bias[channel]))
        for tap in range(taps):
            source = t - (taps - 1) + tap
            if source >= first:
                x = float(problem.qkv[source, channel])
            elif slot is None:
                x = 0.0
            else:  # the state's last row is the token before the first
                x = float(problem.conv_state[slot, (taps - 1) + (source - first), channel])
            total += Decimal(float(problem.taps[tap, channel])) * Decimal(x)
        return total * _logistic(total) if problem.activation == "silu" else total

    def normed(x: list[Decimal]) -> list[Decimal]:
        if problem.norm_eps is None:
            return x
        squares = sum((y * y for y in x), Decimal(problem.norm_eps))
        return x if squares == 0 else [y / squares.sqrt() for y in x]

    key = head * n_kq // n_v
    q = normed([activated(key * d_k + c) for c in range(d_k)])
    k = normed([activated((n_kq + key) * d_k + c) for c in range(d_k)])
    v = [activated(2 * n_kq * d_k + head * d_v + j) for j in range(d_v)]
    logit = float(problem.b[t, head])
    share = Decimal(1 if logit > 0 else 0) if math.isinf(logit) else _logistic(Decimal(logit))
    logits, biases = (np.broadcast_to(x, (d_k,)) for x in (problem.a[t, head], problem.dt_bias[head]))
    rate = Decimal(float(problem.a_log[head])).exp()
    decays = [_gate(rate, float(x), float(dt)) for x, dt in zip(logits, biases, strict=True)]
    return q, k, v, Decimal(problem.beta_scale) * share, decays


def _gate(rate: Decimal, x: float, dt: float) -> Decimal:
    if math.isinf(x):
        return Decimal(0 if x > 0 else 1)
    softplus = (1 + (Decimal(x) + Decimal(dt)).exp()).ln()
    return (-rate * softplus).exp()

"""The chunked Gated DeltaNet kernel on balls: docs/enclosures.md, section 4.

The algorithm is that of `verify.gdn.steps`.  The inverse comes through its contract (running radii are 20 to 10**6
times too wide); log-decays through the front's, which allows every way to form exp(a_log) softplus(a + dt_bias).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from verify.enclosure.ball import Ball, concatenate, where
from verify.enclosure.machine import Machine, stacked
from verify.gdn.contract_front import front as front_bound
from verify.gdn.inverse_contract import inverse_bound
from verify.gdn.inverse_levels import SPLIT_UNIT
from verify.gdn.inverse_steps import CHUNK
from verify.gdn.layout import convolved_rows, finite, initial_state, key_head, numeric
from verify.gdn.problem import BF16, DeltaRuleProblem, GdnProblem, shapes
from verify.gdn.steps import PIECES, PIECES_SIZE

if TYPE_CHECKING:
    from verify.devices import DeviceModel
    from verify.gdn.problem import Problem
    from verify.gdn.steps import ChunkSteps

SURE_EPS = 2.0**-60
"""An epsilon of the norm that no flushed square can matter against."""


@dataclasses.dataclass(frozen=True, eq=False)
class GdnEnclosure:
    """Everything that a conforming kernel may return.

    Attributes:
        out: `[tokens, n_v, d_v]`.
        state: all slots, `[slots, n_v, d_k, d_v]`; exact for slots that nobody writes.
    """

    out: Ball
    state: Ball

    def contains(self, out: np.ndarray, state: np.ndarray) -> bool:
        """Whether a result lies inside."""
        return bool(self.out.contains(out).all() and self.state.contains(state).all())


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """What the delta rule reads, for some tokens.

    Attributes:
        q: scaled, `[tokens, n_kq, d_k]`, or one head of it; k too.
        v: `[tokens, n_v, d_v]`.
        beta, g: `[tokens, n_v]`, g in nats.
    """

    q: Ball
    k: Ball
    v: Ball
    beta: Ball
    g: Ball

    def head(self, key: int, head: int, part: slice) -> Rows:
        """One head's tokens of a chunk."""
        return Rows(self.q[part, key], self.k[part, key], self.v[part, head], self.beta[part, head], self.g[part, head])


def gdn(problem: Problem, steps: ChunkSteps, device: DeviceModel, *, tight: bool = False) -> GdnEnclosure:
    """Enclose the results of every execution; radii of the state go from chunk to chunk, and grow.

    Raises:
        ValueError: the problem has gates per channel.
    """
    if problem.per_channel:
        message = "the enclosed chunk has one decay per head, got one per channel"
        raise ValueError(message)
    machine = Machine(device, tight)
    _, n_v, _, d_v = shapes(problem)
    out = np.zeros((2, problem.tokens, n_v, d_v))
    final = np.zeros((2, *problem.state.shape))
    final[0] = np.where(np.isfinite(problem.state), problem.state.astype(np.float64), 0.0)
    for sequence in range(problem.sequences.count):
        rows = front(problem, sequence, steps, machine)
        span, taken = problem.sequences.span(sequence), problem.sequences.taken(sequence)
        write = int(problem.sequences.write_slots[sequence])
        for head in range(n_v):
            state = Ball.exact(initial_state(problem, sequence)[head])
            kept = state
            for start, stop in steps.chunks(span, taken):
                part = rows.head(key_head(problem, head), head, slice(start, stop))
                found, state = chunk(part, state, steps, machine)
                out[:, span.start + start : span.start + stop, head] = found.mid, found.rad
                if stop == taken:
                    kept = state
            if write >= 0:
                final[:, write, head] = kept.mid, kept.rad
    return GdnEnclosure(Ball(out[0], out[1]), Ball(final[0], final[1]))


def front(problem: Problem, sequence: int, steps: ChunkSteps, machine: Machine) -> Rows:
    """Convolution, silu, l2norm and gates of one sequence; q is scaled."""
    span = problem.sequences.span(sequence)
    scale = machine.constant(problem.scale)
    if isinstance(problem, DeltaRuleProblem):
        q, k, v, beta = (Ball.exact(finite(x[span])) for x in (problem.q, problem.k, problem.v, problem.beta))
        g = np.zeros(beta.shape) if problem.g is None else numeric(problem.g[span])
        return Rows(machine.mul(q, scale), k, v, beta, Ball(g, np.zeros(g.shape)))
    y = convolution(problem, sequence, steps, machine)
    z = silu(y, steps.silu, machine) if problem.activation == "silu" else y
    (q, k, v), (dq, dk, dv) = problem.split(z.mid), problem.split(z.rad)
    queries, keys = Ball(q, dq), Ball(k, dk)
    if problem.norm_eps is not None:
        queries, keys = (l2norm(x, problem.norm_eps, machine) for x in (queries, keys))
    logits = numeric(problem.b[span])
    beta = machine.sigmoid(Ball(np.clip(logits, -1e4, 1e4), np.zeros(logits.shape)), roundings=2)
    if problem.beta_scale != 1.0:
        beta = machine.mul(beta, machine.constant(problem.beta_scale))
    gates = front_bound(problem, sequence, steps, machine.device).g
    return Rows(machine.mul(queries, scale), keys, Ball(v, dv), beta, Ball(gates.value, gates.error))


def convolution(problem: GdnProblem, sequence: int, steps: ChunkSteps, machine: Machine) -> Ball:
    """Sums of taps times inputs in any order, `[tokens, dim]`."""
    rows, taps = convolved_rows(problem, sequence), finite(problem.taps)
    tokens = len(rows) - problem.width + 1
    whole = problem.taps.dtype == BF16 and problem.qkv.dtype == BF16
    terms: list[Ball] = []
    for tap, weights in enumerate(taps):
        term = Ball.exact(rows[tap : tap + tokens]) * Ball.exact(np.broadcast_to(weights, (tokens, len(weights))))
        if steps.convolution == "bf16":
            term = machine.to_bf16(term)
        elif not whole:
            term = term.widened(SPLIT_UNIT * term.size)
        terms.append(term)
    if problem.bias is not None:
        terms.append(Ball.exact(np.broadcast_to(finite(problem.bias), (tokens, rows.shape[1]))))
    together = Ball(np.stack([x.mid for x in terms]), np.stack([x.rad for x in terms]))
    # Taps may be hi/lo pairs in a matrix product: twice the terms, and its unit roundoff.
    device, twice = machine.device, 2 * len(terms) + 1
    roundings = int(np.ceil(twice * max(device.dot_unit_roundoff / device.unit_roundoff, 1.0)))
    found = machine.sum(together, 0, spare=roundings)
    return found.widened(np.where(found.is_zero, 0.0, twice * device.smallest_normal))


def silu(y: Ball, form: str, machine: Machine) -> Ball:
    """0.5 y (1 + tanh(y / 2)), or y times a sigmoid."""
    if form == "tanh":
        half = machine.doubled(y, 0.5)
        one = Ball.exact(np.ones(y.shape))
        return machine.mul(half, machine.add(one, machine.tanh(half)))
    return machine.mul(y, machine.sigmoid(y, roundings=2))


def l2norm(x: Ball, eps: float, machine: Machine) -> Ball:
    """x / sqrt(sum x^2 + eps) along the last axis; a vector that is exactly zero stays zero."""
    axis = x.mid.ndim - 1
    squares = machine.sum(machine.mul(x, x), axis, keepdims=True)
    if eps > 0.0:
        squares = machine.add(squares, machine.constant(eps))
    found = machine.mul(x, machine.rsqrt(squares))
    if eps >= SURE_EPS:
        found = found.cut(-1.01, 1.01)  # relative errors alone separate it from a number within [-1, 1]
    return where(x.is_zero, Ball.exact(np.zeros(x.shape)), found)


@dataclasses.dataclass(frozen=True, eq=False)
class _Decays:
    """D `[n, n]`, exp(G) `[n, 1]`, exp(G_C - G) `[n, 1]`."""

    between: Ball
    from_start: Ball
    to_end: Ball


@dataclasses.dataclass(frozen=True, eq=False)
class _Pairs:
    """What tokens of a chunk have in pairs: decays, X, tril(P D)."""

    decays: _Decays
    inverse: Ball
    scores: Ball


def decays(g: Ball, form: str, machine: Machine) -> _Decays:
    """exp of sums of log-decays over segments; a hard reset inside one gives exactly 0."""
    n = len(g.mid)
    # Column 0 from the chunk's start, column 1 + j from after token j, row i up to token i.
    open_at = np.arange(n)[:, None] >= np.arange(n + 1)[None, :]
    reset_at = np.isneginf(g.mid)
    resets = np.cumsum(open_at & reset_at[:, None], axis=0) > 0
    values = np.where(reset_at, 0.0, g.mid)
    terms = np.where(open_at, values[:, None], 0.0)
    size = np.cumsum(np.abs(terms), axis=0)
    doubt = np.cumsum(np.where(open_at, np.where(reset_at, 0.0, g.rad)[:, None], 0.0), axis=0)
    if form == "cumulative":
        size = np.where(size + doubt > 0.0, 2.0 * np.abs(values).sum(), 0.0)
    counted, unit = np.cumsum(open_at & (terms != 0.0), axis=0), machine.device.unit_roundoff
    if form == "pieces":
        counted, size, unit = PIECES * counted, PIECES_SIZE * (size + doubt), machine.device.dot_unit_roundoff
    room = doubt + np.expm1((counted + 1) * unit) * size
    exact = np.cumsum(terms, axis=0)
    summed = Ball(exact, np.zeros(exact.shape)).widened(room * (1.0 + 2.0**-30))
    found = machine.exp(Ball(np.minimum(summed.mid, 0.0), summed.rad))
    unsure = resets & (form == "cumulative")  # a difference of infinities
    zero = resets | (np.arange(n)[:, None] + 1 < np.arange(n + 1)[None, :])
    found = where(zero, Ball.exact(np.zeros(found.shape)), found)
    found = Ball(found.mid, np.where(unsure, np.inf, found.rad))
    return _Decays(found[:, 1:], found[:, :1], Ball(found.mid[-1, 1:, None], found.rad[-1, 1:, None]))


def chunk(rows: Rows, state: Ball, steps: ChunkSteps, machine: Machine) -> tuple[Ball, Ball]:
    """One chunk of one head of at most 64 tokens: outputs `[n, d_v]`, and the state after it `[d_k, d_v]`."""
    precision, n = steps.precision, len(rows.v.mid)
    d = decays(rows.g, steps.decay, machine)
    beta = Ball(rows.beta.mid[:, None], rows.beta.rad[:, None])
    below, within = (np.tril(np.ones((n, n), dtype=bool), at) for at in (-1, 0))
    zero = Ball.exact(np.zeros((n, n)))
    pairs, scores = (machine.product(a, rows.k.T, p) for a, p in ((rows.k, precision), (rows.q, steps.reading)))
    lower = where(below, machine.mul(machine.mul(pairs, d.between), beta), zero)
    scores = where(within, machine.mul(scores, d.between), zero)
    x = inverse(lower, steps, machine.device)
    found = _residual if steps.updates == "residual" else _products
    out, after = found(dataclasses.replace(rows, beta=beta), _Pairs(d, x, scores), state, steps, machine)
    return (machine.to_bf16(out) if steps.out == "bf16" else out), after


def _residual(rows: Rows, pairs: _Pairs, state: Ball, steps: ChunkSteps, machine: Machine) -> tuple[Ball, Ball]:
    """Outputs and state, the residual first."""
    d, precision, reading, n = pairs.decays, steps.precision, steps.reading, len(rows.v.mid)
    predicted = machine.mul(machine.mul(rows.beta, d.from_start), machine.product(rows.k, state, precision))
    update = machine.product(pairs.inverse, machine.add(machine.mul(rows.v, rows.beta), -predicted), precision)
    read = machine.mul(d.from_start, machine.product(rows.q, state, reading))
    out = machine.onto(read, machine.product(pairs.scores, update, reading), pairs.scores, update, reading)
    scaled = machine.mul(d.to_end, update)
    writes = machine.product(rows.k.T, scaled, precision, partial=4)
    return out, machine.onto(machine.mul(state, d.from_start[n - 1 : n]), writes, rows.k.T, scaled, precision)


def _products(rows: Rows, pairs: _Pairs, state: Ball, steps: ChunkSteps, machine: Machine) -> tuple[Ball, Ball]:
    """Outputs and state from U and W."""
    d, x, scores, beta, precision = pairs.decays, pairs.inverse, pairs.scores, rows.beta, steps.precision
    n, lanes = rows.v.shape
    right = concatenate([machine.mul(rows.v, beta), machine.mul(rows.k, machine.mul(beta, d.from_start))], 1)
    both = machine.product(x, right, precision)
    readers = stacked(both[:, lanes:], machine.mul(rows.q, d.from_start))
    reads = machine.product(readers, state, precision)
    update = machine.onto(both[:, :lanes], -reads[:n], readers[:n], state, precision)
    update = _meet(update, _together(x, right, both, state, machine, precision))
    writers = stacked(scores, machine.mul(rows.k, d.to_end).T)
    writes = machine.product(writers, update, precision)
    out = machine.onto(reads[n:], writes[:n], writers[:n], update, precision)
    after = machine.onto(machine.mul(state, d.from_start[n - 1 : n]), writes[n:], writers[n:], update, precision)
    return out, after


def inverse(lower: Ball, steps: ChunkSteps, device: DeviceModel) -> Ball:
    """(I + L)^-1 as the kernel has it, for every L of a ball: the contract, with the radius as `lower_error`."""
    n = len(lower.mid)
    padded, doubt = np.zeros((CHUNK, CHUNK)), np.zeros((CHUNK, CHUNK))
    padded[:n, :n], doubt[:n, :n] = lower.mid, lower.rad
    if not np.isfinite(doubt).all():
        return Ball(np.eye(n), np.where(np.tril(np.ones((n, n)), -1) > 0.0, np.inf, 0.0))
    found = inverse_bound(padded, steps.inverse, device, lower_error=doubt)
    return Ball(found.exact, np.zeros((CHUNK, CHUNK))).widened(found.bound + found.exact_error)[:n, :n]


def _together(x: Ball, right: Ball, both: Ball, state: Ball, machine: Machine, precision: str) -> Ball:
    """U - W S once more, with X taken out: both sides have the same X, so that what the state predicts cancels.

    With hats for what enters a product, U = X^ R_v^ + e_0, W = X^ R_k^ + e_1, W^ = W + e_2, W^ S^ summed with e_3:

        U - W^ S^ = X^ (R_v^ - R_k^ S^) + e_0 - (e_1 + e_2) S^ - e_3, and U may be the accumulator of W S
    """
    lanes, arithmetic = state.shape[1], machine.arithmetic(precision)
    omega = machine.device.smallest_normal
    inverse_in, right_in, state_in, w_in = (machine.entering(each, precision) for each in (x, right, state, both))
    exact = inverse_in @ (right_in[:, :lanes] - right_in[:, lanes:] @ state_in)
    summed = arithmetic.accumulated(inverse_in.size, right_in.size) + omega
    of_w = summed[:, lanes:] + arithmetic.rounded(both.size[:, lanes:])
    reading = arithmetic.accumulated(w_in.size[:, lanes:], state_in.size) + omega
    room = (summed[:, :lanes] + of_w @ state_in.size + reading) * (1.0 + 2.0**-30)
    joined = arithmetic.joined(both.size[:, :lanes], w_in.size[:, lanes:], state_in.size)
    return exact.widened((room + joined) * (1.0 + 2.0**-30) + omega)


def _meet(left: Ball, right: Ball) -> Ball:
    """What lies in both."""
    return left.cut(right.low, right.high)

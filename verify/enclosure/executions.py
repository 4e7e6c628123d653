"""Random conforming executions: the opponents of the enclosures.

The algorithms of the kernels once more, in numpy, with every freedom that a device model gives used at random: each
operation errs by up to its envelope in either direction, each sum has an order of its own, results below the normal
range are kept or become zero, fragments and anchors are drawn.  Numbers are float64; an execution's rounding stands for
any real error within the envelope, those that round to FP32 numbers among them.  Nothing here is shared with the
enclosures.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from verify.attention.problem import widen
from verify.gdn.inverse_steps import CHUNK, LEVELS, part
from verify.gdn.layout import convolved_rows, finite, initial_state, key_head, numeric
from verify.gdn.problem import DeltaRuleProblem, shapes
from verify.rounding import BF16, FP32, nearest

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.attention.problem import AttentionProblem
    from verify.devices import DeviceModel
    from verify.gdn.inverse_steps import InverseSteps
    from verify.gdn.problem import GdnProblem, Problem
    from verify.gdn.steps import ChunkSteps

SHY = 1.0 - 2.0**-20
"""Executions use this much of an envelope, so that float64's own rounding does not carry them over its edge."""
BIAS = 32
LOG2_E, LN2 = 1.4426950408889634, 0.6931471805599453
LEANINGS = ("either", "up", "down", "nearest")


@dataclasses.dataclass
class Execution:
    """One device at one moment.

    Attributes:
        device: its envelopes.
        rng: of all choices.
        leaning: "either": each result errs to either side, by all or some of its envelope; "up", "down": by all of it;
            "nearest": every FP32 result is rounded to the nearest number.
    """

    device: DeviceModel
    rng: np.random.Generator
    leaning: str = "either"

    def register(self, exact: np.ndarray, relative: float, absolute: float = 0.0) -> np.ndarray:
        """A result within its envelope, flushed or not."""
        room = np.where(np.isfinite(exact), (relative * np.abs(exact) + absolute) * SHY, 0.0)
        if self.leaning == "nearest":
            found = nearest(exact, FP32)
        elif self.leaning == "either":
            found = exact + room * self.rng.choice([-1.0, 1.0, 0.5, 0.0], size=np.shape(exact))
        else:
            found = exact + (room if self.leaning == "up" else -room)
        tiny = np.abs(found) < self.device.smallest_normal
        return np.where(tiny & (self.rng.random(np.shape(exact)) < 0.5), 0.0, found)

    def add(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """x + y, exact where one of them is zero."""
        return np.where((x == 0.0) | (y == 0.0), x + y, self.register(x + y, self.device.unit_roundoff))

    def mul(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Elementwise x * y."""
        return self.register(x * y, self.device.unit_roundoff)

    def constant(self, value: float) -> np.ndarray:
        """A real number in FP32."""
        return self.register(np.asarray(value), self.device.unit_roundoff)

    def sum(self, terms: np.ndarray, unit: float | None = None) -> np.ndarray:
        """Terms along the first axis, added in a random order and shape."""
        u = self.device.unit_roundoff if unit is None else unit
        rows = list(terms[self.rng.permutation(len(terms))])
        if not rows:
            return np.zeros(terms.shape[1:])
        deep = self.rng.random() < 0.5
        while len(rows) > 1:
            count = 1 if deep else int(self.rng.integers(1, len(rows) // 2 + 1))
            pairs = [rows.pop() for _ in range(2 * count)]
            for x, y in zip(pairs[::2], pairs[1::2], strict=True):
                both = (x != 0.0) & (y != 0.0)
                rows.append(np.where(both, self.register(x + y, u), x + y))
        return rows[0]

    def dot(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """A matrix product of BF16 numbers: exact products, summed."""
        products = self.register(left.T[:, :, None] * right[:, None, :], 0.0)
        return self.sum(products, self.device.dot_unit_roundoff)

    def product(self, left: np.ndarray, right: np.ndarray, precision: str) -> np.ndarray:
        """A matrix product of FP32 numbers."""
        high = nearest(left, BF16), nearest(right, BF16)
        if precision == "bf16":
            return self.dot(*high)
        low = nearest(left - high[0], BF16), nearest(right - high[1], BF16)
        left_parts = np.concatenate([high[0], low[0], high[0]], axis=1)
        return self.dot(left_parts, np.concatenate([high[1], high[1], low[1]], axis=0))

    def onto(self, addend: np.ndarray, left: np.ndarray, right: np.ndarray, precision: str) -> np.ndarray:
        """An addend plus a product, which is finished first, or whose passes are summed onto the addend."""
        if self.rng.random() < 0.5:
            return self.add(addend, self.product(left, right, precision))
        high = nearest(left, BF16), nearest(right, BF16)
        passes = [high]
        if precision != "bf16":
            low = nearest(left - high[0], BF16), nearest(right - high[1], BF16)
            passes += [(low[0], high[1]), (high[0], low[1])]
        for at in self.rng.permutation(len(passes)):
            found = self.dot(*passes[at])
            both = (addend != 0.0) & (found != 0.0)
            addend = np.where(both, self.register(addend + found, self.device.dot_unit_roundoff), addend + found)
        return addend

    def function(
        self, f: Callable[[np.ndarray], np.ndarray], x: np.ndarray, relative: float, absolute: float = 0.0
    ) -> np.ndarray:
        """A function of the transcendental unit."""
        with np.errstate(all="ignore"):
            return self.register(f(x), relative, absolute)


def drawn(device: DeviceModel, seed: int) -> Execution:
    """An execution; leanings take turns."""
    return Execution(device, np.random.default_rng(seed), LEANINGS[seed % len(LEANINGS)])


@np.errstate(all="ignore")
def attention(
    problem: AttentionProblem, execution: Execution, *, softmax: str = "static"
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and LSEs of one execution: rows in the contract's domain, without soft cap and sinks."""
    shape = problem.q.shape[:3]
    out, lse = np.zeros((*shape, problem.v_dim)), np.full(shape, -np.inf)
    q_all, k_all, v_all = (widen(x) for x in (problem.q, problem.k, problem.v))
    for b in range(problem.batch):
        for view in problem.views(b):
            members = np.arange(problem.q_len)[view.rows]
            for h in range(problem.heads):
                kv = problem.kv_head(h)
                k, v = k_all[b, kv, view.keys], v_all[b, kv, view.keys]
                for row, start, stop in zip(members, view.start, view.stop, strict=True):
                    if stop > start:
                        seen = slice(start, stop)
                        found = _row(q_all[b, h, row], k[seen], v[seen], problem.scale, execution, softmax)
                        out[b, h, row], lse[b, h, row] = found
    return out, lse


def _row(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, execution: Execution, softmax: str
) -> tuple[np.ndarray, np.ndarray]:
    """One row against the keys that it sees."""
    s = execution.mul(execution.dot(k, q[:, None])[:, 0], execution.constant(scale * LOG2_E))
    cuts = execution.rng.choice(
        np.arange(1, len(k)), size=min(int(execution.rng.integers(0, 5)), len(k) - 1), replace=False
    )
    fragments = [part for part in np.split(np.arange(len(k)), np.sort(cuts)) if len(part)]
    if softmax == "static":
        few = execution.rng.integers(1, len(fragments[0]) + 1)
        anchor = np.ceil(s[fragments[0][:few]].max()) + BIAS
        found = _fast(s, v, anchor, fragments, execution)
        if found is not None:
            return found
    return _running(s, v, fragments, execution, late_bias=softmax == "static")


def _fast(
    s: np.ndarray, v: np.ndarray, anchor: float, fragments: list[np.ndarray], execution: Execution
) -> tuple[np.ndarray, np.ndarray] | None:
    """Against one anchor; None where the check asks for a replay."""
    device = execution.device
    lanes: list[np.ndarray] = []
    o = np.zeros(v.shape[1])
    for keys in fragments:
        t = execution.register(s[keys] - anchor, device.unit_roundoff)
        if t.max() > 120.0:
            return None
        p = execution.function(np.exp2, t, device.exp2_relative)
        o = execution.add(o, execution.dot(nearest(p, BF16)[None], v[keys])[0])
        lanes.extend(
            p[n::8].sum(keepdims=True) if len(p[n::8]) == 1 else execution.sum(p[n::8])[None]
            for n in range(min(8, len(p)))
        )
    total = execution.sum(np.concatenate(lanes))
    if not 2.0 ** -(BIAS + 2) <= total <= 2.0**124 or not np.isfinite(o).all() or np.abs(o).max() > FP32.largest:
        return None
    return _finished(o, total, anchor, execution)


def _running(
    s: np.ndarray, v: np.ndarray, fragments: list[np.ndarray], execution: Execution, *, late_bias: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Against running maxima; BIAS goes into the shift, or is subtracted afterwards."""
    device = execution.device
    shift, total, o = -np.inf, np.zeros(()), np.zeros(v.shape[1])
    for keys in fragments:
        now = max(shift, float(np.ceil(s[keys].max())))
        factor = np.exp2(shift - now) if np.isfinite(shift) else 0.0
        if late_bias:
            t = execution.register(s[keys] - now, device.unit_roundoff)
            t = execution.register(t - BIAS, device.unit_roundoff)
        else:
            t = execution.register(s[keys] - (now + BIAS), device.unit_roundoff)
        p = execution.function(np.exp2, t, device.exp2_relative)
        total = execution.add(execution.register(total * factor, 0.0), execution.sum(p))
        o = execution.add(execution.register(o * factor, 0.0), execution.dot(nearest(p, BF16)[None], v[keys])[0])
        shift = now
    return _finished(o, total, shift + BIAS, execution)


def _finished(o: np.ndarray, total: np.ndarray, shift: float, execution: Execution) -> tuple[np.ndarray, np.ndarray]:
    device = execution.device
    inverse = execution.register(0.5 / total, device.reciprocal_relative)
    half = np.clip(execution.mul(o, inverse), -BF16.largest / 2, BF16.largest / 2)
    logarithm = execution.function(np.log, total, device.log_relative, device.log_absolute)
    lse = execution.add(execution.mul(np.asarray(shift), execution.constant(LN2)), logarithm)
    return nearest(2.0 * half, BF16), lse


@np.errstate(all="ignore")
def gdn(problem: Problem, steps: ChunkSteps, execution: Execution) -> tuple[np.ndarray, np.ndarray]:
    """Outputs `[tokens, n_v, d_v]` and states, all slots, of one execution of the chunked kernel."""
    _, n_v, _, d_v = shapes(problem)
    out = np.zeros((problem.tokens, n_v, d_v))
    states = problem.state.astype(np.float64).copy()
    for sequence in range(problem.sequences.count):
        q, k, v, beta, g = _front(problem, sequence, steps, execution)
        span, taken = problem.sequences.span(sequence), problem.sequences.taken(sequence)
        write = int(problem.sequences.write_slots[sequence])
        for head in range(n_v):
            key = key_head(problem, head)
            state = initial_state(problem, sequence)[head]
            kept = state
            for start, stop in steps.chunks(span, taken):
                rows = slice(start, stop)
                parts = q[rows, key], k[rows, key], v[rows, head], beta[rows, head], g[rows, head]
                found, state = _chunk(parts, state, steps, execution)
                out[span.start + start : span.start + stop, head] = found
                if stop == taken:
                    kept = state
            if write >= 0:
                states[write, head] = kept
    return out, states


def _front(problem: Problem, sequence: int, steps: ChunkSteps, execution: Execution) -> tuple[np.ndarray, ...]:
    span, device = problem.sequences.span(sequence), execution.device
    scale = execution.constant(problem.scale)
    if isinstance(problem, DeltaRuleProblem):
        q, k, v, beta = (finite(x[span]) for x in (problem.q, problem.k, problem.v, problem.beta))
        g = np.zeros_like(beta) if problem.g is None else numeric(problem.g[span])
        return execution.mul(q, scale), k, v, beta, g
    rows, taps = convolved_rows(problem, sequence), finite(problem.taps)
    tokens = len(rows) - problem.width + 1
    terms = np.stack([rows[tap : tap + tokens] * weights for tap, weights in enumerate(taps)])
    terms = nearest(terms, BF16) if steps.convolution == "bf16" else terms
    if problem.bias is not None:
        terms = np.concatenate([terms, np.broadcast_to(finite(problem.bias), (1, *terms.shape[1:]))])
    y = execution.sum(terms)
    q, k, v = problem.split(_silu(y, steps.silu, execution) if problem.activation == "silu" else y)
    if problem.norm_eps is not None:
        q, k = (_l2norm(x, problem.norm_eps, execution) for x in (q, k))
    beta = execution.function(_sigmoid, numeric(problem.b[span]), device.sigmoid_relative)
    if problem.beta_scale != 1.0:
        beta = execution.mul(beta, execution.constant(problem.beta_scale))
    return execution.mul(q, scale), k, v, beta, _log_decay(problem, span, execution)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def _silu(y: np.ndarray, form: str, execution: Execution) -> np.ndarray:
    device = execution.device
    if form == "tanh":
        tangent = execution.function(np.tanh, 0.5 * y, device.tanh_relative, device.tanh_absolute)
        return execution.mul(0.5 * y, execution.register(1.0 + tangent, device.unit_roundoff))
    return execution.mul(y, execution.function(_sigmoid, y, device.sigmoid_relative))


def _l2norm(x: np.ndarray, eps: float, execution: Execution) -> np.ndarray:
    squares = execution.sum(np.moveaxis(execution.mul(x, x), -1, 0))[..., None]
    squares = execution.add(squares, execution.constant(eps)) if eps > 0.0 else squares
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = execution.register(1.0 / np.sqrt(squares), execution.device.rsqrt_relative)
        return np.where(squares > 0.0, execution.mul(x, inverse), 0.0)


def _log_decay(problem: GdnProblem, span: slice, execution: Execution) -> np.ndarray:
    """-exp(a_log + ln softplus(a + dt_bias))."""
    device = execution.device
    a_log = finite(problem.a_log).reshape((-1,) + (1,) * (problem.a.ndim - 2))
    x = execution.add(numeric(problem.a[span]), np.broadcast_to(finite(problem.dt_bias), problem.a[span].shape))
    with np.errstate(all="ignore"):
        small = execution.function(np.exp, -np.abs(x), device.exp_relative)
        raised = execution.function(np.log1p, small, device.log_relative + device.log_absolute)
        softplus = execution.add(np.maximum(x, 0.0), raised)
        logarithm = execution.function(np.log, softplus, device.log_relative, device.log_absolute)
        total = execution.register(a_log + np.where(x < -17.0, x, logarithm), device.unit_roundoff)
        return -execution.function(np.exp, total, device.exp_relative)


def _pieces(x: np.ndarray) -> np.ndarray:
    """Three BF16 numbers for each, one after another along the first axis; exp(-200) is 0 already."""
    found, rest = [], np.maximum(x, -200.0)
    for _ in range(3):
        found.append(nearest(rest, BF16))
        rest = rest - found[-1]
    return np.concatenate(found)


def _decays(g: np.ndarray, form: str, execution: Execution) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each sum from its own segment, in random orders; of pieces on the matrix unit, if the form says so."""
    n, device = len(g), execution.device
    open_at = np.arange(n)[:, None] >= np.arange(n + 1)[None, :]
    found = np.zeros((n, n + 1))
    for i in range(n):
        terms = np.where(open_at[: i + 1], np.where(np.isneginf(g[: i + 1]), 0.0, g[: i + 1])[:, None], 0.0)
        pieces = form == "pieces"
        total = execution.sum(_pieces(terms), device.dot_unit_roundoff) if pieces else execution.sum(terms)
        value = np.where(total == 0.0, 1.0, execution.function(np.exp, total, device.exp_relative))
        reset = (open_at[: i + 1] & np.isneginf(g[: i + 1])[:, None]).any(axis=0)
        seen = np.arange(n + 1) <= i + 1
        found[i] = np.where(seen & ~reset, value, 0.0)
    return found[:, 1:], found[:, :1], found[-1, 1:, None]


def _chunk(
    parts: tuple[np.ndarray, ...], state: np.ndarray, steps: ChunkSteps, execution: Execution
) -> tuple[np.ndarray, np.ndarray]:
    q, k, v, beta, g = parts
    n, lanes = v.shape
    beta = beta[:, None]
    d, from_start, to_end = _decays(g, steps.decay, execution)

    def dot(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return execution.product(x, y, steps.precision)

    def reading(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return execution.product(x, y, steps.reading)

    lower = np.tril(execution.mul(execution.mul(dot(k, k.T), d), beta), -1)
    scores = np.tril(execution.mul(reading(q, k.T), d))
    decayed, values = execution.mul(state, from_start[-1]), execution.mul(v, beta)
    padded = np.zeros((CHUNK, CHUNK))
    padded[:n, :n] = lower
    x = inverse(padded, steps.inverse, execution)[:n, :n]
    if steps.updates == "residual":
        predicted = execution.mul(execution.mul(beta, from_start), dot(k, state))
        update = dot(x, execution.add(values, -predicted))
        read, writers, written = execution.mul(from_start, reading(q, state)), k, execution.mul(to_end, update)
    else:
        both = dot(x, np.concatenate([values, execution.mul(k, execution.mul(beta, from_start))], axis=1))
        update = execution.onto(both[:, :lanes], -both[:, lanes:], state, steps.precision)
        read, writers, written = reading(execution.mul(q, from_start), state), execution.mul(k, to_end), update
    out = execution.onto(read, scores, update, steps.reading)
    after = execution.onto(decayed, writers.T, written, steps.precision)
    return (nearest(out, BF16) if steps.out == "bf16" else out), after


def inverse(lower: np.ndarray, steps: InverseSteps, execution: Execution) -> np.ndarray:
    """(I + L)^-1 in eight products."""
    n, identity = len(lower), np.eye(len(lower))
    base = part(lower, LEVELS[0])

    def dot(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return execution.product(x, y, steps.precision)

    def finish(left: np.ndarray, power: np.ndarray) -> np.ndarray:
        if steps.finish == "add":
            return execution.onto(left, left, power, steps.precision)
        return dot(left, identity + power)

    x = finish(identity - base, dot(base, base))
    for size in LEVELS[1:]:
        if size <= n:
            nilpotent = dot(part(lower, size), x)
            x = finish(execution.onto(x, -x, nilpotent, steps.precision), dot(nilpotent, nilpotent))
    return x

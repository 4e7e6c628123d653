"""The kernel's chain, emulated in numpy with its roundings in named places: the algorithm that the contract is about.

A sequence goes through in chunks of 64 tokens.  Per chunk and value head, with k, q normalised and q scaled,

    A = k k^T, P = q k^T                     one stacked product
    L = tril(beta A D, -1), X = (I + L)^-1   D_ij = exp(g_(j+1) + .. + g_i), `inverse_steps`
    [U W] = X [beta v, beta k exp(G)]        G_i = g_1 + .. + g_i within the chunk
    [R; O] = [W; q exp(G)] S                 S the state at the chunk's start
    V = U - R
    [O; S] += [tril(P D); (k exp(G_C - G))^T] V,  S decayed by exp(G_C)

or, with the residual first (`updates`), V = X (beta v - beta exp(G) (k S)), O = exp(G) (q S) + tril(P D) V and
S += k^T (exp(G_C - G) V).  Operands of matrix products are BF16 or hi/lo pairs, everything else is FP32.

With one decay per key channel (KDA), A_ij = sum_c k_ic k_jc D_ijc and so is P; exp(G) and exp(G_C - G) have channels.
In sub-blocks of 16 tokens on the diagonal the sum is FP32, term by term; below them it is a matrix product through the
first token r of the row's sub-block, sum_c (k_ic D_irc) (k_jc D_rjc), in which no exponent is positive ("blocks").
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from verify.gdn.inverse_steps import CHUNK, PRECISIONS, InverseSteps, invert, product, to_bf16
from verify.gdn.layout import convolved_rows, finite, initial_state, key_head, numeric
from verify.gdn.problem import BF16, DeltaRuleProblem, GdnProblem, shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from verify.gdn.problem import Problem

    Product = Callable[[np.ndarray, np.ndarray], np.ndarray]

SILU_FORMS = ("tanh", "sigmoid")
CONVOLUTIONS = ("exact", "bf16")
DECAYS = ("segments", "pieces", "cumulative")
PIECES = 3
"""BF16 numbers whose sum is an FP32 number: 8 significant bits each."""

PIECES_SIZE = 1.0 + 2.0**-7 + 2.0**-14
"""Sum of the pieces' sizes relative to the number's: the first is at most 1 + u, the others u (1 + u) and u^2 (1 + u)
with u = 2^-8."""

LEAST_LOG_DECAY = np.float32(-200.0)
"""Pieces of smaller ones are this number's: the exponential is 0 as well, and the pieces of -inf are NaN."""

OUTPUTS = ("bf16", "fp32")
OPERANDS = ("any", "known")
CHANNELS = ("blocks", "pairs")
UPDATES = ("products", "residual")
SUB_BLOCK = 16
"""Tokens of a sub-block, for decays per channel."""


@dataclasses.dataclass(frozen=True)
class ChunkSteps:
    """Which roundings the chain makes.

    Attributes:
        inverse: of the triangular inverse.
        precision: of all other matrix products: "bf16" or "bf16x3".
        silu: "tanh": 0.5 y (1 + tanh(y / 2)); "sigmoid": y / (1 + exp(-y)).
        convolution: "exact": products of taps and inputs are exact (each a hi/lo pair); "bf16": rounded to BF16.
        decay: "segments": each D_ij from its own sum; "pieces": the same as a matrix product of three BF16 pieces per
            log-decay with zeros and ones; "cumulative": from differences of G.
        out: format of the output.
        operands: which numbers are rounded to BF16 before the products of [k; q] and of the inverse: "known": those of
            the formulas above, k, scaled q, beta v and beta k exp(G); "any": others as large are allowed too, such as
            beta k in the place of k.  The emulation is "known"; the contract's bound is smaller for it.
        channels: of decays per channel: "blocks" as above, "pairs": every pair of tokens in FP32.
        updates: "products": U, W and V = U - W S; "residual": the state's prediction is taken from beta v before X is
            applied, gates multiply products and V instead of q and k, and the products that reach the outputs alone,
            q k^T, q S and tril(P D) V, have BF16 operands.
        snap: the first chunk starts at a multiple of this many rows, at or before the sequence's first token.
        tile: tokens, from the first chunk's start on, whose rows share matrix products: what one of them makes of an
            overflow, the others may have too.
    """

    inverse: InverseSteps = dataclasses.field(default_factory=InverseSteps)
    precision: str = "bf16"
    silu: str = "tanh"
    convolution: str = "exact"
    decay: str = "segments"
    out: str = "bf16"
    operands: str = "any"
    channels: str = "blocks"
    updates: str = "products"
    snap: int = 1
    tile: int = CHUNK

    def __post_init__(self) -> None:
        choices = (
            ("precision", self.precision, PRECISIONS),
            ("silu", self.silu, SILU_FORMS),
            ("convolution", self.convolution, CONVOLUTIONS),
            ("decay", self.decay, DECAYS),
            ("out", self.out, OUTPUTS),
            ("operands", self.operands, OPERANDS),
            ("channels", self.channels, CHANNELS),
            ("updates", self.updates, UPDATES),
        )
        for name, value, allowed in choices:
            if value not in allowed:
                message = f"{name} must be one of {', '.join(allowed)}, got {value!r}"
                raise ValueError(message)
        if self.tile < CHUNK or self.tile % CHUNK:
            message = f"tile must be a multiple of {CHUNK}, got {self.tile}"
            raise ValueError(message)

    @property
    def reading(self) -> str:
        """Precision of the products that reach the outputs alone."""
        return "bf16" if self.updates == "residual" else self.precision

    def tile_start(self, span: slice, start: int) -> int:
        """First token of the tile that the chunk from `start` on belongs to, within the sequence."""
        return max(start - (span.start % self.snap + start) % self.tile, 0)

    def chunks(self, span: slice, taken: int) -> Iterator[tuple[int, int]]:
        """First token and one past the last of each chunk, within the sequence; one ends where the state is taken."""
        tokens = span.stop - span.start
        start = 0
        while start < tokens:
            stop = min(start + CHUNK - ((span.start + start) % self.snap if start == 0 else 0), tokens)
            if start < taken < stop:
                stop = taken
            yield start, stop
            start = stop


BF16_STEPS = ChunkSteps()
SPLIT_STEPS = ChunkSteps(InverseSteps("bf16x3"), precision="bf16x3")
"""The two modes."""
RESIDUAL_STEPS = dataclasses.replace(SPLIT_STEPS, updates="residual")
"""hi/lo where the state is concerned, the residual first."""
KNOWN_STEPS = ChunkSteps(operands="known")
"""BF16 with known operands."""


@dataclasses.dataclass(frozen=True, eq=False)
class Emulated:
    """What the emulated kernel gives.

    Attributes:
        out: BF16 or FP32 `[tokens, n_v, d_v]`.
        state: FP32 `[slots, n_v, d_k, d_v]`.
    """

    out: np.ndarray
    state: np.ndarray


def run(problem: Problem, steps: ChunkSteps) -> Emulated:
    """The whole chain."""
    _, n_v, _, d_v = shapes(problem)
    out = np.zeros((problem.tokens, n_v, d_v), np.float32)
    state = problem.state.astype(np.float32).copy()
    for sequence in range(problem.sequences.count):
        q, k, v, beta, g = _front(problem, sequence, steps)
        span, taken = problem.sequences.span(sequence), problem.sequences.taken(sequence)
        write = int(problem.sequences.write_slots[sequence])
        for head in range(n_v):
            key = key_head(problem, head)
            s = initial_state(problem, sequence)[head].astype(np.float32)
            final = s
            for start, stop in steps.chunks(span, taken):
                rows = slice(start, stop)
                parts = (q[rows, key], k[rows, key], v[rows, head], beta[rows, head], g[rows, head])
                out[span.start + start : span.start + stop, head], s = _chunk(parts, s, steps)
                if stop == taken:
                    final = s
            if write >= 0:
                state[write, head] = final
    return Emulated(out.astype(BF16) if steps.out == "bf16" else out, state)


def run_recurrent(problem: Problem, steps: ChunkSteps) -> Emulated:
    """Token by token in FP32, as decode kernels do; of `steps` only silu, convolution and out matter."""
    _, n_v, _, d_v = shapes(problem)
    out = np.zeros((problem.tokens, n_v, d_v), np.float32)
    state = problem.state.astype(np.float32).copy()
    for sequence in range(problem.sequences.count):
        q, k, v, beta, g = _front(problem, sequence, steps)
        span, taken = problem.sequences.span(sequence), problem.sequences.taken(sequence)
        write = int(problem.sequences.write_slots[sequence])
        for head in range(n_v):
            key = key_head(problem, head)
            s = initial_state(problem, sequence)[head].astype(np.float32)
            final = s
            for t in range(span.stop - span.start):
                factor = np.exp(g[t, head])
                s = s * (factor[:, None] if problem.per_channel else factor)
                s = s + k[t, key][:, None] * (beta[t, head] * (v[t, head] - k[t, key] @ s))
                out[span.start + t, head] = q[t, key] @ s
                if t + 1 == taken:
                    final = s
            if write >= 0:
                state[write, head] = final
    return Emulated(out.astype(BF16) if steps.out == "bf16" else out, state)


def _front(problem: Problem, sequence: int, steps: ChunkSteps) -> tuple[np.ndarray, ...]:
    """q (scaled), k, v, beta, g in FP32."""
    span, scale = problem.sequences.span(sequence), np.float32(problem.scale)
    if isinstance(problem, DeltaRuleProblem):
        q, k, v, beta = (finite(x[span]).astype(np.float32) for x in (problem.q, problem.k, problem.v, problem.beta))
        g = np.zeros_like(beta) if problem.g is None else numeric(problem.g[span]).astype(np.float32)
        return q * scale, k, v, beta, g
    y = _convolution(problem, sequence, steps)
    q, k, v = problem.split(silu(y, steps.silu) if problem.activation == "silu" else y)
    if problem.norm_eps is not None:
        q, k = (_l2norm(x, np.float32(problem.norm_eps)) for x in (q, k))
    with np.errstate(over="ignore"):
        beta = np.float32(problem.beta_scale) / (1 + np.exp(-numeric(problem.b[span]).astype(np.float32)))
    return q * scale, k, v, beta, _log_decay(problem, span)


def _convolution(problem: GdnProblem, sequence: int, steps: ChunkSteps) -> np.ndarray:
    rows, taps = (x.astype(np.float32) for x in (convolved_rows(problem, sequence), finite(problem.taps)))
    tokens = len(rows) - problem.width + 1
    y = np.zeros((tokens, rows.shape[1]), np.float32)
    for tap, weights in enumerate(taps):
        terms = rows[tap : tap + tokens] * weights
        y += to_bf16(terms) if steps.convolution == "bf16" else terms
    return y if problem.bias is None else y + finite(problem.bias).astype(np.float32)


def silu(y: np.ndarray, form: str) -> np.ndarray:
    """silu of FP32 numbers in FP32."""
    half = np.float32(0.5)
    if form == "tanh":
        return half * y * (1 + np.tanh(half * y))
    with np.errstate(over="ignore"):
        return y / (1 + np.exp(-y))


def _l2norm(x: np.ndarray, eps: np.float32) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        squares = np.sum(x * x, axis=-1, keepdims=True) + eps
        return np.where(squares > 0, x / np.sqrt(squares), 0).astype(np.float32)


def _log_decay(problem: GdnProblem, span: slice) -> np.ndarray:
    """-exp(a_log) softplus(a + dt_bias), as exp of a sum, so that a large a_log does not overflow."""
    a_log = finite(problem.a_log).astype(np.float32).reshape((-1,) + (1,) * (problem.a.ndim - 2))
    x = numeric(problem.a[span]).astype(np.float32) + finite(problem.dt_bias).astype(np.float32)
    with np.errstate(divide="ignore", over="ignore"):
        softplus = np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))
        logarithm = np.where(x < FAR, x, np.log(softplus))
        return -np.exp(a_log + logarithm)


FAR = np.float32(-17.0)
"""Below it ln softplus(x) is x to FP32."""


def decays(g: np.ndarray, form: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """D `[n, n, ...]` (0 above the diagonal), exp(G) `[n, ...]`, exp(G_C - G) `[n, ...]`, in FP32; g `[n, ...]`."""
    n, inner = len(g), (1,) * (g.ndim - 1)
    lower = np.tril(np.ones((n, n), dtype=bool)).reshape(n, n, *inner)
    if form == "cumulative":
        total = np.cumsum(g, axis=0, dtype=np.float32)
        with np.errstate(invalid="ignore"):
            exponents = total[:, None] - total[None, :]
        d = np.where(lower, np.exp(np.where(lower, exponents, 0)), 0).astype(np.float32)
        return d, np.exp(total), np.exp(total[-1:] - total)
    # Row t, column j: g_t for t > j; 0 times -inf is avoided.
    after = np.where(np.tril(np.ones((n, n), dtype=bool), -1).reshape(n, n, *inner), g[:, None], np.float32(0))
    d = np.where(lower, np.exp(_sums(after, form)), 0).astype(np.float32)
    return d, np.exp(_sums(g, form)), d[-1]


def _sums(g: np.ndarray, form: str) -> np.ndarray:
    """Running sums along axis 0 in FP32, of the numbers or of their pieces one after another."""
    if form != "pieces":
        return np.cumsum(g, axis=0, dtype=np.float32)
    pieces, rest = [], np.maximum(np.asarray(g, dtype=np.float32), LEAST_LOG_DECAY)
    for _ in range(PIECES):
        pieces.append(rest.astype(BF16).astype(np.float32))
        rest = rest - pieces[-1]
    terms = np.stack(pieces, axis=1).reshape(PIECES * len(g), *g.shape[1:])
    return np.cumsum(terms, axis=0, dtype=np.float32)[PIECES - 1 :: PIECES]


def _decayed_pairs(left: np.ndarray, k: np.ndarray, d: np.ndarray, steps: ChunkSteps, dot: Product) -> np.ndarray:
    """sum_c left_ic D_ijc k_jc with decays per channel, for j up to i."""
    n = len(k)
    size = SUB_BLOCK if steps.channels == "blocks" else n
    found = np.zeros((n, n), np.float32)
    for start in range(0, n, size):
        rows = slice(start, min(start + size, n))
        terms = left[rows, None] * (k[None, rows] * d[rows, rows])
        found[rows, rows] = terms.sum(axis=2, dtype=np.float32)
        if start:
            found[rows, :start] = dot(left[rows] * d[rows, start], (k[:start] * d[start, :start]).T)
    return found


def _chunk(parts: tuple[np.ndarray, ...], state: np.ndarray, steps: ChunkSteps) -> tuple[np.ndarray, np.ndarray]:
    q, k, v, beta, g = parts
    n, lanes = v.shape
    dot, reading = product(steps.precision), product(steps.reading)
    d, from_start, to_end = decays(g, steps.decay)
    if g.ndim == 1:
        pairs, scores = dot(k, k.T) * d, reading(q, k.T) * d
        from_start, to_end = from_start[:, None], to_end[:, None]
    else:
        refuse_channels(steps)
        pairs, scores = (_decayed_pairs(x, k, d, steps, each) for x, each in ((k, dot), (q, reading)))
    padded = np.zeros((CHUNK, CHUNK), np.float32)
    padded[:n, :n] = np.tril(beta[:, None] * pairs, -1)
    x = invert(padded, steps.inverse)[:n, :n]
    decayed, values = state * from_start[-1][:, None], v * beta[:, None]
    if steps.updates == "residual":
        update = dot(x, values - (beta[:, None] * from_start) * dot(k, state))
        out = from_start * reading(q, state) + reading(scores, update)
        return out, decayed + dot(k.T, to_end * update)
    right = np.concatenate([values, k * (beta[:, None] * from_start)], axis=1)
    both = dot(x, right)
    update = both[:, :lanes] - dot(both[:, lanes:], state)
    out = reading(q * from_start, state) + reading(scores, update)
    return out, decayed + dot((k * to_end).T, update)


def refuse_channels(steps: ChunkSteps) -> None:
    """The residual form multiplies V by decays, of which there has to be one per head.

    Raises:
        ValueError: the steps have that form; called for decays per channel.
    """
    if steps.updates == "residual":
        message = "updates must be 'products' where decays are per channel, got 'residual'"
        raise ValueError(message)

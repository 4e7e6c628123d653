"""One Gated DeltaNet problem: exact inputs and the function that a kernel has to compute.

Two kinds.  A `DeltaRuleProblem` gives queries, keys, values and gates; a `GdnProblem` gives what a model layer has (the
qkv projection, gate logits), from which convolution, silu, l2norm and gates make them:

    y_t  = bias + sum_j taps_j x_(t - width + 1 + j)              taps oldest first; before the sequence: its state
    z_t  = silu(y_t) = y_t / (1 + exp(-y_t))                      (or y_t)
    q, k = z / sqrt(sum_d z_d^2 + norm_eps)                       per head; the zero vector stays zero
    beta = beta_scale / (1 + exp(-b))                             per value head
    g    = -exp(a_log) ln(1 + exp(a + dt_bias))                   log-decay in nats, <= 0

The gated delta rule, per value head, with state S `[d_k, d_v]` and the query/key head h // (n_v / n_kq):

    S'_t = exp(g_t) S_(t-1)          u_t = beta_t (v_t - S'_t^T k_t)          S_t = S'_t + k_t u_t^T
    o_t  = scale S_t^T q_t

g may hold one number per token and head, one per channel of the key (KDA: row c of S decays by exp(g_tc)), or be absent
(no decay).  g = -inf is a hard reset: exp(g) = 0.  The exact result is defined on the inputs as rational numbers, with
subnormal inputs read as zero (TPUs flush them); `scale`, `norm_eps` and `beta_scale` are the binary64 numbers that they
are.  A packed batch holds several sequences, each with a state slot (`Sequences`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Bool, Float, Float32, Float64, Int

BF16 = np.dtype(ml_dtypes.bfloat16)
FP32 = np.dtype(np.float32)
SMALLEST_NORMAL = 2.0**-126
PADDED = -1
"""Slot of a padded entry: its sequence reads zeros and writes nowhere."""

ACTIVATIONS = ("silu", "none")


def widen(x: np.ndarray) -> Float64[np.ndarray, "*shape"]:
    """BF16 or FP32 words as the float64 numbers they stand for, subnormals read as (signed) zero."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        wide = x.astype(np.float64)
    return np.where(np.abs(wide) < SMALLEST_NORMAL, np.copysign(0.0, wide), wide)


@dataclasses.dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences packed along the token axis, and the slots that hold their states.

    Attributes:
        boundaries: cumulative lengths from 0, `[sequences + 1]`; tokens after the last belong to no sequence.
        read_slots: slot of each sequence's initial state; PADDED reads zeros.
        write_slots: slot that its final state goes to; PADDED writes nowhere.
        has_initial: False: the sequence starts from zero, whatever its slot holds.
        accepted: after how many of its tokens a sequence's state is taken (speculative tokens beyond it leave outputs
            but no state); None: after all.
    """

    boundaries: Int[np.ndarray, " sequences_plus_1"]
    read_slots: Int[np.ndarray, " sequences"]
    write_slots: Int[np.ndarray, " sequences"]
    has_initial: Bool[np.ndarray, " sequences"]
    accepted: Int[np.ndarray, " sequences"] | None = None

    def __post_init__(self) -> None:
        bounds = self.boundaries
        if bounds.ndim != 1 or len(bounds) < 1 or bounds[0] != 0 or np.any(np.diff(bounds) < 0):
            message = f"boundaries must be cumulative lengths from 0, got {bounds.tolist()}"
            raise ValueError(message)
        for name in ("read_slots", "write_slots", "has_initial", "accepted"):
            x = getattr(self, name)
            if x is not None and x.shape != (self.count,):
                message = f"{name} must have one entry for each of {self.count} sequences, got shape {x.shape}"
                raise ValueError(message)
        written = self.write_slots[self.write_slots != PADDED]
        if len(np.unique(written)) != len(written):
            message = f"write_slots must differ from each other, got {self.write_slots.tolist()}"
            raise ValueError(message)
        if self.accepted is not None and np.any((self.accepted < 0) | (self.accepted > self.lengths)):
            message = f"accepted must lie in 0..length of each sequence, got {self.accepted.tolist()}"
            raise ValueError(message)

    @classmethod
    def single(cls, tokens: int, *, initial: bool = True) -> Sequences:
        """One sequence of all tokens, with its state in slot 0."""
        slot = np.zeros(1, dtype=np.int64)
        return cls(np.array([0, tokens]), slot, slot, np.array([initial]))

    @classmethod
    def packed(cls, lengths: list[int]) -> Sequences:
        """Sequences of the given lengths, each with its state in the slot of its own number."""
        slots = np.arange(len(lengths))
        return cls(np.cumsum([0, *lengths]), slots, slots, np.ones(len(lengths), dtype=bool))

    @property
    def count(self) -> int:
        """How many sequences."""
        return len(self.boundaries) - 1

    @property
    def lengths(self) -> Int[np.ndarray, " sequences"]:
        """Tokens of each."""
        return np.diff(self.boundaries)

    def span(self, sequence: int) -> slice:
        """Its tokens."""
        return slice(int(self.boundaries[sequence]), int(self.boundaries[sequence + 1]))

    def taken(self, sequence: int) -> int:
        """After how many tokens its state is taken."""
        return int(self.lengths[sequence] if self.accepted is None else self.accepted[sequence])

    def initial_slot(self, sequence: int) -> int | None:
        """The slot of its initial state; None if it starts from zero."""
        slot = int(self.read_slots[sequence])
        return slot if slot != PADDED and self.has_initial[sequence] else None

    def written(self) -> Iterator[tuple[int, int]]:
        """(sequence, slot) of each final state."""
        for sequence, slot in enumerate(self.write_slots.tolist()):
            if slot != PADDED:
                yield sequence, slot


@dataclasses.dataclass(frozen=True, eq=False)
class DeltaRuleProblem:
    """Queries, keys, values and gates of a packed batch.

    Attributes:
        q: BF16 or FP32 `[tokens, n_kq, d_k]`.
        k: BF16 or FP32 `[tokens, n_kq, d_k]`; value head h reads query/key head h // (n_v // n_kq).
        v: BF16 or FP32 `[tokens, n_v, d_v]`.
        beta: FP32 `[tokens, n_v]`, write strength, finite.
        g: FP32 log-decay in nats, <= 0, `[tokens, n_v]` or per key channel `[tokens, n_v, d_k]`; None: no decay.
        state: FP32 `[slots, n_v, d_k, d_v]`.
        sequences: how the tokens are packed.
        scale: factor of the output.
    """

    q: Float[np.ndarray, "tokens n_kq d_k"]
    k: Float[np.ndarray, "tokens n_kq d_k"]
    v: Float[np.ndarray, "tokens n_v d_v"]
    beta: Float32[np.ndarray, "tokens n_v"]
    g: Float32[np.ndarray, "tokens n_v ..."] | None
    state: Float32[np.ndarray, "slots n_v d_k d_v"]
    sequences: Sequences
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("q", "k", "v"):
            _check_array(name, getattr(self, name), 3)
        if self.q.shape != self.k.shape or self.q.shape[0] != self.v.shape[0]:
            message = f"q, k, v must agree in tokens, got {self.q.shape}, {self.k.shape}, {self.v.shape}"
            raise ValueError(message)
        _check_heads(self.n_kq, self.n_v)
        _check_shape("beta", self.beta, (self.tokens, self.n_v))
        if self.g is not None:
            shape = (self.tokens, self.n_v, self.d_k)
            _check_shape("g", self.g, shape[: max(self.g.ndim, 2)])
            if np.any(self.g > 0):
                message = f"g is a natural-log decay and must not be positive, got {float(np.max(self.g))}"
                raise ValueError(message)
        _check_shape("state", self.state, (len(self.state), self.n_v, self.d_k, self.d_v))
        _check_sequences(self.sequences, self.tokens, len(self.state))
        if not math.isfinite(self.scale):
            message = f"scale must be finite, got {self.scale}"
            raise ValueError(message)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences, and of the padding behind them."""
        return self.q.shape[0]

    @property
    def n_kq(self) -> int:
        """Query/key heads."""
        return self.q.shape[1]

    @property
    def n_v(self) -> int:
        """Value heads."""
        return self.v.shape[1]

    @property
    def d_k(self) -> int:
        """Width of queries and keys."""
        return self.q.shape[2]

    @property
    def d_v(self) -> int:
        """Width of values and outputs."""
        return self.v.shape[2]

    @property
    def per_channel(self) -> bool:
        """Whether each key channel decays on its own (KDA)."""
        return self.g is not None and self.g.ndim == 3


@dataclasses.dataclass(frozen=True, eq=False)
class GdnProblem:
    """One layer call: projection, convolution, activations, gates and the delta rule.

    Attributes:
        qkv: BF16 or FP32 `[tokens, dim]`, dim = 2 n_kq d_k + n_v d_v: queries, keys, values, head by head.
        taps: BF16 or FP32 `[width, dim]`, oldest first.
        bias: of the convolution, BF16 or FP32 `[dim]`, or None.
        b: BF16 or FP32 `[tokens, n_v]`: beta before the sigmoid.
        a: BF16 or FP32 `[tokens, n_v]`, or `[tokens, n_v, d_k]` (KDA): what the log-decay is made from.
        a_log: FP32 `[n_v]`.
        dt_bias: FP32 `[n_v]`, or `[n_v, d_k]` for a per-channel a.
        conv_state: `[slots, width - 1, dim]`, oldest first, of qkv's dtype.
        state: FP32 `[slots, n_v, d_k, d_v]`.
        sequences: how the tokens are packed.
        heads: (n_kq, n_v, d_k, d_v).
        scale: factor of the output; a layer takes 1 / sqrt(d_k).
        norm_eps: stands inside the root, on the sum of squares; None leaves q and k as they are.
        beta_scale: 2 for models that allow negative eigenvalues.
        activation: "silu" or "none".
    """

    qkv: Float[np.ndarray, "tokens dim"]
    taps: Float[np.ndarray, "width dim"]
    bias: Float[np.ndarray, " dim"] | None
    b: Float[np.ndarray, "tokens n_v"]
    a: Float[np.ndarray, "tokens n_v ..."]
    a_log: Float32[np.ndarray, " n_v"]
    dt_bias: Float32[np.ndarray, "n_v ..."]
    conv_state: Float[np.ndarray, "slots width_minus_1 dim"]
    state: Float32[np.ndarray, "slots n_v d_k d_v"]
    sequences: Sequences
    heads: tuple[int, int, int, int]
    scale: float
    norm_eps: float | None = 1e-6
    beta_scale: float = 1.0
    activation: str = "silu"

    def __post_init__(self) -> None:
        n_kq, n_v, d_k, d_v = self.heads
        _check_heads(n_kq, n_v)
        for name, rank in (("qkv", 2), ("taps", 2), ("b", 2), ("a", self.a.ndim), ("conv_state", 3)):
            _check_array(name, getattr(self, name), rank)
        slots, dim = len(self.state), 2 * n_kq * d_k + n_v * d_v
        channels = (d_k,) * (self.a.ndim - 2)
        shapes = {
            "qkv": (self.tokens, dim),
            "taps": (self.width, dim),
            "b": (self.tokens, n_v),
            "a": (self.tokens, n_v, *channels),
            "a_log": (n_v,),
            "dt_bias": (n_v, *channels),
            "conv_state": (slots, self.width - 1, dim),
            "state": (slots, n_v, d_k, d_v),
        }
        if self.bias is not None:
            shapes["bias"] = (dim,)
        for name, shape in shapes.items():
            _check_shape(name, getattr(self, name), shape)
        if self.conv_state.dtype != self.qkv.dtype:
            message = f"conv_state must have the dtype of qkv, {self.qkv.dtype}, got {self.conv_state.dtype}"
            raise ValueError(message)
        _check_sequences(self.sequences, self.tokens, slots)
        if self.activation not in ACTIVATIONS:
            message = f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}"
            raise ValueError(message)
        if self.norm_eps is not None and not 0.0 <= self.norm_eps < math.inf:
            message = f"norm_eps must be None, or finite and not negative, got {self.norm_eps}"
            raise ValueError(message)
        for name in ("scale", "beta_scale"):
            if not math.isfinite(getattr(self, name)):
                message = f"{name} must be finite, got {getattr(self, name)}"
                raise ValueError(message)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences, and of the padding behind them."""
        return self.qkv.shape[0]

    @property
    def width(self) -> int:
        """Taps of the convolution."""
        return self.taps.shape[0]

    @property
    def per_channel(self) -> bool:
        """Whether each key channel decays on its own (KDA)."""
        return self.a.ndim == 3

    def split(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, k `[tokens, n_kq, d_k]` and v `[tokens, n_v, d_v]` of an array `[tokens, dim]`."""
        n_kq, n_v, d_k, d_v = self.heads
        width = n_kq * d_k
        q, k, v = x[:, :width], x[:, width : 2 * width], x[:, 2 * width :]
        return q.reshape(-1, n_kq, d_k), k.reshape(-1, n_kq, d_k), v.reshape(-1, n_v, d_v)


Problem = DeltaRuleProblem | GdnProblem


def shapes(problem: Problem) -> tuple[int, int, int, int]:
    """(n_kq, n_v, d_k, d_v)."""
    if isinstance(problem, GdnProblem):
        return problem.heads
    return problem.n_kq, problem.n_v, problem.d_k, problem.d_v


def value_lanes(problem: Problem, lanes: Int[np.ndarray, " lanes"]) -> Problem:
    """The problem of some lanes of every value head alone: a column of the state depends on no other column of v."""
    state = problem.state[..., lanes]
    if isinstance(problem, DeltaRuleProblem):
        return dataclasses.replace(problem, v=problem.v[..., lanes], state=state)
    n_kq, n_v, d_k, d_v = problem.heads
    values = 2 * n_kq * d_k + np.add.outer(np.arange(n_v) * d_v, lanes).ravel()
    columns = np.concatenate([np.arange(2 * n_kq * d_k), values])
    return dataclasses.replace(
        problem,
        qkv=problem.qkv[:, columns],
        taps=problem.taps[:, columns],
        bias=None if problem.bias is None else problem.bias[columns],
        conv_state=problem.conv_state[..., columns],
        state=state,
        heads=(n_kq, n_v, d_k, len(lanes)),
    )


def final_conv_state(problem: GdnProblem) -> np.ndarray:
    """What the convolution state is afterwards, all slots, `[slots, width - 1, dim]`: a matter of copying words.

    A written slot holds the last width - 1 of (initial state, accepted tokens); the other slots are as before.
    """
    after = problem.conv_state.copy()
    keep = problem.width - 1
    for sequence, slot in problem.sequences.written():
        source = problem.sequences.initial_slot(sequence)
        before = np.zeros_like(after[0]) if source is None else problem.conv_state[source]
        start = problem.sequences.span(sequence).start
        rows = problem.qkv[start : start + problem.sequences.taken(sequence)]
        together = np.concatenate([before, rows])
        after[slot] = together[len(together) - keep :]
    return after


def _check_array(name: str, x: np.ndarray, rank: int) -> None:
    if x.dtype not in (BF16, FP32) or x.ndim != rank:
        message = f"{name} must be BF16 or FP32 of rank {rank}, got {x.dtype} of rank {x.ndim}"
        raise ValueError(message)


def _check_shape(name: str, x: np.ndarray, shape: tuple[int, ...]) -> None:
    if x.shape != shape or x.dtype not in (BF16, FP32):
        message = f"{name} must be BF16 or FP32 {list(shape)}, got {x.dtype} {list(x.shape)}"
        raise ValueError(message)


def _check_heads(n_kq: int, n_v: int) -> None:
    if n_kq < 1 or n_v % n_kq:
        message = f"n_v must be a multiple of n_kq, got {n_v} and {n_kq}"
        raise ValueError(message)


def _check_sequences(sequences: Sequences, tokens: int, slots: int) -> None:
    if sequences.boundaries[-1] > tokens:
        message = f"boundaries must end within {tokens} tokens, got {sequences.boundaries.tolist()}"
        raise ValueError(message)
    for name in ("read_slots", "write_slots"):
        x = getattr(sequences, name)
        if np.any((x < PADDED) | (x >= slots)):
            message = f"{name} must be {PADDED} or below {slots}, got {x.tolist()}"
            raise ValueError(message)

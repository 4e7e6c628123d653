"""Small Gated DeltaNet problems in which every number can be followed by hand."""

from __future__ import annotations

import numpy as np

from verify.gdn.problem import BF16, DeltaRuleProblem, GdnProblem, Sequences

LAYER_HEADS = (1, 1, 128, 128)
"""(n_kq, n_v, d_k, d_v) that kernels of layers take."""


def scalar(
    v: list[float],
    *,
    beta: float | list[float] = 0.5,
    g: float | list[float] = 0.0,
    state: tuple[float, ...] = (0.0,),
    sequences: Sequences | None = None,
) -> DeltaRuleProblem:
    """d_k = d_v = 1, q = k = 1: the recurrence in numbers."""
    tokens = len(v)
    ones = np.ones((tokens, 1, 1), np.float32)
    values = np.array(v, np.float32).reshape(tokens, 1, 1)
    gates = [np.broadcast_to(np.asarray(x, np.float32), (tokens,)).reshape(tokens, 1).copy() for x in (beta, g)]
    slots = np.array(state, np.float32).reshape(-1, 1, 1, 1)
    return DeltaRuleProblem(ones, ones, values, gates[0], gates[1], slots, sequences or Sequences.single(tokens))


def layer(
    v: list[float],
    *,
    b: float | list[float] = 0.0,
    a: float | list[float] = -200.0,
    a_log: float = 0.0,
    keys: np.ndarray | None = None,
    state: tuple[float, ...] = (0.0,),
    sequences: Sequences | None = None,
) -> GdnProblem:
    """A layer of LAYER_HEADS whose keys and queries are one direction (or `keys`), and whose values are silu(v).

    With a = -200 the decay is 1 to every digit that FP32 has; b is the logit of beta.
    """
    tokens, (_, _, d_k, d_v) = len(v), LAYER_HEADS
    rows = np.zeros((tokens, d_k)) if keys is None else keys
    if keys is None:
        rows[:, 0] = 4.0
    values = np.repeat(np.array(v, np.float64)[:, None], d_v, axis=1)
    dim = 2 * d_k + d_v
    taps = np.zeros((4, dim))
    taps[-1] = 1.0
    logits = [np.broadcast_to(np.asarray(x, np.float64), (tokens,)).reshape(tokens, 1) for x in (b, a)]
    slots = len(state)
    return GdnProblem(
        qkv=np.concatenate([rows, rows, values], axis=1).astype(BF16),
        taps=taps.astype(BF16),
        bias=None,
        b=logits[0].astype(BF16),
        a=logits[1].astype(BF16),
        a_log=np.full(1, a_log, np.float32),
        dt_bias=np.zeros(1, np.float32),
        conv_state=np.zeros((slots, 3, dim), BF16),
        state=np.broadcast_to(np.array(state, np.float32)[:, None, None, None], (slots, 1, d_k, d_v)).copy(),
        sequences=sequences or Sequences.single(tokens),
        heads=LAYER_HEADS,
        scale=d_k**-0.5,
    )


def equal_keys(beta: float, g: float, tokens: int = 64) -> np.ndarray:
    """(I + L)^-1 for one unit key repeated: -beta exp(g (i - j)) (1 - beta)^(i - j - 1) below the diagonal."""
    i, j = np.indices((tokens, tokens))
    distance = i - j
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        below = -beta * np.exp(g * distance) * (1.0 - beta) ** np.maximum(distance - 1, 0)
    return np.where(distance > 0, below, np.where(distance == 0, 1.0, 0.0))


def convolving(lengths: list[int], *, target: int = 0) -> GdnProblem:
    """Case F9 of one call: width 4, taps 1, 10, 100, 1000, x = 1 .. 6, no activation; y is read through v.

    Queries and keys are 1 (a bias), beta is 1: the state holds the last value, which is the output.
    """
    tokens = sum(lengths)
    qkv = np.zeros((tokens, 3))
    qkv[:, 2] = np.arange(1, tokens + 1)
    taps = np.zeros((4, 3))
    taps[:, 2] = [1, 10, 100, 1000]
    slots = np.arange(len(lengths)) + target
    sequences = Sequences(
        np.cumsum([0, *lengths]), np.zeros(len(lengths), np.int64), slots, np.ones(len(lengths), bool)
    )
    return GdnProblem(
        qkv=qkv.astype(np.float32),
        taps=taps.astype(np.float32),
        bias=np.array([1.0, 1.0, 0.0], np.float32),
        b=np.full((tokens, 1), np.inf, np.float32),
        a=np.full((tokens, 1), -np.inf, np.float32),
        a_log=np.zeros(1, np.float32),
        dt_bias=np.zeros(1, np.float32),
        conv_state=np.zeros((2, 3, 3), np.float32),
        state=np.zeros((2, 1, 1, 1), np.float32),
        sequences=sequences,
        heads=(1, 1, 1, 1),
        scale=1.0,
        norm_eps=None,
        activation="none",
    )


def normed(entries: float, eps: float | None) -> GdnProblem:
    """Case F10: 128 equal entries of q, read through the state I (k = 0, no decay)."""
    d = 128
    qkv = np.zeros((1, 3 * d), np.float32)
    qkv[0, :d] = entries
    return GdnProblem(
        qkv=qkv,
        taps=np.ones((1, 3 * d), np.float32),
        bias=None,
        b=np.zeros((1, 1), np.float32),
        a=np.full((1, 1), -np.inf, np.float32),
        a_log=np.zeros(1, np.float32),
        dt_bias=np.zeros(1, np.float32),
        conv_state=np.zeros((1, 0, 3 * d), np.float32),
        state=np.eye(d, dtype=np.float32)[None, None],
        sequences=Sequences.single(1),
        heads=(1, 1, d, d),
        scale=1.0,
        norm_eps=eps,
        activation="none",
    )

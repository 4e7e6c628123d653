"""A user's kernel with one mistake at a time, each loaded by name as a user would."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from verify.subjects import Arithmetic, Features, subject

LOG2_E = 1.4426950408889634
BLOCK = 128


def _attention(q: Any, k: Any, v: Any, *, causal: bool, scale: float, mistake: str) -> Any:
    group, heads, q_len, kv_len = q.shape[1] // k.shape[1], q.shape[1], q.shape[2], k.shape[2]
    chosen = jnp.arange(heads) % k.shape[1] if mistake == "tiled heads" else jnp.arange(heads) // group
    k, v = k[:, chosen], v[:, chosen]
    s = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32)
    s = s * (1.0 if mistake == "no scale" else scale)
    offset = 0 if mistake == "top-left" else kv_len - q_len
    seen = jnp.tril(jnp.ones((q_len, kv_len), bool), offset) if causal else jnp.ones((q_len, kv_len), bool)
    m = jnp.max(s, axis=-1, keepdims=True, where=seen, initial=-1e30)
    p = jnp.where(seen, jnp.exp(s - m), 0.0)
    total = p.sum(axis=-1, keepdims=True)
    lse = jnp.where(total > 0, m + jnp.log(total), -jnp.inf)[..., 0]
    weights = p.astype(jnp.bfloat16)
    if mistake == "BF16 accumulator":
        out = jnp.zeros(q.shape, jnp.bfloat16)
        for start in range(0, kv_len, BLOCK):
            keys = slice(start, start + BLOCK)
            part = jnp.einsum("bhqk,bhkd->bhqd", weights[..., keys], v[:, :, keys], preferred_element_type=jnp.float32)
            out = out + part.astype(jnp.bfloat16)
        out = out.astype(jnp.float32)
    else:
        out = jnp.einsum("bhqk,bhkd->bhqd", weights, v, preferred_element_type=jnp.float32)
    divisor = jnp.roll(total, -1, axis=2) if mistake == "wrong row" else total
    out = jnp.where(divisor > 0, out / divisor, 0.0).astype(jnp.bfloat16)
    return out, lse * LOG2_E if mistake == "LSE in log2" else lse


def _declared(mistake: str) -> Any:
    return subject(
        name=mistake,
        features=Features(lse="fp32"),
        arithmetic=Arithmetic(weights="bf16", exponential="exp", block_kv=None),
    )(functools.partial(jax.jit(_attention, static_argnames=("causal", "scale", "mistake")), mistake=mistake))


def _masked(q: Any, k: Any, v: Any, seen: Any, scale: float) -> Any:
    """Attention under a mask `[batch, q_len, kv_len]`."""
    group = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
    s = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32) * scale
    s = jnp.where(seen[:, None], s, -jnp.inf)
    m = jnp.maximum(s.max(axis=-1, keepdims=True), -1e30)
    p = jnp.exp(s - m)
    total = p.sum(axis=-1, keepdims=True)
    out = jnp.einsum("bhqk,bhkd->bhqd", p.astype(jnp.bfloat16), v, preferred_element_type=jnp.float32)
    return jnp.where(total > 0, out / total, 0.0).astype(jnp.bfloat16)


def _windowed(q: Any, k: Any, v: Any, *, causal: bool, scale: float, window: Any = (None, None), mistake: str) -> Any:
    """Positions are stored in 32 bits, or by mistake in 16."""
    stored = jnp.int16 if mistake == "int16 positions" else jnp.int32
    keys = jnp.arange(k.shape[2]).astype(stored).astype(jnp.int32)
    rows = (jnp.arange(q.shape[2]) + k.shape[2] - q.shape[2]).astype(stored).astype(jnp.int32)
    distance = keys[None] - rows[:, None]
    left, right = window
    seen = distance <= 0 if causal else jnp.ones(distance.shape, bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return _masked(q, k, v, seen[None], scale)


def _ragged(
    q: Any, k: Any, v: Any, *, causal: bool, scale: float, q_segments: Any = None, k_segments: Any = None,
    q_positions: Any = None, mistake: str,
) -> Any:  # fmt: skip
    """A causal mask within each sequence, aligned as the caller says, or by mistake top-left."""
    if q_segments is None:
        q_segments, k_segments = (jnp.zeros((x.shape[0], x.shape[2]), jnp.int32) for x in (q, k))
    same = q_segments[:, :, None] == k_segments[:, None, :]
    keys = jnp.arange(k.shape[2])[None]
    if mistake == "top-left in each sequence":
        local = (q_segments[:, :, None] == q_segments[:, None, :]) & jnp.tri(q.shape[2], k=-1, dtype=bool)
        first = jnp.where(same, keys[:, None], k.shape[2]).min(axis=2)
        aligned = first + local.sum(axis=2)
    elif q_positions is None:
        aligned = jnp.arange(q.shape[2])[None] + k.shape[2] - q.shape[2]
    else:
        aligned = q_positions
    seen = same & (keys[:, None] <= aligned[:, :, None]) if causal else same
    return _masked(q, k, v, seen, scale)


def _featured(function: Any, features: Features, mistake: str) -> Any:
    return subject(
        name=mistake or "right",
        features=features,
        arithmetic=Arithmetic(weights="bf16", exponential="exp", block_kv=None),
    )(functools.partial(function, mistake=mistake))


WINDOWED, INT16_POSITIONS = (_featured(_windowed, Features(window=True), name) for name in ("", "int16 positions"))
RAGGED, TOP_LEFT_RAGGED = (
    _featured(_ragged, Features(segments=True, positions=True), name) for name in ("", "top-left in each sequence")
)

RIGHT = _declared("right")
TOP_LEFT = _declared("top-left")
TILED_HEADS = _declared("tiled heads")
NO_SCALE = _declared("no scale")
LOG2_LSE = _declared("LSE in log2")
WRONG_ROW = _declared("wrong row")
BF16_ACCUMULATOR = _declared("BF16 accumulator")


def plain(q: Any, k: Any, v: Any, *, causal: bool, scale: float) -> Any:
    """A function without a declaration: the defaults of `Subject` hold."""
    return _attention(q, k, v, causal=causal, scale=scale, mistake="")[0]


@subject(layout="bthd", features=Features(lse="fp32"))
def reads_another_layout(q: Any, k: Any, v: Any, *, causal: bool, scale: float) -> Any:
    """Declares [batch, tokens, heads, head_dim] and computes on [batch, heads, tokens, head_dim]."""
    return _attention(q, k, v, causal=causal, scale=scale, mistake="")


@subject(features=Features(lse="fp32", grouped_heads=False))
def swaps_batch_and_heads(q: Any, k: Any, v: Any, *, causal: bool, scale: float) -> Any:
    """The right numbers with two axes of the result exchanged."""
    out, lse = _attention(q, k, v, causal=causal, scale=scale, mistake="")
    return out.swapaxes(0, 1).reshape(out.shape), lse.swapaxes(0, 1).reshape(lse.shape)


@subject(features=Features(lse="fp32"))
def raises(q: Any, k: Any, v: Any, *, causal: bool, scale: float) -> Any:
    """Fails as a kernel with a bug does."""
    del q, k, v, causal, scale
    message = "no such thing"
    raise KeyError(message)


@subject(features=Features(lse="fp32"))
def refuses(q: Any, k: Any, v: Any, *, causal: bool, scale: float) -> Any:
    """Refuses every input."""
    del q, k, v, causal, scale
    message = "lowering: unsupported shape"
    raise NotImplementedError(message)

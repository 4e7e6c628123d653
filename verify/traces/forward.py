"""Forward pass of a LLaMA-style transformer in numpy, float64 throughout.

Float64 is what makes a capture repeatable: BLAS libraries sum in different orders, so FP32 results differ by processor
and would flip BF16 words; float64 results differ by about 1e-13 and practically never cross a rounding boundary.

Per layer, with x of shape [tokens, width] (Touvron et al., "LLaMA: Open and Efficient Foundation Language Models",
2023):

    q, k, v = split(rms_norm(x) Wq'), split(rms_norm(x) Wk'), split(rms_norm(x) Wv')
    x += attend(rotate(q), rotate(k), v) Wo'
    x += (silu(rms_norm(x) Wg') * (rms_norm(x) Wu')) Wd'
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float64, Int

type Rotary = Literal["interleaved", "half-split"]
"""Which two components of a head turn together: (2i, 2i+1), or (i, i + head_dim / 2)."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Shape and constants of a model.

    Attributes:
        layers: transformer blocks.
        heads: query heads.
        kv_heads: key-value heads; query head h reads KV head h // (heads // kv_heads).
        head_dim: size of a head.
        rms_epsilon: added to the mean square in `rms_norm`.
        rotary_base: component pair i of position p turns by the angle p * rotary_base ** (-2i / head_dim).
        context: tokens that the model was made for.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_epsilon: float
    rotary_base: float
    context: int


def rms_norm(
    x: Float64[np.ndarray, "tokens width"], weight: Float64[np.ndarray, " width"], epsilon: float
) -> Float64[np.ndarray, "tokens width"]:
    """x over its root mean square, times the weight (Zhang and Sennrich, 2019)."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight


def rotate(
    x: Float64[np.ndarray, "heads tokens head_dim"], base: float, rotary: Rotary
) -> Float64[np.ndarray, "heads tokens head_dim"]:
    """Rotary position embedding (Su et al., 2021), positions 0, 1, ..."""
    tokens, head_dim = x.shape[-2:]
    half = head_dim // 2
    angle = np.arange(tokens)[:, None] * base ** (-np.arange(half) / half)
    first, second = (
        (slice(0, None, 2), slice(1, None, 2)) if rotary == "interleaved" else (slice(0, half), slice(half, None))
    )
    result = np.empty_like(x)
    result[..., first] = x[..., first] * np.cos(angle) - x[..., second] * np.sin(angle)
    result[..., second] = x[..., first] * np.sin(angle) + x[..., second] * np.cos(angle)
    return result


def attend(
    q: Float64[np.ndarray, "heads tokens head_dim"],
    k: Float64[np.ndarray, "kv_heads tokens head_dim"],
    v: Float64[np.ndarray, "kv_heads tokens head_dim"],
) -> Float64[np.ndarray, "heads tokens head_dim"]:
    """Causal softmax attention, scale head_dim ** -0.5."""
    group = len(q) // len(k)
    k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
    z = q @ k.swapaxes(1, 2) * q.shape[-1] ** -0.5
    z = np.where(np.tri(z.shape[-1], dtype=bool), z, -np.inf)
    p = np.exp(z - z.max(axis=-1, keepdims=True))
    return p @ v / p.sum(axis=-1, keepdims=True)


def gated_mlp(
    x: Float64[np.ndarray, "tokens width"], gate: np.ndarray, up: np.ndarray, down: np.ndarray
) -> Float64[np.ndarray, "tokens width"]:
    """(silu(x Wg') * (x Wu')) Wd'."""
    gated = x @ gate.T
    # silu by tanh: exp(-x) would overflow at the far end of the negative side.
    return (gated * 0.5 * (1.0 + np.tanh(0.5 * gated)) * (x @ up.T)) @ down.T


def forward(
    config: Config,
    weight: Callable[[str], Float64[np.ndarray, "..."]],
    tokens: Int[np.ndarray, " tokens"],
    observe: Callable[[int, np.ndarray, np.ndarray, np.ndarray], None],
    rotary: Rotary = "interleaved",
) -> Float64[np.ndarray, "tokens width"]:
    """Run every layer.

    Args:
        config: shape and constants.
        weight: gives a weight, `[out, in]` or `[width]`, by its GGUF name without the suffix `.weight`.
        tokens: vocabulary indices.
        observe: called once per layer, in order, with the layer's index and q `[heads, tokens, head_dim]`,
            k and v `[kv_heads, tokens, head_dim]`, q and k after the rotary step.
        rotary: which components turn together; GGUF files of LLaMA models hold q and k permuted for `interleaved`.

    Returns:
        The last hidden state after the output norm.
    """
    x = weight("token_embd")[tokens]

    def split(y: np.ndarray) -> np.ndarray:
        return y.reshape(len(tokens), -1, config.head_dim).swapaxes(0, 1)

    for index in range(config.layers):
        block = f"blk.{index}"
        h = rms_norm(x, weight(f"{block}.attn_norm"), config.rms_epsilon)
        q, k, v = (split(h @ weight(f"{block}.attn_{part}").T) for part in "qkv")
        q, k = rotate(q, config.rotary_base, rotary), rotate(k, config.rotary_base, rotary)
        observe(index, q, k, v)
        heads = attend(q, k, v).swapaxes(0, 1).reshape(len(tokens), -1)
        x = x + heads @ weight(f"{block}.attn_output").T
        h = rms_norm(x, weight(f"{block}.ffn_norm"), config.rms_epsilon)
        x = x + gated_mlp(h, *(weight(f"{block}.ffn_{part}") for part in ("gate", "up", "down")))
    return rms_norm(x, weight("output_norm"), config.rms_epsilon)


def mean_loss(
    hidden: Float64[np.ndarray, "tokens width"],
    head: Float64[np.ndarray, "vocabulary width"],
    tokens: Int[np.ndarray, " tokens"],
) -> float:
    """Mean of -ln P(token i+1 | tokens 0..i), in nats, over all but the last position."""
    logits = hidden[:-1] @ head.T
    largest = logits.max(axis=-1)
    lse = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=-1))
    return float(np.mean(lse - logits[np.arange(len(tokens) - 1), tokens[1:]]))

"""Gradient problems for tests: ordinary ones, and adversarial draws that stress an error bound."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from verify.attention.gradients.problem import GradientProblem, causal_rows, dense_rows, full_rows
from verify.attention.problem import BF16

LARGEST = 3.0e38

Arrays = dict[str, np.ndarray]


def bf16(x: object) -> np.ndarray:
    """Numbers of any type, clipped to what BF16 holds, as BF16."""
    return np.clip(np.asarray(x, dtype=np.float64), -LARGEST, LARGEST).astype(BF16)


def fp32(x: object) -> np.ndarray:
    """Numbers of any type, clipped to what FP32 holds, as FP32."""
    return np.clip(np.asarray(x, dtype=np.float64), -LARGEST, LARGEST).astype(np.float32)


def normal_problem(
    seed: int,
    *,
    batch: int = 1,
    heads: int = 6,
    kv_heads: int = 2,
    q_len: int = 7,
    kv_len: int = 9,
    head_dim: int = 5,
    v_dim: int = 3,
    causal: bool = True,
    **options: Any,
) -> GradientProblem:
    """Normally distributed inputs; all dimensions differ by default."""
    rng = np.random.default_rng(seed)
    rows = causal_rows if causal else full_rows
    return GradientProblem(
        q=bf16(rng.standard_normal((batch, heads, q_len, head_dim))),
        k=bf16(rng.standard_normal((batch, kv_heads, kv_len, head_dim))),
        v=bf16(rng.standard_normal((batch, kv_heads, kv_len, v_dim))),
        d_out=fp32(rng.standard_normal((batch, heads, q_len, v_dim))),
        mask=rows(q_len, kv_len),
        scale=options.pop("scale", head_dim**-0.5),
        **options,
    )


def rich_problem(seed: int, **options: Any) -> GradientProblem:
    """Normally distributed inputs with every option on."""
    problem = normal_problem(seed, batch=2, **options)
    rng = np.random.default_rng(seed + 1000)
    return dataclasses.replace(
        problem,
        d_lse=fp32(rng.standard_normal(problem.q.shape[:3])),
        sinks=fp32(rng.standard_normal(problem.heads)),
        softcap=2.5,
    )


def adversarial_problem(seed: int) -> GradientProblem:
    """A small problem with one or several traits that stress an error bound, random masks and random options."""
    rng = np.random.default_rng(seed)
    kv_heads = int(rng.integers(1, 3))
    heads = kv_heads * int(rng.integers(1, 4))
    q_len, kv_len = int(rng.integers(1, 6)), int(rng.choice([1, 2, 3, 9, 17]))
    head_dim, v_dim = int(rng.choice([1, 2, 8, 33])), int(rng.choice([1, 3, 8]))
    arrays = {
        "q": rng.standard_normal((1, heads, q_len, head_dim)) * 2.0 ** rng.integers(-10, 8),
        "k": rng.standard_normal((1, kv_heads, kv_len, head_dim)) * 2.0 ** rng.integers(-6, 6),
        "v": rng.standard_normal((1, kv_heads, kv_len, v_dim)),
        "d_out": rng.standard_normal((1, heads, q_len, v_dim)),
        "d_lse": rng.standard_normal((1, heads, q_len)) * 2.0 ** rng.integers(-8, 8),
        "sinks": rng.standard_normal(heads) * 2.0 ** rng.integers(-3, 8),
    }
    for trait in rng.choice(list(TRAITS), size=int(rng.integers(0, 4)), replace=False):
        TRAITS[trait](rng, arrays)
    scales = [head_dim**-0.5, 1.0, -0.75, 2.0**-40, 2.0**40, 0.0]
    cotangent = fp32 if rng.integers(2) else bf16
    softcap = None if rng.integers(3) else float(rng.choice([0.125, 3.0, 50.0, 2.0**60]))
    with_sinks = bool(rng.integers(2))
    if with_sinks and not rng.integers(4):
        arrays["sinks"][int(rng.integers(heads))] = -np.inf
    return GradientProblem(
        **{name: bf16(arrays[name]) for name in ("q", "k", "v")},
        d_out=cotangent(arrays["d_out"]),
        mask=_mask(rng, q_len, kv_len),
        scale=float(rng.choice(scales, p=[0.6, 0.2, 0.05, 0.05, 0.05, 0.05])),
        d_lse=fp32(arrays["d_lse"]) if rng.integers(2) else None,
        sinks=arrays["sinks"].astype(np.float32) if with_sinks else None,
        softcap=softcap,
    )


def _mask(rng: np.random.Generator, q_len: int, kv_len: int) -> Any:
    kind = rng.integers(4)
    if kind == 0:
        return causal_rows(q_len, kv_len)
    if kind == 1:
        return full_rows(q_len, kv_len)
    if kind == 2:
        segments = np.sort(rng.integers(0, 3, kv_len))
        return dense_rows(rng.integers(0, 3, q_len)[:, None] == segments)
    return dense_rows(rng.random((q_len, kv_len)) < 0.6)


def _huge_logits(rng: np.random.Generator, arrays: Arrays) -> None:
    arrays["k"][:, :, rng.integers(arrays["k"].shape[2])] *= 2.0 ** rng.integers(20, 60)
    arrays["q"] *= 2.0 ** rng.integers(10, 41)


def _large_logits(rng: np.random.Generator, arrays: Arrays) -> None:
    arrays["q"] *= 2.0 ** rng.integers(10, 30)


def _repeated_keys(rng: np.random.Generator, arrays: Arrays) -> None:
    k = arrays["k"]
    arrays["k"] = k[:, :, rng.integers(min(2, k.shape[2]), size=k.shape[2])]


def _near_keys(rng: np.random.Generator, arrays: Arrays) -> None:
    k = np.repeat(arrays["k"][:, :, :1], arrays["k"].shape[2], axis=2)
    k[..., 0] *= 1.0 + rng.integers(0, 3, k.shape[:3]) * 2.0**-7
    arrays["k"] = k


def _cancelling_lanes(rng: np.random.Generator, arrays: Arrays) -> None:
    if arrays["k"].shape[3] < 2:
        return
    size = 2.0 ** rng.integers(10, 50)
    arrays["q"][..., 0], arrays["q"][..., -1] = size, -size
    arrays["k"][..., -1] = arrays["k"][..., 0]


def _equal_logits(_rng: np.random.Generator, arrays: Arrays) -> None:
    arrays["k"] = np.zeros_like(arrays["k"])


def _wide_values(rng: np.random.Generator, arrays: Arrays) -> None:
    arrays["v"] = np.sign(arrays["v"]) * 2.0 ** rng.integers(-100, 128, size=arrays["v"].shape)


def _equal_values(_rng: np.random.Generator, arrays: Arrays) -> None:
    arrays["v"] = np.repeat(arrays["v"][:, :, :1], arrays["v"].shape[2], axis=2)


def _wide_cotangents(rng: np.random.Generator, arrays: Arrays) -> None:
    arrays["d_out"] = np.sign(arrays["d_out"]) * 2.0 ** rng.integers(-120, 127, size=arrays["d_out"].shape)


def _orthogonal_cotangents(rng: np.random.Generator, arrays: Arrays) -> None:
    """Every dP cancels to almost nothing."""
    if arrays["v"].shape[3] < 2:
        return
    arrays["v"][..., 1] = arrays["v"][..., 0] * (1.0 + 2.0**-7 * rng.integers(0, 2))
    arrays["d_out"][..., 1] = -arrays["d_out"][..., 0]
    arrays["d_out"] *= 2.0 ** rng.integers(0, 60)


def _smallest_inputs(_rng: np.random.Generator, arrays: Arrays) -> None:
    """Cotangents, values and keys at the smallest normal number, so that products underflow float64's range early."""
    for name in ("d_out", "v", "k"):
        arrays[name] = np.sign(arrays[name]) * 2.0**-126


def _underflowing_weights(_rng: np.random.Generator, arrays: Arrays) -> None:
    arrays["k"][..., 0] = -np.arange(arrays["k"].shape[2]) * 16.0
    arrays["q"][..., 0] = 64.0


def _dominant_sinks(rng: np.random.Generator, arrays: Arrays) -> None:
    arrays["sinks"] = np.full_like(arrays["sinks"], 2.0 ** rng.integers(5, 60))


def _huge_lse_cotangents(rng: np.random.Generator, arrays: Arrays) -> None:
    arrays["d_lse"] *= 2.0 ** rng.integers(10, 100)


TRAITS = {
    "huge logits": _huge_logits,
    "large logits": _large_logits,
    "repeated keys": _repeated_keys,
    "near keys": _near_keys,
    "cancelling lanes": _cancelling_lanes,
    "equal logits": _equal_logits,
    "wide values": _wide_values,
    "equal values": _equal_values,
    "wide cotangents": _wide_cotangents,
    "orthogonal cotangents": _orthogonal_cotangents,
    "smallest inputs": _smallest_inputs,
    "underflowing weights": _underflowing_weights,
    "dominant sinks": _dominant_sinks,
    "huge LSE cotangents": _huge_lse_cotangents,
}

"""Problems for testing oracles: closed forms, and adversarial draws that stress an error bound."""

from __future__ import annotations

import dataclasses

import numpy as np

from verify.attention import oracle_float64
from verify.attention.problem import BF16, AttentionProblem


def problem(q: object, k: object, v: object, *, causal: bool, scale: float = 1.0) -> AttentionProblem:
    """A problem from nested lists or arrays of any number type."""
    arrays = [np.asarray(x, dtype=np.float64).astype(BF16) for x in (q, k, v)]
    return AttentionProblem(*arrays, causal=causal, scale=scale)


def normal_problem(
    seed: int,
    *,
    heads: int = 2,
    kv_heads: int = 2,
    q_len: int = 32,
    kv_len: int = 32,
    head_dim: int = 16,
    causal: bool = True,
) -> AttentionProblem:
    """Normally distributed queries, keys and values."""
    rng = np.random.default_rng(seed)
    shapes = ((1, heads, q_len, head_dim), (1, kv_heads, kv_len, head_dim), (1, kv_heads, kv_len, head_dim))
    return problem(*(rng.standard_normal(shape) for shape in shapes), causal=causal, scale=head_dim**-0.5)


def adversarial_problem(seed: int) -> AttentionProblem:
    """A small problem with one or several traits that stress an error bound.

    Traits: logits up to 2^100 and far beyond FP32, repeated keys, keys that differ in one unit of one lane, cancelling
    lanes, equal logits, values from 2^-100 to 2^127 with mixed signs, one key, empty rows, grouped heads, scales from
    2^-40 to 2^40 of either sign, sparse lanes.
    """
    rng = np.random.default_rng(seed)
    kv_heads = int(rng.integers(1, 3))
    heads = kv_heads * int(rng.integers(1, 4))
    q_len, kv_len = int(rng.integers(1, 6)), int(rng.choice([1, 2, 3, 9, 17, 40]))
    dims = int(rng.choice([1, 2, 8, 33]))
    q = rng.standard_normal((1, heads, q_len, dims)) * 2.0 ** rng.integers(-10, 8)
    k = rng.standard_normal((1, kv_heads, kv_len, dims)) * 2.0 ** rng.integers(-6, 6)
    v = rng.standard_normal((1, kv_heads, kv_len, dims))
    for trait in rng.choice(list(TRAITS), size=int(rng.integers(0, 4)), replace=False):
        q, k, v = TRAITS[trait](rng, q, k, v)
    scale = float(rng.choice([dims**-0.5, 1.0, -0.75, 2.0**-40, 2.0**40, 0.0], p=[0.6, 0.2, 0.05, 0.05, 0.05, 0.05]))
    largest = 3.0e38  # values beyond BF16 would become infinite
    q, k, v = (np.clip(x, -largest, largest) for x in (q, k, v))
    return problem(q, k, v, causal=bool(rng.integers(2)), scale=scale)


def _huge_logits(rng: np.random.Generator, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    k = k.copy()
    k[:, :, rng.integers(k.shape[2])] *= 2.0 ** rng.integers(20, 60)
    return q * 2.0 ** rng.integers(10, 41), k, v


def _repeated_keys(rng: np.random.Generator, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    return q, k[:, :, rng.integers(min(2, k.shape[2]), size=k.shape[2])], v


def _near_keys(rng: np.random.Generator, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    k = np.repeat(k[:, :, :1], k.shape[2], axis=2)
    k[..., 0] *= 1.0 + rng.integers(0, 3, k.shape[:3]) * 2.0**-7
    return q, k, v


def _cancelling_lanes(rng: np.random.Generator, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    if k.shape[3] < 2:
        return q, k, v
    q, k = q.copy(), k.copy()
    size = 2.0 ** rng.integers(10, 50)
    q[..., 0], q[..., -1] = size, -size  # what lies between is added to the large product, and lost
    k[..., -1] = k[..., 0]
    return q, k, v


def _one_cancelling_key(
    rng: np.random.Generator, q: np.ndarray, k: np.ndarray, v: np.ndarray
) -> tuple[np.ndarray, ...]:
    q, k, v = _cancelling_lanes(rng, q, k, v)
    others = np.arange(k.shape[2]) != rng.integers(k.shape[2])
    k[:, :, others, 0] = k[:, :, others, -1] = 0.0
    return q, k, v


def _equal_logits(_rng: np.random.Generator, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    return q, np.zeros_like(k), v


def _wide_values(rng: np.random.Generator, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    return q, k, np.sign(v) * 2.0 ** rng.integers(-100, 128, size=v.shape)


def _cancelling_values(
    _rng: np.random.Generator, q: np.ndarray, k: np.ndarray, v: np.ndarray
) -> tuple[np.ndarray, ...]:
    signs = np.where(np.arange(v.shape[2]) % 2, -1.0, 1.0)[:, None]
    return q, k, np.abs(v[:, :, :1]) * signs


def _equal_values(_rng: np.random.Generator, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    return q, k, np.repeat(v[:, :, :1], v.shape[2], axis=2)


def _sparse_lanes(_rng: np.random.Generator, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    q = q.copy()
    q[..., ::2] = 0.0
    return q, k, v


def _underflowing_weights(
    _rng: np.random.Generator, q: np.ndarray, k: np.ndarray, v: np.ndarray
) -> tuple[np.ndarray, ...]:
    k = k.copy()
    k[..., 0] = -np.arange(k.shape[2]) * 4.0
    q = q.copy()
    q[..., 0] = 64.0
    return q, k, v


TRAITS = {
    "huge logits": _huge_logits,
    "repeated keys": _repeated_keys,
    "near keys": _near_keys,
    "cancelling lanes": _cancelling_lanes,
    "one cancelling key": _one_cancelling_key,
    "equal logits": _equal_logits,
    "wide values": _wide_values,
    "cancelling values": _cancelling_values,
    "equal values": _equal_values,
    "sparse lanes": _sparse_lanes,
    "underflowing weights": _underflowing_weights,
}


@dataclasses.dataclass(frozen=True, eq=False)
class PlainBound:
    """A bound for tests of the judge, which must not depend on a kernel's contract."""

    out: np.ndarray
    lse: np.ndarray
    inside_domain: np.ndarray


def plain_bound(case: AttentionProblem, share: float = 2.0**-7) -> PlainBound:
    """`share` of sum_k P_k |v_k| for the output, 2^-20 (1 + |lse|) for the LSE, everything finite inside the domain."""
    found = oracle_float64.attention(dataclasses.replace(case, v=np.abs(case.v)))
    finite = np.isfinite(found.out).all(axis=-1)
    size = np.where(finite[..., None], found.out, 0.0)
    return PlainBound(
        share * size + 2.0**-126, 2.0**-20 * (1.0 + np.abs(np.where(np.isfinite(found.lse), found.lse, 0.0))), finite
    )


def rounded(case: AttentionProblem) -> tuple[np.ndarray, np.ndarray]:
    """What a perfect kernel gives: BF16 output and FP32 log-sum-exp."""
    found = oracle_float64.attention(case)
    return found.out.astype(np.float32).astype(BF16), found.lse.astype(np.float32)

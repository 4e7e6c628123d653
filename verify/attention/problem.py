"""One attention problem: exact inputs and the function that a kernel has to compute.

The exact result is defined on the BF16 inputs as rational numbers, with subnormal inputs read as zero (TPUs flush
them); `scale` is read as the binary64 number that it is.  For query row i with visible keys V(i):

    z_k = scale * sum_d q_id k_kd                 natural-log logits
    out_i = sum_k P_k v_k,   P_k = exp(z_k) / sum_j exp(z_j)
    lse_i = ln sum_k exp(z_k)                     natural log

A row that sees no key has out = 0 and lse = -inf.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Bool, Float64

BF16 = np.dtype(ml_dtypes.bfloat16)
SMALLEST_NORMAL = 2.0**-126
EXPONENT_BITS = np.uint16(0x7F80)
SIGN_BIT = np.uint16(0x8000)


def widen(x: np.ndarray) -> Float64[np.ndarray, "*shape"]:
    """BF16 words as the float64 numbers they stand for, subnormals read as (signed) zero."""
    # By bits, which is several times faster than a cast: a BF16 word is the upper half of a binary32 word.
    words = x.view(np.uint16)
    flushed = np.where(words & EXPONENT_BITS, words, words & SIGN_BIT)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return (flushed.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionProblem:
    """Inputs of one dense attention call.

    Attributes:
        q: BF16 `[batch, heads, q_len, head_dim]`.
        k: BF16 `[batch, kv_heads, kv_len, head_dim]`; query head h reads KV head h // (heads // kv_heads).
        v: BF16 `[batch, kv_heads, kv_len, head_dim]`.
        causal: bottom-right aligned: row i sees keys 0 .. i + kv_len - q_len.
        scale: factor of the logits (a finite binary64 number).
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    causal: bool
    scale: float

    def __post_init__(self) -> None:
        for name in ("q", "k", "v"):
            x = getattr(self, name)
            if x.dtype != BF16 or x.ndim != 4:
                message = f"{name} must be BF16 [batch, heads, tokens, head_dim], got {x.dtype} of rank {x.ndim}"
                raise ValueError(message)
        if self.k.shape != self.v.shape:
            message = f"k and v must have one shape, got {self.k.shape} and {self.v.shape}"
            raise ValueError(message)
        if self.q.shape[0] != self.k.shape[0] or self.q.shape[3] != self.k.shape[3]:
            message = f"q and k must agree in batch and head_dim, got {self.q.shape} and {self.k.shape}"
            raise ValueError(message)
        if self.heads % self.kv_heads:
            message = f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}"
            raise ValueError(message)
        if not math.isfinite(self.scale):
            message = f"scale must be finite, got {self.scale}"
            raise ValueError(message)

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def q_len(self) -> int:
        return self.q.shape[2]

    @property
    def kv_len(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.q.shape[3]

    def kv_head(self, head: int) -> int:
        """The KV head that query head `head` reads."""
        return head // (self.heads // self.kv_heads)

    def visible(self, row: int) -> int:
        """How many keys row `row` sees: always the first ones."""
        if not self.causal:
            return self.kv_len
        return min(max(row + self.kv_len - self.q_len + 1, 0), self.kv_len)

    def mask(self) -> Bool[np.ndarray, "q_len kv_len"]:
        """True where the row sees the key."""
        counts = np.array([self.visible(row) for row in range(self.q_len)])
        return np.arange(self.kv_len)[None, :] < counts[:, None]

"""Sizes of an attention call, for whatever holds q, k and v."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


class Shapes:
    """Sizes of q `[batch, heads, q_len, head_dim]`, k and v `[batch, kv_heads, kv_len, head_dim or v_dim]`."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    @property
    def batch(self) -> int:
        """Independent problems in the call."""
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        """KV heads, of which each serves a group of query heads."""
        return self.k.shape[1]

    @property
    def q_len(self) -> int:
        """Queries."""
        return self.q.shape[2]

    @property
    def kv_len(self) -> int:
        """Keys."""
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        """Width of queries and keys."""
        return self.q.shape[3]

    @property
    def v_dim(self) -> int:
        """Width of values and outputs."""
        return self.v.shape[3]

    def kv_head(self, head: int) -> int:
        """The KV head that query head `head` reads."""
        return head // (self.heads // self.kv_heads)

    def group(self, kv_head: int) -> range:
        """The query heads that read a KV head."""
        size = self.heads // self.kv_heads
        return range(kv_head * size, (kv_head + 1) * size)

"""Paged KV caches: keys and values in pages of a pool, found through a table.

f of a paged call is f of the ragged batch that gathering the pages gives (`PagedProblem.ragged`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from verify.attention.problem import BF16, Window
from verify.attention.ragged import RaggedProblem, check_cu_seqlens

if TYPE_CHECKING:
    from verify.attention.problem import AttentionProblem


@dataclasses.dataclass(frozen=True, eq=False)
class PagedProblem:
    """Inputs of one attention call on a paged KV cache.

    Key j of sequence s stands in page page_table[s, j // page_size], slot j % page_size, for j < lengths[s].  Pages may
    be shared between sequences.  Table entries and slots beyond a sequence's length mean nothing.

    Attributes:
        q: BF16 `[heads, q_tokens, head_dim]`; the new tokens of all sequences, packed.
        k_pages: BF16 `[pages, kv_heads, page_size, head_dim]`.
        v_pages: BF16 `[pages, kv_heads, page_size, v_dim]`.
        page_table: integers `[sequences, pages_per_sequence]`.
        lengths: integers `[sequences]`: keys of each sequence, its new tokens among them.
        cu_seqlens_q: integers `[sequences + 1]`.
        causal: as in `RaggedProblem`, as are the following.
        scale: factor of the scores.
        window: (left, right).
        softcap: bound of the logits.
        sinks: FP32 `[heads]`.
    """

    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    page_table: np.ndarray
    lengths: np.ndarray
    cu_seqlens_q: np.ndarray
    causal: bool
    scale: float
    window: Window | None = None
    softcap: float | None = None
    sinks: np.ndarray | None = None

    def __post_init__(self) -> None:
        for name in ("k_pages", "v_pages"):
            x = getattr(self, name)
            if x.dtype != BF16 or x.ndim != 4:
                message = f"{name} must be BF16 [pages, kv_heads, page_size, head_dim], got {x.dtype} of rank {x.ndim}"
                raise ValueError(message)
        if self.k_pages.shape[:3] != self.v_pages.shape[:3]:
            message = (
                "k_pages and v_pages must agree in pages, kv_heads and page_size, "
                f"got {self.k_pages.shape} and {self.v_pages.shape}"
            )
            raise ValueError(message)
        check_cu_seqlens("cu_seqlens_q", self.cu_seqlens_q, self.q.shape[1])
        self._check_table()
        self.ragged()  # refuses the rest

    def _check_table(self) -> None:
        sequences = len(self.cu_seqlens_q) - 1
        for name, rank in (("page_table", 2), ("lengths", 1)):
            x = getattr(self, name)
            if x.ndim != rank or len(x) != sequences or not np.issubdtype(x.dtype, np.integer):
                message = (
                    f"{name} must be integers of rank {rank} for {sequences} sequences, got {x.dtype} {list(x.shape)}"
                )
                raise ValueError(message)
        room = self.page_table.shape[1] * self.page_size
        for s, length in enumerate(self.lengths.tolist()):
            if not 0 <= length <= room:
                message = f"lengths[{s}] must be in 0..{room} (pages per sequence times page_size), got {length}"
                raise ValueError(message)
            used = self.page_table[s, : math.ceil(length / self.page_size)].tolist()
            if any(not 0 <= page < len(self.k_pages) for page in used):
                message = f"page_table[{s}] must name pages in 0..{len(self.k_pages) - 1}, got {used}"
                raise ValueError(message)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.k_pages.shape[2]

    def ragged(self) -> RaggedProblem:
        """The ragged batch with the same f."""
        return RaggedProblem(
            self.q,
            self._gather(self.k_pages),
            self._gather(self.v_pages),
            self.cu_seqlens_q,
            np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64),
            causal=self.causal,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
        )

    def dense(self) -> AttentionProblem:
        """The dense problem with the same f."""
        return self.ragged().dense()

    def _gather(self, pages: np.ndarray) -> np.ndarray:
        parts = [np.zeros((pages.shape[1], 0, pages.shape[3]), BF16)]
        for s, length in enumerate(self.lengths.tolist()):
            slots = np.arange(length)
            taken = pages[self.page_table[s, slots // self.page_size], :, slots % self.page_size]
            parts.append(np.moveaxis(taken, 0, 1))
        return np.concatenate(parts, axis=1)


def paginate(ragged: RaggedProblem, page_size: int, *, seed: int, spare_pages: int = 1) -> PagedProblem:
    """The same keys and values in scattered pages; every slot that no key fills holds NaN.

    Where the pages stand depends on `seed` and on their number alone, on every machine.

    Table entries beyond a sequence's length name a page that no sequence uses, if there is one.

    Raises:
        ValueError: page_size is not positive, or spare_pages negative.
    """
    if page_size < 1 or spare_pages < 0:
        message = f"page_size must be at least 1 and spare_pages at least 0, got {page_size} and {spare_pages}"
        raise ValueError(message)
    lengths = np.diff(ragged.cu_seqlens_k.astype(np.int64))
    counts = -(-lengths // page_size)
    order = _scattered(int(counts.sum()) + spare_pages, seed)
    unused = int(order[-1]) if spare_pages else 0
    table = np.full((len(lengths), int(counts.max(initial=0))), unused, dtype=np.int32)
    pools = [
        np.full((len(order), x.shape[0], page_size, x.shape[2]), np.nan, dtype=np.float32).astype(BF16)
        for x in (ragged.k, ragged.v)
    ]
    taken = 0
    for s, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        table[s, :count] = order[taken : taken + count]
        taken += count
        slots = np.arange(length)
        first = int(ragged.cu_seqlens_k[s])
        for pool, x in zip(pools, (ragged.k, ragged.v), strict=True):
            pool[table[s, slots // page_size], :, slots % page_size] = np.moveaxis(x[:, first : first + length], 1, 0)
    return PagedProblem(
        ragged.q,
        pools[0],
        pools[1],
        table,
        lengths.astype(np.int32),
        ragged.cu_seqlens_q,
        causal=ragged.causal,
        scale=ragged.scale,
        window=ragged.window,
        softcap=ragged.softcap,
        sinks=ragged.sinks,
    )


def _scattered(count: int, seed: int) -> np.ndarray:
    """0 .. count - 1 in steps of about the golden ratio, beginning at `seed`."""
    step = next((s for s in range(int(0.618 * count), 0, -1) if math.gcd(s, count) == 1), 1)
    return (seed + step * np.arange(count)) % max(count, 1)

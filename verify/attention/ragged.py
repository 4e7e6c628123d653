"""Ragged batches: sequences of any lengths packed along the tokens.

f of a ragged batch is f of one dense problem (`RaggedProblem.dense`) in which every sequence is a segment and every
row is aligned with a key of its own sequence, so that oracles, bounds and verdicts need nothing of their own.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import numpy as np

from verify.attention.problem import AttentionProblem, Window

if TYPE_CHECKING:
    from jaxtyping import Int

    from verify.attention.reference import Reference


@dataclasses.dataclass(frozen=True, eq=False)
class RaggedProblem:
    """Inputs of one ragged attention call.

    Sequence s has the queries cu_seqlens_q[s] .. cu_seqlens_q[s+1] - 1 and the keys cu_seqlens_k[s] ..
    cu_seqlens_k[s+1] - 1; either may be none.  Causal mask and window are bottom-right aligned within the sequence.
    Tokens after the last sequence are padding: nothing is promised for their rows, and no row sees their keys.

    Attributes:
        q: BF16 `[heads, q_tokens, head_dim]`.
        k: BF16 `[kv_heads, k_tokens, head_dim]`.
        v: BF16 `[kv_heads, k_tokens, v_dim]`.
        cu_seqlens_q: integers `[sequences + 1]`, from 0, never falling, at most q_tokens.
        cu_seqlens_k: integers `[sequences + 1]`, from 0, never falling, at most k_tokens.
        causal: as in `AttentionProblem`, as are the following.
        scale: factor of the scores.
        window: (left, right).
        softcap: bound of the logits.
        sinks: FP32 `[heads]`.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    cu_seqlens_q: np.ndarray
    cu_seqlens_k: np.ndarray
    causal: bool
    scale: float
    window: Window | None = None
    softcap: float | None = None
    sinks: np.ndarray | None = None

    def __post_init__(self) -> None:
        for name in ("q", "k", "v"):
            x = getattr(self, name)
            if x.ndim != 3:
                message = f"{name} must be [heads, tokens, head_dim], got rank {x.ndim}"
                raise ValueError(message)
        check_cu_seqlens("cu_seqlens_q", self.cu_seqlens_q, self.q.shape[1])
        check_cu_seqlens("cu_seqlens_k", self.cu_seqlens_k, self.k.shape[1])
        if len(self.cu_seqlens_q) != len(self.cu_seqlens_k):
            message = (
                "cu_seqlens_q and cu_seqlens_k must name as many sequences, "
                f"got {len(self.cu_seqlens_q) - 1} and {len(self.cu_seqlens_k) - 1}"
            )
            raise ValueError(message)
        self.dense()  # refuses the rest

    @property
    def sequences(self) -> int:
        """How many sequences the batch packs."""
        return len(self.cu_seqlens_q) - 1

    @property
    def q_tokens(self) -> int:
        """Rows that belong to a sequence."""
        return int(self.cu_seqlens_q[-1])

    @property
    def k_tokens(self) -> int:
        """Keys that belong to a sequence."""
        return int(self.cu_seqlens_k[-1])

    def dense(self) -> AttentionProblem:
        """The dense problem with the same f: batch 1, padding cut off."""
        return AttentionProblem(
            self.q[None, :, : self.q_tokens],
            self.k[None, :, : self.k_tokens],
            self.v[None, :, : self.k_tokens],
            causal=self.causal,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
            q_segments=segments(self.cu_seqlens_q)[None],
            k_segments=segments(self.cu_seqlens_k)[None],
            q_positions=aligned_keys(self.cu_seqlens_q, self.cu_seqlens_k)[None],
        )

    def pack(self, x: np.ndarray) -> np.ndarray:
        """What a kernel returned, `[heads, q_tokens, ...]`, in the layout of the dense problem, padding cut off."""
        return np.asarray(x)[None, :, : self.q_tokens]

    def scatter(self, reference: Reference) -> Reference:
        """A reference of the dense problem in the ragged layout `[heads, q_tokens, ...]`.

        Padding rows hold 0 with LSE and maximum -inf, as rows that see no key do, and mean nothing.
        """
        blank = {"lse": -np.inf, "max_logit": -np.inf}
        fields = {}
        for name in ("out", "out_error", "lse", "lse_error", "max_logit", "max_logit_error"):
            x = getattr(reference, name)
            if x is None:
                continue
            whole = np.full((x.shape[1], self.q.shape[1], *x.shape[3:]), blank.get(name, 0.0))
            whole[:, : self.q_tokens] = x[0]
            fields[name] = whole
        return dataclasses.replace(reference, **fields)


def check_cu_seqlens(name: str, cu_seqlens: np.ndarray, tokens: int) -> None:
    """Refuse cumulative lengths that do not describe sequences of these tokens.

    Raises:
        ValueError: names the argument, the value and the rule.
    """
    if cu_seqlens.ndim != 1 or not len(cu_seqlens) or not np.issubdtype(cu_seqlens.dtype, np.integer):
        message = f"{name} must be integers [sequences + 1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        raise ValueError(message)
    values = cu_seqlens.tolist()
    if values[0] != 0 or any(a > b for a, b in itertools.pairwise(values)) or values[-1] > tokens:
        message = f"{name} must start at 0, never fall, and end at most at {tokens} tokens, got {values}"
        raise ValueError(message)


def segments(cu_seqlens: Int[np.ndarray, " sequences_plus_1"]) -> Int[np.ndarray, " tokens"]:
    """The sequence of each token."""
    lengths = np.diff(cu_seqlens.astype(np.int64))
    return np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)


def aligned_within_segments(problem: AttentionProblem) -> bool:
    """Whether the positions of a problem with segments say that each segment's last rows meet its last keys."""
    if problem.q_segments is None or problem.k_segments is None or problem.q_positions is None:
        return False
    for batch in range(problem.batch):
        ids, keys = problem.q_segments[batch], problem.k_segments[batch]
        for segment in np.unique(ids):
            rows, own = np.flatnonzero(ids == segment), np.flatnonzero(keys == segment)
            due = (own[-1] + 1 if own.size else 0) - rows.size + np.arange(rows.size)
            if own.size and (problem.q_positions[batch, rows] != due).any():
                return False
    return True


def aligned_keys(cu_seqlens_q: np.ndarray, cu_seqlens_k: np.ndarray) -> Int[np.ndarray, " q_tokens"]:
    """The packed key with which each packed row is aligned: the last rows of a sequence meet its last keys."""
    ends_q, ends_k = (x.astype(np.int64)[1:] for x in (cu_seqlens_q, cu_seqlens_k))
    return np.arange(int(cu_seqlens_q[-1]), dtype=np.int64) + (ends_k - ends_q)[segments(cu_seqlens_q)]

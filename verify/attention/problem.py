"""One attention problem: exact inputs and the function that a kernel has to compute.

The exact result is defined on the BF16 inputs as rational numbers, with subnormal inputs read as zero (TPUs flush
them); `scale`, `softcap` and the sinks are read as the binary64 numbers that they are.  For query row i with visible
keys V(i):

    s_k = scale * sum_d q_id k_kd                 scaled scores
    z_k = softcap * tanh(s_k / softcap)           natural-log logits; z_k = s_k without a soft cap
    out_i = sum_k P_k v_k,   P_k = exp(z_k) / l,   l = sum_j exp(z_j) + exp(sink of the head)
    lse_i = ln l                                  natural log
    max_logit_i = max_k z_k                       nats; visible keys only, never the sink

A row that sees no key has out = 0, max_logit = -inf, and lse = -inf (the sink, where there is one).

What a row sees is asked in two independent forms: `mask` decides pair by pair, `views` gives contiguous ranges.  The
oracles differ in which of them they use, so that a mistake in one shows against the other.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from verify.attention.shapes import Shapes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Bool, Float64, Int

BF16 = np.dtype(ml_dtypes.bfloat16)
SMALLEST_NORMAL = 2.0**-126
EXPONENT_BITS = np.uint16(0x7F80)
SIGN_BIT = np.uint16(0x8000)


def widen(x: np.ndarray) -> Float64[np.ndarray, "*shape"]:
    """BF16 words as the float64 numbers they stand for, subnormals read as (signed) zero."""
    words = x.view(np.uint16)
    if not (words & EXPONENT_BITS).all():
        x = np.where(words & EXPONENT_BITS, words, words & SIGN_BIT).view(BF16)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return x.astype(np.float32).astype(np.float64)  # two exact steps, both faster than one


Window = tuple[int | None, int | None]
"""(left, right): a query aligned with key p sees keys p - left .. p + right; None is unbounded."""


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """Rows of one batch entry and the keys among which they see one contiguous range each.

    Attributes:
        rows: query rows, ascending.
        keys: keys, ascending.
        start: position within `keys` of the first key that each row sees.
        stop: one past the last; equal to `start` where a row sees none.
    """

    rows: slice | Int[np.ndarray, " rows"]
    keys: slice | Int[np.ndarray, " keys"]
    start: Int[np.ndarray, " rows"]
    stop: Int[np.ndarray, " rows"]


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionProblem(Shapes):
    """Inputs of one dense attention call.

    Attributes:
        q: BF16 `[batch, heads, q_len, head_dim]`.
        k: BF16 `[batch, kv_heads, kv_len, head_dim]`; query head h reads KV head h // (heads // kv_heads).
        v: BF16 `[batch, kv_heads, kv_len, v_dim]`.
        causal: a row aligned with key p sees keys 0 .. p.
        scale: factor of the scores (a finite binary64 number).
        window: (left, right), each None or at least 0: a row aligned with key p sees keys p - left .. p + right.
        softcap: None, or the positive bound of the logits.
        sinks: None, or FP32 `[heads]`: natural-log logit of a null key with value zero that every row of the head
            sees; neither scaled nor capped.  -inf is no sink.
        q_segments: None, or integers `[batch, q_len]`; with k_segments: a row sees keys of its own id only.
        k_segments: None, or integers `[batch, kv_len]`.
        q_positions: None, or integers `[batch, q_len]`: the key with which each row is aligned.  None aligns
            bottom-right: row i with key i + kv_len - q_len.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    causal: bool
    scale: float
    window: Window | None = None
    softcap: float | None = None
    sinks: np.ndarray | None = None
    q_segments: np.ndarray | None = None
    k_segments: np.ndarray | None = None
    q_positions: np.ndarray | None = None

    def __post_init__(self) -> None:
        for name in ("q", "k", "v"):
            x = getattr(self, name)
            if x.dtype != BF16 or x.ndim != 4:
                message = f"{name} must be BF16 [batch, heads, tokens, head_dim], got {x.dtype} of rank {x.ndim}"
                raise ValueError(message)
        if self.k.shape[:3] != self.v.shape[:3]:
            message = f"k and v must have one shape, got {self.k.shape} and {self.v.shape} (v_dim apart)"
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
        self._check_features()

    def _check_features(self) -> None:
        if self.window is not None:
            check_window(self.window)
        if self.softcap is not None and not 0.0 < self.softcap < math.inf:
            message = f"softcap must be positive and finite, got {self.softcap}"
            raise ValueError(message)
        if self.sinks is not None and (self.sinks.shape != (self.heads,) or self.sinks.dtype != np.float32):
            message = f"sinks must be FP32 [heads] = [{self.heads}], got {self.sinks.dtype} {list(self.sinks.shape)}"
            raise ValueError(message)
        if (self.q_segments is None) != (self.k_segments is None):
            message = "q_segments and k_segments must be given together, got one of them"
            raise ValueError(message)
        shapes = {"q_segments": self.q_len, "k_segments": self.kv_len, "q_positions": self.q_len}
        for name, tokens in shapes.items():
            x = getattr(self, name)
            if x is not None and (x.shape != (self.batch, tokens) or not np.issubdtype(x.dtype, np.integer)):
                message = f"{name} must be integers [{self.batch}, {tokens}], got {x.dtype} {list(x.shape)}"
                raise ValueError(message)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of what this problem asks of a kernel beyond plain dense attention."""
        names = tuple(name for name in FEATURES if getattr(self, name) is not None)
        return names if self.v_dim == self.head_dim else (*names, "v_dim")

    def sink(self, head: int) -> float | None:
        """The sink's logit in nats, NaN or +inf included; None where there is none."""
        if self.sinks is None or self.sinks[head] == -np.inf:
            return None
        return float(self.sinks[head])

    def visible_to(self, rows: Int[np.ndarray, " rows"]) -> Int[np.ndarray, " rows"]:
        """How many keys the causal mask shows to these rows when aligned bottom-right: always the first ones."""
        if not self.causal:
            return np.full_like(rows, self.kv_len)
        return np.clip(rows + (self.kv_len - self.q_len + 1), 0, self.kv_len)

    def visible(self, row: int) -> int:
        """`visible_to` of one row."""
        return int(self.visible_to(np.array([row]))[0])

    def positions(self, batch: int) -> Int[np.ndarray, " q_len"]:
        """The key with which each row is aligned."""
        if self.q_positions is not None:
            return self.q_positions[batch].astype(np.int64)
        return np.arange(self.q_len, dtype=np.int64) + (self.kv_len - self.q_len)

    def causal_stops(self, batch: int) -> Int[np.ndarray, " q_len"]:
        """One past the last key that the causal mask shows to each row."""
        if self.q_positions is None or not self.causal:
            return self._aligned_stops.copy()
        return np.clip(self.positions(batch) + 1, 0, self.kv_len)

    @functools.cached_property
    def _aligned_stops(self) -> Int[np.ndarray, " q_len"]:
        """`visible_to` of each row; asked several times of one problem."""
        return self.visible_to(np.arange(self.q_len, dtype=np.int64))

    def mask(self, batch: int = 0, rows: Sequence[int] | None = None) -> Bool[np.ndarray, "rows kv_len"]:
        """True where the row sees the key; all rows if none are named."""
        chosen = np.arange(self.q_len) if rows is None else np.asarray(rows, dtype=np.int64)
        keys = np.arange(self.kv_len, dtype=np.int64)[None, :]
        seen = keys < self.causal_stops(batch)[chosen, None]
        if self.window is not None:
            distance = keys - self.positions(batch)[chosen, None]
            left, right = self.window
            if left is not None:
                seen &= distance >= -left
            if right is not None:
                seen &= distance <= right
        if self.q_segments is not None and self.k_segments is not None:
            seen &= self.q_segments[batch][chosen, None] == self.k_segments[batch][None, :]
        return seen

    def seen(self, batch: int, row: int) -> Int[np.ndarray, " keys"]:
        """The keys that one row sees, ascending."""
        return np.flatnonzero(self.mask(batch, [row])[0])

    def views(self, batch: int) -> list[View]:
        """The rows of a batch entry, each row once, with the keys they see as contiguous ranges.

        Causal mask and window show a range of keys; what segment ids leave of it is a range among the keys of the id.
        """
        start, stop = self._ranges(batch)
        if self.q_segments is None or self.k_segments is None:
            return [View(slice(None), slice(None), start, stop)]
        views = []
        keys_of = _members(self.k_segments[batch])
        nothing = np.empty(0, dtype=np.int64)
        for segment, rows in _members(self.q_segments[batch]).items():
            keys = keys_of.get(segment, nothing)
            first, last = np.searchsorted(keys, start[rows]), np.searchsorted(keys, stop[rows])
            views.append(View(rows, keys, first, last))
        return views

    def _ranges(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """First key and one past the last that causal mask and window show to each row."""
        stop = self.causal_stops(batch)
        start = np.zeros(self.q_len, dtype=np.int64)
        if self.window is not None:
            left, right = self.window
            aligned = self.positions(batch)
            if left is not None:
                start = np.clip(aligned - left, 0, self.kv_len)
            if right is not None:
                stop = np.minimum(stop, np.clip(aligned + right + 1, 0, self.kv_len))
        return np.minimum(start, stop), stop


FEATURES = ("window", "softcap", "sinks", "q_segments", "q_positions")


def check_window(window: object) -> None:
    """Refuse what is no window.

    Raises:
        ValueError: not a pair of None or integers >= 0.
    """
    pair = isinstance(window, tuple) and len(window) == 2
    if not pair or not all(side is None or (isinstance(side, int) and side >= 0) for side in window):  # type: ignore[union-attr]
        message = f"window must be (left, right), each None or an integer >= 0, got {window!r}"
        raise ValueError(message)


def _members(ids: np.ndarray) -> dict[int, np.ndarray]:
    """Positions of each id, ascending."""
    order = np.argsort(ids, kind="stable")
    values, first = np.unique(ids[order], return_index=True)
    return dict(zip(values.tolist(), np.split(order, first[1:]), strict=True)) if ids.size else {}

"""One gradient problem: exact inputs, cotangents, and the derivatives that a backward kernel has to compute.

With the forward function of `verify.attention.problem`, a soft cap and sinks, for one query row and the keys k that it
sees,

    s_k = scale * sum_d q_d k_kd       z_k = softcap * tanh(s_k / softcap)       (z_k = s_k without a soft cap)
    l = sum_k exp(z_k) + exp(sink)     P_k = exp(z_k) / l      out = sum_k P_k v_k      lse = ln l

(no term exp(sink) without sinks), the loss is L = sum out * d_out + sum lse * d_lse, and

    dP_k = <d_out, v_k>                delta = sum_k P_k dP_k = <d_out, out>
    dz_k = P_k (dP_k - delta + d_lse)  ds_k = dz_k (1 - (z_k / softcap)**2)
    dq = scale * sum_k ds_k k_k        dk_k = scale * sum ds_k q        dv_k = sum P_k d_out
    dsink = sum exp(sink) / l (d_lse - delta)

where dk and dv sum over the rows of every query head of the group, dsink over the rows of its head.  A row that sees no
key adds nothing to dq, dk and dv; with a sink its lse is the sink, so that it adds d_lse to dsink.

q, k, v and the cotangents are read as rational numbers, subnormals as zero; sinks, scale and softcap as they are.  What
is not finite matters only where it can be reached: a row is *undefined* if it sees a key and its query, its cotangents,
or a key or value that it sees hold a NaN or an infinity (a row that sees none: if it has a sink and its d_lse is not
finite).  Every derivative that an undefined row adds to is undefined: oracles give NaN with an infinite error for it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from verify.attention.problem import BF16, SMALLEST_NORMAL, widen
from verify.attention.shapes import Shapes

if TYPE_CHECKING:
    from jaxtyping import Bool, Float64

    from verify.attention.problem import AttentionProblem

MaskRows = Callable[[int, slice], np.ndarray]
"""(batch, rows) -> Bool `[rows, kv_len]`, True where the row sees the key; so that no full mask need be held."""

COTANGENTS = (BF16, np.dtype(np.float32))


def causal_rows(q_len: int, kv_len: int) -> MaskRows:
    """Bottom-right aligned: row i sees keys 0 .. i + kv_len - q_len."""
    keys = np.arange(kv_len)[None, :]
    return lambda _batch, rows: keys <= np.arange(q_len)[rows, None] + (kv_len - q_len)


def full_rows(q_len: int, kv_len: int) -> MaskRows:
    """Every row sees every key."""
    return lambda _batch, rows: np.ones((len(range(q_len)[rows]), kv_len), dtype=bool)


def dense_rows(mask: Bool[np.ndarray, "*batch q_len kv_len"]) -> MaskRows:
    """A mask that is held as a whole: one for all batch entries `[q_len, kv_len]`, or one for each.

    Raises:
        ValueError: the mask is not boolean, or of another rank.
    """
    if mask.dtype != np.bool_ or mask.ndim not in {2, 3}:
        message = f"mask must be bool [q_len, kv_len] or [batch, q_len, kv_len], got {mask.dtype} of rank {mask.ndim}"
        raise ValueError(message)
    return lambda batch, rows: mask[rows] if mask.ndim == 2 else mask[batch, rows]


@dataclasses.dataclass(frozen=True, eq=False)
class GradientProblem(Shapes):
    """Inputs of one backward pass of dense attention.

    Attributes:
        q: BF16 `[batch, heads, q_len, head_dim]`.
        k: BF16 `[batch, kv_heads, kv_len, head_dim]`; query head h reads KV head h // (heads // kv_heads).
        v: BF16 `[batch, kv_heads, kv_len, v_dim]`.
        d_out: cotangent of the output, BF16 or FP32 `[batch, heads, q_len, v_dim]`.
        mask: which keys a block of rows sees (`causal_rows`, `full_rows`, `dense_rows`).
        scale: factor of the logits (a finite binary64 number).
        d_lse: cotangent of the natural-log LSE, BF16 or FP32 `[batch, heads, q_len]`; None for zero.
        sinks: natural-log logits, unscaled and uncapped, BF16 or FP32 `[heads]`; -inf is no sink; None for none at all.
        softcap: the cap of the logits (natural log, positive); None for none.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    d_out: np.ndarray
    mask: MaskRows
    scale: float
    d_lse: np.ndarray | None = None
    sinks: np.ndarray | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        for name in ("q", "k", "v", "d_out"):
            x = getattr(self, name)
            dtypes = COTANGENTS if name == "d_out" else (BF16,)
            if x.dtype not in dtypes or x.ndim != 4:
                wanted = " or ".join(str(dtype) for dtype in dtypes)
                message = f"{name} must be {wanted} [batch, heads, tokens, dim], got {x.dtype} of rank {x.ndim}"
                raise ValueError(message)
        if self.heads % self.kv_heads:
            message = f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}"
            raise ValueError(message)
        self._check_shape("k", (self.batch, self.kv_heads, self.kv_len, self.q.shape[3]))
        self._check_shape("v", (self.batch, self.kv_heads, self.kv_len, self.v_dim))
        self._check_shape("d_out", (self.batch, self.heads, self.q_len, self.v_dim))
        self._check_option("d_lse", (self.batch, self.heads, self.q_len))
        self._check_option("sinks", (self.heads,))
        self._check_numbers()

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if getattr(self, name).shape != shape:
            message = f"{name} must have shape {shape}, got {getattr(self, name).shape}"
            raise ValueError(message)

    def _check_option(self, name: str, shape: tuple[int, ...]) -> None:
        x = getattr(self, name)
        if x is None:
            return
        if x.dtype not in COTANGENTS:
            message = f"{name} must be bfloat16 or float32, got {x.dtype}"
            raise ValueError(message)
        self._check_shape(name, shape)

    def _check_numbers(self) -> None:
        if self.sinks is not None and not np.all(self.sinks.astype(np.float64) < math.inf):
            message = f"sinks must be finite, or -inf for none, got {self.sinks}"
            raise ValueError(message)
        if not math.isfinite(self.scale):
            message = f"scale must be finite, got {self.scale}"
            raise ValueError(message)
        if self.softcap is not None and not 0.0 < self.softcap < math.inf:
            message = f"softcap must be positive and finite, got {self.softcap}"
            raise ValueError(message)
        shape = self.mask(0, slice(0, 1)).shape if self.batch else (1, self.kv_len)
        if shape != (min(self.q_len, 1), self.kv_len):
            message = f"mask must give [rows, kv_len] = {(min(self.q_len, 1), self.kv_len)} for one row, got {shape}"
            raise ValueError(message)

    @classmethod
    def of(cls, problem: AttentionProblem, d_out: np.ndarray, d_lse: np.ndarray | None = None) -> GradientProblem:
        """The backward pass of a forward problem: its mask, sinks and soft cap."""

        def mask(batch: int, rows: slice) -> np.ndarray:
            return problem.mask(batch, range(problem.q_len)[rows])

        return cls(
            problem.q,
            problem.k,
            problem.v,
            d_out,
            mask,
            problem.scale,
            d_lse=d_lse,
            sinks=problem.sinks,
            softcap=problem.softcap,
        )

    def head(self, batch: int, head: int) -> Head:
        """The inputs of one query head, widened."""
        kv_head = self.kv_head(head)
        q, k, v, d_out = (
            exact(x)
            for x in (self.q[batch, head], self.k[batch, kv_head], self.v[batch, kv_head], self.d_out[batch, head])
        )
        d_lse = np.zeros(self.q_len) if self.d_lse is None else exact(self.d_lse[batch, head])
        odd_d_lse = ~np.isfinite(d_lse)
        odd_rows = ~(np.isfinite(q).all(axis=1) & np.isfinite(d_out).all(axis=1)) | odd_d_lse
        odd_keys = ~(np.isfinite(k).all(axis=1) & np.isfinite(v).all(axis=1))
        return Head(
            q=_finite(q),
            k=_finite(k),
            v=_finite(v),
            d_out=_finite(d_out),
            d_lse=_finite(d_lse),
            sink=-math.inf if self.sinks is None else float(self.sinks[head]),
            scale=self.scale,
            softcap=self.softcap,
            mask=lambda rows: self.mask(batch, rows),
            odd_rows=odd_rows,
            odd_keys=odd_keys,
            odd_d_lse=odd_d_lse,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Head:
    """Inputs of one query head as float64 numbers (exact); what is not finite stands as 0 and is marked as odd.

    Attributes:
        q: queries.
        k: keys of the KV head.
        v: values of the KV head.
        d_out: cotangent of the output.
        d_lse: cotangent of the LSE.
        sink: natural-log logit, -inf for none.
        scale: factor of the logits.
        softcap: the cap of the logits, or None.
        mask: rows -> Bool `[rows, kv_len]`.
        odd_rows: rows whose query or cotangents are not finite.
        odd_keys: keys of which key or value is not finite.
        odd_d_lse: rows whose d_lse is not finite.
    """

    q: Float64[np.ndarray, "q_len head_dim"]
    k: Float64[np.ndarray, "kv_len head_dim"]
    v: Float64[np.ndarray, "kv_len v_dim"]
    d_out: Float64[np.ndarray, "q_len v_dim"]
    d_lse: Float64[np.ndarray, " q_len"]
    sink: float
    scale: float
    softcap: float | None
    mask: Callable[[slice], np.ndarray]
    odd_rows: Bool[np.ndarray, " q_len"]
    odd_keys: Bool[np.ndarray, " kv_len"]
    odd_d_lse: Bool[np.ndarray, " q_len"]

    def undefined(self, rows: slice) -> Bool[np.ndarray, " rows"]:
        """Rows whose derivatives depend on something that is not finite."""
        mask = self.mask(rows)
        sees = mask.any(axis=1)
        bad = sees & (self.odd_rows[rows] | mask[:, self.odd_keys].any(axis=1))
        return bad | (~sees & self.odd_d_lse[rows]) if self.sink > -math.inf else bad

    def seen(self, rows: slice) -> Bool[np.ndarray, "rows kv_len"]:
        """The mask without the undefined rows."""
        return self.mask(rows) & ~self.undefined(rows)[:, None]


def exact(x: np.ndarray) -> Float64[np.ndarray, "*shape"]:
    """BF16 or FP32 numbers as the float64 numbers they stand for, subnormals read as zero."""
    if x.dtype == BF16:
        return widen(np.ascontiguousarray(x))
    wide = x.astype(np.float64)
    return np.where(np.abs(wide) < SMALLEST_NORMAL, 0.0, wide)


def _finite(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x), x, 0.0)

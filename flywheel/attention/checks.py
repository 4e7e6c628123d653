"""What `attention` refuses: each message names the argument, its value and the rule."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax.numpy as jnp

from flywheel.attention.budget import MAX_KEYS
from flywheel.attention.rotary import LAYOUTS, Rotary, RotaryTables, rotary_tables

if TYPE_CHECKING:
    from jax import Array

HEAD_DIMS = (64, 128, 192, 256)
Softmax = Literal["static", "online"]
_RANK = 4
_SMALLEST_NORMAL, _LARGEST = 2.0**-126, 2.0**127
_LOG2_E = math.log2(math.e)


def check_operands(q: Any, k: Any, v: Any) -> None:  # noqa: ANN401  anything a caller may pass
    """Types, ranks, lengths and shapes of q, k and v."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if getattr(x, "dtype", None) != jnp.bfloat16:
            message = f"{name} must be a BF16 array, got {getattr(x, 'dtype', type(x).__name__)}"
            raise TypeError(message)
        if x.ndim != _RANK:
            message = f"{name} must have rank 4, [batch, heads, tokens, head_dim], got shape {x.shape}"
            raise ValueError(message)
        if 0 in x.shape:
            message = f"{name} must not be empty in any axis, got shape {x.shape}"
            raise ValueError(message)
        if x.shape[2] > MAX_KEYS:
            message = f"{name} must have at most 2**30 tokens, got {x.shape[2]}"
            raise ValueError(message)
    _check_shapes(q, k, v)


def _check_shapes(q: Array, k: Array, v: Array) -> None:
    if k.shape[:3] != v.shape[:3]:
        message = f"k and v must agree in batch, kv_heads and tokens, got {k.shape} and {v.shape}"
        raise ValueError(message)
    for axis, what in ((0, "batch"), (3, "head_dim")):
        if q.shape[axis] != k.shape[axis]:
            message = f"q and k must agree in {what}, got {q.shape[axis]} and {k.shape[axis]}"
            raise ValueError(message)
    if q.shape[1] % k.shape[1]:
        message = f"heads must be a multiple of kv_heads, got {q.shape[1]} heads and {k.shape[1]} kv_heads"
        raise ValueError(message)
    for name, width in (("head_dim", q.shape[3]), ("v_dim", v.shape[3])):
        if width not in HEAD_DIMS:
            message = f"{name} must be one of {HEAD_DIMS}, got {width}"
            raise ValueError(message)


def check_flags(**flags: Any) -> None:  # noqa: ANN401
    """Options that select what is compiled."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            message = f"{name} must be a bool (it is part of the compiled kernel), got {flag!r}"
            raise TypeError(message)


def check_softmax(softmax: Any) -> None:  # noqa: ANN401
    """The kind of softmax."""
    if softmax not in get_args(Softmax):
        message = f"softmax must be one of {get_args(Softmax)}, got {softmax!r}"
        raise ValueError(message)


def check_scale(scale: Any) -> float:  # noqa: ANN401
    """The factor of the logits."""
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        message = f"scale must be a Python number (it is part of the compiled kernel), got {type(scale).__name__}"
        raise TypeError(message)
    log2_scale = scale * _LOG2_E if math.isfinite(scale) else math.nan
    if scale != 0 and not _SMALLEST_NORMAL <= abs(log2_scale) <= _LARGEST:
        message = f"scale must be 0 or have 2**-126 <= |scale| log2(e) <= 2**127, got {scale}"
        raise ValueError(message)
    return float(scale)


def check_softcap(softcap: Any, scale: Any) -> float | None:  # noqa: ANN401
    """The bound of the logits; its constants must be FP32 numbers."""
    if softcap is None:
        return None
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
        message = f"softcap must be None or a Python number, got {type(softcap).__name__}"
        raise TypeError(message)
    if not (math.isfinite(softcap) and softcap > 0):
        message = f"softcap must be positive and finite (None is off), got {softcap}"
        raise ValueError(message)
    constants = [softcap, softcap * _LOG2_E, *([abs(scale) / softcap] if scale else [])]
    if not all(_SMALLEST_NORMAL <= constant <= _LARGEST for constant in constants):
        message = (
            "softcap must have softcap, softcap log2(e) and |scale| / softcap within [2**-126, 2**127], "
            f"got softcap = {softcap} with scale = {scale}"
        )
        raise ValueError(message)
    return float(softcap)


def check_window(window: Any) -> tuple[int | None, int | None]:  # noqa: ANN401
    """(left, right), each None or an integer of at least 0."""
    if window is None:
        return None, None
    pair = isinstance(window, tuple) and len(window) == 2
    if not pair or not all(_is_side(side) for side in window):
        message = f"window must be (left, right), each None or an integer >= 0, got {window!r}"
        raise ValueError(message)
    return window


def _is_side(side: Any) -> bool:  # noqa: ANN401
    return side is None or (isinstance(side, int) and not isinstance(side, bool) and side >= 0)


def check_sinks(sinks: Any, heads: int) -> None:  # noqa: ANN401
    """One FP32 logit per query head."""
    if sinks is None:
        return
    if getattr(sinks, "dtype", None) != jnp.float32:
        message = f"sinks must be an FP32 array, got {getattr(sinks, 'dtype', type(sinks).__name__)}"
        raise TypeError(message)
    if sinks.shape != (heads,):
        message = f"sinks must have shape [heads] = [{heads}], got {sinks.shape}"
        raise ValueError(message)


def check_segment_ids(q_ids: Any, kv_ids: Any, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:  # noqa: ANN401
    """Both or neither, INT32, one id per token."""
    if (q_ids is None) != (kv_ids is None):
        message = "q_segment_ids and kv_segment_ids must be given together, got one of them"
        raise ValueError(message)
    if q_ids is None:
        return
    for name, ids, shape in (("q_segment_ids", q_ids, q_shape), ("kv_segment_ids", kv_ids, k_shape)):
        _check_int32(name, ids)
        expected = (shape[0], shape[2])
        if ids.shape != expected:
            message = f"{name} must have shape [batch, tokens] = {list(expected)}, got {ids.shape}"
            raise ValueError(message)


def _check_int32(name: str, x: Any) -> None:  # noqa: ANN401
    if getattr(x, "dtype", None) != jnp.int32:
        message = f"{name} must be an INT32 array, got {getattr(x, 'dtype', type(x).__name__)}"
        raise TypeError(message)


def rotary_operands(rotary: Any, q_shape: tuple[int, ...]) -> tuple[Array | None, Array | None]:  # noqa: ANN401
    """Cosines and sines of a rotary embedding, `[batch or 1, q_len, head_dim / 2]`; None without one."""
    if rotary is None:
        return None, None
    if not isinstance(rotary, Rotary):
        message = f"rotary must be None or a Rotary, got {type(rotary).__name__}"
        raise TypeError(message)
    if rotary.layout not in LAYOUTS:
        message = f"rotary.layout must be one of {LAYOUTS}, got {rotary.layout!r}"
        raise ValueError(message)
    batch, _, q_len, head_dim = q_shape
    if rotary.tables is not None:
        if rotary.positions is not None or rotary.base is not None:
            message = "rotary must have tables, or positions and base, got both"
            raise ValueError(message)
        return _checked_tables(rotary.tables, (batch, q_len, head_dim // 2))
    if rotary.positions is None or rotary.base is None:
        message = "rotary must have tables, or positions and base, got neither in full"
        raise ValueError(message)
    _check_int32("rotary.positions", rotary.positions)
    if rotary.positions.shape not in ((q_len,), (batch, q_len)):
        message = f"rotary.positions must have shape [q_len] or [batch, q_len], got {rotary.positions.shape}"
        raise ValueError(message)
    if not (math.isfinite(rotary.base) and rotary.base >= 1):
        message = f"rotary.base must be a finite number of at least 1, got {rotary.base!r}"
        raise ValueError(message)
    return rotary_tables(rotary.positions, head_dim, float(rotary.base))


def _checked_tables(tables: Any, shape: tuple[int, int, int]) -> RotaryTables:  # noqa: ANN401
    if not isinstance(tables, tuple) or len(tables) != 2:
        message = f"rotary.tables must be (cos, sin), got {type(tables).__name__}"
        raise TypeError(message)
    for name, table in zip(("cos", "sin"), tables, strict=True):
        if getattr(table, "dtype", None) != jnp.float32:
            message = f"rotary.tables.{name} must be an FP32 array, got {getattr(table, 'dtype', type(table).__name__)}"
            raise TypeError(message)
        if table.shape not in (shape, shape[1:]):
            message = (
                f"rotary.tables.{name} must have shape [q_len, head_dim / 2] = {list(shape[1:])}, "
                f"with or without a batch axis, got {table.shape}"
            )
            raise ValueError(message)
    if tables[0].shape != tables[1].shape:
        message = f"rotary.tables must have one shape, got {tables[0].shape} and {tables[1].shape}"
        raise ValueError(message)
    return RotaryTables(*tables)

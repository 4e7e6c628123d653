"""What `ragged_attention` refuses: each message names the argument, its value and the rule."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import jax.core
import jax.numpy as jnp
import numpy as np

from flywheel.attention.checks import HEAD_DIMS
from flywheel.attention.rotary import LAYOUTS, Rotary, RotaryTables, check_positions
from flywheel.packing import MAX_TOKENS

if TYPE_CHECKING:
    from jax import Array

_RANK = 3


def check_operands(q: Any, k: Any, v: Any) -> None:  # noqa: ANN401  anything a caller may pass
    """Types, ranks, lengths and shapes of q, k and v."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if getattr(x, "dtype", None) != jnp.bfloat16:
            message = f"{name} must be a BF16 array, got {getattr(x, 'dtype', type(x).__name__)}"
            raise TypeError(message)
        if x.ndim != _RANK:
            message = f"{name} must have rank 3, [heads, tokens, head_dim], got shape {x.shape}"
            raise ValueError(message)
        if 0 in x.shape:
            message = f"{name} must not be empty in any axis, got shape {x.shape}"
            raise ValueError(message)
        if x.shape[1] > MAX_TOKENS:
            message = f"{name} must have at most 2**30 tokens, got {x.shape[1]}"
            raise ValueError(message)
    _check_shapes(q, k, v)


def _check_shapes(q: Array, k: Array, v: Array) -> None:
    if k.shape[:2] != v.shape[:2]:
        message = f"k and v must agree in kv_heads and tokens, got {k.shape} and {v.shape}"
        raise ValueError(message)
    if q.shape[2] != k.shape[2]:
        message = f"q and k must agree in head_dim, got {q.shape[2]} and {k.shape[2]}"
        raise ValueError(message)
    if q.shape[0] % k.shape[0]:
        message = f"heads must be a multiple of kv_heads, got {q.shape[0]} heads and {k.shape[0]} kv_heads"
        raise ValueError(message)
    for name, width in (("head_dim", q.shape[2]), ("v_dim", v.shape[2])):
        if width not in HEAD_DIMS:
            message = f"{name} must be one of {HEAD_DIMS}, got {width}"
            raise ValueError(message)


def check_cu_seqlens(cu_q: Any, cu_k: Any, q_tokens: int, k_tokens: int) -> None:  # noqa: ANN401
    """INT32, as many for q as for k; where the values are known, they must describe sequences of these tokens."""
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if getattr(cu, "dtype", None) != jnp.int32:
            message = f"{name} must be an INT32 array, got {getattr(cu, 'dtype', type(cu).__name__)}"
            raise TypeError(message)
        if cu.ndim != 1 or not cu.shape[0]:
            message = f"{name} must have shape [sequences + 1], got {list(cu.shape)}"
            raise ValueError(message)
    if cu_q.shape != cu_k.shape:
        message = (
            "cu_seqlens_q and cu_seqlens_k must name as many sequences, "
            f"got {cu_q.shape[0] - 1} and {cu_k.shape[0] - 1}"
        )
        raise ValueError(message)
    for name, cu, tokens in (("cu_seqlens_q", cu_q, q_tokens), ("cu_seqlens_k", cu_k, k_tokens)):
        if not isinstance(cu, jax.core.Tracer):
            _check_values(name, cu, tokens)


def _check_values(name: str, cu: Array, tokens: int) -> None:
    values = np.asarray(cu).tolist()
    if values[0] != 0:
        message = f"{name} must start at 0, got {name}[0] = {values[0]}"
        raise ValueError(message)
    for n, (before, after) in enumerate(itertools.pairwise(values)):
        if before > after:
            message = f"{name} must never fall, got {name}[{n}] = {before} and {name}[{n + 1}] = {after}"
            raise ValueError(message)
    if values[-1] > tokens:
        message = f"{name} must end at most at the number of tokens, {tokens}, got {values[-1]}"
        raise ValueError(message)


def check_rotary(rotary: Any, q_tokens: int, head_dim: int) -> None:  # noqa: ANN401
    """A rotary embedding of packed queries."""
    if rotary is None:
        return
    if not isinstance(rotary, Rotary):
        message = f"rotary must be None or a Rotary, got {type(rotary).__name__}"
        raise TypeError(message)
    if rotary.layout not in LAYOUTS:
        message = f"rotary.layout must be one of {LAYOUTS}, got {rotary.layout!r}"
        raise ValueError(message)
    if rotary.tables is not None:
        if rotary.positions is not None or rotary.base is not None:
            message = "rotary must have tables, or base and perhaps positions, got both"
            raise ValueError(message)
        _check_tables(rotary.tables, (q_tokens, head_dim // 2))
        return
    if rotary.base is None or not (math.isfinite(rotary.base) and rotary.base >= 1):
        message = f"rotary.base must be a finite number of at least 1 where there are no tables, got {rotary.base!r}"
        raise ValueError(message)
    positions = rotary.positions
    if positions is None:
        return
    if getattr(positions, "dtype", None) != jnp.int32:
        message = (
            f"rotary.positions must be an INT32 array, got {getattr(positions, 'dtype', type(positions).__name__)}"
        )
        raise TypeError(message)
    if positions.shape != (q_tokens,):
        message = f"rotary.positions must have shape [q_tokens] = [{q_tokens}], got {positions.shape}"
        raise ValueError(message)
    check_positions(positions)


def _check_tables(tables: Any, shape: tuple[int, int]) -> None:  # noqa: ANN401
    if not isinstance(tables, tuple) or len(tables) != 2:
        message = f"rotary.tables must be (cos, sin), got {type(tables).__name__}"
        raise TypeError(message)
    for name, table in zip(RotaryTables._fields, tables, strict=True):
        if getattr(table, "dtype", None) != jnp.float32:
            message = f"rotary.tables.{name} must be an FP32 array, got {getattr(table, 'dtype', type(table).__name__)}"
            raise TypeError(message)
        if table.shape != shape:
            message = (
                f"rotary.tables.{name} must have shape [q_tokens, head_dim / 2] = {list(shape)}, got {table.shape}"
            )
            raise ValueError(message)

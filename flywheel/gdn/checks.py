"""What the functions of this package refuse: each message names the argument, its value and the rule."""

from __future__ import annotations

import math
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from flywheel.gdn.inverse import CHUNK
from flywheel.gdn.products import Precision
from flywheel.gdn.spec import HEAD_DIM


def concrete(x: Any) -> np.ndarray | None:  # noqa: ANN401  anything a caller may pass
    """The values of an array that has any: not of a traced or abstract one."""
    if isinstance(x, (Tracer, jax.ShapeDtypeStruct)):
        return None
    return np.asarray(x)


def check_precision(precision: Any) -> None:  # noqa: ANN401
    """The precision of the matrix products."""
    if precision not in get_args(Precision):
        message = f"precision must be one of {get_args(Precision)}, got {precision!r}"
        raise ValueError(message)


def check_array(name: str, x: Any, dtype: Any, shape: tuple[int | None, ...], words: str) -> None:  # noqa: ANN401
    """Type and shape of an array; None is any length."""
    if getattr(x, "dtype", None) != dtype:
        message = f"{name} must be a {_short(dtype)} array, got {getattr(x, 'dtype', type(x).__name__)}"
        raise TypeError(message)
    found = tuple(x.shape)
    if len(found) != len(shape) or any(want not in (None, have) for want, have in zip(shape, found, strict=True)):
        message = f"{name} must have shape {words}, got {found}"
        raise ValueError(message)


def _short(dtype: Any) -> str:  # noqa: ANN401
    return {jnp.bfloat16: "BF16", jnp.float32: "FP32", jnp.int32: "INT32", jnp.bool_: "bool"}[dtype]


def check_lower(lower: Any) -> None:  # noqa: ANN401
    """The matrices of `triangular_inverse`."""
    if getattr(lower, "dtype", None) != jnp.float32:
        message = f"l must be a FP32 array, got {getattr(lower, 'dtype', type(lower).__name__)}"
        raise TypeError(message)
    if lower.ndim < 2 or lower.shape[-2:] != (CHUNK, CHUNK):
        message = f"l must have shape [..., {CHUNK}, {CHUNK}], got {tuple(lower.shape)}"
        raise ValueError(message)
    if 0 in lower.shape:
        message = f"l must not be empty in any axis, got shape {tuple(lower.shape)}"
        raise ValueError(message)
    values = concrete(lower)
    if values is None:
        return
    upper = np.triu(values) != 0  # NaN counts
    if upper.any():
        place = tuple(int(n) for n in np.argwhere(upper)[0])
        message = f"l must be strictly lower triangular, got {values[place]} at {list(place)}"
        raise ValueError(message)
    if not np.isfinite(values).all():
        place = tuple(int(n) for n in np.argwhere(~np.isfinite(values))[0])
        message = f"l must be finite, got {values[place]} at {list(place)}"
        raise ValueError(message)


def check_beta(beta: Any, lower: Any, precision: Precision) -> None:  # noqa: ANN401
    """The write strengths that went into L: `bf16` is for those up to 1."""
    if beta is None:
        return
    rows = tuple(lower.shape[:-1])
    check_array("beta", beta, jnp.float32, rows, f"{rows}, one for each row of l")
    values = concrete(beta)
    if values is None or precision != "bf16":
        return
    if not (values <= 1.0).all():
        worst = float(values.max())
        message = (
            f"beta must be at most 1 with precision='bf16', got {worst}: repeated keys then make errors larger than "
            "the inverse itself; use precision='bf16x3'"
        )
        raise ValueError(message)


WIDTHS = (2, 8)
"""Taps of the convolution, least and most."""

MOST_HEADS = 128
ACTIVATIONS = ("silu", "none")
_SMALLEST_NORMAL = 2.0**-126


def check_heads(n_kq: Any, n_v: Any) -> tuple[int, int]:  # noqa: ANN401
    """Numbers of heads."""
    for name, count in (("n_kq", n_kq), ("n_v", n_v)):
        if isinstance(count, bool) or not isinstance(count, int):
            message = f"{name} must be an int (it is part of the compiled kernel), got {count!r}"
            raise TypeError(message)
    if n_kq < 1 or n_v < 1 or n_v % n_kq:
        message = f"n_v must be a positive multiple of n_kq, got n_v = {n_v} and n_kq = {n_kq}"
        raise ValueError(message)
    if n_v > MOST_HEADS:
        message = f"n_v must be at most {MOST_HEADS}, got {n_v}"
        raise ValueError(message)
    return n_kq, n_v


def check_options(*, scale: Any, norm_eps: Any, beta_scale: Any, activation: Any) -> None:  # noqa: ANN401
    """Static numbers and names."""
    for name, value, optional in (
        ("scale", scale, True),
        ("norm_eps", norm_eps, True),
        ("beta_scale", beta_scale, False),
    ):
        if value is None and optional:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            message = f"{name} must be a Python number (it is part of the compiled kernel), got {type(value).__name__}"
            raise TypeError(message)
        if not math.isfinite(value):
            message = f"{name} must be finite, got {value}"
            raise ValueError(message)
    if norm_eps is not None and norm_eps != 0 and norm_eps < _SMALLEST_NORMAL:
        message = f"norm_eps must be None, 0 or at least 2**-126, got {norm_eps}"
        raise ValueError(message)
    if activation not in ACTIVATIONS:
        message = f"activation must be one of {ACTIVATIONS}, got {activation!r}"
        raise ValueError(message)


def check_layer(
    heads: tuple[int, int],
    qkv: Any,  # noqa: ANN401
    b: Any,  # noqa: ANN401
    a: Any,  # noqa: ANN401
    conv_state: Any,  # noqa: ANN401
    recurrent_state: Any,  # noqa: ANN401
    conv_weight: Any,  # noqa: ANN401
    conv_bias: Any,  # noqa: ANN401
    a_log: Any,  # noqa: ANN401
    dt_bias: Any,  # noqa: ANN401
) -> int:
    """The arrays of a layer; returns the convolution's width."""
    n_kq, n_v = heads
    dim = (2 * n_kq + n_v) * HEAD_DIM
    words = f"[tokens, {dim}] for n_kq = {n_kq}, n_v = {n_v} and head_dim {HEAD_DIM}"
    check_array("qkv", qkv, jnp.bfloat16, (None, dim), words)
    tokens = qkv.shape[0]
    if tokens < 1:
        message = "qkv must have at least 1 token, got 0"
        raise ValueError(message)
    for name, x in (("b", b), ("a", a)):
        _check_float(name, x, (tokens, n_v), f"[{tokens}, {n_v}]")
    _check_float("conv_weight", conv_weight, (None, dim), f"[width, {dim}], oldest tap first")
    width = conv_weight.shape[0]
    if not WIDTHS[0] <= width <= WIDTHS[1]:
        message = f"conv_weight must have {WIDTHS[0]} to {WIDTHS[1]} taps, got {width}"
        raise ValueError(message)
    if conv_bias is not None:
        _check_float("conv_bias", conv_bias, (dim,), f"[{dim}]")
    for name, x in (("a_log", a_log), ("dt_bias", dt_bias)):
        check_array(name, x, jnp.float32, (n_v,), f"[{n_v}]")
    states = (None, n_v, HEAD_DIM, HEAD_DIM)
    check_array("recurrent_state", recurrent_state, jnp.float32, states, f"[slots, {', '.join(map(str, states[1:]))}]")
    slots = recurrent_state.shape[0]
    check_array(
        "conv_state", conv_state, jnp.bfloat16, (slots, width - 1, dim), f"[{slots}, {width - 1}, {dim}], oldest first"
    )
    return width


def _check_float(name: str, x: Any, shape: tuple[int | None, ...], words: str) -> None:  # noqa: ANN401
    if getattr(x, "dtype", None) not in (jnp.bfloat16, jnp.float32):
        message = f"{name} must be a BF16 or FP32 array, got {getattr(x, 'dtype', type(x).__name__)}"
        raise TypeError(message)
    check_array(name, x, x.dtype.type, shape, words)


def check_sequences(tokens: int, slots: int, starts: Any, write: Any, read: Any, has_initial: Any) -> None:  # noqa: ANN401
    """Where sequences start, and their slots: types and shapes; values where they are known."""
    if getattr(starts, "ndim", 1) != 1 or getattr(starts, "shape", (0,))[0] < 1:
        message = f"query_start_loc must have shape [sequences + 1], got {tuple(starts.shape)}"
        raise ValueError(message)
    check_array("query_start_loc", starts, jnp.int32, (None,), "[sequences + 1]")
    count = starts.shape[0] - 1
    for name, x in (("state_indices", write), ("read_state_indices", read)):
        check_array(name, x, jnp.int32, (count,), f"[{count}], one for each sequence")
    check_array("has_initial_state", has_initial, jnp.bool_, (count,), f"[{count}], one for each sequence")
    _check_starts(concrete(starts), tokens)
    targets, sources, flags = (concrete(x) for x in (write, read, has_initial))
    for name, x in (("state_indices", targets), ("read_state_indices", sources)):
        if x is not None and ((x < -1) | (x >= slots)).any():
            message = f"{name} must lie in -1 .. {slots - 1}, got {x.tolist()}"
            raise ValueError(message)
    if targets is None:
        return
    kept = targets[targets >= 0]
    if len(np.unique(kept)) != len(kept):
        message = f"state_indices must differ from each other, got {targets.tolist()}"
        raise ValueError(message)
    if sources is None or flags is None:
        return
    for sequence in np.flatnonzero(flags & (sources >= 0)):
        writer = np.flatnonzero(targets == sources[sequence])
        if len(writer) and writer[0] != sequence:
            message = (
                f"read_state_indices must name no slot that another sequence writes, got slot {sources[sequence]} read "
                f"by sequence {sequence} and written by {writer[0]}"
            )
            raise ValueError(message)


def _check_starts(starts: np.ndarray | None, tokens: int) -> None:
    if starts is None:
        return
    if starts[0] != 0 or (np.diff(starts) < 0).any() or starts[-1] > tokens:
        message = f"query_start_loc must start at 0, never fall and end within {tokens} tokens, got {starts.tolist()}"
        raise ValueError(message)

"""The two attention kernels for TPU that ship with JAX: splash attention and flash attention, in interpret mode.

Both take whole blocks of 128; the adapters pad lengths at the end (and, for flash attention's top-left causal mask,
rows at the front), repeat K and V where a kernel has no grouped heads, and scale the query where the kernel asks for
it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import TYPE_CHECKING, Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from verify.measures import SMALLEST_NORMAL
from verify.subjects.arithmetic import Arithmetic
from verify.subjects.subject import EVERYWHERE, Features, Subject

if TYPE_CHECKING:
    from collections.abc import Generator

BLOCK = 128
Window = tuple[int | None, int | None]


# Padding and the like is done by numpy: JAX would compile it anew for every length.


def padded(x: jax.Array | np.ndarray, axis: int, *, front: int = 0) -> np.ndarray:
    """Zeros at the end of an axis up to whole blocks, after `front` zeros at its beginning."""
    size = x.shape[axis] + front
    widths = [(0, 0)] * x.ndim
    widths[axis] = (front, -size % BLOCK)
    return np.pad(np.asarray(x), widths)


def ids(real: int, axis_length: int, front: int = 0) -> np.ndarray:
    """Segment ids that keep padding apart: 0 for the real tokens, 1 elsewhere."""
    token = np.arange(axis_length)
    return np.where((token >= front) & (token < front + real), 0, 1).astype(np.int32)


def segment_ids(given: jax.Array | np.ndarray, size: int, filler: int, *, front: int = 0) -> np.ndarray:
    """Segment ids of one sequence, with `filler` on the padding."""
    row = np.asarray(given, np.int32)
    return np.pad(row, (front, size - front - row.shape[0]), constant_values=filler)


def splash_mask(masks: Any, shape: tuple[int, int], *, causal: bool, window: Window | None, offset: int) -> Any:  # noqa: ANN401
    """The mask object of a splash kernel for bottom-right aligned lengths that were padded to `shape`."""
    if window is not None:
        left, right = window
        return masks.LocalMask(shape, (left, 0 if causal else right), offset)
    return masks.CausalMask(shape, offset) if causal else masks.FullMask(shape)


@functools.cache
def _splash_kernel(
    heads: int,
    shape: tuple[int, int],
    causal: bool,  # noqa: FBT001  a key of the cache
    window: Window | None,
    offset: int,
    softcap: float | None,
) -> Any:  # noqa: ANN401
    kernels = importlib.import_module("jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel")
    masks = importlib.import_module("jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask")
    mask = masks.MultiHeadMask([splash_mask(masks, shape, causal=causal, window=window, offset=offset)] * heads)
    kernel = kernels.make_splash_mha_single_device(
        mask,
        block_sizes=kernels.BlockSizes(block_q=BLOCK, block_kv=BLOCK, block_kv_compute=BLOCK),
        save_residuals=True,
        attn_logits_soft_cap=softcap,
        interpret=True,
    )

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array, q_ids: Any, k_ids: Any, sinks: Any) -> Any:  # noqa: ANN401
        segments = None if q_ids is None else kernels.SegmentIds(q=q_ids, kv=k_ids)
        return kernel(q, k, v, segments, sinks=sinks)

    return run


def scaled_query(q: jax.Array | np.ndarray, scale: float) -> np.ndarray:
    """The query times the scale, which splash kernels leave to callers: BF16 if it holds every product, else FP32.

    Raises:
        NotImplementedError: a product leaves FP32's normal numbers, where machines flush it: the logit that it is part
            of may be of any size, and the kernel has no part in its loss.
    """
    words = np.asarray(q)
    with np.errstate(over="ignore", invalid="ignore"):
        given = words.astype(np.float32)
        wide = given * np.float32(scale)
        lost = (np.abs(given) >= SMALLEST_NORMAL) & (np.abs(wide) < SMALLEST_NORMAL) & (scale != 0.0)
        if (lost | (np.isfinite(given) & np.isinf(wide))).any():
            message = f"q times the scale, {scale!r}, leaves FP32's normal numbers"
            raise NotImplementedError(message)
        narrow = wide.astype(words.dtype)
        held = (narrow.astype(np.float32) == wide) | np.isnan(wide)
    return narrow if held.all() else wide


def _splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool,
    scale: float,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    q_segments: jax.Array | None = None,
    k_segments: jax.Array | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    heads, q_len, kv_len = q.shape[0], q.shape[1], k.shape[1]
    query, key, value = padded(scaled_query(q, scale), 1), padded(k, 1), padded(v, 1)
    shape = (query.shape[1], key.shape[1])
    q_ids = k_ids = None
    if q_segments is not None and k_segments is not None:
        q_ids, k_ids = segment_ids(q_segments, shape[0], -1), segment_ids(k_segments, shape[1], -2)
    elif not causal and kv_len % BLOCK:
        q_ids, k_ids = ids(q_len, shape[0]), ids(kv_len, shape[1])
    run = _splash_kernel(heads, shape, causal, window, kv_len - q_len, softcap)
    out, (lse,) = run(query, key, value, q_ids, k_ids, sinks)
    return np.asarray(out)[:, :q_len].astype(q.dtype), np.asarray(lse)[:, :q_len]


SPLASH = Subject(
    name="jax.splash_attention",
    call=_splash,
    layout="htd",
    features=Features(
        lse="fp32", masked_rows="zero", window=True, softcap=True, sinks=True, segments=True, head_dims=(64, 128, 256)
    ),
    domain=EVERYWHERE,
    arithmetic=Arithmetic(weights="fp32", exponential="exp", block_kv=BLOCK),
    package="jax",
    contract="splash_attention_mask.py: a negative offset leaves rows without a key, which is undefined",
    notes=(
        "lengths padded to 128 at the end, kept apart by the mask or by segment ids",
        "the query is multiplied by the scale before the call, in FP32 unless BF16 holds the product",
    ),
)


@contextlib.contextmanager
def interpreted() -> Generator[None]:
    """Pallas calls traced inside run in the fast interpreter; for kernels that have no argument for it."""
    with mock.patch.object(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True)):
        yield


def _flash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool,
    scale: float,
    q_segments: jax.Array | None = None,
    k_segments: jax.Array | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    flash = importlib.import_module("jax.experimental.pallas.ops.tpu.flash_attention")
    batch, heads, q_len, head_dim = q.shape
    kv_len = k.shape[2]
    # Its causal mask is aligned top-left: rows in front of the first one align it bottom-right.
    front = kv_len - q_len if causal else 0
    if front < 0:
        message = f"causal needs q_len <= kv_len, got {q_len} and {kv_len}"
        raise NotImplementedError(message)
    query = padded(q, 2, front=front)
    key, value = (padded(np.repeat(np.asarray(x), heads // x.shape[1], axis=1), 2) for x in (k, v))
    segments = None
    if q_segments is not None and k_segments is not None:
        segments = flash.SegmentIds(
            q=np.stack([segment_ids(row, query.shape[2], -1, front=front) for row in q_segments]),
            kv=np.stack([segment_ids(row, key.shape[2], -2) for row in k_segments]),
        )
    elif not causal and kv_len % BLOCK:
        q_ids, k_ids = ids(q_len, query.shape[2], front), ids(kv_len, key.shape[2])
        segments = flash.SegmentIds(q=np.tile(q_ids, (batch, 1)), kv=np.tile(k_ids, (batch, 1)))
    blocks = flash.BlockSizes.get_default(batch, heads, query.shape[2], key.shape[2], head_dim)
    out, lse = _flash_run()(query, key, value, segments, causal, scale, blocks)
    rows = slice(front, front + q_len)
    return np.asarray(out)[:, :, rows], np.asarray(lse)[:, :, rows]


@functools.cache
def _flash_run() -> Any:  # noqa: ANN401
    """The kernel with its residuals; the public function returns the output alone."""
    flash = importlib.import_module("jax.experimental.pallas.ops.tpu.flash_attention")

    @functools.partial(jax.jit, static_argnums=(4, 5, 6))
    def run(q: Any, k: Any, v: Any, segments: Any, causal: bool, scale: float, blocks: Any) -> Any:  # noqa: ANN401, FBT001
        with interpreted():
            out, l, m = flash._flash_attention(q, k, v, None, segments, True, causal, scale, blocks, False)  # noqa: E741, FBT003, SLF001
        return out, m + jnp.log(l)

    return run


FLASH = Subject(
    name="jax.flash_attention",
    call=_flash,
    layout="bhtd",
    features=Features(lse="fp32", masked_rows="unspecified", segments=True, head_dims=(64, 128, 256)),
    domain=EVERYWHERE,
    arithmetic=Arithmetic(weights="bf16", exponential="exp", block_kv=BLOCK),
    package="jax",
    notes=(
        "lengths padded to 128 at the end, kept apart by the causal mask or by segment ids",
        "rows put in front align its top-left causal mask bottom-right",
        "K and V repeated for grouped heads",
    ),
)


def lint_target() -> tuple[Any, ...]:
    """Splash attention and the shapes of one call, for `verify.lint.lint`."""
    kernel = _splash_kernel(2, (BLOCK, BLOCK), True, None, 0, None)  # noqa: FBT003
    query = jax.ShapeDtypeStruct((2, BLOCK, 64), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((1, BLOCK, 64), jnp.bfloat16)
    return (lambda q, k, v: kernel(q, k, v, None, None, None)), query, key, key

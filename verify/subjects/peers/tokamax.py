"""Tokamax's splash attention for TPU, in interpret mode.

Three configurations of one kernel: its default, which computes exp2 of logits times log2(e); natural exponentials; and
a caller's constant in place of the running maximum.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from verify.subjects.arithmetic import Arithmetic
from verify.subjects.jax_pallas import BLOCK, Window, ids, padded, scaled_query, segment_ids, splash_mask
from verify.subjects.subject import EVERYWHERE, Features, Subject

if TYPE_CHECKING:
    from collections.abc import Callable

_HOME = "tokamax._src.ops.experimental.tpu.splash_attention"
LARGEST_CONSTANT = 30.0


@functools.cache
def _kernel(
    shape: tuple[int, int],
    causal: bool,  # noqa: FBT001
    window: Window | None,
    offset: int,
    settings: tuple[tuple[str, Any], ...],
) -> Any:  # noqa: ANN401
    kernels = importlib.import_module(f"{_HOME}.splash_attention_kernel")
    masks = importlib.import_module(f"{_HOME}.splash_attention_mask")
    config = dataclasses.replace(
        kernels.SplashConfig.get_default(),
        block_q=BLOCK,
        block_kv=BLOCK,
        block_kv_compute=BLOCK,
        interpret=True,
        **dict(settings),
    )
    mask = splash_mask(masks, shape, causal=causal, window=window, offset=offset)
    kernel = kernels.make_splash_mha_single_device(mask, config=config, save_residuals=True)

    @jax.jit
    def run(q: Any, k: Any, v: Any, q_ids: Any, k_ids: Any, sinks: Any) -> Any:  # noqa: ANN401
        segments = None if q_ids is None else kernels.SegmentIds(q=q_ids, kv=k_ids)
        return kernel(q, k, v, segments, sinks)

    return run


def _splash(**settings: Any) -> Callable[..., tuple[np.ndarray, np.ndarray]]:  # noqa: ANN401
    def call(
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        *,
        causal: bool,
        scale: float,
        window: Window | None = None,
        softcap: float | None = None,
        sinks: np.ndarray | None = None,
        q_segments: np.ndarray | None = None,
        k_segments: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        q_len, kv_len = q.shape[1], k.shape[1]
        query, key, value = padded(scaled_query(q, scale), 1), padded(k, 1), padded(v, 1)
        shape = (query.shape[1], key.shape[1])
        q_ids = k_ids = None
        if q_segments is not None and k_segments is not None:
            q_ids, k_ids = segment_ids(q_segments, shape[0], -1), segment_ids(k_segments, shape[1], -2)
        elif not causal and kv_len % BLOCK:
            q_ids, k_ids = ids(q_len, shape[0]), ids(kv_len, shape[1])
        options = settings if softcap is None else {**settings, "attn_logits_soft_cap": softcap}
        run = _kernel(shape, causal, window, kv_len - q_len, tuple(options.items()))
        out, stats = run(query, key, value, q_ids, k_ids, sinks)
        return np.asarray(out)[:, :q_len].astype(q.dtype), np.asarray(stats["logsumexp"])[:, :q_len]

    return call


_FEATURES = Features(
    lse="fp32", masked_rows="zero", window=True, softcap=True, sinks=True, segments=True, head_dims=(64, 128, 256)
)
_UNDEFINED_ROWS = "splash_attention_mask.py: a negative offset leaves rows without a key, which is undefined"
_NOTES = (
    "lengths padded to 128 at the end, kept apart by the mask or by segment ids",
    "the query is multiplied by the scale before the call, in FP32 unless BF16 holds the product",
)

SPLASH = Subject(
    name="tokamax.splash_attention",
    call=_splash(),
    layout="htd",
    features=_FEATURES,
    domain=EVERYWHERE,
    arithmetic=Arithmetic(weights="bf16", exponential="exp2", block_kv=BLOCK),
    package="tokamax",
    modules=("tokamax",),
    contract=_UNDEFINED_ROWS,
    notes=_NOTES,
)

SPLASH_EXP = dataclasses.replace(
    SPLASH,
    name="tokamax.splash_attention[exp]",
    call=_splash(use_base2_exp=False),
    arithmetic=Arithmetic(weights="bf16", exponential="exp", block_kv=BLOCK),
)

SPLASH_CONSTANT = dataclasses.replace(
    SPLASH,
    name="tokamax.splash_attention[max_logit_const=30]",
    call=_splash(use_base2_exp=False, max_logit_const=LARGEST_CONSTANT),
    arithmetic=Arithmetic(weights="bf16", exponential="exp", block_kv=None),
    contract="max_logit_const is the caller's estimate of the largest logit; no range is stated",
)

"""Decode kernels of flywheel-tpu and Tokamax, over a KV cache, in Pallas' TPU interpreter.

A decode call has one query per request.  An attention problem becomes one: a row is a request with as many keys of the
cache as the row sees, all of one batch entry on the same cache.  So a decode kernel can be put to every causal problem,
and to problems without a mask.  Keys behind the last that a row sees stay in the cache and belong to no request.

The interpreter takes a hundredth of a second and more per request: a few rows of each problem are decoded, and nothing
is promised for the others.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from verify.subjects.arithmetic import Arithmetic
from verify.subjects.jax_pallas import BLOCK, padded
from verify.subjects.subject import Domain, Features, Subject

if TYPE_CHECKING:
    from jaxtyping import Int, Int32

    from verify.attention.problem import AttentionProblem
    from verify.subjects.jax_pallas import Window

PAGE = BLOCK
_FEATURES = {"lse": "fp32", "masked_rows": "zero", "window": True, "softcap": True}
_ROWS = "decoded rows are requests of their own; requests of one batch entry share a cache"
REQUESTS = 12


def decoded(q_len: int) -> Int[np.ndarray, " requests"]:
    """The rows that are decoded: first, last, and others evenly between them; as many for every length."""
    return np.linspace(0, q_len - 1, REQUESTS).astype(np.int64)


def _decoded_rows(problem: AttentionProblem) -> np.ndarray:
    return np.broadcast_to(np.isin(np.arange(problem.q_len), decoded(problem.q_len)), problem.q.shape[:3])


DECODED = Domain(f"{REQUESTS} rows, evenly from the first to the last", _decoded_rows)


def lengths(q_len: int, kv_len: int, *, causal: bool) -> Int32[np.ndarray, " q_len"]:
    """Keys that each row sees, from the first on."""
    if not causal:
        return np.full(q_len, kv_len, np.int32)
    return np.maximum(np.arange(q_len) + 1 + kv_len - q_len, 0).astype(np.int32)


def _left(window: Window | None, *, causal: bool) -> int:
    if window is None:
        return -1
    left, right = window
    # A request's query stands at its last key: nothing lies to the right of it, and another right edge cannot be said.
    if not causal and (left is not None or right is not None):
        message = "a window needs a causal mask: a decode's query stands at its last key"
        raise NotImplementedError(message)
    return -1 if left is None else left


@functools.cache
def _flywheel_run(scale: float, left: int, softcap: float, *, paged: bool) -> Any:  # noqa: ANN401
    flash_attn_with_kvcache = importlib.import_module("flywheel_tpu").flash_attn_with_kvcache
    common = {
        "softmax_scale": scale,
        "causal": True,
        "window_size": (left, 0 if left >= 0 else -1),
        "softcap": softcap,
        "return_softmax_lse": True,
        "interpret": True,
    }

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = q.shape[0]
        if paged:
            # [heads, keys, d] to pages of K and V rows in turn; the pages lie in the pool backwards.
            merged = jnp.stack([k, v], axis=1).reshape(2 * k.shape[0], -1, PAGE, k.shape[2])
            pool = jnp.transpose(merged, (1, 2, 0, 3))[::-1]
            table = jnp.broadcast_to(jnp.arange(pool.shape[0])[::-1], (rows, pool.shape[0]))
            out, lse, _ = flash_attn_with_kvcache(q, pool, None, cache_seqlens=seen, block_table=table, **common)
        else:
            caches = (jnp.transpose(x, (1, 0, 2))[None] for x in (k, v))
            row = jnp.zeros(rows, jnp.int32)
            out, lse, _, _ = flash_attn_with_kvcache(q, *caches, cache_seqlens=seen, cache_batch_idx=row, **common)
        return jnp.transpose(out[:, 0], (1, 0, 2)), jnp.transpose(lse[:, :, 0])

    return run


def _flywheel(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool,
    scale: float,
    window: Window | None = None,
    softcap: float | None = None,
    paged: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    run = _flywheel_run(scale, _left(window, causal=causal), softcap or 0.0, paged=paged)
    rows = decoded(q.shape[1])
    tokens = np.transpose(np.asarray(q)[:, rows], (1, 0, 2))[:, None]
    out, lse = np.full(q.shape, np.nan, q.dtype), np.full(q.shape[:2], np.nan, np.float32)
    found = run(tokens, padded(k, 1), padded(v, 1), lengths(q.shape[1], k.shape[1], causal=causal)[rows])
    out[:, rows], lse[:, rows] = (np.asarray(x) for x in found)
    return out, lse


def _flywheel_paged(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> tuple[np.ndarray, np.ndarray]:  # noqa: ANN401
    return _flywheel(q, k, v, **options, paged=True)


_FLYWHEEL_CONTRACT = (
    "'a decode row with nothing to attend returns out = 0 and lse = -inf'; the documentation states no numerical bound"
)

FLYWHEEL_TPU = Subject(
    name="verify.subjects.peers.decode:FLYWHEEL_TPU",
    call=_flywheel,
    layout="htd",
    features=Features(**_FEATURES, head_dims=(64, 128, 256)),  # type: ignore[arg-type]
    domain=DECODED,
    arithmetic=Arithmetic(weights="bf16", exponential="exp2", block_kv=BLOCK),
    package="flywheel-tpu",
    modules=("flywheel_tpu",),
    contract=_FLYWHEEL_CONTRACT,
    notes=("flash_attn_with_kvcache on a contiguous cache, nothing appended", _ROWS),
)

FLYWHEEL_TPU_PAGED = dataclasses.replace(
    FLYWHEEL_TPU,
    name="verify.subjects.peers.decode:FLYWHEEL_TPU_PAGED",
    call=_flywheel_paged,
    notes=("flash_attn_with_kvcache on pages of 128 keys, which lie backwards in the pool", _ROWS),
)

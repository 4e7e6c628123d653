"""Other people's attention kernels as compile targets: the factories of `verify.compiled.compare`.

Each takes the problem (`heads`, `kv_heads`, `tokens`, `head_dim`; batch 1, causal, BF16) and returns a function with
its abstract arguments.  They run in the process that compiles, in the environment that holds the package.

The peers' own defaults are used wherever a peer has tuned ones.  JAX's splash attention ships with placeholder blocks
of 128 and no tuning table, so it gets blocks chosen from a small set by the modelled time (see
`compare.SPLASH_BLOCKS`).
"""

# ruff: noqa: PLC0415, ANN401  each function imports its own package; they hand arrays through

# pyright: reportMissingImports=false

from __future__ import annotations

import math
from typing import Any


def _arrays(batch: tuple[int, ...], heads: int, kv_heads: int, tokens: int, head_dim: int) -> tuple[Any, Any, Any]:
    import jax
    import jax.numpy as jnp

    query = jax.ShapeDtypeStruct((*batch, heads, tokens, head_dim), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((*batch, kv_heads, tokens, head_dim), jnp.bfloat16)
    return query, key, key


def flywheel(heads: int, kv_heads: int, tokens: int, head_dim: int, **options: Any) -> tuple[Any, Any]:
    """This project's kernel, `[batch, heads, tokens, head_dim]`."""
    import functools

    from flywheel import attention

    return functools.partial(attention, causal=True, **options), _arrays((1,), heads, kv_heads, tokens, head_dim)


def flywheel_tpu(heads: int, kv_heads: int, tokens: int, head_dim: int) -> tuple[Any, Any]:
    """flywheel-tpu's dense forward with its tuned blocks."""
    import functools

    from flywheel_tpu import flash_attn_func

    return functools.partial(flash_attn_func, causal=True), _arrays((1,), heads, kv_heads, tokens, head_dim)


def jax_splash(
    heads: int, kv_heads: int, tokens: int, head_dim: int, *, block_q: int, block_kv: int, block_kv_compute: int
) -> tuple[Any, Any]:
    """Splash attention as it ships with JAX; the caller scales the query, as its documentation asks."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    blocks = splash_attention_kernel.BlockSizes(
        block_q=min(block_q, tokens),
        block_kv=min(block_kv, tokens),
        block_kv_compute=min(block_kv_compute, block_kv, tokens),
    )
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((tokens, tokens))] * heads)
    kernel = splash_attention_kernel.make_splash_mha_single_device(mask, block_sizes=blocks)

    def attention(query: Any, key: Any, value: Any) -> Any:
        return kernel(query, key, value)

    return attention, _arrays((), heads, kv_heads, tokens, head_dim)


def tokamax_splash(heads: int, kv_heads: int, tokens: int, head_dim: int, **config: Any) -> tuple[Any, Any]:
    """Tokamax's splash attention with the blocks of its heuristic, or the given ones; the caller scales the query."""
    import dataclasses

    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    block = 1024 if tokens % 1024 == 0 else 128
    heuristic = {
        "block_q": block,
        "block_kv": block,
        "block_kv_compute": min(block, 512),
        "use_experimental_scheduler": True,
    }
    chosen = {**heuristic, **config}
    for name in ("q_layout", "k_layout", "v_layout"):
        chosen[name] = splash_attention_kernel.QKVLayout(chosen.get(name, 1))
    for name in ("block_q", "block_kv", "block_kv_compute"):
        chosen[name] = min(chosen[name], tokens)
    settings = dataclasses.replace(splash_attention_kernel.SplashConfig.get_default(), **chosen)
    mask = splash_attention_mask.CausalMask(shape=(tokens, tokens), shard_count=1)
    kernel = splash_attention_kernel.make_splash_mha_single_device(mask, config=settings)

    def attention(query: Any, key: Any, value: Any) -> Any:
        return kernel(query, key, value)

    return attention, _arrays((), heads, kv_heads, tokens, head_dim)


def tokamax_flash(
    query: list[int], key: list[int], value: list[int], *, causal: bool, residuals: bool, config: dict[str, Any]
) -> tuple[Any, Any]:
    """Tokamax's dense attention as its published timings ran it, `[batch, tokens, heads, head_dim]`."""
    import jax
    import jax.numpy as jnp
    from tokamax._src.ops.attention import base, pallas_mosaic_tpu

    operation = pallas_mosaic_tpu.PallasMosaicTpuFlashAttention()
    chosen = pallas_mosaic_tpu.Config(**config)

    def attention(q: Any, k: Any, v: Any) -> Any:
        # `_fwd` rather than the operation itself, which refuses to be traced on a machine without a TPU.
        out, stats = operation._fwd(  # noqa: SLF001  see above
            q,
            k,
            v,
            precision=((jax.lax.Precision.DEFAULT,) * 2,) * 2,
            logits_dtype=jnp.dtype(jnp.float32),
            logits_scale=1 / math.sqrt(q.shape[-1]),
            bias=None,
            logits_soft_cap=None,
            mask=base.Mask(is_causal=causal),
            dropout_mask=None,
            dropout_rate=0.0,
            paging_info=None,
            q_indices=None,
            k_indices=None,
            normalize_output=True,
            return_residuals=residuals,
            config=chosen,
        )
        return (out, stats) if residuals else out

    return attention, tuple(jax.ShapeDtypeStruct(tuple(shape), jnp.bfloat16) for shape in (query, key, value))

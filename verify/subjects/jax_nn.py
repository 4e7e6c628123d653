"""`jax.nn.dot_product_attention`, XLA implementation."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from verify.subjects.arithmetic import Arithmetic
from verify.subjects.subject import EVERYWHERE, GRADIENTS, Features, Subject


@functools.partial(jax.jit, static_argnames=("causal", "window"))
def _attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool,
    scale: float,
    window: tuple[int | None, int | None] | None = None,
    q_segments: jax.Array | None = None,
    k_segments: jax.Array | None = None,
    q_positions: jax.Array | None = None,
) -> Any:  # noqa: ANN401  a pair of arrays
    """`is_causal` is top-left aligned, so that the mask is built here and handed over."""
    q_len, kv_len = q.shape[1], k.shape[1]
    aligned = jnp.arange(q_len)[None] + (kv_len - q_len) if q_positions is None else q_positions
    distance = jnp.arange(kv_len)[None, None, :] - aligned[:, :, None]
    left, right = window or (None, None)
    seen = jnp.ones(distance.shape, bool)
    if causal:
        seen &= distance <= 0
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    if q_segments is not None and k_segments is not None:
        seen &= q_segments[:, :, None] == k_segments[:, None, :]
    return jax.nn.dot_product_attention(
        q, k, v, mask=seen[:, None], scale=scale, implementation="xla", return_residual=True
    )


_FEATURES = Features(lse="bf16", masked_rows="unspecified", window=True, segments=True, positions=True)

XLA = Subject(
    name="jax.nn.dot_product_attention",
    call=_attention,
    layout="bthd",
    features=_FEATURES,
    domain=EVERYWHERE,
    # The maximum is known before the first weight; P is divided by its sum before it is rounded: one division for one
    # reciprocal and product.
    arithmetic=Arithmetic(weights="bf16", exponential="exp", block_kv=None),
    package="jax",
    notes=("causal and window masks are passed as `mask`, aligned bottom-right",),
)


@functools.partial(jax.jit, static_argnames=("causal", "window"))
def _gradients(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, **options: Any) -> Any:  # noqa: ANN401
    _, backward = jax.vjp(lambda *inputs: _attention(*inputs, **options)[0], q, k, v)
    return backward(d_out)


XLA_GRADIENTS = Subject(
    name="jax.nn.dot_product_attention[gradients]",
    call=_gradients,
    layout="bthd",
    features=dataclasses.replace(_FEATURES, lse=None),
    domain=EVERYWHERE,
    # dP comes out of its product in BF16, as the cotangent of the BF16 weights; the softmax is differentiated in FP32.
    arithmetic=Arithmetic(
        weights="bf16", exponential="exp", block_kv=None, d_weights="bf16", d_scores="bf16", delta="weights"
    ),
    package="jax",
    notes=(*XLA.notes, "jax.vjp of the output alone"),
    operation=GRADIENTS,
)

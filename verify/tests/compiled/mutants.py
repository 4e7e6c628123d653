"""The project's kernel with one fault that interpret mode cannot see, as compile targets.

Each plants its fault by replacing one function, in the process that compiles, before the kernel is traced.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

import flywheel
from flywheel.attention import replay, tile

if TYPE_CHECKING:
    from collections.abc import Callable

F32 = jnp.float32


def _call(q_len: int = 1024, kv_len: int = 1024, head_dim: int = 128, **config: int) -> tuple[Any, Any]:
    shapes = [
        jax.ShapeDtypeStruct((1, heads, tokens, head_dim), jnp.bfloat16) for heads, tokens in ((2, q_len), (1, kv_len))
    ]
    blocks = flywheel.AttentionConfig(**config)
    return functools.partial(flywheel.attention, causal=True, config=blocks), (*shapes, shapes[1])


def sound() -> tuple[Any, Any]:
    """No fault: what the others are compared with."""
    return _call()


def fp32_values() -> tuple[Any, Any]:
    """P V as an FP32 product at default precision: exact operands, so that interpret mode computes the same bits."""

    def turned_values(vt: Any, p: Any) -> Any:
        return lax.dot_general(vt.astype(F32), p.astype(F32), (((1,), (0,)), ((), ())), preferred_element_type=F32)

    tile.turned_values = turned_values
    return _call()


def fp32_scores() -> tuple[Any, Any]:
    """K Q^T on operands that were widened on their way: a BF16 product that became FP32."""
    original: Callable[..., Any] = tile.dot_products

    def dot_products(k: Any, q: Any) -> Any:
        return original(k.astype(F32), q.astype(F32))

    tile.dot_products = dot_products
    return _call()


def unproven_alignment() -> tuple[Any, Any]:
    """The replay's DMA without the statement that its start is a multiple of the fragment."""

    class WithoutPromise:
        """`pl` as the kernel sees it, its starts going through a division that hides what they are multiples of."""

        def __getattr__(self, name: str) -> Any:
            return getattr(original, name)

        @staticmethod
        def multiple_of(value: Any, _: int) -> Any:
            return lax.div(value * 3 + 1, jnp.int32(3))

    original = replay.pl
    replay.pl = WithoutPromise()
    # Two key blocks: a replay fetches all but the last again.
    return _call(2048, 2048, block_q=1024, block_kv=1024)


def transposed_weights() -> tuple[Any, Any]:
    """P turned, and turned back by the matrix unit: its tiles are pushed transposed."""

    def turned_values(vt: Any, p: Any) -> Any:
        turned = p.astype(F32).T.astype(jnp.bfloat16)
        return lax.dot_general(vt, turned, (((1,), (1,)), ((), ())), preferred_element_type=F32)

    tile.turned_values = turned_values
    return _call()


def tokens_first() -> tuple[Any, Any]:
    """A caller that keeps `[batch, tokens, heads, head_dim]`: XLA has to transpose the query and the output."""
    attention, shapes = _call()

    def swapped(*operands: Any) -> Any:
        return jnp.swapaxes(attention(*(jnp.swapaxes(each, 1, 2) for each in operands)), 1, 2)

    turned = [
        jax.ShapeDtypeStruct((each.shape[0], each.shape[2], each.shape[1], each.shape[3]), each.dtype)
        for each in shapes
    ]
    return swapped, tuple(turned)

"""The public configurations of this project's kernels, as compile targets for the checks.

The process that compiles imports this file by path, so it imports nothing of `verify`.
"""

# ruff: noqa: PLC0415  JAX is imported in the process that compiles alone

from __future__ import annotations

import dataclasses
import math
from types import MappingProxyType
from typing import Any


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """One call of `flywheel.attention`.

    Attributes:
        head_dim: width of a head.
        q_len: queries.
        kv_len: keys.
        causal: masked, bottom-right aligned.
        heads: query heads.
        kv_heads: key heads.
        options: further options of the call.
        config: block sizes; empty is the default.
    """

    head_dim: int
    q_len: int
    kv_len: int
    causal: bool = True
    heads: int = 2
    kv_heads: int = 1
    options: tuple[str, ...] = ()
    config: tuple[tuple[str, int], ...] = ()

    @property
    def flops(self) -> float:
        """Useful FLOP: two products over the visible pairs."""
        offset = self.kv_len - self.q_len
        visible = (
            sum(min(max(row + offset + 1, 0), self.kv_len) for row in range(self.q_len))
            if self.causal
            else self.q_len * self.kv_len
        )
        return 4.0 * self.heads * self.head_dim * visible


CASES = MappingProxyType(
    {
        "d64-causal": AttentionCase(64, 4096, 4096),
        "d128-causal": AttentionCase(128, 4096, 4096),
        "d256-causal": AttentionCase(256, 4096, 4096),
        "d128-full": AttentionCase(128, 4096, 4096, causal=False),
        "d256-full": AttentionCase(256, 4096, 4096, causal=False),
        "d128-causal-lse-diagnostics": AttentionCase(128, 4096, 4096, options=("return_lse", "return_diagnostics")),
        "d128-causal-short": AttentionCase(128, 512, 512),
        "d128-causal-ragged": AttentionCase(128, 1000, 3001),
        "d128-causal-more-queries": AttentionCase(128, 3000, 1000),
        "d128-full-one-query": AttentionCase(128, 1, 4096, causal=False),
        "d128-causal-blocks-1024": AttentionCase(128, 4096, 4096, config=(("block_q", 1024), ("block_kv", 1024))),
        "d128-causal-fragment-512": AttentionCase(128, 4096, 4096, config=(("fragment", 512),)),
    }
)


def attention(case: str) -> tuple[Any, Any]:
    """Factory of a case."""
    return call(CASES[case])


def call(case: AttentionCase) -> tuple[Any, Any]:
    """The function and the abstract arguments of a case."""
    import functools

    import jax
    import jax.numpy as jnp

    import flywheel

    options: dict[str, Any] = dict.fromkeys(case.options, True)
    if case.config:
        options["config"] = flywheel.AttentionConfig(**dict(case.config))
    query = jax.ShapeDtypeStruct((1, case.heads, case.q_len, case.head_dim), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((1, case.kv_heads, case.kv_len, case.head_dim), jnp.bfloat16)
    scale = 1 / math.sqrt(case.head_dim)
    function = functools.partial(flywheel.attention, causal=case.causal, scale=scale, **options)
    return function, (query, key, key)

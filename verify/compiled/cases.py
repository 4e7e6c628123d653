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
        options: flags of the call that are set.
        config: block sizes; empty is the default.
        v_dim: width of the values; None is head_dim.
        more: further static options of the call.
        operands: further arrays of the call: sinks, segments, rotary (its layout).
    """

    head_dim: int
    q_len: int
    kv_len: int
    causal: bool = True
    heads: int = 2
    kv_heads: int = 1
    options: tuple[str, ...] = ()
    config: tuple[tuple[str, int], ...] = ()
    v_dim: int | None = None
    more: tuple[tuple[str, Any], ...] = ()
    operands: tuple[str, ...] = ()

    @property
    def flops(self) -> float:
        """Useful FLOP: two products over the visible pairs, segments apart."""
        offset = self.kv_len - self.q_len
        left, right = dict(self.more).get("window", (None, None))
        right = 0 if self.causal else right
        visible = 0
        for position in range(offset, self.kv_len):
            stop = self.kv_len if right is None else min(position + right + 1, self.kv_len)
            visible += max(stop - (0 if left is None else max(position - left, 0)), 0)
        return 2.0 * self.heads * (self.head_dim + (self.v_dim or self.head_dim)) * visible


CASES = MappingProxyType(
    {
        "d64-causal": AttentionCase(64, 2048, 2048),
        "d128-causal": AttentionCase(128, 2048, 2048),
        "d192-v128-causal": AttentionCase(192, 2048, 2048, v_dim=128),
        "d256-causal": AttentionCase(256, 2048, 2048),
        "d128-full": AttentionCase(128, 2048, 2048, causal=False),
        "d256-full": AttentionCase(256, 2048, 2048, causal=False),
        "d128-causal-long": AttentionCase(128, 8192, 8192),
        "d256-causal-long": AttentionCase(256, 8192, 8192),
        "d128-causal-online": AttentionCase(128, 2048, 2048, more=(("softmax", "online"),)),
        "d256-causal-online": AttentionCase(256, 2048, 2048, more=(("softmax", "online"),)),
        "d128-window": AttentionCase(128, 8192, 8192, more=(("window", (1023, 0)),)),
        "d128-softcap": AttentionCase(128, 2048, 2048, more=(("softcap", 50.0),)),
        "d128-sinks": AttentionCase(128, 2048, 2048, operands=("sinks",)),
        "d128-segments": AttentionCase(128, 2048, 2048, operands=("segments",)),
        "d128-rotary-half": AttentionCase(128, 2048, 2048, operands=("half",)),
        "d64-rotary-interleaved": AttentionCase(64, 2048, 2048, operands=("interleaved",)),
        "d128-causal-all-outputs": AttentionCase(
            128, 2048, 2048, options=("return_lse", "return_max_logit", "return_diagnostics")
        ),
        "d128-causal-short": AttentionCase(128, 512, 512),
        "d128-causal-ragged": AttentionCase(128, 1000, 3001),
        "d128-causal-more-queries": AttentionCase(128, 3000, 1000),
        "d128-full-one-query": AttentionCase(128, 1, 4096, causal=False),
        "d128-causal-blocks-1024": AttentionCase(128, 4096, 4096, config=(("block_q", 1024), ("block_kv", 1024))),
    }
)


def attention(case: str) -> tuple[Any, Any]:
    """Factory of a case."""
    return call(CASES[case])


def call(case: AttentionCase) -> tuple[Any, Any]:
    """The function and the abstract arguments of a case."""
    import jax
    import jax.numpy as jnp

    import flywheel

    options: dict[str, Any] = dict.fromkeys(case.options, True) | dict(case.more)
    if case.config:
        sizes: dict[str, Any] = dict(case.config)
        options["config"] = flywheel.AttentionConfig(**sizes)
    query = jax.ShapeDtypeStruct((1, case.heads, case.q_len, case.head_dim), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((1, case.kv_heads, case.kv_len, case.head_dim), jnp.bfloat16)
    value = jax.ShapeDtypeStruct((1, case.kv_heads, case.kv_len, case.v_dim or case.head_dim), jnp.bfloat16)
    scale = 1 / math.sqrt(case.head_dim)
    arrays: dict[str, Any] = {}
    if "sinks" in case.operands:
        arrays["sinks"] = jax.ShapeDtypeStruct((case.heads,), jnp.float32)
    if "segments" in case.operands:
        arrays["q_segment_ids"] = jax.ShapeDtypeStruct((1, case.q_len), jnp.int32)
        arrays["kv_segment_ids"] = jax.ShapeDtypeStruct((1, case.kv_len), jnp.int32)
    layout: Any = next((x for x in case.operands if x in ("half", "interleaved")), None)
    if layout is not None:
        arrays["cos"] = arrays["sin"] = jax.ShapeDtypeStruct((case.q_len, case.head_dim // 2), jnp.float32)

    def function(q: Any, k: Any, v: Any, *rest: Any) -> Any:  # noqa: ANN401
        given = dict(zip(arrays, rest, strict=True))
        if layout is not None:
            tables = flywheel.RotaryTables(given.pop("cos"), given.pop("sin"))
            given["rotary"] = flywheel.Rotary(tables=tables, layout=layout)
        return flywheel.attention(q, k, v, causal=case.causal, scale=scale, **given, **options)

    return function, (query, key, value, *arrays.values())

"""Packed attention's public configurations as compile targets for the checks.

The process that compiles imports this file by path, so it imports nothing of `verify`.
"""

# ruff: noqa: PLC0415  JAX is imported in the process that compiles alone

from __future__ import annotations

import dataclasses
import itertools
from types import MappingProxyType
from typing import Any


@dataclasses.dataclass(frozen=True)
class RaggedCase:
    """One call of `flywheel.ragged_attention`, causal, with as many keys as queries.

    Attributes:
        head_dim: width of a head.
        lengths: of the sequences; the schedule is read for these, the compiled kernel serves any.
        heads: query heads.
        kv_heads: key heads.
        block: as in `flywheel.RaggedConfig`.
        batch_invariant: bitwise independent of a sequence's place.
    """

    head_dim: int
    lengths: tuple[int, ...]
    heads: int = 8
    kv_heads: int = 1
    block: int = 1024
    batch_invariant: bool = False

    @property
    def flops(self) -> float:
        """Useful FLOP: two products over the visible pairs."""
        return sum(2.0 * self.heads * 2 * self.head_dim * n * (n + 1) / 2 for n in self.lengths)


RAGGED_CASES = MappingProxyType(
    {
        "ragged-d256": RaggedCase(256, (1003, 77, 2222, 300)),
        "ragged-d128": RaggedCase(128, (1003, 77, 2222, 300), heads=4, kv_heads=4),
    }
)


def ragged(case: str) -> tuple[Any, ...]:
    """Factory of a case: the function, its abstract arguments, and the lengths' values."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import flywheel

    one = RAGGED_CASES[case]
    bounds = np.asarray([0, *itertools.accumulate(one.lengths)], np.int32)
    tokens = -(-int(bounds[-1]) // 8) * 8
    query, key = (jax.ShapeDtypeStruct((n, tokens, one.head_dim), jnp.bfloat16) for n in (one.heads, one.kv_heads))
    cu = jax.ShapeDtypeStruct(bounds.shape, jnp.int32)

    def function(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any) -> Any:  # noqa: ANN401
        config = flywheel.RaggedConfig(block=one.block)
        return flywheel.ragged_attention(
            q, k, v, cu_q, cu_k, causal=True, config=config, batch_invariant=one.batch_invariant
        )

    return function, (query, key, key, cu, cu), {3: bounds, 4: bounds}

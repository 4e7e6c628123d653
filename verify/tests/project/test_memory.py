"""Compiled kernels are let go before their mappings run out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from verify import memory

pytestmark = pytest.mark.smoke


def test_many_kernels_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the limit a compiled function stays; above it, it is made again, with the same result."""
    made = []

    @jax.jit
    def doubled(x: jax.Array) -> jax.Array:
        made.append(1)
        return 2.0 * x

    x = jnp.arange(4.0)
    monkeypatch.setattr(memory, "MOST_MAPPINGS", memory.mappings() + 10_000)
    for _ in range(2):
        assert doubled(x).tolist() == [0.0, 2.0, 4.0, 6.0]
        assert not memory.forget_kernels()
    assert len(made) == 1
    monkeypatch.setattr(memory, "MOST_MAPPINGS", 0)
    assert memory.forget_kernels() == (memory.mappings() > 0)
    assert doubled(x).tolist() == [0.0, 2.0, 4.0, 6.0]
    assert len(made) == (2 if memory.mappings() else 1)

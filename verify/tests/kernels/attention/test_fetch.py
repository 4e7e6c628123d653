"""Blocks that the kernel fetches two steps ahead: the same bits as with Pallas' own pipeline, and no race."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import flywheel
from flywheel.attention.tiling import resolve, vmem_bytes

JUMP = 1000.0
"""A key that is this much longer makes some scores exceed their anchors by far: the query blocks that see it replay."""

Call = tuple[tuple[int, int, int, int, int], tuple[int, int | None], dict[str, Any]]

CALLS: dict[str, Call] = {
    # batch, heads, kv_heads, q_len, kv_len; block_q, block_kv; options
    "one step per head, heads of a group share keys": ((2, 4, 2, 128, 256), (128, 256), {"causal": True}),
    "one step in all": ((1, 1, 1, 128, 128), (128, 128), {"causal": False}),
    "two steps in all": ((1, 2, 1, 128, 128), (128, 128), {"causal": False}),
    "several blocks, each head its keys": ((1, 3, 3, 384, 512), (128, 128), {"causal": True}),
    "window": ((2, 2, 1, 512, 512), (128, 256), {"causal": True, "window": (150, 0)}),
    "window over key blocks that overlap": ((1, 4, 2, 1024, 1536), (512, None), {"causal": True, "window": (300, 0)}),
    "sinks, segments and rotary": ((2, 4, 2, 256, 256), (128, 256), {"causal": True, "features": True}),
    "online": ((1, 4, 2, 256, 256), (256, 256), {"causal": True, "softmax": "online", "softcap": 9.0}),
}
IN_DEFAULT = "one step per head, heads of a group share keys"


def run(name: str, lookahead: int, interpret: Any = True) -> flywheel.AttentionOutput:
    """One call with all outputs; the keys of every other KV head make query blocks that see them replay."""
    (batch, heads, kv_heads, q_len, kv_len), (block_q, block_kv), given = CALLS[name]
    rng = np.random.default_rng(3)
    q, k, v = (rng.normal(size=(batch, h, n, 64)) for h, n in ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len)))
    k[:, ::2, kv_len - 40] *= JUMP
    options = dict(given)
    if options.pop("features", False):
        options["sinks"] = jnp.asarray(rng.normal(size=heads), jnp.float32)
        options["q_segment_ids"] = jnp.asarray(rng.integers(0, 2, size=(batch, q_len)), jnp.int32)
        options["kv_segment_ids"] = jnp.asarray(rng.integers(0, 2, size=(batch, kv_len)), jnp.int32)
        positions = jnp.asarray(rng.integers(0, 999, size=(batch, q_len)), jnp.int32)
        options["rotary"] = flywheel.Rotary(positions=positions, base=10000.0)
    result = flywheel.attention(
        *(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)),
        **options,
        return_lse=True,
        return_max_logit=True,
        return_diagnostics=True,
        config=flywheel.AttentionConfig(block_q, block_kv, 128, lookahead=lookahead),
        interpret=interpret,
    )
    assert isinstance(result, flywheel.AttentionOutput)
    return result


def words(result: flywheel.AttentionOutput) -> list[np.ndarray]:
    """Everything a call returned, bit by bit."""
    return [np.ascontiguousarray(x).view(np.uint8) for x in map(np.asarray, jax.tree.leaves(result))]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == IN_DEFAULT else pytest.mark.deep) for name in CALLS]
)
def test_fetching_ahead_changes_no_bit(name: str) -> None:
    """Every result, for every head and batch entry, is what it is with Pallas' own pipeline, replayed blocks' too."""
    ahead, plain = run(name, 2), run(name, 1)
    assert all((a == b).all() for a, b in zip(words(ahead), words(plain), strict=True))
    assert ahead.diagnostics is not None
    replays = np.asarray(ahead.diagnostics.replays)
    if CALLS[name][2].get("softmax") != "online" and CALLS[name][0][2] > 1:
        assert 0 < replays.sum() < replays.size


@pytest.mark.deep
@pytest.mark.parametrize("name", CALLS)
def test_fetching_ahead_without_races(name: str) -> None:
    """The interpreter that simulates copies finds no race, and raises if it does.

    Memory that no copy has filled holds NaN, which none reads: bit by bit the results are those of Pallas' own pipeline
    in that interpreter.
    """
    poisoned, plain = (
        run(name, n, pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")) for n in (2, 1)
    )
    assert np.isfinite(np.asarray(poisoned.out, np.float32)).all()
    assert all((a == b).all() for a, b in zip(words(poisoned), words(plain), strict=True))


@pytest.mark.smoke
def test_whole_blocks_are_fetched_ahead() -> None:
    """By default lengths that are whole blocks are, others are not; the buffers count as VMEM."""
    config = flywheel.AttentionConfig(128, 256)
    assert resolve(config, 256, 512).lookahead == 2
    assert resolve(config, 255, 512).lookahead == resolve(config, 256, 511).lookahead == 1
    near, far = (resolve(flywheel.AttentionConfig(128, 256, lookahead=n), 256, 512) for n in (1, 2))
    more = vmem_bytes(far, 128, 256) - vmem_bytes(near, 128, 256)
    assert more == 2 * (128 * 128 + 256 * (128 + 256)), "one more block of q, k and v in BF16"

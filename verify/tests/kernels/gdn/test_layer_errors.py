"""The fused layer refuses bad input before anything is launched; and its list of tiles is the shared machinery's."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flywheel.gdn import fused_conv1d_gdn
from flywheel.gdn.schedule import Plan, sequences_operand, words
from flywheel.gdn.tiling import group_of
from flywheel.packing import Packing

BF16, FP32, INT32 = jnp.bfloat16, jnp.float32, jnp.int32


def shape(*sizes: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    """An abstract array: values are not looked at."""
    return jax.ShapeDtypeStruct(sizes, dtype)


def call(**changes: Any) -> Any:
    """A call of 2 query/key and 4 value heads with 3 sequences and 5 slots, but for the changes."""
    good: dict[str, Any] = {
        "qkv": shape(64, 1024),
        "b": shape(64, 4),
        "a": shape(64, 4),
        "conv_state": shape(5, 3, 1024),
        "recurrent_state": shape(5, 4, 128, 128, dtype=FP32),
        "conv_weight": shape(4, 1024),
        "conv_bias": None,
        "a_log": shape(4, dtype=FP32),
        "dt_bias": shape(4, dtype=FP32),
        "query_start_loc": np.array([0, 10, 10, 64], np.int32),
        "state_indices": np.array([0, 1, 2], np.int32),
        "has_initial_state": np.array([True, False, True]),
        "n_kq": 2,
        "n_v": 4,
        "interpret": True,
    }
    return fused_conv1d_gdn(**(good | changes))


def ints(*values: int) -> np.ndarray:
    """INT32."""
    return np.array(values, np.int32)


READ = "read_state_indices"
CASES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"n_v": 3}, ValueError, "n_v must be a positive multiple of n_kq, got n_v = 3 and n_kq = 2"),
    ({"n_kq": 0}, ValueError, "n_v must be a positive multiple of n_kq, got n_v = 4 and n_kq = 0"),
    ({"n_v": 256}, ValueError, "n_v must be at most 128, got 256"),
    ({"n_kq": 2.0}, TypeError, "n_kq must be an int (it is part of the compiled kernel), got 2.0"),
    ({"qkv": shape(64, 1024, dtype=FP32)}, TypeError, "qkv must be a BF16 array, got float32"),
    (
        {"qkv": shape(64, 1000)},
        ValueError,
        "qkv must have shape [tokens, 1024] for n_kq = 2, n_v = 4 and head_dim 128, got (64, 1000)",
    ),
    ({"qkv": shape(0, 1024)}, ValueError, "qkv must have at least 1 token, got 0"),
    ({"b": shape(63, 4)}, ValueError, "b must have shape [64, 4], got (63, 4)"),
    ({"a": shape(64, 4, dtype=jnp.float16)}, TypeError, "a must be a BF16 or FP32 array, got float16"),
    ({"conv_weight": shape(9, 1024)}, ValueError, "conv_weight must have 2 to 8 taps, got 9"),
    ({"conv_weight": shape(1, 1024)}, ValueError, "conv_weight must have 2 to 8 taps, got 1"),
    ({"conv_state": shape(5, 4, 1024)}, ValueError, "conv_state must have shape [5, 3, 1024], oldest first, got"),
    ({"conv_bias": shape(1000)}, ValueError, "conv_bias must have shape [1024], got (1000,)"),
    ({"recurrent_state": shape(5, 4, 128, 128)}, TypeError, "recurrent_state must be a FP32 array, got bfloat16"),
    (
        {"recurrent_state": shape(5, 4, 64, 128, dtype=FP32)},
        ValueError,
        "recurrent_state must have shape [slots, 4, 128, 128], got (5, 4, 64, 128)",
    ),
    ({"a_log": shape(4)}, TypeError, "a_log must be a FP32 array, got bfloat16"),
    ({"dt_bias": shape(5, dtype=FP32)}, ValueError, "dt_bias must have shape [4], got (5,)"),
    (
        {"query_start_loc": ints(0, 10, 9, 64)},
        ValueError,
        "query_start_loc must start at 0, never fall and end within 64 tokens, got [0, 10, 9, 64]",
    ),
    (
        {"query_start_loc": ints(1, 10, 10, 64)},
        ValueError,
        "query_start_loc must start at 0, never fall and end within 64 tokens, got [1, 10, 10, 64]",
    ),
    (
        {"query_start_loc": ints(0, 10, 10, 65)},
        ValueError,
        "query_start_loc must start at 0, never fall and end within 64 tokens, got [0, 10, 10, 65]",
    ),
    ({"query_start_loc": np.zeros(4)}, TypeError, "query_start_loc must be a INT32 array, got float64"),
    ({"query_start_loc": ints()}, ValueError, "query_start_loc must have shape [sequences + 1], got (0,)"),
    ({"state_indices": ints(0, 1)}, ValueError, "state_indices must have shape [3], one for each sequence, got (2,)"),
    ({"state_indices": ints(0, 1, 5)}, ValueError, "state_indices must lie in -1 .. 4, got [0, 1, 5]"),
    ({"state_indices": ints(0, 1, -2)}, ValueError, "state_indices must lie in -1 .. 4, got [0, 1, -2]"),
    ({"state_indices": ints(0, 1, 1)}, ValueError, "state_indices must differ from each other, got [0, 1, 1]"),
    ({READ: ints(0, 1, 7)}, ValueError, "read_state_indices must lie in -1 .. 4, got [0, 1, 7]"),
    (
        {READ: ints(3, 4, 0)},
        ValueError,
        "read_state_indices must name no slot that another sequence writes, got slot 0 read by sequence 2 and written",
    ),
    ({"has_initial_state": ints(1, 0, 1)}, TypeError, "has_initial_state must be a bool array, got int32"),
    ({"precision": "fp32"}, ValueError, "precision must be one of ('bf16', 'bf16x3'), got 'fp32'"),
    ({"activation": "gelu"}, ValueError, "activation must be one of ('silu', 'none'), got 'gelu'"),
    ({"norm_eps": -1.0}, ValueError, "norm_eps must be None, 0 or at least 2**-126, got -1.0"),
    ({"scale": float("inf")}, ValueError, "scale must be finite, got inf"),
    ({"beta_scale": None}, TypeError, "beta_scale must be a Python number (it is part of the compiled kernel), got No"),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("changes", "error", "words_"), CASES, ids=[str(n) for n in range(len(CASES))])
def test_refuses(changes: dict[str, Any], error: type[Exception], words_: str) -> None:
    """Each message names the argument, its value and the rule."""
    with pytest.raises(error, match=re.escape(words_)):
        call(**changes)


def listed(packing: Packing, given: np.ndarray, tokens: int, slots: int) -> np.ndarray:
    """The list that the scalar unit makes."""

    def kernel(operand: Any, out: Any, ref: Any) -> None:
        Plan(packing, tokens, slots, operand, ref).fill()
        for n in range(words(packing)):
            out[n] = ref[n]

    smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    return np.asarray(
        pl.pallas_call(
            kernel,
            in_specs=[smem],
            out_specs=smem,
            out_shape=jax.ShapeDtypeStruct((words(packing),), INT32),
            scratch_shapes=[pltpu.SMEM((words(packing),), INT32)],
            interpret=True,
        )(jnp.asarray(given))
    )


@pytest.mark.parametrize(
    "bounds",
    [(0, 13, 13, 16, 300, 300), (0, 128, 256, 384, 384, 384), (0, 0, 0, 1, 2, 400), (0, 7, 8, 9, 10, 390)],
)
def test_list_of_tiles_is_that_of_the_packing(bounds: tuple[int, ...]) -> None:
    """Blocks, windows and flags are those of `flywheel.packing`, padding included, with each sequence's slots."""
    packing, count = Packing(400, 5, 128, padding=True), len(bounds) - 1
    read, write = np.array([3, 0, -1, 9, 2]), np.array([1, -1, 4, 0, 7])
    flags = np.array([True, False, True, True, True])
    operand = sequences_operand(*(jnp.asarray(x, INT32) for x in (bounds, read, write)), jnp.asarray(flags))
    found = listed(packing, np.asarray(operand), 400, 8)
    want = packing.blocks(jnp.asarray(bounds, INT32))
    total = int(found[0])
    assert total == int(want.total)
    rows = found[1 : 1 + 5 * total].reshape(total, 5)
    plan = Plan(packing, 400, 8, None, found)
    for name in ("carried", "stop", "groups", "is_first", "is_last"):
        got = [int(plan.field(n, name)) for n in range(total)]
        assert got == np.asarray(getattr(want, name))[:total].astype(int).tolist(), name
    assert rows[:, 0].tolist() == np.asarray(want.group)[:total].tolist()
    assert rows[:, 2].tolist() == np.asarray(want.sequence)[:total].tolist()
    own_read = np.where(flags & (read < 8), read, -1)
    for _, _, sequence, source, target in rows:
        inside = sequence < count
        assert source == (own_read[sequence] if inside else -1)
        assert target == (write[sequence] if inside else -1)


@pytest.mark.parametrize(
    ("n_kq", "n_v", "group", "split"),
    [(16, 48, 4, 4), (16, 32, 4, 8), (1, 2, 1, 1), (2, 2, 2, 2), (6, 18, 3, 3), (1, 24, 1, 1)],
)
def test_heads_of_a_step(n_kq: int, n_v: int, group: int, split: int) -> None:
    """A step takes a divisor of the query/key heads: at most 12 value heads, 16 in hi/lo, or one key head's."""
    assert group_of(n_kq, n_v, "bf16") == group
    assert group_of(n_kq, n_v, "bf16x3") == split

"""Bad input is refused before anything is launched, with the argument, the value and the rule."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import flywheel

pytestmark = pytest.mark.smoke

ROTARY = flywheel.Rotary
POSITIONS = jnp.arange(16, dtype=jnp.int32)
TABLES = (jnp.ones((16, 32), jnp.float32), jnp.zeros((16, 32), jnp.float32))
GOOD = {"q": (1, 4, 16, 64), "k": (1, 2, 16, 64), "v": (1, 2, 16, 64)}


def call(changes: dict[str, Any] | None = None, **options: Any) -> Any:
    """Call with good operands but for `changes` (a shape, or an operand), with options over the defaults."""
    operands = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in GOOD.items()}
    for name, change in (changes or {}).items():
        operands[name] = jax.ShapeDtypeStruct(change, jnp.bfloat16) if isinstance(change, tuple) else change
    return flywheel.attention(**operands, **({"causal": True, "interpret": True} | options))


CASES: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({"q": jnp.zeros((1, 4, 16, 64))}, {}, TypeError, "q must be a BF16 array, got float32"),
    ({"k": jnp.zeros((1, 2, 16, 64), jnp.float16)}, {}, TypeError, "k must be a BF16 array, got float16"),
    ({"v": [1.0]}, {}, TypeError, "v must be a BF16 array, got list"),
    ({"q": (4, 16, 64)}, {}, ValueError, "q must have rank 4, [batch, heads, tokens, head_dim], got shape (4, 16, 64)"),
    ({"k": (1, 2, 0, 64)}, {}, ValueError, "k must not be empty in any axis, got shape (1, 2, 0, 64)"),
    (
        {"v": (1, 2, 17, 64)},
        {},
        ValueError,
        "k and v must agree in batch, kv_heads and tokens, got (1, 2, 16, 64) and (1, 2, 17, 64)",
    ),
    ({"v": (1, 2, 16, 80)}, {}, ValueError, "v_dim must be one of (64, 128, 192, 256), got 80"),
    ({"q": (2, 4, 16, 64)}, {}, ValueError, "q and k must agree in batch, got 2 and 1"),
    ({"q": (1, 4, 16, 128)}, {}, ValueError, "q and k must agree in head_dim, got 128 and 64"),
    ({"q": (1, 3, 16, 64)}, {}, ValueError, "heads must be a multiple of kv_heads, got 3 heads and 2 kv_heads"),
    (
        {"q": (1, 4, 16, 96), "k": (1, 2, 16, 96), "v": (1, 2, 16, 96)},
        {},
        ValueError,
        "head_dim must be one of (64, 128, 192, 256), got 96",
    ),
    ({"q": (1, 4, 2**31, 64)}, {}, ValueError, "q must have at most 2**30 tokens, got 2147483648"),
    ({}, {"scale": float("nan")}, ValueError, "scale must be 0 or have 2**-126 <= |scale| log2(e) <= 2**127, got nan"),
    ({}, {"scale": 1e-40}, ValueError, "scale must be 0 or have 2**-126 <= |scale| log2(e) <= 2**127, got 1e-40"),
    ({}, {"scale": "1"}, TypeError, "scale must be a Python number (it is part of the compiled kernel), got str"),
    ({}, {"causal": 1}, TypeError, "causal must be a bool (it is part of the compiled kernel), got 1"),
    ({}, {"softmax": "fast"}, ValueError, "softmax must be one of ('static', 'online'), got 'fast'"),
    ({}, {"window": 5}, ValueError, "window must be (left, right), each None or an integer >= 0, got 5"),
    ({}, {"window": (-1, 0)}, ValueError, "window must be (left, right), each None or an integer >= 0, got (-1, 0)"),
    ({}, {"softcap": 0.0}, ValueError, "softcap must be positive and finite (None is off), got 0.0"),
    ({}, {"softcap": "30"}, TypeError, "softcap must be None or a Python number, got str"),
    (
        {},
        {"softcap": 1e39},
        ValueError,
        "softcap must have softcap, softcap log2(e) and |scale| / softcap within [2**-126, 2**127], got softcap = ",
    ),
    ({}, {"sinks": jnp.zeros(4, jnp.bfloat16)}, TypeError, "sinks must be an FP32 array, got bfloat16"),
    ({}, {"sinks": jnp.zeros(2)}, ValueError, "sinks must have shape [heads] = [4], got (2,)"),
    (
        {},
        {"q_segment_ids": jnp.zeros((1, 16), jnp.int32)},
        ValueError,
        "q_segment_ids and kv_segment_ids must be given together, got one of them",
    ),
    (
        {},
        {"q_segment_ids": jnp.zeros((1, 16)), "kv_segment_ids": jnp.zeros((1, 16), jnp.int32)},
        TypeError,
        "q_segment_ids must be an INT32 array, got float32",
    ),
    (
        {},
        {"q_segment_ids": jnp.zeros((1, 16), jnp.int32), "kv_segment_ids": jnp.zeros((16,), jnp.int32)},
        ValueError,
        "kv_segment_ids must have shape [batch, tokens] = [1, 16], got (16,)",
    ),
    ({}, {"rotary": 1e4}, TypeError, "rotary must be None or a Rotary, got float"),
    (
        {},
        {"rotary": ROTARY(base=1e4)},
        ValueError,
        "rotary must have tables, or positions and base, got neither in full",
    ),
    (
        {},
        {"rotary": ROTARY(positions=POSITIONS, base=0.5)},
        ValueError,
        "rotary.base must be a finite number of at least 1, got 0.5",
    ),
    (
        {},
        {"rotary": ROTARY(positions=POSITIONS[:3], base=1e4)},
        ValueError,
        "rotary.positions must have shape [q_len] or [batch, q_len], got (3,)",
    ),
    (
        {},
        {"rotary": ROTARY(positions=POSITIONS - 1, base=1e4)},
        ValueError,
        "rotary.positions must be in 0 .. 1073741824, got -1",
    ),
    (
        {},
        {"rotary": ROTARY(positions=POSITIONS + 2**30, base=1e4)},
        ValueError,
        "rotary.positions must be in 0 .. 1073741824, got 1073741825",
    ),
    (
        {},
        {"rotary": ROTARY(positions=POSITIONS, base=1e4, layout="neox")},
        ValueError,
        "rotary.layout must be one of ('half', 'interleaved'), got 'neox'",
    ),
    (
        {},
        {"rotary": ROTARY(tables=TABLES, base=1e4)},
        ValueError,
        "rotary must have tables, or positions and base, got both",
    ),
    (
        {},
        {"rotary": ROTARY(tables=(TABLES[0][:, :5], TABLES[1]))},
        ValueError,
        "rotary.tables.cos must have shape [q_len, head_dim / 2] = [16, 32], with or without a batch axis, got (16, 5)",
    ),
    (
        {},
        {"rotary": ROTARY(tables=(TABLES[0].astype(jnp.bfloat16), TABLES[1]))},
        TypeError,
        "rotary.tables.cos must be an FP32 array, got bfloat16",
    ),
    (
        {},
        {"return_max_logit": 1},
        TypeError,
        "return_max_logit must be a bool (it is part of the compiled kernel), got 1",
    ),
    ({}, {"return_lse": None}, TypeError, "return_lse must be a bool (it is part of the compiled kernel), got None"),
]


@pytest.mark.parametrize(("changes", "options", "kind", "text"), CASES, ids=[case[3][:40] for case in CASES])
def test_refusal(changes: dict[str, Any], options: dict[str, Any], kind: type[Exception], text: str) -> None:
    """Each rule has its own message."""
    with pytest.raises(kind, match=re.escape(text)):
        call(changes, **options)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"block_q": 100}, "config.block_q must be a positive multiple of 128, got 100"),
        ({"block_q": 0}, "config.block_q must be a positive multiple of 128, got 0"),
        ({"fragment": 64}, "config.fragment must be a positive multiple of 128, got 64"),
        (
            {"block_kv": 384, "fragment": 256},
            "config.block_kv must be a multiple of config.fragment, got block_kv = 384 and fragment = 256",
        ),
        ({"block_q": 2**16, "block_kv": 2**16}, "config needs "),
        ({"generation": "v3"}, "config.generation must be None or one of ('v5e', 'v6e', 'v7x'), got 'v3'"),
        ({"generation": 6}, "config.generation must be None or one of ('v5e', 'v6e', 'v7x'), got 6"),
        ({"lookahead": 3}, "config.lookahead must be 1 or 2, got 3"),
        ({"lookahead": True}, "config.lookahead must be 1 or 2, got True"),
        ({"lookahead": 2.0}, "config.lookahead must be 1 or 2, got 2.0"),
        (
            {"block_q": 768, "lookahead": 2},
            "got 2: 1024 queries in blocks of 768 and 1024 keys in blocks of 1024",
        ),
    ],
)
def test_config_refusal(config: dict[str, Any], text: str) -> None:
    """Block sizes off their grid, that do not fit together, or that do not fit in VMEM."""
    big = dict.fromkeys(GOOD, (1, 4, 1024, 64))
    with pytest.raises(ValueError, match=re.escape(text)):
        call(big, config=flywheel.AttentionConfig(**config))


@pytest.mark.parametrize("lookahead", [0, 3, True, 2.0, "2"])
def test_lookahead_is_refused_under_a_window_too(lookahead: Any) -> None:
    """Where key blocks overlap, which are always fetched two steps ahead, other values are refused all the same."""
    long = dict.fromkeys(GOOD, (1, 1, 4096, 64))
    config = flywheel.AttentionConfig(block_q=1024, generation="v6e", lookahead=lookahead)
    with pytest.raises(ValueError, match=re.escape(f"config.lookahead must be 1 or 2, got {lookahead!r}")):
        call(long, config=config, window=(127, 0))


@pytest.mark.parametrize(
    ("tokens", "options", "text"),
    [
        ((2**20, 128), {"causal": False}, "config makes 8192 query blocks, at most 4096"),
        ((128, 2**20), {"causal": False}, "config makes 8192 key blocks, at most 4096"),
        ((2**17, 2**17), {}, "config makes 524800 steps per head, at most 131072"),
        ((8195, 8192), {"window": (4000, 0), "config": (4096, 128)}, "kinds of partly visible blocks, at most 32"),
    ],
)
def test_too_many_blocks_are_refused(tokens: tuple[int, int], options: dict[str, Any], text: str) -> None:
    """Block sizes that make more steps or bodies than the kernel has room for are refused with the counts."""
    q_len, kv_len = tokens
    block_q, block_kv = options.pop("config", (128, 128))
    operands = {"q": (1, 1, q_len, 64), "k": (1, 1, kv_len, 64), "v": (1, 1, kv_len, 64)}
    config = flywheel.AttentionConfig(block_q=block_q, block_kv=block_kv, fragment=128)
    with pytest.raises(ValueError, match=re.escape(text)):
        call(operands, config=config, **options)


def test_traced_scale_is_refused() -> None:
    """A traced scale has no value when the kernel is compiled; the error says so."""
    x = jnp.zeros((1, 1, 16, 64), jnp.bfloat16)
    with pytest.raises(TypeError, match="scale must be a Python number"):
        jax.jit(lambda s: flywheel.attention(x, x, x, causal=True, scale=s, interpret=True))(1.0)


def test_results_have_the_documented_shapes() -> None:
    """The output alone by default; LSE and diagnostics in a NamedTuple on request, absent ones None."""
    x = jnp.zeros((2, 4, 200, 64), jnp.bfloat16)
    kv = jnp.zeros((2, 2, 200, 64), jnp.bfloat16)
    config = flywheel.AttentionConfig(block_q=128)

    def shapes(**options: bool) -> Any:
        return jax.eval_shape(
            lambda: flywheel.attention(x, kv, kv, causal=True, config=config, interpret=True, **options)
        )

    assert shapes().shape == x.shape
    only_lse = shapes(return_lse=True)
    assert only_lse.lse.shape == (2, 4, 200)
    assert only_lse.diagnostics is None
    both = shapes(return_lse=True, return_diagnostics=True)
    assert both.diagnostics.replays.shape == (2, 4, 2)
    assert both.diagnostics.anchor.shape == both.diagnostics.l.shape == (2, 4, 200)
    assert both.lse.dtype == jnp.float32
    assert both.diagnostics.replays.dtype == jnp.int32
    assert shapes(return_max_logit=True).max_logit.shape == (2, 4)

"""Bad input is refused before anything is launched, with the argument, the value and the rule."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import flywheel

pytestmark = pytest.mark.smoke

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
    ({"v": (1, 2, 17, 64)}, {}, ValueError, "k and v must have the same shape, got (1, 2, 16, 64) and (1, 2, 17, 64)"),
    ({"q": (2, 4, 16, 64)}, {}, ValueError, "q and k must agree in batch, got 2 and 1"),
    ({"q": (1, 4, 16, 128)}, {}, ValueError, "q and k must agree in head_dim, got 128 and 64"),
    ({"q": (1, 3, 16, 64)}, {}, ValueError, "heads must be a multiple of kv_heads, got 3 heads and 2 kv_heads"),
    (
        {"q": (1, 4, 16, 96), "k": (1, 2, 16, 96), "v": (1, 2, 16, 96)},
        {},
        ValueError,
        "head_dim must be one of (64, 128, 256), got 96",
    ),
    ({"q": (1, 4, 2**31, 64)}, {}, ValueError, "q must have at most 2**30 tokens, got 2147483648"),
    ({}, {"scale": float("nan")}, ValueError, "scale must be 0 or have 2**-126 <= |scale| log2(e) <= 2**127, got nan"),
    ({}, {"scale": 1e-40}, ValueError, "scale must be 0 or have 2**-126 <= |scale| log2(e) <= 2**127, got 1e-40"),
    ({}, {"scale": "1"}, TypeError, "scale must be a Python number (it is part of the compiled kernel), got str"),
    ({}, {"causal": 1}, TypeError, "causal must be a bool (it is part of the compiled kernel), got 1"),
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
        ({"block_kv": 384, "fragment": 256}, "config.block_kv must be a positive multiple of 256, got 384"),
        (
            {"block_q": 128, "block_kv": 256},
            (
                "config.block_kv must equal block_q when there are several query and several key blocks, "
                "got block_q = 128 and block_kv = 256"
            ),
        ),
        ({"block_q": 2**16, "block_kv": 2**16}, "config needs "),
    ],
)
def test_config_refusal(config: dict[str, int], text: str) -> None:
    """Block sizes off their grid, that do not fit together, or that do not fit in VMEM."""
    big = dict.fromkeys(GOOD, (1, 4, 1024, 64))
    with pytest.raises(ValueError, match=re.escape(text)):
        call(big, config=flywheel.AttentionConfig(**config))


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

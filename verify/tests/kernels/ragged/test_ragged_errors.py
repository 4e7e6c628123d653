"""Bad input is refused before anything is launched, with the argument, the value and the rule."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import flywheel

pytestmark = pytest.mark.smoke

GOOD = {"q": (4, 16, 64), "k": (2, 24, 64), "v": (2, 24, 64)}
CU = jnp.array([0, 5, 16], jnp.int32)


def bounds(*values: int) -> jax.Array:
    """Cumulative lengths."""
    return jnp.array(values, jnp.int32)


def call(changes: dict[str, Any], **options: Any) -> Any:
    """Call with good operands but for `changes` (a shape, or an operand), with options over the defaults."""
    operands: dict[str, Any] = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in GOOD.items()}
    operands |= {"cu_seqlens_q": CU, "cu_seqlens_k": CU}
    for name, change in changes.items():
        operands[name] = jax.ShapeDtypeStruct(change, jnp.bfloat16) if isinstance(change, tuple) else change
    return flywheel.ragged_attention(**operands, **({"causal": True, "interpret": True} | options))


TABLES = flywheel.RotaryTables(jnp.ones((16, 32)), jnp.zeros((16, 31)))
CASES: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({"q": jnp.zeros((4, 16, 64))}, {}, TypeError, "q must be a BF16 array, got float32"),
    ({"v": [1.0]}, {}, TypeError, "v must be a BF16 array, got list"),
    ({"q": (1, 4, 16, 64)}, {}, ValueError, "q must have rank 3, [heads, tokens, head_dim], got shape (1, 4, 16, 64)"),
    ({"k": (2, 0, 64)}, {}, ValueError, "k must not be empty in any axis, got shape (2, 0, 64)"),
    ({"v": (2, 23, 64)}, {}, ValueError, "k and v must agree in kv_heads and tokens, got (2, 24, 64) and (2, 23, 64)"),
    ({"q": (4, 16, 128)}, {}, ValueError, "q and k must agree in head_dim, got 128 and 64"),
    ({"q": (3, 16, 64)}, {}, ValueError, "heads must be a multiple of kv_heads, got 3 heads and 2 kv_heads"),
    ({"v": (2, 24, 80)}, {}, ValueError, "v_dim must be one of (64, 128, 192, 256), got 80"),
    ({"q": (4, 2**31, 64)}, {}, ValueError, "q must have at most 2**30 tokens, got 2147483648"),
    ({"cu_seqlens_q": [0, 5]}, {}, TypeError, "cu_seqlens_q must be an INT32 array, got list"),
    ({"cu_seqlens_k": CU.astype(jnp.float32)}, {}, TypeError, "cu_seqlens_k must be an INT32 array, got float32"),
    ({"cu_seqlens_q": CU[None]}, {}, ValueError, "cu_seqlens_q must have shape [sequences + 1], got [1, 3]"),
    ({"cu_seqlens_q": CU[:0]}, {}, ValueError, "cu_seqlens_q must have shape [sequences + 1], got [0]"),
    (
        {"cu_seqlens_q": CU[:2]},
        {},
        ValueError,
        "cu_seqlens_q and cu_seqlens_k must name as many sequences, got 1 and 2",
    ),
    ({"cu_seqlens_q": bounds(1, 5, 16)}, {}, ValueError, "cu_seqlens_q must start at 0, got cu_seqlens_q[0] = 1"),
    (
        {"cu_seqlens_k": bounds(0, 9, 8)},
        {},
        ValueError,
        "cu_seqlens_k must never fall, got cu_seqlens_k[1] = 9 and cu_seqlens_k[2] = 8",
    ),
    (
        {"cu_seqlens_q": bounds(0, 9, 17)},
        {},
        ValueError,
        "cu_seqlens_q must end at most at the number of tokens, 16, got 17",
    ),
    (
        {},
        {"batch_invariant": 1},
        TypeError,
        "batch_invariant must be a bool (it is part of the compiled kernel), got 1",
    ),
    ({}, {"softmax": "fast"}, ValueError, "softmax must be one of ('static', 'online'), got 'fast'"),
    ({}, {"window": 5}, ValueError, "window must be (left, right), each None or an integer >= 0, got 5"),
    ({}, {"softcap": 0.0}, ValueError, "softcap must be positive and finite (None is off), got 0.0"),
    ({}, {"sinks": jnp.zeros(3)}, ValueError, "sinks must have shape [heads] = [4], got (3,)"),
    ({}, {"rotary": 1.0}, TypeError, "rotary must be None or a Rotary, got float"),
    (
        {},
        {"rotary": flywheel.Rotary()},
        ValueError,
        "rotary.base must be a finite number of at least 1 where there are no tables, got None",
    ),
    (
        {},
        {"rotary": flywheel.Rotary(tables=TABLES)},
        ValueError,
        "rotary.tables.sin must have shape [q_tokens, head_dim / 2] = [16, 32], got (16, 31)",
    ),
    (
        {},
        {"rotary": flywheel.Rotary(positions=jnp.zeros(3, jnp.int32), base=10.0)},
        ValueError,
        "rotary.positions must have shape [q_tokens] = [16], got (3,)",
    ),
    (
        {},
        {"rotary": flywheel.Rotary(positions=jnp.full(16, -7, jnp.int32), base=10.0)},
        ValueError,
        "rotary.positions must be in 0 .. 1073741824, got -7",
    ),
    (
        {},
        {"config": flywheel.RaggedConfig(block=100)},
        ValueError,
        "config.block must be a positive multiple of 128, got 100",
    ),
    (
        {},
        {"config": flywheel.RaggedConfig(block=128, short=256)},
        ValueError,
        "config.short must be at most config.block, got short = 256 and block = 128",
    ),
    ({"q": (4, 2**22, 64)}, {"return_lse": True}, ValueError, "config and q need"),
]


@pytest.mark.parametrize(("changes", "options", "kind", "message"), CASES, ids=range(len(CASES)))
def test_refusals(changes: dict[str, Any], options: dict[str, Any], kind: type[Exception], message: str) -> None:
    """The error is of its type and its text names the argument, the value and the rule."""
    with pytest.raises(kind, match=re.escape(message)):
        call(changes, **options)

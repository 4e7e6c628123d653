"""The lint over a kernel's jaxpr: clean on our kernel, and each planted offence found at its line."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import flywheel
from verify.lint import BF16_CHAIN, BF16_FUNCTION, DEFAULT_DOT, lint
from verify.subjects.jax_pallas import lint_target as splash_target

if TYPE_CHECKING:
    from collections.abc import Callable

LOG2_E = 1.4426950408889634
X = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)


def in_kernel(body: Callable[..., None]) -> Callable[[jax.Array], jax.Array]:
    """A Pallas kernel of one block with a BF16 scratch buffer."""

    def call(x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(body, out_shape=shape, scratch_shapes=[pltpu.VMEM(x.shape, x.dtype)], interpret=True)(x)

    return call


def fp32_dot(x: Any) -> Any:
    """OFFENCE on the next line."""
    return x.astype(jnp.float32) @ x.astype(jnp.float32)


def scaled_query(x: Any) -> Any:
    """log2(e) in BF16 times a BF16 query: two roundings; OFFENCE on the next line."""
    return lax.dot(x * LOG2_E, x, preferred_element_type=jnp.float32)


def bf16_exponential(x: Any) -> Any:
    """OFFENCE on the next line."""
    return jnp.exp2(x)


def carried_sum(x: Any) -> Any:
    """A loop that adds in BF16."""

    def body(total: Any, row: Any) -> Any:
        return total + row, None

    return lax.scan(body, jnp.zeros(x.shape[1:], x.dtype), x)[0]


@in_kernel
def scratch_accumulator(x_ref: Any, out_ref: Any, acc_ref: Any) -> None:
    """An accumulator in a BF16 scratch buffer."""
    acc_ref[...] = jnp.zeros_like(acc_ref)

    def body(_: Any, carry: None) -> None:
        acc_ref[...] += x_ref[...]
        return carry

    lax.fori_loop(0, 3, body, None)
    out_ref[...] = acc_ref[...]


@in_kernel
def fp32_dot_in_kernel(x_ref: Any, out_ref: Any, acc_ref: Any) -> None:
    """The same as fp32_dot inside a Pallas kernel, behind a condition."""
    acc_ref[...] = x_ref[...]

    @pl.when(x_ref[0, 0] > 0)
    def _() -> None:
        wide = x_ref[...].astype(jnp.float32)
        out_ref[...] = jnp.dot(wide, wide).astype(out_ref.dtype)


OFFENCES = (
    (fp32_dot, DEFAULT_DOT),
    (scaled_query, BF16_CHAIN),
    (bf16_exponential, BF16_FUNCTION),
    (carried_sum, BF16_CHAIN),
    (scratch_accumulator, BF16_CHAIN),
    (fp32_dot_in_kernel, DEFAULT_DOT),
)


@pytest.mark.smoke
@pytest.mark.parametrize(("function", "rule"), OFFENCES, ids=[str(n) for n in range(len(OFFENCES))])
def test_planted_offence_is_found_at_its_line(function: Callable[..., Any], rule: str) -> None:
    """Each offence is found once or more, by its rule, and in this file."""
    found = lint(function, X)
    assert {finding.rule for finding in found} == {rule}, [str(f) for f in found]
    assert all("test_lint.py:" in finding.where for finding in found)


@pytest.mark.smoke
def test_the_line_is_the_offending_one() -> None:
    """The finding names the source line of the operation, not of its caller."""
    lines, first = inspect.getsourcelines(fp32_dot)
    (finding,) = lint(fp32_dot, X)
    assert f"test_lint.py:{first + len(lines) - 1}:" in finding.where


@pytest.mark.smoke
def test_what_rounds_once_is_clean() -> None:
    """Exact BF16 operations, one conversion, a product of BF16 operands, and FP32 arithmetic are no offence."""

    def clean(x: jax.Array) -> jax.Array:
        scores = lax.dot(jnp.maximum(-x * 0.125, x), x, preferred_element_type=jnp.float32)
        weights = jnp.exp2(scores - scores.max(axis=1, keepdims=True))
        return lax.dot(weights.astype(jnp.bfloat16), x, preferred_element_type=jnp.float32).astype(jnp.bfloat16)

    def highest(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return jnp.dot(wide, wide, precision=lax.Precision.HIGHEST)

    assert lint(clean, X) == []
    assert lint(highest, X) == []


@pytest.mark.smoke
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [True, False])
def test_our_kernel_is_clean(head_dim: int, causal: bool) -> None:
    """flywheel.attention has no FP32 product at default precision and no BF16 chain, in fast path and replay."""
    q, k = (jax.ShapeDtypeStruct((1, heads, 300, head_dim), jnp.bfloat16) for heads in (2, 1))
    options = {"causal": causal, "return_lse": True, "return_diagnostics": True, "interpret": True}
    assert lint(functools.partial(flywheel.attention, **options), q, k, k) == []


def test_splash_attention_multiplies_fp32_weights_at_default_precision() -> None:
    """JAX's splash attention keeps P in FP32 for its second product: FP32 here, BF16 operands on a TPU."""
    (finding,) = lint(*splash_target())
    assert finding.rule == DEFAULT_DOT
    assert "splash_attention_kernel.py" in finding.where

"""Functions whose digits are worth following, at inputs that lose some: what the command offers by name."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from flywheel.attention import tile
from verify.attention.contract import LOG2_E
from verify.gdn.inverse_steps import CHUNK, LEVELS, part
from verify.gdn.problem import BF16
from verify.gdn.tables import matrix

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax import Array
    from jaxtyping import BFloat16, Float32


@dataclasses.dataclass(frozen=True, eq=False)
class Shown:
    """A function with inputs.

    Attributes:
        name: on the command line.
        words: what it is, and where its inputs come from.
        function: of arrays, pure.
        arguments: arrays.
        measure: how an error is measured: "relative", each element by its own size; "largest", by the largest element.
    """

    name: str
    words: str
    function: Callable[..., Any]
    arguments: tuple[np.ndarray, ...]
    measure: str


def silu(y: Float32[Array, " n"]) -> Float32[Array, " n"]:
    """0.5 y (1 + tanh(y / 2)): one function of the transcendental unit, and a cancellation on the left."""
    half = 0.5 * y
    tangent = jnp.tanh(half)
    raised = 1.0 + tangent
    return half * raised


def triangular_inverse(lower: Float32[Array, "64 64"], *, precision: str) -> Float32[Array, "64 64"]:
    """(I + L)^-1 in eight products, 4 -> 16 -> 64: `verify.gdn.inverse_steps` in JAX, an operation a line."""
    dot = _bf16_product if precision == "bf16" else _split_product
    identity = jnp.eye(CHUNK, dtype=jnp.float32)
    base = jnp.where(_level(4), lower, 0.0)
    power = dot(base, base)
    last = dot(identity - base, power)
    x = identity - base + last
    for size in LEVELS[1:]:
        added = jnp.where(_level(size), lower, 0.0)
        nilpotent = dot(added, x)
        correction = dot(x, nilpotent)
        square = dot(nilpotent, nilpotent)
        left = x - correction
        last = dot(left, square)
        x = left + last
    return x


def _level(size: int) -> np.ndarray:
    return part(np.tril(np.ones((CHUNK, CHUNK)), -1), size) > 0.0


def _bf16_product(left: Array, right: Array) -> Array:
    a, b = left.astype(jnp.bfloat16), right.astype(jnp.bfloat16)
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _split_product(left: Array, right: Array) -> Array:
    (a_high, a_low), (b_high, b_low) = _halves(left), _halves(right)
    a = jnp.concatenate([a_high, a_low, a_high], axis=1)
    b = jnp.concatenate([b_high, b_high, b_low], axis=0)
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _halves(x: Array) -> tuple[Array, Array]:
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def static_anchor(
    q: BFloat16[Array, "C D"], k: BFloat16[Array, "N D"], v: BFloat16[Array, "N E"], *, fragment: int = 128
) -> BFloat16[Array, "C E"]:
    """`flywheel.attention`'s tile maths for one block of queries that sees every key.

    The anchor of the first fragment, weights in BF16, sums and V^T P^T fragment by fragment, division at the end.
    """
    rule = tile.ScoreRule(q.shape[1] ** -0.5)
    anchor = sums = acc = None
    for start in range(0, k.shape[0], fragment):
        keys, values = k[start : start + fragment], v[start : start + fragment]
        s = rule(tile.dot_products(keys, q))
        if anchor is None:
            anchor = jnp.broadcast_to(tile.choose_anchor(s[: tile.SUBLANES], None), (tile.SUBLANES, q.shape[0]))
        p = tile.weights(s, anchor, None)
        added = tile.partial_sums(p)
        product = tile.weighted_values(values, p.astype(jnp.bfloat16))
        sums, acc = (added, product) if sums is None or acc is None else (sums + added, acc + product)
    assert sums is not None  # noqa: S101  there is a key
    assert acc is not None  # noqa: S101
    return tile.normalise(acc, tile.denominator(sums)).T.astype(q.dtype)


def _attention_inputs(size: float) -> tuple[np.ndarray, ...]:
    """64 queries, 256 keys, head_dim 64: scores of about `size` log2 units."""
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal(shape) for shape in ((64, 64), (256, 64), (256, 64)))
    return tuple(x.astype(BF16) for x in (q * size / LOG2_E, k, v))


def _inverse_inputs(keys: str) -> tuple[np.ndarray, ...]:
    return (matrix(keys, "up to 1", "mild", 1).astype(np.float32),)


def shown() -> dict[str, Shown]:
    """All of them, by name."""
    arguments = np.linspace(-20.0, 20.0, 401).astype(np.float32)
    found = (
        Shown("silu", "silu as 0.5 y (1 + tanh(y / 2)), y from -20 to 20", silu, (arguments,), "relative"),
        *(
            Shown(
                f"inverse-{precision}",
                f"the inverse in eight products, {precision}, near-duplicate keys, mild decay",
                _with_precision(precision),
                _inverse_inputs("near-duplicate"),
                "largest",
            )
            for precision in ("bf16", "bf16x3")
        ),
        *(
            Shown(
                f"static-anchor-{name}",
                f"static-anchor attention, 64 queries, 256 keys, scores of about {size:g} log2 units",
                static_anchor,
                _attention_inputs(size),
                "largest",
            )
            for name, size in (("small", 1.0), ("large", 16.0))
        ),
    )
    return {each.name: each for each in found}


def _with_precision(precision: str) -> Callable[..., Any]:
    def inverse(lower: Float32[Array, "64 64"]) -> Float32[Array, "64 64"]:
        return triangular_inverse(lower, precision=precision)

    return inverse

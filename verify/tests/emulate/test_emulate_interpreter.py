"""The interpreter: every primitive as JAX computes it, control flow, clear errors, source lines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from verify.devices import CPU_INTERPRET
from verify.emulate.arithmetic import EmulationError, Exact, Nearest
from verify.emulate.interpreter import trace
from verify.emulate.sites import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Callable

RNG = np.random.default_rng(5)
X = RNG.standard_normal((6, 8)).astype(np.float32)
Y = RNG.standard_normal((6, 8)).astype(np.float32)
ROOM = X.size * CPU_INTERPRET.unit_roundoff + CPU_INTERPRET.exp2_relative
"""No result here has more roundings behind it than X has elements (its sum), and exp2 is the function that XLA:CPU
computes worst.  Values are of order one, so that it is an absolute room too."""

I = np.arange(-6, 6, dtype=np.int32)  # noqa: E741

FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "elementwise": (lambda x, y: (x + y, x - y, x * y, x / y, -x, jnp.abs(x), jnp.sign(x), x % y), (X, Y)),
    "functions": (
        lambda x: (
            jnp.exp(x),
            jnp.exp2(x),
            jnp.log(jnp.abs(x) + 1),
            jnp.log1p(jnp.abs(x)),
            jnp.expm1(x),
            jnp.tanh(x),
            lax.logistic(x),
            lax.rsqrt(jnp.abs(x)),
            jnp.sqrt(jnp.abs(x)),
            jnp.sin(x),
            jnp.cos(x),
            lax.erf(x),
        ),
        (X,),
    ),
    "powers": (lambda x: (x**2, x**3, lax.integer_pow(x, -2), jnp.power(jnp.abs(x), 1.5), jnp.square(x)), (X,)),
    "rounding": (lambda x: (jnp.floor(x), jnp.ceil(x), jnp.round(x), jnp.trunc(x), jnp.clip(x, -0.5, 0.5)), (X,)),
    "comparisons": (
        lambda x, y: (x < y, x >= y, x == y, jnp.where(x > y, x, y), jnp.maximum(x, y), jnp.isfinite(x / 0.0), x != y),
        (X, Y),
    ),
    "integers": (
        lambda i: (i + 3, i * i, i // 4, i % 4, i << 2, i >> 1, i & 5, i | 2, ~i, lax.shift_right_logical(i, 3)),
        (I,),
    ),
    "moves": (
        lambda x: (
            x.reshape(8, 6),
            x.T,
            x[1:5:2, ::-1],
            jnp.flip(x, 0),
            x[:, None, :],
            jnp.concatenate([x, 2 * x], axis=1),
            jnp.pad(x, ((1, 2), (0, 3)), constant_values=7.0),
            lax.pad(x, jnp.float32(1.0), ((-1, 2, 1), (0, -2, 0))),
            jnp.roll(x, 2, axis=1),
            jnp.broadcast_to(x[0], (3, 8)),
            jnp.tril(x),
            jnp.squeeze(x[:1]),
        ),
        (X,),
    ),
    "indices": (
        lambda x, i: (
            x[i % 6],
            jnp.take(x, i % 8, axis=1),
            x.at[1].get(mode="fill", fill_value=0.0),
            jnp.take(x, i + 5, axis=1, mode="clip"),
            lax.dynamic_slice(x, (i[0], i[-1]), (2, 3)),
            lax.dynamic_update_slice(x, 9 * x[:2, :2], (i[8], i[11])),
            jnp.argmax(x, axis=1),
            jnp.argmin(x, axis=0),
        ),
        (X, I),
    ),
    "reductions": (
        lambda x: (
            jnp.sum(x, axis=0),
            jnp.sum(x),
            jnp.max(x, axis=1),
            jnp.min(x),
            jnp.prod(x, axis=0),
            jnp.any(x > 0, axis=1),
            jnp.all(x > -9, axis=0),
            jnp.cumsum(x, axis=1),
            jnp.cumsum(x[::-1], axis=0),
            lax.cumsum(x, axis=0, reverse=True),
            lax.cummax(x, axis=1),
            jnp.cumprod(x, axis=0),
            jnp.mean(x, axis=1),
        ),
        (X,),
    ),
    "products": (
        lambda x, y: (
            x @ y.T,
            jnp.einsum("ij,ik->jk", x, y),
            jnp.einsum("bij,bjk->bik", x.reshape(2, 3, 8), y.reshape(2, 8, 3)),
            jnp.dot(x[0], y[0]),
            lax.dot_general(x, y, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32),
        ),
        (X, Y),
    ),
    "sorting": (lambda x: (jnp.sort(x, axis=0), jnp.argsort(x, axis=1), *jnp.split(x, 2, axis=1)), (X,)),
    "bits": (
        lambda x: (
            lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) + (1 << 23), jnp.float32),
            x.astype(int),
        ),
        (X,),
    ),
    "calls": (
        lambda x: (jax.jit(jnp.tanh)(x), jax.nn.relu(x), jax.nn.silu(x), jax.checkpoint(jnp.sin)(x), jax.nn.softmax(x)),
        (X,),
    ),
    "scan": (
        lambda x: lax.scan(lambda c, row: (c * 0.5 + row, jnp.sum(c) + row[0]), x[0], x),
        (X,),
    ),
    "scan backwards": (lambda x: lax.scan(lambda c, row: (c + row, c), x[0] * 0, x, reverse=True), (X,)),
    "scan without inputs": (lambda x: lax.scan(lambda c, _: (c * 1.5, c[0]), x[0], None, length=4), (X,)),
    "fori": (lambda x: lax.fori_loop(0, 5, lambda n, c: c + n * x, x), (X,)),
    "while": (
        lambda x: lax.while_loop(lambda c: c[1] < 40.0, lambda c: (c[0] + 1, c[1] * 1.5 + 1.0), (0, x[0, 0])),
        (X,),
    ),
    "cond": (
        lambda x: (
            lax.cond(x[0, 0] > 0, lambda: x, lambda: -x),
            lax.switch(2, [lambda: x, lambda: x * 2, lambda: x * 3]),
        ),
        (X,),
    ),
    "derivatives": (jax.grad(lambda x: jnp.sum(jax.nn.silu(x) * jnp.tanh(x))), (X,)),
    "vectorised": (jax.vmap(lambda r: jnp.sum(r * jnp.arange(8.0)) + r), (X,)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_exact_arithmetic_is_what_jax_computes(name: str) -> None:
    """Every result, to FP32's accuracy: primitives, moves, loops, calls."""
    function, arguments = FUNCTIONS[name]
    wanted = jax.tree.leaves(function(*(jnp.asarray(x) for x in arguments)))
    found = trace(function, *arguments).run(arguments)
    assert len(found) == len(wanted)
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape
        if got.dtype == np.float64:
            np.testing.assert_allclose(got, np.asarray(want, dtype=np.float64), rtol=ROOM, atol=ROOM)
        else:
            assert got.dtype == want.dtype
            assert (got == np.asarray(want)).all()


def test_nearest_is_bit_for_bit_what_jax_computes() -> None:
    """Elementwise FP32 and BF16 arithmetic: the same words as XLA gives."""

    def function(x: Any, y: Any) -> tuple[Any, ...]:
        a, b = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
        return x * y + x, (x - y) * 3.0, a * b, a + b, x / y, (x * 1e-30) * 1e-9

    wanted = jax.jit(function)(X, Y)
    found = trace(function, X, Y).run((X, Y), Nearest())
    for got, want in zip(found, wanted, strict=True):
        assert (got == np.asarray(want, dtype=np.float64)).all()


def test_exact_arithmetic_does_not_round_conversions() -> None:
    """BF16 in the program, float64 in the emulation."""
    program = trace(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), X)
    assert (program.run((X,), Exact())[0] == X).all()
    assert (program.run((X,), Nearest())[0] != X).any()


def test_unsupported_primitives_are_named_with_their_line() -> None:
    """All of them, before anything is computed."""

    def function(x: Any) -> Any:
        return lax.linalg.cholesky(x @ x.T) + jnp.linalg.qr(x)[1].sum()

    with pytest.raises(
        EmulationError, match=r"cannot emulate: .*cholesky \(verify/tests/emulate/test_emulate_interpreter"
    ):
        trace(function, np.eye(3, dtype=np.float32))


def test_kernels_are_refused() -> None:
    """A pallas_call is no tile maths."""

    def kernel(x: Any, out: Any) -> None:
        out[...] = x[...] * 2

    call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32), interpret=True)
    with pytest.raises(EmulationError, match="cannot emulate: pallas_call"):
        trace(call, np.zeros((8, 128), np.float32))


def test_wrong_arguments_are_refused() -> None:
    """Another number of arrays, or other shapes."""
    program = trace(lambda x, y: x + y, X, Y, name="sum")
    with pytest.raises(ValueError, match="sum takes 2 arrays, got 1"):
        program.run((X,))
    with pytest.raises(ValueError, match=r"argument 1 of sum must have shape \(6, 8\), got \(8, 6\)"):
        program.run((X, Y.T))


def test_endless_loops_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the loop's source line."""
    monkeypatch.setattr("verify.emulate.interpreter.MOST_STEPS", 10)
    program = trace(lambda x: lax.while_loop(lambda c: c[0] < jnp.inf, lambda c: c + 1, x[0]), X)
    with pytest.raises(EmulationError, match="a loop of more than 10 steps"):
        program.run((X,))


def test_sites_know_their_lines() -> None:
    """File relative to the checkout, line, function, text, and who called; inner equations have paths of their own."""

    def helper(x: Any) -> Any:
        return jnp.tanh(x)

    def function(x: Any) -> Any:
        return lax.scan(lambda c, row: (c + helper(row), c), x[0], x)

    program = trace(function, X)
    site = next(site for site in program.sites if site.primitive == "tanh")
    assert site.file == str(Path("verify/tests/emulate") / Path(__file__).name)
    assert (site.function, site.text, "/" in site.path) == ("helper", "return jnp.tanh(x)", True)
    assert any(caller.startswith("verify/tests/emulate/") for caller in site.callers)
    assert all(site.file != UNKNOWN for site in program.sites)
    assert len({site.path for site in program.sites}) == len(program.sites)

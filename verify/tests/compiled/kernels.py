"""Small Pallas kernels whose schedule can be worked out by hand.

Each is a factory for `verify.compiled`: it returns a function, its abstract arguments and, where the kernel's control
flow depends on them, the values of arguments.  The process that compiles imports this file by path.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BF16, F32 = jnp.bfloat16, jnp.float32
LENGTHS = (5, 0, 2, 4)


def _array(*shape: int, dtype: Any = BF16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def product(m: int = 512, k: int = 1024, n: int = 1024) -> tuple[Any, Any]:
    """One BF16 product in one block."""

    def kernel(a: Any, b: Any, out: Any) -> None:
        out[...] = jnp.dot(a[...], b[...], preferred_element_type=F32)

    return pl.pallas_call(kernel, out_shape=_array(m, n, dtype=F32), name="product"), (_array(m, k), _array(k, n))


def transposed(m: int = 256, k: int = 256, n: int = 256) -> tuple[Any, Any]:
    """`A B^T`, so that the stationary operand is pushed transposed."""

    def kernel(a: Any, b: Any, out: Any) -> None:
        out[...] = lax.dot_general(a[...], b[...], (((1,), (1,)), ((), ())), preferred_element_type=F32)

    return pl.pallas_call(kernel, out_shape=_array(m, n, dtype=F32), name="transposed"), (_array(m, k), _array(n, k))


def steps(blocks: int = 4, parallel: bool = False) -> tuple[Any, Any]:
    """A product in `blocks` grid steps of 512 rows: double-buffered DMA, one loop."""

    def kernel(a: Any, b: Any, out: Any) -> None:
        out[...] = jnp.dot(a[...], b[...], preferred_element_type=F32)

    semantics = "parallel" if parallel else "arbitrary"
    call = pl.pallas_call(
        kernel,
        grid=(blocks,),
        in_specs=[pl.BlockSpec((512, 256), lambda i: (i, 0)), pl.BlockSpec((256, 256), lambda _: (0, 0))],
        out_specs=pl.BlockSpec((512, 256), lambda i: (i, 0)),
        out_shape=_array(512 * blocks, 256, dtype=F32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=(semantics,)),
        name="steps",
    )
    return call, (_array(512 * blocks, 256), _array(256, 256))


def chain(length: int = 8) -> tuple[Any, Any]:
    """`length` dependent BF16 products of 64 rows: nothing can hide a result's latency."""

    def kernel(a: Any, b: Any, out: Any) -> None:
        x = a[...]
        for _ in range(length):
            x = jnp.dot(x, b[...], preferred_element_type=F32).astype(BF16)
        out[...] = x

    return pl.pallas_call(kernel, out_shape=_array(64, 64), name="chain"), (_array(64, 64), _array(64, 64))


def lengths(values: tuple[int, ...] = LENGTHS) -> tuple[Any, Any, Any]:
    """Trip counts and a condition that scalar operands decide: `values[i]` turns in step i, exp where it is over 3."""

    def kernel(count: Any, x: Any, out: Any) -> None:
        i = pl.program_id(0)
        out[...] = lax.fori_loop(0, count[i], lambda _, acc: acc + x[...] * 2.0, jnp.zeros_like(x[...]))

        @pl.when(count[i] > 3)
        def _() -> None:
            out[...] = jnp.exp2(out[...])

    block = pl.BlockSpec((64, 128), lambda i, _: (i, 0))
    grid = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(len(values),), in_specs=[block], out_specs=block)
    rows = 64 * len(values)
    call = pl.pallas_call(kernel, grid_spec=grid, out_shape=_array(rows, 128, dtype=F32), name="lengths")
    return call, (_array(len(values), dtype=jnp.int32), _array(rows, 128, dtype=F32)), {0: values}


def table(dtype: str = "int8", shape: tuple[int, ...] = (2, 40, 300)) -> tuple[Any, Any, Any]:
    """A loop whose trip counts are read from a packed integer table in SMEM."""
    size = 1
    for extent in shape:
        size *= extent

    def kernel(count: Any, x: Any, out: Any) -> None:
        out[...] = jnp.zeros_like(x[...])
        for turn in range(8):
            index = tuple((turn * (3 + 2 * axis) + axis) % extent for axis, extent in enumerate(shape))
            number = count[index].astype(jnp.int32)
            out[...] += lax.fori_loop(0, number, lambda _, acc: acc + x[...], jnp.zeros_like(x[...]))

    block = pl.BlockSpec((8, 128), lambda *_: (0, 0))
    grid = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(1,), in_specs=[block], out_specs=block)
    call = pl.pallas_call(kernel, grid_spec=grid, out_shape=_array(8, 128, dtype=F32), name="table")
    values = [7 * i % 11 for i in range(size)]
    return call, (_array(*shape, dtype=dtype), _array(8, 128, dtype=F32)), {0: values}


def table_turns(shape: tuple[int, ...]) -> int:
    """How many turns `table`'s loops make together."""
    total = 0
    for turn in range(8):
        flat = 0
        for axis, extent in enumerate(shape):
            flat = flat * extent + (turn * (3 + 2 * axis) + axis) % extent
        total += 7 * flat % 11
    return total


def data_dependent() -> tuple[Any, Any]:
    """A conditional region that a value from the vector unit decides."""

    def kernel(x: Any, out: Any) -> None:
        out[...] = x[...] * 2.0

        @pl.when(jnp.max(x[...]) > 0.5)
        def _() -> None:
            out[...] = jnp.exp2(out[...])

    return pl.pallas_call(kernel, out_shape=_array(64, 128, dtype=F32), name="guarded"), (_array(64, 128, dtype=F32),)


def transcendentals() -> tuple[Any, Any]:
    """One register tile through each function of the extended unary pipe, and a transpose."""

    def kernel(x: Any, out: Any) -> None:
        y = x[...]
        out[...] = jnp.exp2(y) + jnp.tanh(y) + lax.rsqrt(y) + y.T

    shape = _array(128, 128, dtype=F32)
    return pl.pallas_call(kernel, out_shape=shape, name="unary"), (shape,)


def precision(name: str = "DEFAULT", size: int = 256) -> tuple[Any, Any]:
    """An FP32 product at a given precision."""

    def kernel(a: Any, b: Any, out: Any) -> None:
        out[...] = jnp.dot(a[...], b[...], precision=lax.Precision[name], preferred_element_type=F32)

    shape = _array(size, size, dtype=F32)
    return pl.pallas_call(kernel, out_shape=shape, name="precise"), (shape, shape)


def relayout() -> tuple[Any, Any]:
    """A kernel whose caller keeps tokens before heads and FP32: XLA has to transpose and convert around it."""

    def kernel(a: Any, b: Any, out: Any) -> None:
        out[...] = jnp.dot(a[...], b[...], preferred_element_type=F32).astype(BF16)

    def block(rows: int) -> Any:
        return pl.BlockSpec((None, rows, 128), lambda h: (h, 0, 0))

    call = pl.pallas_call(
        kernel,
        grid=(4,),
        in_specs=[block(1024), block(128)],
        out_specs=block(1024),
        out_shape=_array(4, 1024, 128),
        name="heads",
    )

    def function(x: Any, weights: Any) -> Any:
        out = call(jnp.swapaxes(x, 0, 1).astype(BF16), weights)
        return jnp.swapaxes(out, 0, 1)

    return function, (_array(1024, 4, 128, dtype=F32), _array(4, 128, 128))


def unaligned() -> tuple[Any, Any]:
    """A DMA whose start nobody can prove to be a multiple of 8 rows: interpret mode runs it, the compiler refuses."""

    def kernel(start: Any, source: Any, out: Any, semaphore: Any) -> None:
        copy = pltpu.make_async_copy(source.at[pl.ds(start[0], 64), :], out, semaphore)
        copy.start()
        copy.wait()

    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(1,),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec((64, 128), lambda *_: (0, 0)),
        scratch_shapes=[pltpu.SemaphoreType.DMA],
    )
    call = pl.pallas_call(kernel, grid_spec=grid, out_shape=_array(64, 128), name="unaligned")
    return call, (_array(1, dtype=jnp.int32), _array(256, 128)), {0: [8]}


def broken(where: str = "trace") -> tuple[Any, Any]:
    """A target that raises while it is traced, or hands out what no compiler takes."""

    def kernel(x: Any, out: Any) -> None:
        if where == "trace":
            message = "the kernel's own complaint"
            raise RuntimeError(message)
        out[...] = lax.cumsum(x[...], axis=0)

    shape = _array(64, 128, dtype=F32)
    return pl.pallas_call(kernel, out_shape=shape, name="broken"), (shape,)


def plain(x: Any, *, factor: float = 1.0) -> Any:
    """A callable for shapes on the command line, with an option."""

    def kernel(source: Any, out: Any) -> None:
        out[...] = source[...] * factor

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="plain")(x)

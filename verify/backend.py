"""Whether the backend can be trusted, and which device model describes it.

Flags can be ignored (another processor, a backend started earlier), and interpreters have bugs of their own.  The
probes run once per process, before any verdict: a backend that fails one is *unsound*, and no kernel is judged on it.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from verify.devices import CPU_INTERPRET, MODELS, DeviceModel

COPY_SHAPES = ((1, 256), (1, 384), (8, 512))
"""Shapes at which an interpreter of Pallas has lost block writes before."""

_BLOCK = 128


class BackendUnsoundError(RuntimeError):
    """The backend does something that no device model allows; no verdict may rest on it."""


@functools.cache
def device_model() -> DeviceModel:
    """The model of the backend this process runs on, after probing it.

    Raises:
        BackendUnsoundError: a probe failed, or no model describes the backend.
    """
    backend = jax.default_backend()
    if backend == "tpu":
        kind = jax.devices()[0].device_kind.lower()
        for model in MODELS.values():
            if kind in model.kinds:
                return model
        message = f"no device model describes {kind!r}; there are {', '.join(MODELS)}"
        raise BackendUnsoundError(message)
    if backend != "cpu":
        message = f"no device model describes the backend {backend!r}"
        raise BackendUnsoundError(message)
    problems = [problem for probe in CPU_PROBES if (problem := probe()) is not None]
    if problems:
        message = "backend unsound: " + "; ".join(problems)
        raise BackendUnsoundError(message)
    return CPU_INTERPRET


def excess_precision() -> str | None:
    """BF16 intermediates must be rounded: 1 + 2**-8 is 1 in BF16."""
    one, tiny = jnp.bfloat16(1.0), jnp.bfloat16(2.0**-8)
    got = jax.jit(lambda a, b: (a + b).astype(jnp.float32) - a.astype(jnp.float32))(one, tiny)
    return None if float(got) == 0.0 else "BF16 sums keep excess precision (xla_allow_excess_precision is on)"


def contraction() -> str | None:
    """x * y + z must round twice, as the vector units of a v6e do."""
    x = jnp.float32(1.0 + 2.0**-12)
    got = jax.jit(lambda a, b, c: a * b + c)(x, x, jnp.float32(-1.0 - 2.0**-11))
    return None if float(got) == 0.0 else "x * y + z contracts to a fused multiply-add (xla_cpu_max_isa is above AVX)"


def flush_to_zero() -> str | None:
    """Subnormal results must become zero, as on a TPU; the kernels' inputs are read the same way."""
    got = jax.jit(lambda a, b: a * b)(jnp.float32(2.0**-100), jnp.float32(2.0**-40))
    return None if float(got) == 0.0 else "subnormal results are kept, which no TPU does"


def copies() -> str | None:
    """A kernel that copies its input must return it, bit for bit."""
    for rows, columns in COPY_SHAPES:
        x = jnp.asarray(np.arange(rows * columns, dtype=np.float32).reshape(rows, columns))
        spec = pl.BlockSpec((rows, _BLOCK), lambda j: (0, j))
        for unused in (False, True):
            got = _copy(x, spec, unused=unused)
            if not np.array_equal(np.asarray(got), np.asarray(x)):
                return f"a copying kernel changes its input at shape ({rows}, {columns})"
    return None


def _copy(x: jax.Array, spec: pl.BlockSpec, *, unused: bool) -> jax.Array:
    operands = (x, x) if unused else (x,)

    def kernel(*refs: jax.Array) -> None:
        refs[-1][...] = refs[0][...]

    return pl.pallas_call(
        kernel,
        grid=(x.shape[1] // _BLOCK,),
        in_specs=[spec] * len(operands),
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret=True,
    )(*operands)


CPU_PROBES = (excess_precision, contraction, flush_to_zero, copies)

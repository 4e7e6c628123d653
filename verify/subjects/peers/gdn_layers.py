"""flywheel-tpu's and Tokamax's fused convolution and Gated DeltaNet kernels, in Pallas' TPU interpreter.

Both descend from one kernel and share a signature.  To run interpreted they need an answer to `get_tpu_info` (a v6e),
and plain loads in place of `ref.reshape`, which the interpreter does not know, both for the call alone; and rows up to
whole tiles, which they read, and which exist in a TPU's memory but not in the interpreter's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import TYPE_CHECKING, Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from verify.gdn.judge import GdnResult
from verify.gdn.steps import ChunkSteps
from verify.subjects.gdn import GdnSubject, all_single, in_dtype, layer_limits

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from jaxtyping import Float32

    from verify.gdn.problem import GdnProblem

CONTEXT = 1 << 10
"""Tokens that a sequence with an initial state is said to have had before; the kernels ask whether there were any."""

TILE_ROWS = 128
"""Tokens of a tile of prefill, so that few shapes are compiled (memory's tiles of packed BF16 have 16 rows)."""

_NOTES = (
    "runs in Pallas' TPU interpreter with an answer for get_tpu_info (v6e) and plain loads in place of ref.reshape",
    "tokens are padded with zeros to a multiple of 128; the padding belongs to no sequence",
    "slots are shifted by one: slot 0 is the kernel's null block, which padded entries name",
)
_DECODE_NOTE = (
    "held to the FP32 recurrence: its matrix products are FP32 at default precision, which a CPU computes in FP32; on "
    "a TPU their operands are rounded to BF16 first, and this contract would not be the one"
)
_CONTRACT = "no numerical bound is documented"


@functools.cache
def _info() -> Any:  # noqa: ANN401  pltpu.TpuInfo
    return pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V6E, 1)


def _on_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of what its first argument, a ref, holds: arrays can be reshaped everywhere."""

    @functools.wraps(function)
    def call(ref: Any, *rest: Any, **named: Any) -> Any:  # noqa: ANN401
        return function(ref[...], *rest, **named)

    return call


@contextlib.contextmanager
def _interpreted(loads: Any, names: tuple[str, ...]) -> Generator[None]:  # noqa: ANN401  a module
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(pltpu, "get_tpu_info", _info))
        for name in names:
            stack.enter_context(mock.patch.object(loads, name, _on_values(getattr(loads, name))))
        stack.enter_context(pltpu.force_tpu_interpret_mode())
        yield


def _arguments(problem: GdnProblem, *, decode: bool) -> dict[str, Any]:
    """The call's arguments; a slot more, in front, is the null block."""
    sequences = problem.sequences
    n_kq, n_v, d_k, d_v = problem.heads
    count = sequences.count
    state, conv = (np.concatenate([np.zeros_like(x[:1]), x]) for x in (problem.state, problem.conv_state))
    lengths = sequences.lengths + np.where(sequences.has_initial, CONTEXT, 0)
    rows = ((0, -problem.tokens % TILE_ROWS), (0, 0))
    qkv, b, a = (jnp.asarray(np.pad(x, rows)) for x in (problem.qkv, problem.b, problem.a))
    return {
        "qkv": qkv,
        "b": b,
        "a": a,
        "conv_state": jnp.asarray(conv),
        "recurrent_state": jnp.asarray(state),
        "conv_weight": jnp.asarray(problem.taps.T[:, None, :]),
        "conv_bias": None if problem.bias is None else jnp.asarray(problem.bias),
        "a_log": jnp.asarray(problem.a_log),
        "dt_bias": jnp.asarray(problem.dt_bias),
        "query_start_loc": jnp.asarray(sequences.boundaries, jnp.int32),
        "state_indices": jnp.asarray(sequences.write_slots + 1, jnp.int32),
        "distribution": jnp.asarray([count if decode else 0, count if decode else 0, count], jnp.int32),
        "seq_lens": jnp.asarray(lengths, jnp.int32),
        "read_state_indices": jnp.asarray(sequences.read_slots + 1, jnp.int32),
        "n_kq": n_kq,
        "n_v": n_v,
        "d_k": d_k,
        "d_v": d_v,
        "kernel_size": problem.width,
    }


def _run(home: str, loads: tuple[str, ...], problem: GdnProblem, *, decode: bool) -> GdnResult:
    kernel = importlib.import_module(f"{home}.wrapper").fused_conv1d_gdn
    with _interpreted(importlib.import_module(f"{home}.vmem_ldst"), loads):
        (conv, state), out = kernel(**_arguments(problem, decode=decode))
    _, n_v, _, d_v = problem.heads
    shaped = np.asarray(out)[: problem.tokens].reshape(problem.tokens, n_v, d_v)
    return GdnResult(
        in_dtype(shaped, problem.qkv.dtype), np.asarray(state)[1:], in_dtype(np.asarray(conv)[1:], problem.qkv.dtype)
    )


def flywheel_inverse(lower: Float32[np.ndarray, "n n"]) -> Float32[np.ndarray, "n n"]:
    """flywheel-tpu's inverse of I + L alone, on one chunk of 64 tokens: plain JAX, no interpreter."""
    module = importlib.import_module(f"{_FLYWHEEL_HOME}.compute_gdn")
    unit = np.eye(len(lower), dtype=np.float32) + lower
    return np.asarray(module.invert_triangular_matrix(jnp.asarray(unit)[None]))[0]


def _decode_only(problem: GdnProblem) -> str | None:
    limits = layer_limits(problem)
    return limits if limits is not None or all_single(problem) else "a decode step has one token per sequence"


_FLYWHEEL_HOME = "flywheel_tpu.linear_attention.gdn"
_FLYWHEEL_LOADS = ("load_squeeze_unit_axis",)
_TOKAMAX_HOME = "tokamax._src.ops.causal_conv1d_gated_delta_rule"
_TOKAMAX_LOADS = ("load_strided_heads", "load_as_qkv_large", "load_compact_to_large")


def _subject(
    name: str, home: str, loads: tuple[str, ...], package: str, steps: ChunkSteps, *, decode: bool
) -> GdnSubject:
    return GdnSubject(
        name=name + ("[decode]" if decode else ""),
        call=lambda problem: _run(home, loads, problem, decode=decode),
        steps=steps,
        recurrent=decode,
        lacking=_decode_only if decode else layer_limits,
        package=package,
        modules=(home.split(".", maxsplit=1)[0],),
        contract=_CONTRACT,
        notes=(*_NOTES, _DECODE_NOTE) if decode else _NOTES,
    )


# Gates are owed from sums of their own segments, as from every kernel: both take differences of cumulative sums.
_FLYWHEEL_STEPS = ChunkSteps(silu="tanh", convolution="bf16", snap=8)
_TOKAMAX_STEPS = ChunkSteps(silu="sigmoid", convolution="exact")
_ARGUMENTS = {
    "flywheel": ("flywheel_tpu.fused_conv1d_gdn", _FLYWHEEL_HOME, _FLYWHEEL_LOADS, "flywheel-tpu", _FLYWHEEL_STEPS),
    "tokamax": ("tokamax.fused_conv1d_gdn", _TOKAMAX_HOME, _TOKAMAX_LOADS, "tokamax", _TOKAMAX_STEPS),
}
FLYWHEEL_TPU = _subject(*_ARGUMENTS["flywheel"], decode=False)
FLYWHEEL_TPU_DECODE = _subject(*_ARGUMENTS["flywheel"], decode=True)
TOKAMAX = _subject(*_ARGUMENTS["tokamax"], decode=False)
TOKAMAX_DECODE = _subject(*_ARGUMENTS["tokamax"], decode=True)


def flywheel_tpu_inverse(lower: Float32[np.ndarray, "n n"], precision: str) -> Float32[np.ndarray, "n n"]:
    """The same as a subject of campaigns.

    Raises:
        NotImplementedError: another precision than BF16 operands, its only one.
    """
    if precision != "bf16":
        message = f"its operands are BF16, not {precision}"
        raise NotImplementedError(message)
    return flywheel_inverse(lower)

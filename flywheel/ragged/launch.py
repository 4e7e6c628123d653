"""The launch: operands, results and scratch memory of the call, in the order in which Pallas passes them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flywheel.attention import tile
from flywheel.attention.budget import LANES
from flywheel.attention.kernel import RawOutputs
from flywheel.attention.schedule import round_up
from flywheel.packing import GROUP
from flywheel.ragged.kernel import kernel
from flywheel.ragged.spec import SEMAPHORES, RaggedSpec, Refs
from flywheel.ragged.tiling import VMEM_LIMIT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Array

    from flywheel.ragged.geometry import Keys


class Operands(NamedTuple):
    """Arrays of one call; None for what the call does not have.  Token axes are multiples of 8."""

    q: Array
    k: Array
    v: Array
    cu_seqlens_q: Array
    keys: Keys
    sinks: Array | None = None
    cos: Array | None = None
    sin: Array | None = None


class _Built(NamedTuple):
    """Refs of a call in the order in which pallas_call passes them."""

    names: list[str]
    arrays: list[Any]
    in_specs: list[Any]
    out_shapes: list[Any]
    out_specs: list[Any]
    scratch: list[Any]


def call(operands: Operands, *, spec: RaggedSpec, interpret: Any = False) -> RawOutputs:  # noqa: ANN401
    """Launch the kernel on validated operands."""
    records, totals = spec.geometry.records(operands.cu_seqlens_q, operands.keys)
    built = _Built(["records", "totals"], [], [], [], [], [])
    _operands(built, operands)
    _results(built, operands, spec)
    _scratch(built, operands, spec)
    results = pl.pallas_call(
        functools.partial(kernel, spec, tuple(built.names)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(spec.heads // spec.tiling.unit,),
            in_specs=built.in_specs,
            out_specs=built.out_specs,
            scratch_shapes=built.scratch,
        ),
        out_shape=built.out_shapes,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=VMEM_LIMIT,
            # Every window comes from the maps of `flywheel.packing` and `geometry`; the checks cost each step.
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="flywheel_ragged_attention",
    )(records, totals, *built.arrays)
    return _unpack(built, results, operands.q.shape[1])


def _operands(built: _Built, operands: Operands) -> None:
    whole = pl.BlockSpec(memory_space=pl.ANY)
    given = [("q_hbm", operands.q, whole), ("k_hbm", operands.k, whole), ("v_hbm", operands.v, whole)]
    if operands.sinks is not None:
        given.append(("sinks", operands.sinks, pl.BlockSpec(memory_space=pltpu.SMEM)))
    if operands.cos is not None:
        given += [("cos_hbm", operands.cos, whole), ("sin_hbm", operands.sin, whole)]
    for name, array, place in given:
        built.names.append(name)
        built.arrays.append(array)
        built.in_specs.append(place)


def _results(built: _Built, operands: Operands, spec: RaggedSpec) -> None:
    heads, tokens, _ = operands.q.shape
    units, unit = spec.heads // spec.tiling.unit, spec.tiling.unit

    def result(name: str, shape: tuple[int, ...], dtype: Any, place: pl.BlockSpec) -> None:  # noqa: ANN401
        built.names.append(name)
        built.out_shapes.append(jax.ShapeDtypeStruct(shape, dtype))
        built.out_specs.append(place)

    out = (heads, tokens, operands.v.shape[2])
    result("out_hbm", out, operands.q.dtype, pl.BlockSpec(memory_space=pl.ANY))
    # A block's row values are merged on whole lanes: up to a block and 128 lanes from the lanes of its first row on.
    span = round_up(tokens, LANES) + spec.tiling.block + LANES
    for name in (name for name in Refs._fields if name.removesuffix("_rows") in spec.row_values and "_rows" in name):
        rows = pl.BlockSpec((1, unit, 1, span), lambda u, *_: (u, 0, 0, 0))
        result(name, (units, unit, 1, span), jnp.float32, rows)
    if spec.return_diagnostics:
        shape = (1, unit, max(spec.geometry.queries.max_blocks, 1))
        smem = pl.BlockSpec(shape, lambda u, *_: (u, 0, 0), memory_space=pltpu.SMEM)
        result("replays", (units, *shape[1:]), jnp.int32, smem)


def _scratch(built: _Built, operands: Operands, spec: RaggedSpec) -> None:
    tiling, dtype = spec.tiling, operands.q.dtype
    head_dim, v_dim = operands.q.shape[2], operands.v.shape[2]
    state = pltpu.VMEM((tile.SUBLANES, tiling.lanes), jnp.float32)

    def ref(name: str, shape: Any) -> None:  # noqa: ANN401
        built.names.append(name)
        built.scratch.append(shape)

    ref("q_long", pltpu.VMEM((2, tiling.block, head_dim), dtype))
    ref("k_long", pltpu.VMEM((2, tiling.block, head_dim), dtype))
    ref("v_long", pltpu.VMEM((2, tiling.block, v_dim), dtype))
    ref("out_long", pltpu.VMEM((2, tiling.block, v_dim), dtype))
    ref("q_short", pltpu.VMEM((2, tiling.unit, tiling.short, head_dim), dtype))
    ref("k_short", pltpu.VMEM((2, tiling.kv_unit, tiling.short, head_dim), dtype))
    ref("v_short", pltpu.VMEM((2, tiling.kv_unit, tiling.short, v_dim), dtype))
    ref("out_short", pltpu.VMEM((2, tiling.unit, tiling.short, v_dim), dtype))
    if spec.rotary is not None:
        for name in ("cos_buffer", "sin_buffer"):
            ref(name, pltpu.VMEM((2, tiling.block, head_dim), jnp.float32))
        ref("q_rotated", pltpu.VMEM((tiling.lanes, head_dim), dtype))
    ref("tails", pltpu.VMEM((tiling.unit, GROUP, v_dim), jnp.float32))
    for name in spec.row_values:
        ref(name, pltpu.VMEM((1, 1, 1, tiling.lanes), jnp.float32))
    ref("acc", pltpu.VMEM((v_dim, tiling.lanes), jnp.float32))
    ref("sums", state)
    ref("anchor", state)
    if spec.return_max_logit:
        ref("maxima", state)
    ref("marks", pltpu.VMEM((v_dim, tiling.lanes), jnp.int32))
    ref("failing", pltpu.VMEM((1, tiling.lanes), jnp.float32))
    ref("k_stage", pltpu.VMEM((tiling.loop_tile, head_dim), dtype))
    ref("v_stage", pltpu.VMEM((tiling.loop_tile, v_dim), dtype))
    ref("control", pltpu.SMEM((4,), jnp.int32))
    ref("sems", pltpu.SemaphoreType.DMA((SEMAPHORES,)))


def _unpack(built: _Built, results: Sequence[Array], tokens: int) -> RawOutputs:
    first = 2 + len(built.arrays)
    found = dict(zip(built.names[first : first + len(results)], results, strict=True))

    def rows(name: str) -> Array | None:
        array = found.get(f"{name}_rows")
        return None if array is None else array.reshape(-1, array.shape[3])[:, :tokens]

    replays = found.get("replays")
    return RawOutputs(
        found["out_hbm"],
        rows("lse"),
        rows("max_logit"),
        None if replays is None else replays.reshape(-1, replays.shape[2]),
        rows("anchor_out"),
        rows("l_out"),
    )

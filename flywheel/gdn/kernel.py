"""The fused kernel: one loop over steps, each turn of which works on four steps' data at once.

A step is a tile of 128 tokens and a group of heads.  Its work goes through four stages, one per turn of the loop:

1. `front.activate`: convolution, silu, norms of step n;
2. `front.prepare`: scores, gates and all else that is elementwise of step n - 1;
3. `front.solve`: the inverses of step n - 2;
4. `tile.state_chain`: updates, outputs and state of step n - 3.

They are independent of each other, so that one stage's vector work fills the other stages' waits for products; all
stand in one block of straight code, their emission interleaved.  Around it are scalar code and rare branches: copies in
and out (`moves`), first and last tiles of sequences (`edges`), a tile's gates.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flywheel.gdn import edges, front, moves, residual
from flywheel.gdn.inverse import CHUNK, LEVELS
from flywheel.gdn.products import Track, interleave, kept
from flywheel.gdn.schedule import Plan, words
from flywheel.gdn.spec import HEAD_DIM, HISTORY, RING, GdnSpec, Place, Refs
from flywheel.gdn.tile import TILE, Front, State, state_chain
from flywheel.gdn.tiling import VMEM_LIMIT
from flywheel.packing import GROUP

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from jax import Array


class Operands(NamedTuple):
    """Arrays of one call; shapes as in `fused_conv1d_gdn`, tokens a multiple of 8."""

    sequences: Array
    taps: Array
    bias: Array | None
    a_log: Array
    dt_bias: Array
    qkv: Array
    b: Array
    a: Array
    conv_state: Array
    state: Array


def _step(spec: GdnSpec, refs: Refs, plan: Plan, places: tuple[Place, ...]) -> None:
    """One turn of the loop: `places` are those of the four stages."""
    first, second, third, fourth = places

    edges.prepare_state(spec, refs, plan, third, fourth)

    @pl.when(first.live)
    def _() -> None:
        @pl.when(first.g == 0)
        def _() -> None:
            @pl.when(first.block + 1 < plan.count)
            def _() -> None:
                moves.fetch(spec, refs, plan, first.block + 1, start=True)

            moves.fetch(spec, refs, plan, first.block, start=False)
            front.tile_gates(spec, refs, plan, first.block)

        edges.prepare_rows(spec, refs, plan, first)

    interleave(_tracks(spec, refs, first, second, fourth))

    @pl.when(first.live)
    def _() -> None:
        edges.keep_rows(spec, refs, plan, first)

    @pl.when(fourth.live)
    def _() -> None:
        edges.finish(spec, refs, plan, fourth)


def _tracks(spec: GdnSpec, refs: Refs, first: Place, second: Place, fourth: Place) -> list[Track]:
    """The stages' pieces over the nine rounds of the third stage, whose chains are the longest.

    Found by the schedule: the matrix unit takes products in the order of their emission, so that those of the second
    stage, which wait for much vector work, come last; the first stage has none and fills the start.
    docs/gdn-kernel.md has the figures.
    """
    if spec.split:
        states = Track([_split_states(spec, refs, fourth, h) for h in range(spec.group)], 7, 0, 7)
    else:
        states = Track([_state(spec, refs, fourth, head) for head in range(spec.values)], 6, 0, 5)
    return [
        Track(front.solve(spec, refs), 9, 0, 8),
        states,
        Track([front.prepare(spec, refs, second)], spec.values + 2, 6, 8),
        Track([front.activate(spec, refs, first)], spec.channels + 1, *((2, 4) if spec.split else (0, 2))),
    ]


def _held(spec: GdnSpec, refs: Refs, place: Place, head: int) -> State:
    slot = jnp.where(place.live, place.g, spec.groups)

    def store(value: Array) -> None:
        refs.s[slot, head] = value

    return State(lambda: refs.s[slot, head], store)


def _put(spec: GdnSpec, refs: Refs, place: Place, head: int, outs: Sequence[Array]) -> None:
    """Outputs of a value head by chunk, as they are returned."""
    lanes = moves.lanes(place.g * (spec.values * HEAD_DIM) + head * HEAD_DIM, HEAD_DIM)
    for c, out in enumerate(outs):
        refs.o[place.block & 1, c * CHUNK : (c + 1) * CHUNK, lanes] = out.astype(refs.o.dtype)


def _state(spec: GdnSpec, refs: Refs, place: Place, head: int) -> Generator[None, None, None]:
    found = Front(
        refs.inverse[head],
        refs.v[place.ring, head],
        refs.keys[place.ring, head],
        refs.read[place.ring, head],
        refs.writes[place.ring, head],
        tuple(refs.decay[place.ring, head, c : c + 1] for c in range(2)),
    )
    outs = yield from state_chain(found, _held(spec, refs, place, head))
    _put(spec, refs, place, head, outs)


def _split_states(spec: GdnSpec, refs: Refs, place: Place, h: int) -> Generator[None, None, None]:
    """With hi/lo operands, the value heads of a query/key head together."""
    heads = range(h * spec.per_key, (h + 1) * spec.per_key)
    columns = refs.columns[place.ring]

    def brought(head: int) -> residual.Residuals:
        own = tuple(columns[:, m * spec.values + head : m * spec.values + head + 1] for m in range(1, spec.gates))
        first, second = kept(refs.inverse[head], spec.precision)
        return residual.Residuals((first, second), refs.v[place.ring, head], refs.scores[place.ring, head], own)

    k_q, k_t = ((ref[place.ring, h, 0], ref[place.ring, h, 1]) for ref in (refs.k_q, refs.k_t_chunks))
    states = [_held(spec, refs, place, head) for head in heads]
    outs = yield from residual.residual_chain([brought(head) for head in heads], states, residual.Keys(k_q, k_t))
    for head, out in zip(heads, outs, strict=True):
        _put(spec, refs, place, head, (out[:CHUNK], out[CHUNK:]))


def _kernel(spec: GdnSpec, names: tuple[str, ...], *refs_in_order: Any) -> None:  # noqa: ANN401
    given = dict(zip(names, refs_in_order, strict=True))
    refs = Refs(*(given.get(name) for name in Refs._fields))
    plan = Plan(spec.packing, spec.tokens, refs.state.shape[0], refs.sequences, refs.blocks)
    plan.fill()
    groups, total = spec.groups, plan.count * spec.groups
    moves.begin(spec, refs, plan)

    def place(n: Any, block: Any, g: Any) -> Place:  # noqa: ANN401
        live = (n >= 0) & (n < total)
        return Place(jnp.where(live, block, 0), jnp.where(live, g, 0), live, n & 1, n & (RING - 1))

    @pl.when(total > 0)
    def _() -> None:
        moves.fetch(spec, refs, plan, jnp.int32(0), start=True)

    def turn(n: Any, indices: tuple[Any, ...]) -> tuple[Any, ...]:  # noqa: ANN401
        """`indices`: block and group of steps n, n - 1, n - 2, n - 3."""
        places = tuple(place(n - age, *indices[2 * age : 2 * age + 2]) for age in range(4))
        _step(spec, refs, plan, places)
        block, g = indices[:2]
        wraps = g + 1 == groups
        return jnp.where(wraps, block + 1, block), jnp.where(wraps, 0, g + 1), *indices[:-2]

    zero = jnp.int32(0)
    lax.fori_loop(0, jnp.where(total > 0, total + 3, 0), turn, (zero,) * 8)
    moves.end(spec, refs)


def _single_scratch(spec: GdnSpec) -> dict[str, Any]:
    v, kq, fp32, bf16 = spec.values, spec.group, jnp.float32, jnp.bfloat16
    return {
        "q": pltpu.VMEM((2, kq, TILE, HEAD_DIM), fp32),
        "k": pltpu.VMEM((2, kq, TILE, HEAD_DIM), fp32),
        "v": pltpu.VMEM((RING, v, TILE, HEAD_DIM), bf16),
        "k_t": pltpu.VMEM((kq, HEAD_DIM, TILE), fp32),
        "keys": pltpu.VMEM((RING, v, TILE, HEAD_DIM), bf16),
        "read": pltpu.VMEM((RING, v, TILE, HEAD_DIM), bf16),
        "writes": pltpu.VMEM((RING, v, CHUNK + HEAD_DIM, TILE), bf16),
        "decay": pltpu.VMEM((RING, v, 8, HEAD_DIM), fp32),
    }


def _split_scratch(spec: GdnSpec) -> dict[str, Any]:
    v, kq, parts, fp32, bf16 = spec.values, spec.group, spec.parts, jnp.float32, jnp.bfloat16
    return {
        "v": pltpu.VMEM((RING, v, TILE, HEAD_DIM), fp32),
        "k_t": pltpu.VMEM((2, kq, HEAD_DIM, parts * TILE), bf16),
        "small": pltpu.VMEM((v, CHUNK, parts * TILE), bf16),
        "k_q": pltpu.VMEM((RING, kq, 2, TILE, parts * HEAD_DIM), bf16),
        "k_t_chunks": pltpu.VMEM((RING, kq, 2, HEAD_DIM, TILE), bf16),
        "scores": pltpu.VMEM((RING, v, CHUNK, TILE), bf16),
        "columns": pltpu.VMEM((RING, TILE, spec.gate_rows), fp32),
    }


def _scratch(spec: GdnSpec, operands: Operands) -> dict[str, Any]:
    v, kq, lanes, parts = spec.values, spec.group, spec.channels * HEAD_DIM, spec.parts
    dim = operands.qkv.shape[1]
    fp32, bf16 = jnp.float32, jnp.bfloat16
    return {
        **(_split_scratch(spec) if spec.split else _single_scratch(spec)),
        "x": pltpu.VMEM((2, TILE, dim), bf16),
        "b_in": pltpu.VMEM((2, TILE, spec.n_v), operands.b.dtype),
        "a_in": pltpu.VMEM((2, TILE, spec.n_v), operands.a.dtype),
        "x_last": pltpu.VMEM((2, GROUP, dim), bf16),
        "b_last": pltpu.VMEM((2, GROUP, spec.n_v), operands.b.dtype),
        "a_last": pltpu.VMEM((2, GROUP, spec.n_v), operands.a.dtype),
        "conv_in": pltpu.VMEM((2, spec.width - 1, dim), bf16),
        "conv_out": pltpu.VMEM((spec.width - 1, dim), bf16),
        "history": pltpu.VMEM((spec.groups, HISTORY, lanes), bf16),
        "rows": pltpu.VMEM((spec.channels, HISTORY + TILE, HEAD_DIM), fp32),
        "gate_logits": pltpu.VMEM((2, TILE, HEAD_DIM), fp32),
        "gates": pltpu.VMEM((2, spec.groups, spec.gate_rows, TILE), fp32),
        "words": pltpu.VMEM((2, spec.groups, spec.word_rows, TILE), jnp.int32),
        "a_kk": pltpu.VMEM((kq, CHUNK, TILE), fp32),
        "a_qk": pltpu.VMEM((kq, CHUNK, TILE), fp32),
        "base": pltpu.VMEM((v, CHUNK, TILE), fp32),
        "added": pltpu.VMEM((v, len(LEVELS) - 1, CHUNK, parts * TILE), bf16),
        "inverse": pltpu.VMEM((v, CHUNK, parts * TILE), bf16),
        "s": pltpu.VMEM((spec.groups + 1, v, HEAD_DIM, HEAD_DIM), fp32),
        "o": pltpu.VMEM((2, TILE, spec.n_v * HEAD_DIM), bf16),
        "o_last": pltpu.VMEM((2, GROUP, spec.n_v * HEAD_DIM), bf16),
        "tail": pltpu.VMEM((GROUP, spec.n_v * HEAD_DIM), fp32),
        "blocks": pltpu.SMEM((words(spec.packing),), jnp.int32),
        "flags": pltpu.SMEM((3,), jnp.int32),
        "x_sem": pltpu.SemaphoreType.DMA((2,)),
        "conv_sem": pltpu.SemaphoreType.DMA((2,)),
        "conv_out_sem": pltpu.SemaphoreType.DMA(()),
        "state_sem": pltpu.SemaphoreType.DMA((2,)),
        "state_out_sem": pltpu.SemaphoreType.DMA(()),
        "out_sem": pltpu.SemaphoreType.DMA(()),
    }


def call(operands: Operands, *, spec: GdnSpec, interpret: Any = False) -> tuple[Array, Array, Array]:  # noqa: ANN401
    """Launch the kernel on validated operands: (out, conv_state, state)."""
    whole, hbm = pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pl.ANY)
    inputs = {name: x for name, x in operands._asdict().items() if x is not None}
    names = list(inputs)
    results = {
        "out": jax.ShapeDtypeStruct((operands.qkv.shape[0], spec.n_v * HEAD_DIM), jnp.bfloat16),
        "conv": jax.ShapeDtypeStruct(operands.conv_state.shape, operands.conv_state.dtype),
        "state": jax.ShapeDtypeStruct(operands.state.shape, operands.state.dtype),
    }
    scratch = _scratch(spec, operands)
    in_vmem = {"taps", "bias", "a_log", "dt_bias"}
    return pl.pallas_call(
        functools.partial(_kernel, spec, (*names, *results, *scratch)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[whole if name in in_vmem else hbm for name in names[1:]],
            out_specs=[hbm] * 3,
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=list(results.values()),
        input_output_aliases={names.index("conv_state"): 1, names.index("state"): 2},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=VMEM_LIMIT,
            # Every index comes from `schedule`, whose values `api` has bounded.
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="flywheel_gdn",
    )(*inputs.values())

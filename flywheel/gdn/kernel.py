"""The fused kernel: one loop over steps, each turn of which works on several steps' data at once.

A step is a tile of 128 tokens and a group of heads.  Its work goes through four stages, one per turn of the loop:

1. `front.activate`: convolution, silu, norms of step n;
2. `front.prepare`: scores, gates and all else that is elementwise of step n - 1;
3. `front.solve`: the inverses of step n - 2;
4. `tile.state_chain`: updates, outputs and state of step n - 3.

They are independent of each other, so that one stage's vector work fills the other stages' waits for products; all
stand in one block of straight code, their emission interleaved.  Around it are scalar code and rare branches: copies in
and out (`moves`), first and last tiles of sequences (`edges`), a tile's gates.

With hi/lo operands a turn is two waves in the same block, each of which takes half of the heads through every stage:
what the first has left to do when its last products are issued lies beside the second's first.  A step then is under
way for three turns instead of four.
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
    from collections.abc import Callable, Generator, Sequence

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
    """One turn of the loop: `places` are those of the steps under way, the newest first."""
    first, ahead, last = places[0], places[-2], places[-1]

    edges.prepare_state(spec, refs, plan, ahead, last)

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

    if spec.split:
        _split_turn(spec, refs, *places)
    else:
        interleave(_tracks(spec, refs, *places))

    @pl.when(first.live)
    def _() -> None:
        edges.keep_rows(spec, refs, plan, first)

    @pl.when(last.live)
    def _() -> None:
        edges.finish(spec, refs, plan, last)


def _tracks(spec: GdnSpec, refs: Refs, first: Place, second: Place, _: Place, fourth: Place) -> list[Track]:
    """The stages' pieces over the nine rounds of the third stage, whose chains are the longest.

    Found by the schedule: the matrix unit takes products in the order of their emission, so that those of the second
    stage, which wait for much vector work, come last; the first stage has none and fills the start.
    docs/gdn-kernel.md has the figures.
    """
    heads = range(spec.group)
    return [
        Track(front.solve(spec, refs, heads), 9, 0, 8),
        Track([_state(spec, refs, fourth, head) for head in range(spec.values)], 6, 0, 5),
        Track([front.prepare(spec, refs, second, heads)], spec.values + 2, 6, 8),
        Track([front.activate(spec, refs, first, heads)], spec.channels + 1, 0, 2),
    ]


def _split_turn(spec: GdnSpec, refs: Refs, first: Place, second: Place, third: Place) -> None:
    """With pairs: two waves of eighteen rounds, and the halves of a step's heads.

    The first half of step n is prepared in the second wave, solved in that of the next turn, and its states go on in
    the first wave of the turn after.  The second half is prepared and solved in the first waves of the next two turns,
    and its states go on in the second.  Memory is read before it is written anew: a half's inverses begin before the
    next step is prepared, and its states before the next inverses end.  Rounds are found by the schedule
    (docs/gdn-kernel.md): vector work of the first stage, which waits for nothing, lies where few products are issued.

    The first turn has nothing to solve and the last one nothing to begin: they have blocks of their own.
    """
    early, late = spec.halves

    def activate(heads: range, rounds: tuple[int, int]) -> Track:
        pieces = 2 * len(heads) + len(spec.values_of(heads)) + 1
        return Track([front.activate(spec, refs, first, heads)], pieces, *rounds)

    def prepare(heads: range, rounds: tuple[int, int]) -> Track:
        place = first if heads == early else second
        return Track([front.prepare(spec, refs, place, heads)], len(spec.values_of(heads)) + 2, *rounds)

    def solve(heads: range, rounds: tuple[int, int]) -> Track:
        return Track(front.solve(spec, refs, heads), 9, *rounds)

    def states(heads: range, rounds: tuple[int, int]) -> Track:
        return Track([_split_states(spec, refs, third, h) for h in heads], 7, *rounds)

    def emit(*emitted: tuple[Callable[[range, tuple[int, int]], Track], range, tuple[int, int]]) -> None:
        interleave([stage(heads, rounds) for stage, heads, rounds in emitted if heads])

    begins, ends = first.live & ~second.live, third.live & ~second.live

    @pl.when(begins)
    def _() -> None:
        emit((activate, early, (0, 17)), (activate, late, (18, 35)), (prepare, early, (18, 35)))

    @pl.when(ends)
    def _() -> None:
        emit((solve, late, (0, 17)), (states, early, (0, 15)), (states, late, (18, 33)))

    @pl.when(~(begins | ends))
    def _() -> None:
        emit(
            (solve, late, (0, 17)),
            (states, early, (0, 15)),
            (activate, early, (8, 21)),
            (prepare, late, (12, 17)),
            (solve, early, (18, 35)),
            (states, late, (18, 33)),
            (prepare, early, (30, 35)),
            (activate, late, (22, 35)),
        )


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
        refs.inverse[head, 0],
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
    heads = spec.values_of(range(h, h + 1))
    columns = refs.columns[place.ring]

    def brought(head: int) -> residual.Residuals:
        own = tuple(columns[:, m * spec.values + head : m * spec.values + head + 1] for m in range(1, spec.gates))
        first, second = kept(refs.inverse.at[head])
        return residual.Residuals((first, second), refs.v[place.ring, head], refs.scores[place.ring, head], own)

    k_q = tuple(kept(refs.k_q.at[place.ring, h, c]) for c in range(2))
    first, second = kept(refs.k_t_chunks.at[place.ring, h])
    keys = residual.Keys(k_q, (first, second))
    states = [_held(spec, refs, place, head) for head in heads]
    outs = yield from residual.residual_chain([brought(head) for head in heads], states, keys)
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
        """`indices`: block and group of the steps under way, n, n - 1 and so on."""
        places = tuple(place(n - age, *indices[2 * age : 2 * age + 2]) for age in range(spec.depth))
        _step(spec, refs, plan, places)
        block, g = indices[:2]
        wraps = g + 1 == groups
        return jnp.where(wraps, block + 1, block), jnp.where(wraps, 0, g + 1), *indices[:-2]

    zero = jnp.int32(0)
    lax.fori_loop(0, jnp.where(total > 0, total + spec.depth - 1, 0), turn, (zero,) * (2 * spec.depth))
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
        "added": pltpu.VMEM((v, len(LEVELS) - 1, 1, CHUNK, TILE), bf16),
        "inverse": pltpu.VMEM((v, 1, CHUNK, TILE), bf16),
    }


def _split_scratch(spec: GdnSpec) -> dict[str, Any]:
    v, kq, parts, fp32, bf16, pairs = spec.values, spec.group, spec.parts, jnp.float32, jnp.bfloat16, jnp.int32
    return {
        "v": pltpu.VMEM((RING, v, TILE, HEAD_DIM), fp32),
        "k_t": pltpu.VMEM((2, kq, parts, HEAD_DIM // 2, TILE), pairs),
        "small": pltpu.VMEM((v, parts, CHUNK // 2, TILE), pairs),
        "k_q": pltpu.VMEM((RING, kq, 2, parts, TILE // 2, HEAD_DIM), pairs),
        "k_t_chunks": pltpu.VMEM((RING, kq, 2, HEAD_DIM // 2, TILE), pairs),
        "scores": pltpu.VMEM((RING, v, CHUNK, TILE), bf16),
        "columns": pltpu.VMEM((RING, TILE, spec.gate_rows), fp32),
        "added": pltpu.VMEM((v, len(LEVELS) - 1, parts, CHUNK // 2, TILE), pairs),
        "inverse": pltpu.VMEM((v, parts, CHUNK // 2, TILE), pairs),
    }


def _scratch(spec: GdnSpec, operands: Operands) -> dict[str, Any]:
    v, kq, lanes = spec.values, spec.group, spec.channels * HEAD_DIM
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

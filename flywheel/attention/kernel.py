"""The kernel: grid, memory spaces and the order of things around the bodies of `block`.

Grid (batch, head, step).  A step is a query block against one of the key blocks that it sees; which, it reads from a
list of packed scalars (`pack`), so that no step is idle.  Where lengths are whole blocks, blocks of q, k and v are
fetched by the kernel itself, two steps ahead (`fetch`); else by Pallas' own pipeline, one step ahead.
Per query block:

1. at its first step q is rotated if asked for; the state is cleared and anchors are chosen from the first keys, unless
   the first body does both (`Schedule.opening`), or does without (`Schedule.by_queries`);
2. each step runs the unrolled body of its kind (`block.emit`), unless a check has failed before: then the flag in SMEM
   stands, and the remaining steps are skipped;
3. the body with a query's last key divides and writes it; if a check has failed, the last step computes the whole query
   block again (`replay.replay`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flywheel.attention import rotary, tile
from flywheel.attention.block import emit
from flywheel.attention.fetch import Fetcher, Place
from flywheel.attention.replay import replay
from flywheel.attention.schedule import INDEX_BITS
from flywheel.attention.spec import (
    ANCHOR_KEYS,
    CONTROLS,
    FIRST_BLOCK,
    FLAG,
    CallSpec,
    Refs,
    Site,
    band_mask,
    both,
    on_sublanes,
)
from flywheel.attention.tiling import VMEM_LIMIT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Array

    from flywheel.attention.schedule import Step

_FIELDS = {"i": INDEX_BITS, "j": INDEX_BITS, "body": 5, "moved": 1, "first": 1, "last": 1}
"""Bits of a packed step."""

MAX_BLOCKS = 2 ** _FIELDS["i"]
MAX_BODIES = 2 ** _FIELDS["body"]
MAX_STEPS = 2**17
"""Half a MiB of scalar memory, of which a core has one MiB."""


class Operands(NamedTuple):
    """Arrays of one call; shapes as in `flywheel.attention`, None for what the call does not have."""

    q: Array
    k: Array
    v: Array
    sinks: Array | None = None
    q_segment_ids: Array | None = None
    kv_segment_ids: Array | None = None
    cos: Array | None = None
    sin: Array | None = None


class RawOutputs(NamedTuple):
    """What the kernel writes; what was not asked for is None."""

    out: Array
    lse: Array | None = None
    max_logit: Array | None = None
    replays: Array | None = None
    anchor: Array | None = None
    l: Array | None = None  # noqa: E741  the field's name of the denominator


def pack(steps: Sequence[Step]) -> np.ndarray:
    """Steps as int32 words."""
    words = np.zeros(len(steps), np.int64)
    for name, bits in _FIELDS.items():
        words = (words << bits) | np.asarray([getattr(step, name) for step in steps], np.int64)
    return words.astype(np.int32)


def unpack_field(word: Any, name: str) -> Any:  # noqa: ANN401  int32, maybe traced
    """One field of packed steps."""
    shift = 0
    for each, bits in reversed(_FIELDS.items()):
        if each == name:
            return lax.shift_right_logical(word, jnp.int32(shift)) & jnp.int32(2**bits - 1)
        shift += bits
    raise KeyError(name)


def _begin(site: Site) -> None:
    """Rotate q; clear the state and choose anchors, unless the first body does without (`Schedule.opening`)."""
    refs, spec = site.refs, site.spec
    refs.control[FLAG] = 0
    refs.control[FIRST_BLOCK] = site.j
    if spec.rotary is not None:
        refs.q_rotated[...] = rotary.rotate(refs.q_in[...], refs.cos[0], refs.sin[0], spec.rotary)
    if spec.segments:
        refs.seen[...] = jnp.zeros_like(refs.seen)
    if spec.return_max_logit:
        refs.maxima[...] = jnp.full_like(refs.maxima, tile.UNSET)
    if spec.schedule.by_queries:
        return
    if spec.late_anchors or spec.online:
        refs.anchor[...] = jnp.full_like(refs.anchor, tile.UNSET)
    if spec.schedule.opening:
        return
    refs.acc[...] = jnp.zeros_like(refs.acc)
    refs.sums[...] = jnp.zeros_like(refs.sums)
    if not (spec.late_anchors or spec.online) and spec.anchor is None:
        refs.anchor[...] = on_sublanes(_anchors(site))


def _anchors(site: Site) -> Array:
    """Anchors from the first keys, of which every query that sees a key sees the first."""
    schedule, refs = site.schedule, site.refs
    s = site.spec.rule(tile.dot_products(refs.k[pl.ds(0, ANCHOR_KEYS), :], refs.q[...]))
    keys = lax.broadcasted_iota(jnp.int32, s.shape, 0)
    visible = band_mask(schedule.band, keys, site.rows(0, schedule.block_q))
    if schedule.kv_len < ANCHOR_KEYS:
        visible = both(visible, keys < schedule.kv_len)
    return tile.choose_anchor(s, visible)


def _kernel(spec: CallSpec, names: tuple[str, ...], fetcher: Fetcher | None, *refs_in_order: Any) -> None:  # noqa: ANN401
    refs = _named(names, refs_in_order)
    b, h, n = (pl.program_id(axis) for axis in range(3))
    if fetcher is None:
        refs = refs._replace(q_in=refs.q_in.at[0, 0], k=refs.k.at[0, 0], v=refs.v.at[0, 0])
    else:
        refs = fetcher.arrive(refs, Place(b, h, n))
    word = refs.steps[n]
    site = Site(spec, refs, b, h, unpack_field(word, "i"), unpack_field(word, "j"))
    schedule = spec.schedule

    @pl.when(unpack_field(word, "first") == 1)
    def _() -> None:
        _begin(site)

    body_here = unpack_field(word, "body")
    sound = refs.control[FLAG] == 0
    for index, body in enumerate(schedule.bodies):

        @pl.when(sound & (body_here == index))
        def _(body: Any = body) -> None:  # noqa: ANN401
            emit(site, body)

    @pl.when(unpack_field(word, "last") == 1)
    def _() -> None:
        @pl.when(refs.control[FLAG] != 0)
        def _() -> None:
            replay(site)

        if spec.return_diagnostics:
            refs.replays[0, 0, 0, site.i] = refs.control[FLAG]


def _named(names: tuple[str, ...], refs: tuple[Any, ...]) -> Refs:
    given = dict(zip(names, refs, strict=True))
    return Refs(*(given.get(name) for name in Refs._fields))


@dataclasses.dataclass
class _Call:
    """Refs of a call in the order in which pallas_call passes them."""

    names: list[str] = dataclasses.field(default_factory=lambda: ["steps"])
    arrays: list[Any] = dataclasses.field(default_factory=list)
    in_specs: list[Any] = dataclasses.field(default_factory=list)
    out_shapes: list[Any] = dataclasses.field(default_factory=list)
    out_specs: list[Any] = dataclasses.field(default_factory=list)
    scratch: list[Any] = dataclasses.field(default_factory=list)

    def operand(self, name: str, array: Any, spec: pl.BlockSpec) -> None:  # noqa: ANN401
        self.names.append(name)
        self.arrays.append(array)
        self.in_specs.append(spec)

    def result(self, name: str, shape: tuple[int, ...], dtype: Any, spec: pl.BlockSpec) -> None:  # noqa: ANN401
        self.names.append(name)
        self.out_shapes.append(jax.ShapeDtypeStruct(shape, dtype))
        self.out_specs.append(spec)

    def scratch_ref(self, name: str, shape: Any) -> None:  # noqa: ANN401
        self.names.append(name)
        self.scratch.append(shape)


def call(operands: Operands, *, spec: CallSpec, interpret: Any = False) -> RawOutputs:  # noqa: ANN401
    """Launch the kernel on validated operands."""
    batch, heads, q_len, head_dim = operands.q.shape
    v_dim = operands.v.shape[3]
    schedule = spec.schedule
    built = _Call()
    fetcher = _operands(built, operands, spec)
    _results(built, (batch, heads, q_len, v_dim), operands.q.dtype, spec)
    _scratch(built, head_dim, v_dim, operands, spec)
    steps = pack(schedule.steps)
    results = pl.pallas_call(
        functools.partial(_kernel, spec, tuple(built.names), fetcher),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads, len(steps)),
            in_specs=built.in_specs,
            out_specs=built.out_specs,
            scratch_shapes=built.scratch,
        ),
        out_shape=built.out_shapes,
        compiler_params=pltpu.CompilerParams(
            # What is fetched ahead crosses from head to head, in order.
            dimension_semantics=("parallel", "parallel", "arbitrary") if fetcher is None else ("arbitrary",) * 3,
            vmem_limit_bytes=VMEM_LIMIT,
            # Every index comes from the list of steps, which test_schedule.py goes through; the checks cost each step.
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="flywheel_attention",
    )(jnp.asarray(steps), *built.arrays)
    return _unpack(built, results)


def _operands(built: _Call, operands: Operands, spec: CallSpec) -> Fetcher | None:
    """Add the operands; what fetches q, k and v, unless Pallas does."""
    tiling = spec.tiling

    def q_index(b: Any, h: Any, n: Any, steps: Any) -> tuple[Any, ...]:  # noqa: ANN401
        return b, h, unpack_field(steps[n], "i"), 0

    def kv_index(b: Any, h: Any, n: Any, steps: Any) -> tuple[Any, ...]:  # noqa: ANN401
        return b, lax.div(h, jnp.int32(spec.group)), unpack_field(steps[n], "j"), 0

    def q_ids_index(b: Any, _h: Any, n: Any, steps: Any) -> tuple[Any, ...]:  # noqa: ANN401
        return b, 0, unpack_field(steps[n], "i")

    def kv_ids_index(b: Any, _h: Any, n: Any, steps: Any) -> tuple[Any, ...]:  # noqa: ANN401
        return b, 0, unpack_field(steps[n], "j")

    q, k, v = operands.q, operands.k, operands.v
    whole = pl.BlockSpec(memory_space=pl.ANY)
    fetcher = None
    if tiling.lookahead > 1:
        fetcher = Fetcher(spec, q.shape[0], q.shape[1], q_index, kv_index, unpack_field)
        built.operand("q_hbm", q, whole)
    else:
        built.operand("q_in", q, pl.BlockSpec((1, 1, tiling.block_q, q.shape[3]), q_index))
        built.operand("k", k, pl.BlockSpec((1, 1, tiling.block_kv, k.shape[3]), kv_index))
        built.operand("v", v, pl.BlockSpec((1, 1, tiling.block_kv, v.shape[3]), kv_index))
    built.operand("k_hbm", k, whole)
    built.operand("v_hbm", v, whole)
    if operands.sinks is not None:
        built.operand("sinks", operands.sinks, pl.BlockSpec(memory_space=pltpu.SMEM))
    if operands.q_segment_ids is not None and operands.kv_segment_ids is not None:
        q_ids, k_ids = (x[:, None, :] for x in (operands.q_segment_ids, operands.kv_segment_ids))
        built.operand("q_ids", q_ids, pl.BlockSpec((1, 1, tiling.block_q), q_ids_index))
        built.operand("k_ids", k_ids, pl.BlockSpec((1, 1, tiling.block_kv), kv_ids_index))
        built.operand("k_ids_hbm", k_ids, whole)
    if operands.cos is not None and operands.sin is not None:

        def table_index(b: Any, _h: Any, n: Any, steps: Any) -> tuple[Any, ...]:  # noqa: ANN401
            return (b if operands.cos.shape[0] > 1 else 0), unpack_field(steps[n], "i"), 0  # type: ignore[union-attr]

        table = pl.BlockSpec((1, tiling.block_q, q.shape[3]), table_index)
        built.operand("cos", operands.cos, table)
        built.operand("sin", operands.sin, table)
    return fetcher


def _results(built: _Call, shape: tuple[int, int, int, int], dtype: Any, spec: CallSpec) -> None:  # noqa: ANN401
    batch, heads, q_len, v_dim = shape
    block_q = spec.tiling.block_q

    def out_index(b: Any, h: Any, n: Any, steps: Any) -> tuple[Any, ...]:  # noqa: ANN401
        return b, h, unpack_field(steps[n], "i"), 0

    def row_index(b: Any, h: Any, n: Any, steps: Any) -> tuple[Any, ...]:  # noqa: ANN401
        return b, h, 0, unpack_field(steps[n], "i")

    row = pl.BlockSpec((1, 1, 1, block_q), row_index)
    built.result("out", shape, dtype, pl.BlockSpec((1, 1, block_q, v_dim), out_index))
    if spec.return_lse:
        built.result("lse", (batch, heads, 1, q_len), jnp.float32, row)
    if spec.return_max_logit:
        built.result("max_logit", (batch, heads, 1, q_len), jnp.float32, row)
    if spec.return_diagnostics:
        blocks = spec.schedule.q_blocks
        smem = pl.BlockSpec((1, 1, 1, blocks), lambda b, h, _n, _steps: (b, h, 0, 0), memory_space=pltpu.SMEM)
        built.result("replays", (batch, heads, 1, blocks), jnp.int32, smem)
        built.result("anchor_out", (batch, heads, 1, q_len), jnp.float32, row)
        built.result("l_out", (batch, heads, 1, q_len), jnp.float32, row)


def _scratch(built: _Call, head_dim: int, v_dim: int, operands: Operands, spec: CallSpec) -> None:
    tiling = spec.tiling
    state = pltpu.VMEM((tile.SUBLANES, tiling.block_q), jnp.float32)
    built.scratch_ref("acc", pltpu.VMEM((v_dim, tiling.block_q), jnp.float32))
    built.scratch_ref("sums", state)
    built.scratch_ref("anchor", state)
    if spec.segments:
        built.scratch_ref("seen", state)
    if spec.return_max_logit:
        built.scratch_ref("maxima", state)
    built.scratch_ref("marks", pltpu.VMEM((v_dim, tiling.block_q), jnp.int32))
    if spec.rotary is not None:
        built.scratch_ref("q_rotated", pltpu.VMEM((tiling.block_q, head_dim), operands.q.dtype))
    built.scratch_ref("k_stage", pltpu.VMEM((2, tiling.replay_keys, head_dim), operands.k.dtype))
    built.scratch_ref("v_stage", pltpu.VMEM((2, tiling.replay_keys, v_dim), operands.v.dtype))
    built.scratch_ref("v_clean", pltpu.VMEM((tiling.replay_keys, v_dim), operands.v.dtype))
    if spec.segments:
        built.scratch_ref("k_ids_stage", pltpu.VMEM((2, 1, tiling.replay_keys), jnp.int32))
    built.scratch_ref("control", pltpu.SMEM((CONTROLS,), jnp.int32))
    built.scratch_ref("sems", pltpu.SemaphoreType.DMA((2, 3)))
    if tiling.lookahead > 1:
        slots = tiling.lookahead + 1
        built.scratch_ref("q_slots", pltpu.VMEM((slots, tiling.block_q, head_dim), operands.q.dtype))
        built.scratch_ref("k_slots", pltpu.VMEM((slots, tiling.block_kv, head_dim), operands.k.dtype))
        built.scratch_ref("v_slots", pltpu.VMEM((slots, tiling.block_kv, v_dim), operands.v.dtype))
        built.scratch_ref("fetch_sems", pltpu.SemaphoreType.DMA((3, slots)))


def _unpack(built: _Call, results: Sequence[Array]) -> RawOutputs:
    first = 1 + len(built.arrays)
    found = dict(zip(built.names[first : first + len(results)], results, strict=True))
    rows = {name: array if name == "out" else array[:, :, 0] for name, array in found.items()}
    return RawOutputs(
        rows["out"],
        rows.get("lse"),
        rows.get("max_logit"),
        rows.get("replays"),
        rows.get("anchor_out"),
        rows.get("l_out"),
    )

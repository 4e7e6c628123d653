"""A whole query block again, with the rescaling softmax.

A replay starts afresh rather than from a saved state: an overflow of o may predate the block whose check fails, and
without a save buffer the fast path carries no cost for it.  All key blocks but the last visited one are fetched from
HBM again, a tile at a time and one tile ahead; that one is still in VMEM, which also keeps every DMA whole and aligned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flywheel.attention import tile
from flywheel.attention.budget import FP32_MAX
from flywheel.attention.finish import finish_queries
from flywheel.attention.spec import FIRST_BLOCK, Site, band_mask, key_ids_on_sublanes, lane_slice, on_sublanes

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax import Array

CELL = 256
"""Most keys, and most queries, of one product: few enough that its scores stay in registers between the maximum and the
weights."""


class _Cell(NamedTuple):
    """Keys start .. start + keys - 1 of a staged tile against queries first .. first + width - 1 of the block."""

    start: int
    keys: int
    first: Any
    width: int

    @property
    def queries(self) -> Any:  # noqa: ANN401
        return lane_slice(self.first, self.width)


class _Tile(NamedTuple):
    """Staged keys: the stage that holds them, and the position of the first one in the sequence."""

    stage: Any
    key0: Any


def replay(site: Site) -> None:
    """Every visited key of one query block, tile by tile; writes the block's results."""
    refs, schedule, tiling = site.refs, site.schedule, site.spec.tiling
    size = tiling.replay_keys
    per_block = schedule.stride // size
    resident = site.j * per_block
    begin, end = refs.control[FIRST_BLOCK] * per_block, resident + schedule.block_kv // size
    _clear(site)
    _start(site, begin, resident)

    def one(n: Any, carry: Any) -> Any:  # noqa: ANN401
        @pl.when(n + 1 < end)
        def _() -> None:
            _start(site, n + 1, resident)

        for copy in _from_block(site, n, resident):
            copy.wait()
        _add(site, _Tile(lax.rem(n, 2), n * size))
        return carry

    lax.fori_loop(begin, end, one, 0)

    def finish(first: Any) -> None:  # noqa: ANN401
        for at, count in _pieces(tiling.replay_queries):
            finish_queries(site, first + at, count, replayed=True)

    _over_queries(site, finish)


def _clear(site: Site) -> None:
    refs, spec = site.refs, site.spec
    for ref in (refs.acc, refs.sums, refs.marks):
        ref[...] = jnp.zeros_like(ref)
    # Integer-valued and below every score; the difference of two such sentinels is formed only as 0.
    running_max = jnp.full(refs.anchor.shape, tile.UNSET, jnp.float32)
    if spec.sinks:
        running_max = jnp.maximum(running_max, jnp.ceil(refs.sinks[site.h] * tile.LOG2_E))
    refs.anchor[...] = running_max
    if spec.segments:
        refs.seen[...] = jnp.zeros_like(refs.seen)
    if spec.return_max_logit:
        refs.maxima[...] = jnp.full_like(refs.maxima, tile.UNSET)


def _start(site: Site, n: Any, resident: Any) -> None:  # noqa: ANN401
    """Ask for tile n of the sequence: from HBM, or from the block that is in VMEM."""

    def start(copies: list[Any]) -> None:
        for copy in copies:
            copy.start()

    if site.schedule.kv_blocks > 1:
        pl.when(n < resident)(lambda: start(_from_hbm(site, n)))
    pl.when(n >= resident)(lambda: start(_from_block(site, n, resident)))


def _from_hbm(site: Site, n: Any) -> list[Any]:  # noqa: ANN401
    """Copies of K, V and the ids of tile n."""
    refs, size = site.refs, site.spec.tiling.replay_keys
    kv_head = lax.div(site.h, jnp.int32(site.spec.group))
    keys = pl.ds(pl.multiple_of(n * size, size), size)
    sources = [refs.k_hbm.at[site.b, kv_head, keys, :], refs.v_hbm.at[site.b, kv_head, keys, :]]
    if site.spec.segments:
        sources.append(refs.k_ids_hbm.at[site.b, :, keys])
    return _copies(site, sources, n)


def _from_block(site: Site, n: Any, resident: Any) -> list[Any]:  # noqa: ANN401
    """The same where the block that is in VMEM begins with tile `resident`.  What waits for one waits for the other."""
    refs, size = site.refs, site.spec.tiling.replay_keys
    keys = pl.ds(pl.multiple_of(jnp.maximum(n - resident, 0) * size, size), size)
    sources = [refs.k.at[keys, :], refs.v.at[keys, :]]
    if site.spec.segments:
        sources.append(refs.k_ids.at[0, :, keys])
    return _copies(site, sources, n)


def _copies(site: Site, sources: list[Any], n: Any) -> list[Any]:  # noqa: ANN401
    refs, stage = site.refs, lax.rem(n, 2)
    stages = (refs.k_stage, refs.v_stage, refs.k_ids_stage)
    return [
        pltpu.make_async_copy(source, target.at[stage], refs.sems.at[stage, i])
        for i, (source, target) in enumerate(zip(sources, stages, strict=False))
    ]


def _pieces(size: int) -> list[tuple[int, int]]:
    """Where each piece of at most CELL begins, and its size."""
    return [(at, min(CELL, size - at)) for at in range(0, size, CELL)]


def _over_queries(site: Site, body: Callable[[Any], None]) -> None:
    count = site.spec.tiling.replay_queries

    def one(n: Any, carry: Any) -> Any:  # noqa: ANN401
        body(pl.multiple_of(n * count, count))
        return carry

    lax.fori_loop(0, site.schedule.block_q // count, one, 0)


def _add(site: Site, staged: _Tile) -> None:
    """A staged tile against all queries of the block."""
    refs, tiling = site.refs, site.spec.tiling
    v = refs.v_stage[staged.stage]
    is_key = lax.broadcasted_iota(jnp.int32, v.shape, 0) + staged.key0 < site.schedule.kv_len
    refs.v_clean[...] = tile.finite_values(v, is_key)
    nonfinite = jnp.where(is_key & jnp.logical_not(jnp.abs(v.astype(jnp.float32)) <= FP32_MAX), 1.0, 0.0)

    def cells(first: Any) -> list[_Cell]:  # noqa: ANN401
        return [
            _Cell(start, keys, first + at, count)
            for start, keys in _pieces(tiling.replay_keys)
            for at, count in _pieces(tiling.replay_queries)
        ]

    def add(first: Any) -> None:  # noqa: ANN401
        """As in `block`: the products of one cell behind the softmax of the next."""
        pending = None
        for cell in cells(first):
            weights = _softmax(site, staged, cell)
            if pending is not None:
                _add_values(site, *pending)
            pending = cell, *weights
        if pending is not None:
            _add_values(site, *pending)

    _over_queries(site, add)

    @pl.when(jnp.max(nonfinite) > 0.0)
    def _() -> None:
        def mark(first: Any) -> None:  # noqa: ANN401
            for cell in cells(first):
                _mark(site, staged, cell)

        _over_queries(site, mark)


def _scores(site: Site, staged: _Tile, cell: _Cell) -> tuple[Array, Array]:
    """Scores of a cell, and which of them count."""
    refs, spec, schedule = site.refs, site.spec, site.schedule
    k = refs.k_stage[staged.stage, pl.ds(cell.start, cell.keys), :]
    s = spec.rule(tile.dot_products(k, refs.q[cell.queries, :]))
    keys = lax.broadcasted_iota(jnp.int32, (cell.keys, 1), 0) + (staged.key0 + cell.start)
    visible = jnp.broadcast_to(keys < schedule.kv_len, s.shape)
    in_band = band_mask(schedule.band, keys, site.rows(cell.first, cell.width))
    if in_band is not None:
        visible &= in_band
    if spec.segments:
        ids = refs.k_ids_stage[staged.stage, :, pl.ds(cell.start, cell.keys)]
        visible &= key_ids_on_sublanes(ids, cell.width) == refs.q_ids[0, :, cell.queries]
    return s, visible


def _softmax(site: Site, staged: _Tile, cell: _Cell) -> tuple[Array, Array]:
    """Weights of a cell, and the factor of what o was before."""
    refs, spec, queries = site.refs, site.spec, cell.queries
    s, visible = _scores(site, staged, cell)
    if spec.segments:
        refs.seen[:, queries] += tile.partial_sums(jnp.where(visible, 1.0, 0.0))
    if spec.return_max_logit:
        refs.maxima[:, queries] = tile.maxima_with_nan(refs.maxima[:, queries], tile.hide(s, visible))
    p, running_max, factor = tile.online_weights(s, refs.anchor[:1, queries], visible, late_bias=True)
    refs.anchor[:, queries] = on_sublanes(running_max)
    refs.sums[:, queries] = refs.sums[:, queries] * factor + tile.partial_sums(p)
    return p.astype(jnp.bfloat16), factor


def _add_values(site: Site, cell: _Cell, p: Array, factor: Array) -> None:
    """o += V^T P^T for one cell."""
    refs = site.refs
    product = tile.weighted_values(refs.v_clean[pl.ds(cell.start, cell.keys), :], p)
    refs.acc[:, cell.queries] = refs.acc[:, cell.queries] * factor + product


def _mark(site: Site, staged: _Tile, cell: _Cell) -> None:
    """Keep which results a non-finite value of the cell's keys reaches."""
    refs, queries = site.refs, cell.queries
    s, visible = _scores(site, staged, cell)
    v = refs.v_stage[staged.stage, pl.ds(cell.start, cell.keys), :]
    is_key = lax.broadcasted_iota(jnp.int32, v.shape, 0) + (staged.key0 + cell.start) < site.schedule.kv_len
    refs.marks[:, queries] = refs.marks[:, queries] | tile.nonfinite_marks(s, visible, v, is_key)

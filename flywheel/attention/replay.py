"""A whole query block again, with the rescaling softmax.

A replay starts afresh rather than from a saved state: an overflow of o may predate the block whose check fails, and
without a save buffer the fast path carries no cost for it.  All key blocks but the last visited one are fetched from
HBM again; that one is still in VMEM, which also keeps every DMA whole and aligned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


def replay(site: Site) -> None:
    """Every visited key of one query block, fragment by fragment; writes the block's results."""
    refs, schedule, tiling = site.refs, site.schedule, site.spec.tiling
    size = tiling.replay_keys
    per_block = schedule.block_kv // size
    resident = site.j * per_block
    _clear(site)

    def one(n: Any, carry: Any) -> Any:  # noqa: ANN401
        if schedule.kv_blocks > 1:

            @pl.when(n < resident)
            def _() -> None:
                _fetch(site, n * size)

        @pl.when(n >= resident)
        def _() -> None:
            _take(site, (n - resident) * size)

        _fragment(site, n * size)
        return carry

    lax.fori_loop(refs.control[FIRST_BLOCK] * per_block, resident + per_block, one, 0)

    def finish(first: Any) -> None:  # noqa: ANN401
        finish_queries(site, first, tiling.replay_queries, replayed=True)

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


def _fetch(site: Site, start: Any) -> None:  # noqa: ANN401
    """K, V and the ids of the keys from position `start` on, from HBM."""
    refs, size = site.refs, site.spec.tiling.replay_keys
    kv_head = lax.div(site.h, jnp.int32(site.spec.group))
    keys = pl.ds(pl.multiple_of(start, size), size)
    moves = [
        (refs.k_hbm.at[site.b, kv_head, keys, :], refs.k_stage),
        (refs.v_hbm.at[site.b, kv_head, keys, :], refs.v_stage),
    ]
    if site.spec.segments:
        moves.append((refs.k_ids_hbm.at[site.b, :, keys], refs.k_ids_stage))
    copies = [pltpu.make_async_copy(hbm, stage, refs.sems.at[n]) for n, (hbm, stage) in enumerate(moves)]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait()


def _take(site: Site, start: Any) -> None:  # noqa: ANN401
    """The same from the block that is in VMEM, where `start` counts."""
    refs, size = site.refs, site.spec.tiling.replay_keys
    keys = pl.ds(pl.multiple_of(start, size), size)
    refs.k_stage[...] = refs.k[keys, :]
    refs.v_stage[...] = refs.v[keys, :]
    if site.spec.segments:
        refs.k_ids_stage[...] = refs.k_ids[0, :, keys]


def _over_queries(site: Site, body: Callable[[Any], None]) -> None:
    count = site.spec.tiling.replay_queries

    def one(n: Any, carry: Any) -> Any:  # noqa: ANN401
        body(pl.multiple_of(n * count, count))
        return carry

    lax.fori_loop(0, site.schedule.block_q // count, one, 0)


def _fragment(site: Site, key0: Any) -> None:  # noqa: ANN401
    """The staged keys, from position key0 of the sequence on, against all queries of the block."""
    refs, schedule, spec = site.refs, site.schedule, site.spec
    k, v = refs.k_stage[...], refs.v_stage[...]
    count, size = spec.tiling.replay_queries, spec.tiling.replay_keys
    is_key = lax.broadcasted_iota(jnp.int32, v.shape, 0) + key0 < schedule.kv_len
    clean = tile.finite_values(v, is_key)
    nonfinite = jnp.max(jnp.where(is_key & jnp.logical_not(jnp.abs(v.astype(jnp.float32)) <= FP32_MAX), 1.0, 0.0)) > 0.0
    keys = lax.broadcasted_iota(jnp.int32, (size, 1), 0) + key0

    def body(first: Any) -> None:  # noqa: ANN401
        queries = lane_slice(first, count)
        s = spec.rule(tile.dot_products(k, refs.q[queries, :]))
        visible = jnp.broadcast_to(keys < schedule.kv_len, s.shape)
        in_band = band_mask(schedule.band, keys, site.rows(first, count))
        if in_band is not None:
            visible &= in_band
        if spec.segments:
            visible &= key_ids_on_sublanes(refs.k_ids_stage[...], count) == refs.q_ids[0, :, queries]
            refs.seen[:, queries] += tile.partial_sums(jnp.where(visible, 1.0, 0.0))
        if spec.return_max_logit:
            refs.maxima[:, queries] = tile.maxima_with_nan(refs.maxima[:, queries], tile.hide(s, visible))
        p, running_max, factor = tile.online_weights(s, refs.anchor[:1, queries], visible, late_bias=True)
        refs.anchor[:, queries] = on_sublanes(running_max)
        refs.sums[:, queries] = refs.sums[:, queries] * factor + tile.partial_sums(p)
        refs.acc[:, queries] = refs.acc[:, queries] * factor + tile.weighted_values(clean, p.astype(jnp.bfloat16))

        @pl.when(nonfinite)
        def _() -> None:
            refs.marks[:, queries] = refs.marks[:, queries] | tile.nonfinite_marks(s, visible, v, is_key)

    _over_queries(site, body)

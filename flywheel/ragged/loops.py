"""Loops over traced bounds: windows of keys that no unrolled body fits, the end of such blocks, and replays.

A tile is the same here as everywhere; only, a loop drains the matrix unit after each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flywheel.attention import tile
from flywheel.attention.budget import FP32_MAX, LANES
from flywheel.attention.finish import any_mark, finish_queries
from flywheel.attention.schedule import ROW_GRID
from flywheel.attention.spec import lane_slice, on_sublanes
from flywheel.packing import GROUP, snap
from flywheel.ragged.copies import Transfer, Window
from flywheel.ragged.geometry import Step
from flywheel.ragged.spec import FLAG, STAGE, Site

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax import Array


def clear(site: Site) -> None:
    """The state of a block's queries before anything was added."""
    refs, spec = site.refs, site.spec

    def one(first: Any) -> None:  # noqa: ANN401
        queries = lane_slice(first, LANES)
        unset = jnp.full((tile.SUBLANES, LANES), tile.UNSET, jnp.float32)
        refs.acc[:, queries] = jnp.zeros((refs.acc.shape[0], LANES), jnp.float32)
        refs.sums[:, queries] = jnp.zeros((tile.SUBLANES, LANES), jnp.float32)
        refs.anchor[:, queries] = unset
        if spec.return_max_logit:
            refs.maxima[:, queries] = unset

    _over_queries(site, LANES, one)


def scrub(values: Any, lo: Any, hi: Any, stop: Any) -> None:  # noqa: ANN401
    """Zeros in the rows of values (a ref) before `lo` and from `hi` up to `stop`: 0 * NaN is NaN."""

    def one(at: Any) -> None:  # noqa: ANN401
        rows = pl.ds(at, ROW_GRID)
        number = lax.broadcasted_iota(jnp.int32, (ROW_GRID, values.shape[1]), 0) + at
        wide = values[rows, :].astype(jnp.float32)
        values[rows, :] = jnp.where((number >= lo) & (number < hi), wide, 0.0).astype(values.dtype)

    @pl.when(lo > 0)
    def _() -> None:
        _loop(0, lo, ROW_GRID, one)

    @pl.when(hi < stop)
    def _() -> None:
        _loop(_down(hi, ROW_GRID), stop, ROW_GRID, one)


def edge(site: Site, step: Step) -> None:
    """Any window of keys: those that some row sees, tile by tile, with a mask."""
    size, refs = site.spec.tiling.loop_tile, site.refs

    @pl.when(site.fresh)
    def _() -> None:
        clear(site)

    def one(at: Any) -> None:  # noqa: ANN401
        keys = pl.ds(at, size)
        k, v = site.k[keys, :], site.v[keys, :]

        def add(first: Any) -> None:  # noqa: ANN401
            visible, s = _scores(site, step, at, first, k)
            _add(site, s, visible, first, v)

        _over_queries(site, size, add)

    _loop(_down(step.lo, size), step.hi, size, one)
    if not site.spec.online:
        refs.control[FLAG] = 0

        def check(first: Any) -> None:  # noqa: ANN401
            exceeding = tile.exceeds_limit(refs.sums[:, lane_slice(first, size)])
            refs.control[FLAG] |= any_mark(jnp.where(site.inside(first, size), exceeding, 0.0))

        _over_queries(site, size, check)


def finish(site: Site) -> None:
    """Divide and write all queries of a block."""
    refs, size = site.refs, site.spec.tiling.loop_tile

    def one(first: Any) -> None:  # noqa: ANN401
        refs.control[FLAG] |= any_mark(finish_queries(site, first, size))  # type: ignore[arg-type]

    _over_queries(site, size, one)


def replay(site: Site) -> None:
    """The whole block again with the rescaling softmax, from the first key that it sees on; writes its results.

    Keys are fetched again, as copies in VMEM hold the last window only.
    """
    refs, record, size = site.refs, site.record, site.spec.tiling.loop_tile
    _clear_for_replay(site)
    origin = snap(record.first_key)

    def one(at: Any) -> None:  # noqa: ANN401
        start = origin + at
        step = Step(
            start=start,
            lo=jnp.maximum(record.first_key - start, 0),
            hi=jnp.minimum(record.stop_key - start, size),
            shift=record.aligned - start,
            whole=0,
        )
        group = lax.div(start, jnp.int32(GROUP))
        windows = (
            Window(refs.k_hbm.at[site.kv_head], group, refs.k_stage, 0),
            Window(refs.v_hbm.at[site.kv_head], group, refs.v_stage, 0),
        )
        groups = lax.div(step.hi + jnp.int32(GROUP - 1), jnp.int32(GROUP))
        copies = Transfer(windows, groups, refs.sems.at[STAGE], needed=True)
        copies.run("start", whole=site.spec.whole_copies)
        copies.run("wait", whole=site.spec.whole_copies)
        _replay_keys(site, step)

    _loop(0, record.stop_key - origin, size, one)

    def end(first: Any) -> None:  # noqa: ANN401
        finish_queries(site, first, size, replayed=True)  # type: ignore[arg-type]

    _over_queries(site, size, end)


def _clear_for_replay(site: Site) -> None:
    clear(site)
    refs = site.refs

    def one(first: Any) -> None:  # noqa: ANN401
        refs.marks[:, lane_slice(first, LANES)] = jnp.zeros((refs.marks.shape[0], LANES), jnp.int32)
        if site.spec.sinks:
            # Integer-valued; a sink is a score of every row.
            running_max = jnp.maximum(jnp.float32(tile.UNSET), jnp.ceil(refs.sinks[site.h] * tile.LOG2_E))
            refs.anchor[:, lane_slice(first, LANES)] = jnp.full((tile.SUBLANES, LANES), running_max)

    _over_queries(site, LANES, one)


def _replay_keys(site: Site, step: Step) -> None:
    """The staged keys against all queries of the block."""
    refs, size = site.refs, site.spec.tiling.loop_tile
    k, v = refs.k_stage[...], refs.v_stage[...]
    number = lax.broadcasted_iota(jnp.int32, v.shape, 0)
    is_key = (number >= step.lo) & (number < step.hi)
    clean = tile.finite_values(v, is_key)
    nonfinite = jnp.max(jnp.where(is_key & ~(jnp.abs(v.astype(jnp.float32)) <= FP32_MAX), 1.0, 0.0)) > 0.0

    def add(first: Any) -> None:  # noqa: ANN401
        visible, s = _scores(site, step, 0, first, k)
        _add(site, s, visible, first, clean, replaying=True)

        @pl.when(nonfinite)
        def _() -> None:
            queries = lane_slice(first, size)
            refs.marks[:, queries] = refs.marks[:, queries] | tile.nonfinite_marks(s, visible, v, is_key)

    _over_queries(site, size, add)


def _scores(site: Site, step: Step, at: Any, first: Any, k: Array) -> tuple[Array, Array]:  # noqa: ANN401
    """Which keys (from row `at` of the window on) the queries from lane `first` on see, and their scores."""
    size = site.spec.tiling.loop_tile
    s = site.spec.rule(tile.dot_products(k, site.queries(first, size)))
    keys = lax.broadcasted_iota(jnp.int32, (size, 1), 0) + at
    return site.visible(step, keys, site.rows(first, size)), s


def _add(site: Site, s: Array, visible: Array, first: Any, v: Array, *, replaying: bool = False) -> None:  # noqa: ANN401
    """One tile's weights to the sums and its values to o."""
    refs, spec = site.refs, site.spec
    queries = lane_slice(first, s.shape[1])
    if spec.return_max_logit:
        before, hidden = refs.maxima[:, queries], tile.hide(s, visible)
        refs.maxima[:, queries] = (
            tile.maxima_with_nan(before, hidden) if replaying else jnp.maximum(before, tile.partial_maxima(hidden))
        )
    if spec.online or replaying:
        p, shift, factor = tile.online_weights(s, refs.anchor[:1, queries], visible, late_bias=replaying)
        refs.anchor[:, queries] = on_sublanes(shift)
        refs.sums[:, queries] = refs.sums[:, queries] * factor + tile.partial_sums(p)
        refs.acc[:, queries] = refs.acc[:, queries] * factor + tile.weighted_values(v, p.astype(jnp.bfloat16))
        return
    anchor = tile.adopt_anchor(refs.anchor[:, queries], s, visible)
    refs.anchor[:, queries] = anchor
    p = tile.weights(s, anchor, visible)
    refs.sums[:, queries] += tile.partial_sums(p)
    refs.acc[:, queries] += tile.weighted_values(v, p.astype(jnp.bfloat16))


def _over_queries(site: Site, count: int, body: Callable[[Any], None]) -> None:
    """Call body(lane) for every `count` queries of the block."""
    _loop(0, site.record.stop, count, lambda at: body(pl.multiple_of(site.lane + at, count)))


def _loop(first: Any, stop: Any, by: int, body: Callable[[Any], None]) -> None:  # noqa: ANN401
    """Call body(n) for n = first, first + by, ... below stop; first is a multiple of `by`."""

    def one(n: Any, carry: Any) -> Any:  # noqa: ANN401
        body(pl.multiple_of(n * by, by))
        return carry

    begin = lax.div(jnp.int32(first), jnp.int32(by))
    lax.fori_loop(begin, lax.div(jnp.int32(stop) + jnp.int32(by - 1), jnp.int32(by)), one, 0)


def _down(n: Any, multiple: int) -> Any:  # noqa: ANN401
    return lax.div(n, jnp.int32(multiple)) * multiple

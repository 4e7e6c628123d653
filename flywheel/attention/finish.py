"""The end of a query block: the final check, the division, and what else is known of each query."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from flywheel.attention import tile
from flywheel.attention.budget import LANES
from flywheel.attention.spec import Site, both, lane_slice

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float32, Int32


def finish_queries(site: Site, first: Any, count: int, *, replayed: bool = False) -> Float32[Array, "1 C"]:  # noqa: ANN401
    """Divide and write queries first .. first + count - 1 of the block.

    Returns:
        1 for queries on which the final check fails (a replay has none to fail), 0 for the others.
    """
    refs = site.refs
    queries = lane_slice(first, count)
    o = refs.acc[:, queries]
    shared = None if replayed else site.spec.anchor
    shift = refs.anchor[:1, queries] if shared is None else jnp.full((1, count), shared, jnp.float32)
    l = tile.denominator(refs.sums[:, queries])  # noqa: E741  the field's name
    if site.spec.sinks:
        l = l + tile.sink_weight(refs.sinks[site.h], shift, late_bias=replayed)  # noqa: E741
    out = tile.normalise(o, l)
    if replayed:
        out = tile.restore_nonfinite(tile.keep_nan(out, o), refs.marks[:, queries])
        # From here on the shift is what the fast path's is, bias included.
        shift = shift + tile.BIAS
    seeing = site.has_key(first, count)
    if seeing is not None:
        out = jnp.where(seeing, out, 0.0)
    refs.out[0, 0, queries, :] = out.T.astype(refs.out.dtype)
    _write_row_values(site, queries, shift, l, seeing)
    failing = jnp.maximum(tile.denominator_unsound(l), tile.overflow_marks(o))
    counted = both(site.inside(first, count), seeing)
    return failing if counted is None else jnp.where(counted, failing, 0.0)


def _write_row_values(site: Site, queries: Any, shift: Array, l: Array, seeing: Array | None) -> None:  # noqa: ANN401, E741
    """LSE, maxima and diagnostics; rows without a key have the LSE of an empty sum, or of the sink."""
    refs, spec = site.refs, site.spec
    if spec.return_lse:
        lse = tile.log_sum_exp(shift, l)
        if seeing is not None:
            lse = jnp.where(seeing, lse, refs.sinks[site.h] if spec.sinks else -jnp.inf)
        refs.lse[0, 0, :, queries] = lse
    if spec.return_max_logit:
        largest = tile.largest_or_nan(refs.maxima[:, queries], axis=0)
        refs.max_logit[0, 0, :, queries] = jnp.where(largest == tile.UNSET, -jnp.inf, largest * tile.LN2)
    if spec.return_diagnostics:
        refs.anchor_out[0, 0, :, queries] = shift
        refs.l_out[0, 0, :, queries] = l


def any_mark(*marks: Float32[Array, "rows C"]) -> Int32[Array, ""]:
    """1 if any mark is set, else 0; one pass through the cross-lane unit for all of them."""
    pieces = [mark[:, at : at + LANES] for mark in marks for at in range(0, mark.shape[1], LANES)]
    rows = [jnp.max(piece, axis=0, keepdims=True) for piece in pieces]
    return (jnp.max(functools.reduce(jnp.maximum, rows)) > 0.0).astype(jnp.int32)

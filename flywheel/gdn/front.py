"""The stages of a step before its state, on refs: rows to queries, keys and values; these to what the state needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from flywheel.gdn import moves, tile
from flywheel.gdn.edges import join_last, own_stop
from flywheel.gdn.inverse import CHUNK, LEVELS, inverse_chain
from flywheel.gdn.products import beside, kept, multiply, parts
from flywheel.gdn.spec import HEAD_DIM, HISTORY, LANES
from flywheel.gdn.tile import PIECES, TILE

if TYPE_CHECKING:
    from collections.abc import Generator

    from jax import Array

    from flywheel.gdn.schedule import Plan
    from flywheel.gdn.spec import GdnSpec, Place, Refs


def tile_gates(spec: GdnSpec, refs: Refs, plan: Plan, block: Any) -> None:  # noqa: ANN401
    """Gates of all heads of a tile; rows that are not the sequence's own get beta 0 and no decay."""
    parity = block & 1
    carried, stop = plan.field(block, "carried"), own_stop(plan, block)
    for whole, last in ((refs.b_in, refs.b_last), (refs.a_in, refs.a_last)):
        join_last(whole.at[parity], last.at[parity], plan.field(block, "groups"))
    row = lax.broadcasted_iota(jnp.int32, (TILE, spec.n_v), 0)
    own = (row >= carried) & (row < stop)
    beta = spec.beta_scale * jax.nn.sigmoid(refs.b_in[parity].astype(jnp.float32))
    g = tile.log_decay(refs.a_in[parity].astype(jnp.float32), refs.a_log[...], refs.dt_bias[...])
    for which, x in enumerate((beta, g)):
        refs.gate_logits[which, :, : spec.n_v] = jnp.where(own, x, 0.0)
    turned = tile.gates(refs.gate_logits[0].T, refs.gate_logits[1].T)
    for group in range(spec.groups):
        heads = slice(group * spec.values, (group + 1) * spec.values)
        for n, rows in enumerate((turned.beta, turned.beta_from_start, turned.from_start)):
            refs.gates[parity, group, n * spec.values : (n + 1) * spec.values] = rows[heads]
        for n, words in enumerate(turned.words):
            refs.words[parity, group, n * spec.values : (n + 1) * spec.values] = words[heads]


def activate(spec: GdnSpec, refs: Refs, place: Place) -> Generator[None, None, None]:
    """Stage 1: a channel tile at a time; values leave it multiplied by beta."""
    beta = refs.gates[place.block & 1, place.g].T
    half = 0.5 if spec.silu else 1.0
    for which, (column, size, at) in enumerate(spec.columns(place.g)):
        # silu takes half of its argument, exactly.
        taps = refs.taps[:, moves.lanes(column, size)].astype(jnp.float32) * half
        bias = refs.bias[:, moves.lanes(column, size)].astype(jnp.float32) * half if spec.bias else None
        for head in range(size // HEAD_DIM):
            here = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            where = (at // LANES + head, column + head * LANES)
            x = _convolved(refs, place, where, taps[:, here], None if bias is None else bias[:, here])
            z = tile.silu_of_twice(x) if spec.silu else x
            if which < 2:
                scale = spec.scale if which == 0 else 1.0
                z = tile.l2norm(z, spec.eps, scale) if spec.eps is not None else z * scale
                (refs.q, refs.k)[which][place.parity, head] = z
            else:
                refs.v[place.ring, head] = beside(parts(z * beta[:, head : head + 1], spec.precision))
            yield
    for column, size, at in spec.columns(place.g):
        kept = refs.x[place.block & 1, TILE - HISTORY :, moves.lanes(column, size)]
        refs.history[place.g, :, at : at + size] = kept


def _convolved(refs: Refs, place: Place, where: tuple[int, Any], taps: Array, bias: Array | None) -> Array:
    """A channel tile, `where` in the step and in qkv."""
    channel, column = where
    lanes, rows = slice(channel * LANES, (channel + 1) * LANES), refs.rows
    rows[channel, :HISTORY] = refs.history[place.g, :, lanes].astype(jnp.float32)
    here = refs.x[place.block & 1, :, moves.lanes(column, LANES)].astype(jnp.float32)
    rows[channel, HISTORY:] = here

    def aged(age: int) -> Array:
        # A load of FP32 rows may start at any sublane: shifting costs nothing.
        return here if age == 0 else rows[channel, HISTORY - age : HISTORY - age + TILE]

    return tile.convolve(aged, taps, bias)


def prepare(spec: GdnSpec, refs: Refs, place: Place) -> Generator[None, None, None]:
    """Stage 2: scores, gates and operands, a value head at a time after what they share."""
    parity = place.block & 1
    q, k = refs.q.at[place.parity], refs.k.at[place.parity]
    for n in range(spec.group):
        head = tile.key_head(q[n], k[n], spec.precision)
        refs.k_t[n], refs.a_kk[n], refs.a_qk[n] = head.k_t, head.a, head.scores
    columns = refs.gates[parity, place.g].T
    mask, words = tile.up_to_row(), refs.words.at[parity, place.g]
    values = spec.values
    rows = [
        tile.segment_rows(tuple(words[p * values + n : p * values + n + 1] for p in range(PIECES)), mask)
        for n in range(values)
    ]
    segments = multiply(jnp.concatenate(rows, axis=0), tile.segment_weights())
    yield
    for n in range(values):
        own = tuple(columns[:, m * values + n : m * values + n + 1] for m in range(3))
        h = n // (values // spec.group)
        head = tile.Head(k[h], q[h], refs.k_t[h], refs.a_kk[h], refs.a_qk[h])
        found = tile.prepare(head, own, segments[n * CHUNK : (n + 1) * CHUNK], spec.precision)
        refs.base[n] = found.base
        for level, part in enumerate(found.added):
            refs.added[n, level] = beside(part)
        refs.keys[place.ring, n] = beside(found.keys)
        refs.read[place.ring, n] = beside(found.read)
        refs.writes[place.ring, n] = beside(found.writes)
        for c in range(2):
            refs.decay[place.ring, n, c : c + 1] = found.decay[c]
        yield


def solve(spec: GdnSpec, refs: Refs) -> list[Generator[None, None, None]]:
    """Stage 3: the inverse, a chain per value head."""

    def chain(n: int) -> Generator[None, None, None]:
        added = tuple(kept(refs.added[n, level], spec.precision) for level in range(len(LEVELS) - 1))
        x = yield from inverse_chain(refs.base[n], added, spec.precision)
        refs.inverse[n] = beside(parts(x, spec.precision))

    return [chain(n) for n in range(spec.values)]

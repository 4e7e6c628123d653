"""The stages of a step before its state, on refs: rows to queries, keys and values; these to what the state needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from flywheel.gdn import moves, residual, tile
from flywheel.gdn.edges import join_last, own_stop
from flywheel.gdn.inverse import CHUNK, LEVELS, Cut, inverse_chain
from flywheel.gdn.products import keep, kept, multiply, parts
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
        wanted = (turned.beta, turned.beta_from_start, turned.from_start, turned.to_end)
        for n, rows in enumerate(wanted[: spec.gates]):
            refs.gates[parity, group, n * spec.values : (n + 1) * spec.values] = rows[heads]
        for n, words in enumerate(turned.words):
            refs.words[parity, group, n * spec.values : (n + 1) * spec.values] = words[heads]


def activate(spec: GdnSpec, refs: Refs, place: Place, heads: range) -> Generator[None, None, None]:
    """Stage 1 of some query/key heads of a step, the first of them first: a channel tile at a time.

    Values leave it multiplied by beta, keys split if they are to be.
    """
    queries: dict[int, Array] = {}
    beta = _columns(spec, refs, place, first=heads.start == 0)
    half = 0.5 if spec.silu else 1.0
    for which, (column, size, at) in enumerate(spec.columns(place.g, heads)):
        # silu takes half of its argument, exactly.
        taps = refs.taps[:, moves.lanes(column, size)].astype(jnp.float32) * half
        bias = refs.bias[:, moves.lanes(column, size)].astype(jnp.float32) * half if spec.bias else None
        for n, head in enumerate(heads if which < 2 else spec.values_of(heads)):
            here = slice(n * HEAD_DIM, (n + 1) * HEAD_DIM)
            where = (at // LANES + n, column + n * LANES)
            x = _convolved(refs, place, where, taps[:, here], None if bias is None else bias[:, here])
            z = tile.silu_of_twice(x) if spec.silu else x
            if which < 2:
                scale = spec.scale if which == 0 else 1.0
                z = tile.l2norm(z, spec.eps, scale) if spec.eps is not None else z * scale
                if not spec.split:
                    (refs.q, refs.k)[which][place.parity, head] = z
                elif which == 0:
                    queries[head] = z
                else:
                    _split_keys(refs, place, head, queries[head], z)
            else:
                refs.v[place.ring, head] = (z * beta[:, head : head + 1]).astype(refs.v.dtype)
            yield
    for column, size, at in spec.columns(place.g, heads):
        last = refs.x[place.block & 1, TILE - HISTORY :, moves.lanes(column, size)]
        refs.history[place.g, :, at : at + size] = last


def _columns(spec: GdnSpec, refs: Refs, place: Place, *, first: bool) -> Array:
    """A step's gates with tokens on sublanes: with pairs turned once, by the `first` that asks."""
    if not spec.split:
        return refs.gates[place.block & 1, place.g].T
    if first:
        refs.columns[place.ring] = refs.gates[place.block & 1, place.g].T
    return refs.columns[place.ring]


def _split_keys(refs: Refs, place: Place, head: int, q: Array, k: Array) -> None:
    found, k_t = residual.split_keys(q, k)
    keep(refs.k_t.at[place.parity, head], k_t)
    keep(refs.k_t_chunks.at[place.ring, head], found.k_t)
    for c in range(2):
        keep(refs.k_q.at[place.ring, head, c], found.k_q[c])


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


def prepare(spec: GdnSpec, refs: Refs, place: Place, heads: range) -> Generator[None, None, None]:
    """Stage 2 of some query/key heads: scores, gates and operands, a value head at a time after what they share."""
    for n in heads:
        if spec.split:
            k_q = tuple(kept(refs.k_q.at[place.ring, n, c]) for c in range(2))
            refs.a_kk[n], refs.a_qk[n] = residual.key_head(k_q, kept(refs.k_t.at[place.parity, n]))
        else:
            head = tile.key_head(refs.q[place.parity, n], refs.k[place.parity, n])
            refs.k_t[n], refs.a_kk[n], refs.a_qk[n] = head.k_t, head.a, head.scores
    columns, values = _columns(spec, refs, place, first=False), spec.values_of(heads)
    segments = _segments(spec, refs, place, values)
    yield
    for at, n in enumerate(values):
        own = tuple(columns[:, m * spec.values + n : m * spec.values + n + 1] for m in range(spec.gates))
        of_segment = segments[at * CHUNK : (at + 1) * CHUNK]
        cut = (_prepare_split if spec.split else _prepare_single)(spec, refs, place, n, own, of_segment)
        refs.base[n] = cut.base
        for level, part in enumerate(cut.added):
            keep(refs.added.at[n, level], part)
        if spec.split:
            keep(refs.small.at[n], cut.small)
        yield


def _segments(spec: GdnSpec, refs: Refs, place: Place, values: range) -> Array:
    """Sums of log-decays of some value heads of a step, below one another."""
    mask, words, step = tile.up_to_row(), refs.words.at[place.block & 1, place.g], spec.values
    rows = [
        tile.segment_rows(tuple(words[p * step + n : p * step + n + 1] for p in range(PIECES)), mask) for n in values
    ]
    return multiply(jnp.concatenate(rows, axis=0), tile.segment_weights())


def _prepare_single(
    spec: GdnSpec, refs: Refs, place: Place, n: int, columns: tuple[Array, ...], segments: Array
) -> Cut:
    h = n // spec.per_key
    q, k = refs.q[place.parity, h], refs.k[place.parity, h]
    head = tile.Head(k, q, refs.k_t[h], refs.a_kk[h], refs.a_qk[h])
    found = tile.prepare(head, columns, segments)
    refs.keys[place.ring, n] = found.keys
    refs.read[place.ring, n] = found.read
    refs.writes[place.ring, n] = found.writes
    for c in range(2):
        refs.decay[place.ring, n, c : c + 1] = found.decay[c]
    return found.lower


def _prepare_split(spec: GdnSpec, refs: Refs, place: Place, n: int, columns: tuple[Array, ...], segments: Array) -> Cut:
    h = n // spec.per_key
    lower, scores = residual.prepare(refs.a_kk[h], refs.a_qk[h], columns[0], segments)
    refs.scores[place.ring, n] = scores
    return lower


def solve(spec: GdnSpec, refs: Refs, heads: range) -> list[Generator[None, None, None]]:
    """Stage 3 of some query/key heads: the inverse, a chain per value head."""

    def chain(n: int) -> Generator[None, None, None]:
        added = tuple(kept(refs.added.at[n, level]) for level in range(len(LEVELS) - 1))
        base = refs.base[n]
        small = kept(refs.small.at[n]) if spec.split else parts(base, spec.precision)
        x = parts((yield from inverse_chain(Cut(base, small, added), spec.precision)), spec.precision)
        keep(refs.inverse.at[n], residual.short(x) if spec.split else x)

    return [chain(n) for n in spec.values_of(heads)]

"""The maths of one tile with hi/lo operands (`bf16x3`): what differs from `tile`, where operands are single numbers.

    A, P, L, X as there
    [K_S; O] = [k; q] S                  per chunk, S the state at its start
    V = X (beta v - beta exp(G) K_S)     the residual first, then the inverse
    O = exp(G) O + tril(P D) V
    S = exp(G_C) S + k^T (exp(G_C - G) V)

Splits are what vector work is spent on.  k and k^T are split once for all value heads of their query/key head; of a
value head S, the residual, exp(G_C - G) V, X and what the inverse takes: half of what U, W and decayed keys ask for.
What reaches the outputs alone, q k^T, q S and tril(P D) V, has single operands: outputs are BF16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from flywheel.gdn.inverse import CHUNK, block_diagonal, cut, inverse_chain, places
from flywheel.gdn.products import beside, dot_shared, dot_short, lockstep, multiply, parts, stack
from flywheel.gdn.tile import (
    TILE,
    State,
    first_chunk,
    gates,
    segment_rows,
    segment_weights,
    up_to_row,
    write_strength,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from jax import Array
    from jaxtyping import BFloat16, Float32

    from flywheel.gdn.inverse import Cut
    from flywheel.gdn.products import Parts

type Short = tuple[Array, Array]
"""Two chunks' matrices over 64 terms, hi and lo side by side on 128 lanes."""


def short(x: Parts) -> Short:
    """Matrices of two chunks side by side as [hi lo] of the first and [lo hi] of the second: lefts of `dot_short`."""
    high, low = (pltpu.bitcast(part, jnp.int32) for part in x)
    low = pltpu.roll(low, CHUNK, 1)
    first = lax.broadcasted_iota(jnp.int32, high.shape, 1) < CHUNK
    both = jnp.where(first, high, low), jnp.where(first, low, high)
    return pltpu.bitcast(both[0], jnp.bfloat16), pltpu.bitcast(both[1], jnp.bfloat16)


class Keys(NamedTuple):
    """What the value heads of one query/key head share, per chunk.

    Attributes:
        k_q: [k_hi; q] and [k_lo; 0].
        k_t: k^T, `short`.
    """

    k_q: tuple[Parts, ...]
    k_t: Short


def split_keys(q: Float32[Array, "128 d_k"], k: Float32[Array, "128 d_k"]) -> tuple[Keys, Parts]:
    """What the value heads share, and the parts of k^T."""
    of_k, of_k_t, of_q = parts(k, "bf16x3"), parts(k.T, "bf16x3"), q.astype(jnp.bfloat16)
    of_q = (of_q, jnp.zeros_like(of_q))
    chunks = (slice(c * CHUNK, (c + 1) * CHUNK) for c in range(2))
    k_q = tuple(stack(tuple(x[here] for x in of_k), tuple(x[here] for x in of_q), axis=0) for here in chunks)
    return Keys(k_q, short(of_k_t)), of_k_t


def key_head(k_q: tuple[Parts, ...], k_t: Parts) -> tuple[Float32[Array, "64 128"], Float32[Array, "64 128"]]:
    """k k^T, and tril(q k^T) with single operands, chunks side by side."""
    pushed = beside(k_t)
    found = multiply(beside(stack(*k_q, axis=0)), jnp.concatenate([pushed, pushed], axis=0))
    of_high, of_low = jnp.split(found, 2, axis=1)
    (k_0, q_0, k_1, q_1), (low_0, _, low_1, _) = (jnp.split(x, 4, axis=0) for x in (of_high, of_low))
    row, column = places(TILE)
    first = first_chunk()
    scores = jnp.where(row >= column, jnp.where(first, q_0, q_1), 0.0)
    return jnp.where(first, k_0, k_1) + jnp.where(first, low_0, low_1), scores


def prepare(
    a: Float32[Array, "64 128"],
    scores: Float32[Array, "64 128"],
    beta: Float32[Array, "128 1"],
    segments: Float32[Array, "64 128"],
) -> tuple[Cut, BFloat16[Array, "64 128"]]:
    """L and tril(P D), from `key_head`, a column of write strengths and sums of log-decays."""
    d = jnp.exp(segments)
    lower = a * write_strength(d, jnp.broadcast_to(beta, (TILE, TILE)))
    return cut(lower, "bf16x3"), (scores * d).astype(jnp.bfloat16)


class Residuals(NamedTuple):
    """What a value head's tile brings to the state.

    Attributes:
        x: X, `short`.
        values: beta v.
        scores: tril(P D), chunks side by side.
        columns: beta exp(G), exp(G) and exp(G_C - G).
    """

    x: Short
    values: Float32[Array, "128 d_v"]
    scores: BFloat16[Array, "64 128"]
    columns: tuple[Float32[Array, "128 1"], ...]


def predict(k_q: Parts, state: Parts) -> tuple[Float32[Array, "64 d_v"], Float32[Array, "64 d_v"]]:
    """k S, and q S with single operands."""
    pushed = beside(state)
    found = multiply(beside(k_q), jnp.concatenate([pushed, pushed], axis=0))
    of_high, of_low = jnp.split(found, 2, axis=1)
    return of_high[:CHUNK] + of_low[:CHUNK], of_high[CHUNK:]


def residual_chain(
    fronts: Sequence[Residuals], states: Sequence[State], keys: Keys
) -> Generator[None, None, list[Float32[Array, "128 d_v"]]]:
    """Outputs of the value heads of one query/key head, whose states go through both chunks.

    Yields after each of three products a chunk.
    """
    reads: list[list[Array]] = [[] for _ in fronts]
    updates: list[list[Array]] = [[] for _ in fronts]
    outs: list[Array] = []
    for c in range(2):
        here = slice(c * CHUNK, (c + 1) * CHUNK)
        predicted = [predict(keys.k_q[c], parts(state.load(), "bf16x3")) for state in states]
        yield
        found = []
        for front, (of_k, _) in zip(fronts, predicted, strict=True):
            residual = front.values[here] - _column(front.columns[0], here) * of_k
            found.append(dot_short(front.x[c], parts(residual, "bf16x3")))
        yield
        scaled = []
        for n, (front, v) in enumerate(zip(fronts, found, strict=True)):
            from_start, to_end = (_column(x, here) for x in front.columns[1:])
            updates[n].append(v.astype(jnp.bfloat16))
            scaled.append(parts(v * to_end, "bf16x3"))
            reads[n].append(from_start * predicted[n][1])
        if c:
            for front, read, v in zip(fronts, reads, updates, strict=True):
                within = multiply(block_diagonal(front.scores), jnp.concatenate(v, axis=0))
                outs.append(jnp.concatenate(read, axis=0) + within)
        writes = dot_shared(keys.k_t[c], scaled)
        yield
        for front, state, write in zip(fronts, states, writes, strict=True):
            decay = _column(front.columns[1], slice(here.stop - 1, here.stop))
            state.store(state.load() * decay + write)
    return outs


def _column(x: Float32[Array, "128 1"], rows: slice) -> Float32[Array, "m 128"]:
    """A number per token on all lanes."""
    return jnp.broadcast_to(x[rows], (rows.stop - rows.start, TILE))


@jax.jit
def delta_rule_tile(
    q: Float32[Array, "128 d_k"],
    k: Float32[Array, "128 d_k"],
    v: Float32[Array, "128 d_v"],
    beta: Float32[Array, " 128"],
    g: Float32[Array, " 128"],
    state: Float32[Array, "d_k d_v"],
) -> tuple[Float32[Array, "128 d_v"], Float32[Array, "d_k d_v"]]:
    """One tile of one value head on plain arrays: what the kernel does, without its grid."""
    found = gates(beta[None], g[None])
    of_beta, *columns = (x.T for x in (found.beta, found.beta_from_start, found.from_start, found.to_end))
    keys, k_t = split_keys(q, k)
    segments = multiply(segment_rows(found.words, up_to_row()), segment_weights())
    lower, scores = prepare(*key_head(keys.k_q, k_t), of_beta, segments)
    (x,) = lockstep([inverse_chain(lower, "bf16x3")])
    front = Residuals(short(parts(x, "bf16x3")), v * of_beta, scores, tuple(columns))
    states = [state]
    ((out,),) = lockstep([residual_chain([front], [State(lambda: states[-1], states.append)], keys)])
    return out, states[-1]

"""The maths of one tile: 128 tokens of one sequence, two chunks of 64, as pure functions of values.

Operands of products are BF16; `residual` has what differs where they are hi/lo pairs.

Per value head, with k and q normalised and q scaled, D_ij = exp(g_(j+1) + .. + g_i) and G_i = g_1 + .. + g_i within a
chunk (docs/gdn-contract.md; the chunk-wise delta rule is that of Gated Delta Networks, arXiv:2412.06464):

    A = k k^T, P = q k^T                 one product: [k; q] against one push of k^T, both chunks
    L = tril(beta A D, -1)               X = (I + L)^-1, `inverse`
    [U W] = X [beta v, beta k exp(G)]
    [R; O] = [W; q exp(G)] S             per chunk, S the state at its start
    V = U - R
    [O; S] += [tril(P D); (k exp(G_C - G))^T] V, S decayed by exp(G_C)

The two chunks of a tile lie side by side where matrices of tokens by tokens are concerned: `[64, 128]`, lanes 0 .. 63
of chunk 0, the rest of chunk 1.  What a token has one number of comes as a row (tokens on lanes) or a column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from flywheel.gdn.inverse import CHUNK, Cut, block_diagonal, cut, inverse_chain, places
from flywheel.gdn.products import lockstep, multiply

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from jax import Array
    from jaxtyping import BFloat16, Bool, Float32, Int32

TILE = 2 * CHUNK
"""Tokens of a tile."""

LEAST_LOG_DECAY = -200.0
"""Log-decays are raised to it: exp of it is 0 in FP32, as of everything below, and sums of it stay finite, so that a
hard reset (-inf) or a huge one does not meet 0 x inf in a product, and leaves the digits of its neighbours alone."""

PIECES = 3
"""BF16 numbers that hold an FP32 number exactly, bit for bit of its 24."""

FAR = -17.0
"""Below it ln softplus(x) is x to FP32."""


def silu_of_twice(half: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """silu(2 half) = half (1 + tanh(half)), one transcendental; where it cancels, the error is absolute."""
    return half + half * jnp.tanh(half)


def convolve(
    rows: Callable[[int], Float32[Array, "tokens lanes"]],
    taps: Float32[Array, "width lanes"],
    bias: Float32[Array, "1 lanes"] | None,
) -> Float32[Array, "tokens lanes"]:
    """Causal convolution on the vector unit, oldest tap first; `rows(n)` are the rows n tokens before each token.

    Products of BF16 rows and taps are exact; the sum is FP32.
    """
    width = taps.shape[0]
    y = rows(width - 1) * taps[:1]
    for tap in range(1, width):
        y = y + rows(width - 1 - tap) * taps[tap : tap + 1]
    return y if bias is None else y + bias


def selector(width: int) -> Float32[Array, "64 width_x_64"]:
    """The constant 0/1 matrix of the convolution on the matrix unit: entry (r, 64 n + c) picks row c for tap age n.

    The rows of age n are the chunk rotated by n: rows r >= n stand n above, rows r < n wrapped around.
    """
    row = lax.broadcasted_iota(jnp.int32, (CHUNK, width * CHUNK), 0)
    column = lax.broadcasted_iota(jnp.int32, (CHUNK, width * CHUNK), 1)
    age, source = column // CHUNK, column & (CHUNK - 1)
    return (((row - age) & (CHUNK - 1)) == source).astype(jnp.float32)


def convolve_by_products(
    chunk: Float32[Array, "64 lanes"],
    before: Float32[Array, "64 lanes"],
    taps: Float32[Array, "width lanes"],
    bias: Float32[Array, "1 lanes"] | None,
) -> Float32[Array, "64 lanes"]:
    """The same on the matrix unit (Flywheel Attention, section 3.2), for a chunk and the chunk before it.

    A copy of the rows for each tap, its last rows those of the chunk before, scaled by the tap, against `selector`;
    each scaled copy as hi + lo, which is the product of BF16 numbers exactly.  The kernel uses the vector form:
    docs/gdn-kernel.md has the figures.
    """
    width = taps.shape[0]
    row = lax.broadcasted_iota(jnp.int32, chunk.shape, 0)
    copies = [
        jnp.where(row >= CHUNK - age, before, chunk) * taps[width - 1 - age : width - age] for age in range(width)
    ]
    stacked = jnp.concatenate(copies, axis=0)
    high = stacked.astype(jnp.bfloat16)
    low = (stacked - high.astype(jnp.float32)).astype(jnp.bfloat16)
    pick = selector(width).astype(jnp.bfloat16)
    y = multiply(jnp.concatenate([pick, pick], axis=1), jnp.concatenate([high, low], axis=0))
    return y if bias is None else y + bias


def l2norm(x: Float32[Array, "tokens d"], eps: float, scale: float = 1.0) -> Float32[Array, "tokens d"]:
    """scale x / sqrt(sum x^2 + eps), eps inside the root; the zero vector stays zero, without eps too."""
    squares = jnp.sum(x * x, axis=1, keepdims=True) + eps
    root = lax.rsqrt(squares)
    if eps == 0.0:
        root = jnp.where(squares > 0.0, root, 0.0)
    return x * (root * scale)


def log_decay(
    a: Float32[Array, "tokens n_v"], a_log: Float32[Array, "1 n_v"], dt_bias: Float32[Array, "1 n_v"]
) -> Float32[Array, "tokens n_v"]:
    """-exp(a_log) softplus(a + dt_bias) in nats, as exp of a sum: a large a_log alone does not overflow."""
    x = a + dt_bias
    softplus = jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
    return -jnp.exp(a_log + jnp.where(x < FAR, x, jnp.log(softplus)))


class Gates(NamedTuple):
    """Gates of one tile, a row per value head, tokens on lanes; rows of invalid tokens are inert.

    Attributes:
        beta: write strength.
        beta_from_start: beta exp(G).
        from_start: exp(G), G the sum of log-decays from the chunk's start up to and with the token.
        to_end: exp of the sum of log-decays after the token, to the chunk's end.
        words: the log-decay as three BF16 numbers whose sum it is, each twice in a 32-bit word.
    """

    beta: Float32[Array, "n_v 128"]
    beta_from_start: Float32[Array, "n_v 128"]
    from_start: Float32[Array, "n_v 128"]
    to_end: Float32[Array, "n_v 128"]
    words: tuple[Int32[Array, "n_v 128"], ...]


def gates(beta: Float32[Array, "n_v 128"], g: Float32[Array, "n_v 128"]) -> Gates:
    """What the chunks need of write strengths and log-decays (nats, at most 0, -inf a hard reset)."""
    pieces, rest = [], jnp.maximum(g, LEAST_LOG_DECAY)
    for _ in range(PIECES):
        piece = rest.astype(jnp.bfloat16)
        pieces.append(piece)
        rest = rest - piece.astype(jnp.float32)
    side_by_side = jnp.concatenate(pieces, axis=1)
    from_start, to_end = (
        jnp.exp(multiply(side_by_side, jnp.concatenate([ones] * PIECES, axis=0))) for ones in (_until(), _after())
    )
    return Gates(beta, beta * from_start, from_start, to_end, tuple(_twice(piece) for piece in pieces))


def _same_chunk(row: Array, column: Array) -> Array:
    return (row < CHUNK) == (column < CHUNK)


def _places() -> tuple[Array, Array]:
    shape = (TILE, TILE)
    return lax.broadcasted_iota(jnp.int32, shape, 0), lax.broadcasted_iota(jnp.int32, shape, 1)


def _until() -> BFloat16[Array, "128 128"]:
    """Entry (t, j): 1 if t and j are in one chunk and t <= j."""
    row, column = _places()
    return (_same_chunk(row, column) & (row <= column)).astype(jnp.float32).astype(jnp.bfloat16)


def _after() -> BFloat16[Array, "128 128"]:
    """Entry (t, j): 1 if t and j are in one chunk and t > j."""
    row, column = _places()
    return (_same_chunk(row, column) & (row > column)).astype(jnp.float32).astype(jnp.bfloat16)


def _twice(piece: BFloat16[Array, "n_v 128"]) -> Int32[Array, "n_v 128"]:
    """A BF16 number in both halves of a word: words broadcast over sublanes are that BF16 row in every row."""
    bits = lax.bitcast_convert_type(piece.astype(jnp.float32), jnp.int32)
    return bits | lax.shift_right_logical(bits, jnp.int32(16))


def up_to_row() -> Int32[Array, "32 128"]:
    """Bits of pairs of BF16 rows: all ones where the lane's token is not after the row, in its chunk."""
    pair = 2 * lax.broadcasted_iota(jnp.int32, (CHUNK // 2, TILE), 0)
    token = lax.broadcasted_iota(jnp.int32, (CHUNK // 2, TILE), 1) & (CHUNK - 1)
    low = jnp.where(token <= pair, jnp.int32(0xFFFF), jnp.int32(0))
    high = jnp.where(token <= pair + 1, jnp.int32(-0x10000), jnp.int32(0))
    return low | high


def segment_rows(words: tuple[Int32[Array, "1 128"], ...], mask: Int32[Array, "32 128"]) -> BFloat16[Array, "64 384"]:
    """Row i: the log-decays of tokens up to i of each chunk, in pieces; times `segment_weights`, the segments' sums."""
    rows = [pltpu.bitcast(jnp.broadcast_to(word, mask.shape) & mask, jnp.bfloat16) for word in words]
    return jnp.concatenate(rows, axis=1)


def segment_weights() -> BFloat16[Array, "384 128"]:
    """Column j: the tokens after j.  Tokens outside of a segment meet an exact 0: its sum has its own terms alone."""
    return jnp.concatenate([_after()] * PIECES, axis=0)


class Head(NamedTuple):
    """What the value heads of one query/key head share.

    Attributes:
        k: normalised keys.
        q: normalised and scaled queries.
        k_t: k^T.
        a: k k^T, chunks side by side.
        scores: tril(q k^T), chunks side by side.
    """

    k: Float32[Array, "128 d_k"]
    q: Float32[Array, "128 d_k"]
    k_t: Float32[Array, "d_k 128"]
    a: Float32[Array, "64 128"]
    scores: Float32[Array, "64 128"]


def key_head(q: Float32[Array, "128 d_k"], k: Float32[Array, "128 d_k"]) -> Head:
    """[k; q] against one push of k^T.  Turned in FP32: a BF16 transpose would be folded into a transposed push."""
    k_t = k.T
    both = multiply(jnp.concatenate([k, q], axis=0).astype(jnp.bfloat16), k_t.astype(jnp.bfloat16))
    row, column = places(TILE)
    first = first_chunk()
    a = jnp.where(first, both[:CHUNK], both[CHUNK:TILE])
    scores = jnp.where(first, both[TILE : TILE + CHUNK], both[TILE + CHUNK :])
    return Head(k, q, k_t, a, jnp.where(row >= column, scores, 0.0))


class Prepared(NamedTuple):
    """What a value head's tile needs of its gates and keys.

    Attributes:
        lower: L, chunks side by side.
        keys: beta k exp(G).
        read: q exp(G).
        writes: [tril(P D); (k exp(G_C - G))^T], chunks side by side.
        decay: exp(G_C) per chunk, on lanes.
    """

    lower: Cut
    keys: BFloat16[Array, "128 d_k"]
    read: BFloat16[Array, "128 d_k"]
    writes: BFloat16[Array, "192 128"]
    decay: tuple[Float32[Array, "1 d_v"], ...]


def prepare(head: Head, columns: tuple[Float32[Array, "128 1"], ...], segments: Float32[Array, "64 128"]) -> Prepared:
    """All that is elementwise about a value head's tile.

    Args:
        head: its query/key head.
        columns: beta, beta exp(G) and exp(G).
        segments: g_(j+1) + .. + g_i, chunks side by side; 0 above the diagonal.
    """
    beta, beta_from_start, from_start = (jnp.broadcast_to(x, (TILE, TILE)) for x in columns)
    d = jnp.exp(segments)
    writes = jnp.concatenate([head.scores * d, head.k_t * d[CHUNK - 1 :]], axis=0)
    return Prepared(
        cut(head.a * write_strength(d, beta), "bf16"),
        (head.k * beta_from_start).astype(jnp.bfloat16),
        (head.q * from_start).astype(jnp.bfloat16),
        writes.astype(jnp.bfloat16),
        tuple(from_start[(c + 1) * CHUNK - 1 : (c + 1) * CHUNK] for c in range(2)),
    )


def write_strength(d: Float32[Array, "64 128"], beta: Float32[Array, "128 128"]) -> Float32[Array, "64 128"]:
    """beta_i D_ij, chunks side by side; beta of each token on all lanes."""
    return d * jnp.where(first_chunk(), beta[:CHUNK], beta[CHUNK:])


def first_chunk() -> Bool[Array, "64 128"]:
    """Lanes of the first of two matrices side by side."""
    return lax.broadcasted_iota(jnp.int32, (CHUNK, TILE), 1) < CHUNK


class Front(NamedTuple):
    """What a value head's tile brings to the state.

    Attributes:
        x: X, chunks side by side.
        values: beta v.
        keys, read, writes, decay: `Prepared`.
    """

    x: BFloat16[Array, "64 128"]
    values: BFloat16[Array, "128 d_v"]
    keys: BFloat16[Array, "128 d_k"]
    read: BFloat16[Array, "128 d_k"]
    writes: BFloat16[Array, "192 128"]
    decay: tuple[Float32[Array, "1 d_v"], ...]


class State(NamedTuple):
    """A value head's state in memory: read anew where it is needed, instead of held in registers over two products.

    Attributes:
        load: its value.
        store: replaces it.
    """

    load: Callable[[], Float32[Array, "d_k d_v"]]
    store: Callable[[Float32[Array, "d_k d_v"]], None]


def state_chain(front: Front, state: State) -> Generator[None, None, tuple[Float32[Array, "64 d_v"], ...]]:
    """[U W] = X [beta v, beta k exp(G)], then per chunk its outputs and the state after it.

    Yields after each of the five products.  The state is read rounded to BF16, kept in FP32.  Writes of both chunks lie
    side by side: each chunk's V has zeros in the place of the other's.
    """
    both = multiply(block_diagonal(front.x), jnp.concatenate([front.values, front.keys], axis=1))
    yield
    u, w = jnp.split(both, 2, axis=1)
    outs = []
    for c in range(2):
        here = slice(c * CHUNK, (c + 1) * CHUNK)
        readers = jnp.concatenate([w[here].astype(jnp.bfloat16), front.read[here]], axis=0)
        reads = multiply(readers, state.load().astype(jnp.bfloat16))
        yield
        v = (u[here] - reads[:CHUNK]).astype(jnp.bfloat16)
        none = jnp.zeros_like(v)
        writes = multiply(front.writes, jnp.concatenate([none, v] if c else [v, none], axis=0))
        yield
        outs.append(reads[CHUNK:] + writes[:CHUNK])
        state.store(state.load() * front.decay[c] + writes[CHUNK:])
    return tuple(outs)


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
    columns = tuple(x.T for x in (found.beta, found.beta_from_start, found.from_start))
    segments = multiply(segment_rows(found.words, up_to_row()), segment_weights())
    ready = prepare(key_head(q, k), columns, segments)
    (x,) = lockstep([inverse_chain(ready.lower, "bf16")])
    x, values = (each.astype(jnp.bfloat16) for each in (x, v * columns[0]))
    front = Front(x, values, ready.keys, ready.read, ready.writes, ready.decay)
    states = [state]
    (outs,) = lockstep([state_chain(front, State(lambda: states[-1], states.append))])
    return jnp.concatenate(outs, axis=0), states[-1]

"""Block shapes: what a configuration says, a table by TPU generation for the rest, and the VMEM that they take."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import NamedTuple

from flywheel.attention.budget import LANES
from flywheel.attention.generation import Hardware, hardware
from flywheel.attention.schedule import EDGE_FRAGMENT, INDEX_BITS, Band, round_up

VMEM_LIMIT = 56 * 2**20
"""Bytes that a call may take: the smallest supported core (v7x) has 64 MiB, of which the compiler needs some itself."""


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Block sizes, in tokens; None is chosen from the lengths and the generation.

    Attributes:
        block_q: queries per block, a multiple of 128.
        block_kv: keys per block, a multiple of 128 (of `fragment`, where that is larger).
        fragment: keys per softmax step inside a block that no mask cuts, a multiple of 128.
        lookahead: how many steps ahead blocks of q, k and v are fetched: 1, or 2 where both lengths are whole blocks.
        generation: the TPU generation to choose for, "v5e", "v6e" or "v7x"; None: the TPU that JAX has.  Any choice
            runs on any TPU.
    """

    block_q: int | None = None
    block_kv: int | None = None
    fragment: int | None = None
    lookahead: int | None = None
    generation: str | None = None


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Resolved sizes, in tokens.

    Attributes:
        block_q: queries per block.
        block_kv: keys per block.
        fragment: keys per softmax step.
        width: most queries per product.
        replay_keys: keys that a replay treats at once.
        replay_queries: queries that a replay treats at once.
        lookahead: how many steps ahead blocks are fetched.
        overlap: keys that a key block shares with the next one.
    """

    block_q: int
    block_kv: int
    fragment: int
    width: int
    replay_keys: int
    replay_queries: int
    lookahead: int
    overlap: int = 0


class Blocks(NamedTuple):
    """Largest default sizes, in tokens."""

    block_q: int
    block_kv: int
    fragment: int


TABLE = MappingProxyType(
    {
        "v5e": {True: Blocks(4096, 2048, 512), False: Blocks(4096, 4096, 256)},
        "v6e": {True: Blocks(4096, 2048, 512), False: Blocks(4096, 4096, 512)},
        "v7x": {True: Blocks(4096, 2048, 512), False: Blocks(4096, 4096, 512)},
    }
)
"""Sizes by generation and by whether head_dim or v_dim exceeds 128.  Long blocks of queries stream through every pushed
tile of keys, and filling and draining the matrix unit happens once per body; wide heads take half as many keys, since
larger bodies compile for minutes.  Under a band of at most half a block of queries they take as many keys as queries,
and no body is larger for it; where the kernel fetches them itself, blocks of keys overlap instead, and are as long as
what a block of queries sees.  The modelled figures behind each entry: docs/reading-a-schedule.md of the source tree."""

ONLINE = Blocks(2048, 2048, EDGE_FRAGMENT)
"""The same for the rescaling softmax, whose bodies take three times as long to compile."""

_VMEM_SHARE = 7 / 8
"""Of a core's VMEM: the rest is the compiler's."""

REPLAY_TILE = 512
"""Most keys, and most queries, that a replay treats at once: enough products to hide their latency in a loop."""

WIDTH = 256
"""Queries per product: as many as a matrix unit is wide, and few enough that a cell's scores stay in registers."""

MOST_LOOKAHEAD = 2
"""Steps ahead that blocks are fetched where lengths are whole blocks: with 1, a step that is shorter than the copies of
the next waits for their latency each time (v6e, 1024 tokens, head_dim 256, modelled: 36.9 % of peak; with 2: 43.4 %).
"""


_EVERYTHING = Band(None, None)


def resolve(
    config: AttentionConfig,
    q_len: int,
    kv_len: int,
    *,
    online: bool = False,
    wide: bool = False,
    band: Band = _EVERYTHING,
    segments: bool = False,
) -> Tiling:
    """Fill in what the configuration leaves open, and refuse what cannot work.

    `online`: for the rescaling softmax; `wide`: head_dim or v_dim exceeds 128; `band`: what row r sees of the keys;
    `segments`: rows see keys of their own segment only.

    Raises:
        ValueError: a size is not on its grid, the generation is unknown, or the lengths allow no lookahead.
    """
    core = hardware(config.generation)
    most = default_blocks(core, online=online, wide=wide, band_keys=band.keys)
    block_q = config.block_q if config.block_q is not None else min(most.block_q, round_up(q_len, LANES))
    block_kv = config.block_kv if config.block_kv is not None else min(most.block_kv, round_up(kv_len, LANES))
    fragment = config.fragment if config.fragment is not None else most.fragment
    for name, size in (("block_q", block_q), ("block_kv", block_kv), ("fragment", fragment)):
        _on_grid(f"config.{name}", size)
    if config.fragment is not None and config.block_kv is not None and block_kv % fragment:
        message = (
            "config.block_kv must be a multiple of config.fragment, "
            f"got block_kv = {block_kv} and fragment = {fragment}"
        )
        raise ValueError(message)
    lookahead = config.lookahead
    if lookahead is not None and (type(lookahead) is not int or lookahead not in (1, MOST_LOOKAHEAD)):
        message = f"config.lookahead must be 1 or {MOST_LOOKAHEAD}, got {lookahead!r}"
        raise ValueError(message)
    # Cores that share a call take steps side by side, and what is fetched ahead goes from step to step.
    if config.block_kv is None and not (online or segments) and lookahead != 1 and core.cores == 1:
        overlapping = _overlapping(Blocks(block_q, block_kv, fragment), q_len, kv_len, band, most.block_q)
        widest = 2 * LANES if wide else LANES
        if overlapping is not None and vmem_bytes(overlapping, widest, widest) <= VMEM_LIMIT:
            return overlapping
    whole = q_len % block_q == 0 and kv_len % block_kv == 0
    if lookahead is None:
        lookahead = MOST_LOOKAHEAD if whole and core.cores == 1 else 1
    if lookahead > 1 and not whole:
        message = (
            f"config.lookahead must be 1 unless q_len and kv_len are whole blocks, got {lookahead}: "
            f"{q_len} queries in blocks of {block_q} and {kv_len} keys in blocks of {block_kv}"
        )
        raise ValueError(message)
    return _tiling(Blocks(block_q, block_kv, fragment), WIDTH, lookahead)


def _overlapping(sizes: Blocks, q_len: int, kv_len: int, band: Band, most_queries: int) -> Tiling | None:
    """Blocks of which each query block needs but one: all the keys that it sees, where a band makes them few.

    They begin on a grid on which replays' tiles lie too, and so that the last one ends with the last key.
    """
    stride, block_q = REPLAY_TILE, sizes.block_q
    if band.lower is None or band.keys is None or 2 * band.keys > most_queries:
        return None
    if q_len % block_q or kv_len % stride or kv_len > stride * 2**INDEX_BITS:
        return None
    if block_q % stride and block_q != q_len:
        return None  # query blocks would see their first key at different places of the grid
    block_kv = round_up(block_q + band.keys - 1 + band.lower % stride, stride)
    if block_kv >= kv_len:
        return None
    tiling = _tiling(sizes._replace(block_kv=block_kv), WIDTH, MOST_LOOKAHEAD)
    return dataclasses.replace(tiling, overlap=block_kv - stride)


def default_blocks(core: Hardware, *, online: bool, wide: bool, band_keys: int | None) -> Blocks:
    """Largest sizes that are chosen for a call."""
    if online:
        return ONLINE
    sizes = blocks_without_table(core, wide=wide) if core.name is None else TABLE[core.name][wide]
    if band_keys is not None and 2 * band_keys <= sizes.block_q:
        return sizes._replace(block_kv=max(sizes.block_kv, sizes.block_q))
    return sizes


def blocks_without_table(core: Hardware, *, wide: bool) -> Blocks:
    """Sizes for a generation that the table does not have.

    Queries and keys as in the table, whose generations agree on them; fragments of two widths of the matrix unit; and
    queries are halved until all of it fits into VMEM.
    """
    sizes = Blocks(4096, 2048 if wide else 4096, 2 * core.mxu_width)
    limit = min(VMEM_LIMIT, int(_VMEM_SHARE * core.vmem_bytes))
    while sizes.block_q > LANES and vmem_bytes(_tiling(sizes, WIDTH, MOST_LOOKAHEAD), 2 * LANES, 2 * LANES) > limit:
        sizes = sizes._replace(block_q=sizes.block_q // 2)
    return sizes


def _tiling(sizes: Blocks, width: int, lookahead: int) -> Tiling:
    return Tiling(*sizes, width, _divisor(sizes.block_kv), _divisor(sizes.block_q), lookahead)


def _divisor(block: int) -> int:
    """The largest multiple of LANES that divides a block, up to what a replay treats at once."""
    return next(size for size in range(REPLAY_TILE, 0, -LANES) if block % size == 0)


def _on_grid(name: str, value: int) -> None:
    if value <= 0 or value % LANES:
        message = f"{name} must be a positive multiple of {LANES}, got {value}"
        raise ValueError(message)


def vmem_bytes(tiling: Tiling, head_dim: int, v_dim: int) -> int:
    """VMEM of one call: BF16 blocks, FP32 state, marks, and the replay's staging buffers."""
    qk, value = max(head_dim, LANES), max(v_dim, LANES)
    fetched = (tiling.lookahead + 1) * (tiling.block_q * qk + tiling.block_kv * (qk + value))
    blocks = 2 * (fetched + 2 * tiling.block_q * value)
    state = 4 * tiling.block_q * (2 * v_dim + 4 * 8)
    staging = 2 * tiling.replay_keys * (2 * qk + 3 * value)
    return blocks + state + staging

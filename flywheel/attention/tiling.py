"""Block shapes and the VMEM that they take."""

from __future__ import annotations

import dataclasses

from flywheel.attention.budget import LANES
from flywheel.attention.schedule import EDGE_FRAGMENT, round_up

VMEM_LIMIT = 56 * 2**20
"""Bytes that a call may take: the smallest supported core (v7x) has 64 MiB, of which the compiler needs some itself."""

WHOLE = 1 << 30


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Block sizes, in tokens; None is chosen from the lengths.

    Attributes:
        block_q: queries per block, a multiple of 128.
        block_kv: keys per block, a multiple of 128 (of `fragment`, where that is larger).
        fragment: keys per softmax step inside a block that no mask cuts, a multiple of 128.
        lookahead: how many steps ahead blocks of q, k and v are fetched, 1 or 2.  2 needs lengths that are whole blocks.
    """

    block_q: int | None = None
    block_kv: int | None = None
    fragment: int | None = None
    lookahead: int | None = None


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Resolved sizes, in tokens.

    Attributes:
        block_q: queries per block.
        block_kv: keys per block.
        fragment: keys per softmax step.
        width: most queries per product; WHOLE: all that the fragment concerns.
        replay_keys: keys that a replay treats at once.
        replay_queries: queries that a replay treats at once.
        lookahead: how many steps ahead blocks are fetched.
    """

    block_q: int
    block_kv: int
    fragment: int
    width: int
    replay_keys: int
    replay_queries: int
    lookahead: int


BLOCKS = {False: (4096, 4096), True: (4096, 2048)}
"""Largest default (block_q, block_kv), by whether head_dim or v_dim exceeds 128.  Long blocks of queries stream through
every pushed tile of keys, and filling and draining the matrix unit happens once per body; wide heads take half as many
keys, since larger bodies compile for minutes."""

ONLINE_BLOCKS = (2048, 2048)
"""The same for the rescaling softmax, whose bodies take three times as long to compile."""

DEFAULT_FRAGMENT = 512
MOST_LOOKAHEAD = 2
REPLAY_TILE = 512
"""Most keys, and most queries, that a replay treats at once: enough products to hide their latency in a loop."""

ONLINE_WIDTH = 256
"""Queries per product of the rescaling softmax: few enough that a fragment's scores stay in registers between the
maximum and the weights."""


def resolve(config: AttentionConfig, q_len: int, kv_len: int, *, online: bool = False, wide: bool = False) -> Tiling:
    """Fill in what the configuration leaves open, and refuse what cannot work.

    `online`: for the rescaling softmax; `wide`: head_dim or v_dim exceeds 128.

    Raises:
        ValueError: a size is not on its grid.
    """
    most_q, most_kv = ONLINE_BLOCKS if online else BLOCKS[wide]
    block_q = config.block_q if config.block_q is not None else min(most_q, round_up(q_len, LANES))
    block_kv = config.block_kv if config.block_kv is not None else min(most_kv, round_up(kv_len, LANES))
    fragment = config.fragment if config.fragment is not None else EDGE_FRAGMENT if online else DEFAULT_FRAGMENT
    for name, size in (("block_q", block_q), ("block_kv", block_kv), ("fragment", fragment)):
        _on_grid(f"config.{name}", size)
    if config.fragment is not None and config.block_kv is not None and block_kv % fragment:
        message = (
            "config.block_kv must be a multiple of config.fragment, "
            f"got block_kv = {block_kv} and fragment = {fragment}"
        )
        raise ValueError(message)
    width = ONLINE_WIDTH if online else WHOLE
    lookahead = _lookahead(config.lookahead, whole=q_len % block_q == 0 and kv_len % block_kv == 0)
    return Tiling(block_q, block_kv, fragment, width, _divisor(block_kv), _divisor(block_q), lookahead)


def _lookahead(asked: int | None, *, whole: bool) -> int:
    """How far ahead blocks are fetched: as far as can be, unless the configuration says otherwise."""
    if asked is None:
        return MOST_LOOKAHEAD if whole else 1
    if isinstance(asked, bool) or asked not in range(1, MOST_LOOKAHEAD + 1):
        message = f"config.lookahead must be 1 or {MOST_LOOKAHEAD}, got {asked!r}"
        raise ValueError(message)
    if asked > 1 and not whole:
        message = f"config.lookahead must be 1 unless q_len and kv_len are whole blocks, got {asked}"
        raise ValueError(message)
    return asked


def _divisor(block: int) -> int:
    """The largest multiple of LANES that divides a block, up to what a replay treats at once."""
    return next(size for size in range(REPLAY_TILE, 0, -LANES) if block % size == 0)


def _on_grid(name: str, value: int) -> None:
    if value <= 0 or value % LANES:
        message = f"{name} must be a positive multiple of {LANES}, got {value}"
        raise ValueError(message)


def vmem_bytes(tiling: Tiling, head_dim: int, v_dim: int) -> int:
    """VMEM of one call: BF16 blocks, one more of each than are fetched ahead, FP32 state, marks, and the replay's staging buffers."""
    qk, value = max(head_dim, LANES), max(v_dim, LANES)
    fetched = (tiling.lookahead + 1) * (tiling.block_q * qk + tiling.block_kv * (qk + value))
    blocks = 2 * (fetched + 2 * tiling.block_q * value)
    state = 4 * tiling.block_q * (2 * v_dim + 4 * 8)
    staging = 2 * tiling.replay_keys * (qk + value)
    return blocks + state + staging

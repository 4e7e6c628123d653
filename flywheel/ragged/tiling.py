"""Block shapes, how many heads one step takes, and the VMEM that both cost."""

from __future__ import annotations

import dataclasses

from flywheel.attention.budget import LANES
from flywheel.attention.schedule import round_up
from flywheel.attention.tiling import VMEM_LIMIT

MAX_UNIT = 8
"""Most query heads that one step takes for short sequences: enough work to hide what a step costs."""

DEFAULT_BLOCK = 2048
DEFAULT_SHORT = 512
ONLINE_BLOCK = 1024
"""The rescaling softmax takes three times as long to compile per body."""

FRAGMENT = 512
"""Keys per softmax step in a block that no mask cuts."""

EDGE = 256
"""Keys per softmax step where a mask cuts the block, and the grid of the classes of blocks: the matrix unit's width."""

LOOP_TILE = 512
"""Most keys, and most queries, that the loops over traced bounds treat at once."""

ONLINE_WIDTH = 256
WHOLE = 1 << 30


@dataclasses.dataclass(frozen=True)
class RaggedConfig:
    """Block sizes in tokens; None is chosen from the lengths of the token axes.

    Attributes:
        block: queries per block and keys per block of a long sequence, a multiple of 128.
        short: longest sequence (from its first group of 8 rows on) that is computed for several heads at once, a
            multiple of 128, at most `block`.
    """

    block: int | None = None
    short: int | None = None


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Resolved sizes.

    Attributes:
        block: queries per block, and keys per block.
        short: rows of a window of a short sequence.
        unit: query heads that a step of short sequences takes; the outer grid goes over units of heads.
        kv_unit: KV heads that they read.
        width: most queries per product.
    """

    block: int
    short: int
    unit: int
    kv_unit: int
    width: int

    @property
    def lanes(self) -> int:
        """Queries that the state has room for."""
        return max(self.block, self.unit * self.short)

    @property
    def loop_tile(self) -> int:
        """Keys, and queries, that the loops over traced bounds treat at once: a divisor of both blocks."""
        return next(n for n in range(LOOP_TILE, 0, -LANES) if self.block % n == 0 and self.short % n == 0)

    @property
    def classes(self) -> tuple[int, ...]:
        """Sizes of blocks on the diagonal that have a body of their own."""
        step = EDGE if self.block % EDGE == 0 else LANES
        return tuple(range(step, self.block + 1, step))

    @property
    def full_classes(self) -> tuple[int, ...]:
        """The same of blocks of queries that see whole blocks of keys."""
        return (*(n for n in (EDGE, 2 * EDGE, 4 * EDGE, 6 * EDGE) if n < self.block), self.block)

    @property
    def short_classes(self) -> tuple[int, ...]:
        """The same of short sequences."""
        return tuple(range(LANES, self.short + 1, LANES))


def resolve(config: RaggedConfig, tokens: int, heads: int, kv_heads: int, *, online: bool) -> Tiling:
    """Fill in what the configuration leaves open, and refuse what cannot work.

    Raises:
        ValueError: a size is not on its grid.
    """
    block = config.block if config.block is not None else min(ONLINE_BLOCK if online else DEFAULT_BLOCK, _fit(tokens))
    short = config.short if config.short is not None else min(DEFAULT_SHORT, block)
    for name, size in (("block", block), ("short", short)):
        if size <= 0 or size % LANES:
            message = f"config.{name} must be a positive multiple of {LANES}, got {size}"
            raise ValueError(message)
    if short > block:
        message = f"config.short must be at most config.block, got short = {short} and block = {block}"
        raise ValueError(message)
    unit = _unit(heads, heads // kv_heads)
    kv_unit = max(1, unit * kv_heads // heads)
    return Tiling(block, short, unit, kv_unit, ONLINE_WIDTH if online else WHOLE)


def _fit(tokens: int) -> int:
    """A block that holds all tokens, on the grid of the classes."""
    return LANES if tokens <= LANES else round_up(tokens, EDGE)


def _unit(heads: int, group: int) -> int:
    """The most query heads, up to MAX_UNIT, that divide a group or consist of whole groups."""
    sizes = range(min(MAX_UNIT, heads), 0, -1)
    return next(n for n in sizes if heads % n == 0 and (group % n == 0 or n % group == 0))


def row_bytes(tiling: Tiling, tokens: int, quantities: int) -> int:
    """VMEM of the values per row that a call returns: whole rows of tokens, double-buffered."""
    return 2 * 4 * quantities * tiling.unit * (tokens + tiling.block + 2 * LANES)


def vmem_bytes(tiling: Tiling, head_dim: int, v_dim: int, *, rotary: bool) -> int:
    """VMEM of one call, apart from `row_bytes`."""
    qk, value = max(head_dim, LANES), max(v_dim, LANES)
    rows = 2 * tiling.block + (tiling.unit + tiling.kv_unit) * tiling.short
    blocks = 2 * 2 * rows * (qk + value)
    state = 4 * tiling.lanes * (2 * v_dim + 4 * 8)
    staging = 2 * tiling.loop_tile * (qk + value)
    tables = (2 * 2 * 4 * tiling.block + 2 * tiling.lanes) * qk if rotary else 0
    return blocks + state + staging + tables


__all__ = ["VMEM_LIMIT", "RaggedConfig", "Tiling", "resolve", "row_bytes", "vmem_bytes"]

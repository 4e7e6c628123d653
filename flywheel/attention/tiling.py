"""Block shapes and the VMEM that they take."""

from __future__ import annotations

import dataclasses

from flywheel.attention.budget import LANES
from flywheel.attention.schedule import cdiv

VMEM_BUDGET = 64 * 2**20
"""Bytes: half of a v6e's 128 MiB, the VMEM of the smallest supported core (v7x) being 64 MiB."""


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Block sizes, in tokens; None is chosen from the lengths.

    Attributes:
        block_q: queries per block, a multiple of 128.
        block_kv: keys per block, a multiple of `fragment`; with more than one query block it must equal block_q or hold
            all keys, so that few kinds of partly visible blocks occur.
        fragment: keys per softmax step inside a block, a multiple of 128.
    """

    block_q: int | None = None
    block_kv: int | None = None
    fragment: int | None = None


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Resolved block sizes, in tokens."""

    block_q: int
    block_kv: int
    fragment: int

    @property
    def replay_rows(self) -> int:
        """Rows that a replay treats at once: few enough that a fragment's scores stay in registers and spill little."""
        return min(self.block_q, 2 * LANES) if self.block_q % (2 * LANES) == 0 else LANES


# On v6e a block of 2048 x 2048 runs within 4 % of the best one; larger ones compile much longer.
DEFAULT_BLOCK = 2048
DEFAULT_FRAGMENT = 256


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is at least n."""
    return cdiv(n, multiple) * multiple


def resolve(config: AttentionConfig, q_len: int, kv_len: int) -> Tiling:
    """Fill in what the configuration leaves open, and refuse what cannot work.

    Raises:
        ValueError: a size is not on its grid, or block_q and block_kv do not fit together.
    """
    block_q = config.block_q if config.block_q is not None else min(DEFAULT_BLOCK, round_up(q_len, LANES))
    _on_grid("config.block_q", block_q, LANES)
    largest_kv = config.block_kv or config.block_q or DEFAULT_BLOCK
    _on_grid("config.block_kv", largest_kv, LANES)
    fragment = config.fragment if config.fragment is not None else _default_fragment(largest_kv, kv_len)
    _on_grid("config.fragment", fragment, LANES)
    block_kv = config.block_kv if config.block_kv is not None else min(largest_kv, round_up(kv_len, fragment))
    _on_grid("config.block_kv", block_kv, fragment)
    if cdiv(q_len, block_q) > 1 and cdiv(kv_len, block_kv) > 1 and block_q != block_kv:
        message = (
            f"config.block_kv must equal block_q when there are several query and several key blocks, "
            f"got block_q = {block_q} and block_kv = {block_kv}"
        )
        raise ValueError(message)
    return Tiling(block_q, block_kv, fragment)


def _default_fragment(largest_kv: int, kv_len: int) -> int:
    """256 keys fill the 256-wide MXU; 128 where so few keys, or so small a pinned block, would waste half of it."""
    return DEFAULT_FRAGMENT if largest_kv % DEFAULT_FRAGMENT == 0 and kv_len > LANES else LANES


def _on_grid(name: str, value: int, multiple: int) -> None:
    if value <= 0 or value % multiple:
        message = f"{name} must be a positive multiple of {multiple}, got {value}"
        raise ValueError(message)


def vmem_bytes(tiling: Tiling, head_dim: int) -> int:
    """VMEM of one call: double-buffered BF16 blocks, FP32 state, marks, and the replay's staging buffers."""
    width = max(head_dim, LANES)
    blocks = 2 * 2 * width * (2 * tiling.block_q + 2 * tiling.block_kv)
    state = 4 * tiling.block_q * (2 * width + 2 * LANES)
    staging = 2 * 2 * width * tiling.fragment
    return blocks + state + staging

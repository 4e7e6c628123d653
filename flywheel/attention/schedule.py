"""Which tile when: the geometry of the (query block, key block) grid, in plain integers.

Row r of query block i sees column c of key block j iff c <= r + delta(i, j) (causal) and c < keys(j).  Both are known
when the kernel is traced, up to the grid indices; the few distinct pairs that occur at the edge of the visible region
(`BlockKind`) each become one fully unrolled body, in which fragments and rows without a visible key are not emitted.
"""

from __future__ import annotations

import dataclasses
import functools

# A BF16 register tile holds 16 rows; row slices start on its grid.
ROW_GRID = 16


def cdiv(a: int, b: int) -> int:
    """ceil(a / b)."""
    return -(-a // b)


@dataclasses.dataclass(frozen=True, order=True)
class BlockKind:
    """How much of a key block the rows of a query block see.

    Attributes:
        delta: row r sees column c iff c <= r + delta; None: every row sees every key.
        keys: how many of the block's columns are keys; the others lie beyond kv_len and hold garbage.
    """

    delta: int | None
    keys: int

    def sees(self, row: int, column: int) -> bool:
        """Whether the row of the query block sees the column of the key block."""
        return column < self.keys and (self.delta is None or column <= row + self.delta)


@dataclasses.dataclass(frozen=True)
class FragmentRows:
    """The rows of a query block that one fragment of keys concerns.

    Attributes:
        first: no row before it sees a key of the fragment (on ROW_GRID).
        clear: every row from it on sees every key of the fragment; rows first .. clear-1 need the mask (on ROW_GRID).
    """

    first: int
    clear: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The grid of one attention call; all lengths in tokens."""

    q_len: int
    kv_len: int
    causal: bool
    block_q: int
    block_kv: int
    fragment: int

    @property
    def offset(self) -> int:
        """Bottom-right alignment: row i of the call sees keys 0 .. i + offset."""
        return self.kv_len - self.q_len

    @property
    def q_blocks(self) -> int:
        """Query blocks; the last may be ragged."""
        return cdiv(self.q_len, self.block_q)

    @property
    def kv_blocks(self) -> int:
        """Key blocks; the last may be ragged."""
        return cdiv(self.kv_len, self.block_kv)

    @property
    def ragged_rows(self) -> bool:
        """Whether the last query block has rows beyond q_len (they hold garbage and are never written)."""
        return self.q_len % self.block_q != 0

    @property
    def has_empty_rows(self) -> bool:
        """Whether some rows see no key at all."""
        return self.causal and self.offset < 0

    def delta(self, i: int, j: int) -> int:
        """Row r of query block i sees column c of key block j iff c <= r + delta (causal calls; i, j may be traced)."""
        return i * self.block_q + self.offset - j * self.block_kv

    def last_block(self, i: int) -> int:
        """The last key block that query block i visits; 0 also for a block whose rows are all empty."""
        if not self.causal:
            return self.kv_blocks - 1
        last_row = min((i + 1) * self.block_q, self.q_len) - 1
        return max(last_row + self.offset, 0) // self.block_kv

    def kind(self, i: int, j: int) -> BlockKind | None:
        """What query block i sees of key block j; None: nothing."""
        keys = min(self.block_kv, self.kv_len - j * self.block_kv)
        if not self.causal:
            return BlockKind(None, keys)
        delta = self.delta(i, j)
        if delta >= self.block_kv - 1 and keys == self.block_kv:
            return BlockKind(None, keys)
        return BlockKind(delta, keys) if delta + self.block_q > 0 else None

    @functools.cached_property
    def edge_kinds(self) -> tuple[BlockKind, ...]:
        """The distinct kinds that need a mask, each of which the kernel unrolls as a body of its own."""
        full = BlockKind(None, self.block_kv)
        found: set[BlockKind] = set()
        for i in range(self.q_blocks):
            last = self.last_block(i)
            # Blocks before the first edge are all full, since visibility is a prefix of the keys.
            for j in range(last, -1, -1):
                kind = self.kind(i, j)
                if kind == full:
                    break
                if kind is not None:
                    found.add(kind)
        return tuple(sorted(found, key=lambda kind: (kind.delta is None, kind.delta or 0, kind.keys)))

    @property
    def has_full_blocks(self) -> bool:
        """Whether any visited block is seen whole by every row."""
        last_i = self.q_blocks - 1
        return self.kind(last_i, 0) == BlockKind(None, self.block_kv)

    def fragments(self, kind: BlockKind) -> tuple[tuple[int, FragmentRows], ...]:
        """The fragments of a block of this kind that some row sees, each with the rows that it concerns."""
        seen: list[tuple[int, FragmentRows]] = []
        for n in range(cdiv(kind.keys, self.fragment)):
            rows = self._fragment_rows(kind, n)
            if rows.first < self.block_q:
                seen.append((n, rows))
        return tuple(seen)

    def _fragment_rows(self, kind: BlockKind, n: int) -> FragmentRows:
        start, stop = n * self.fragment, (n + 1) * self.fragment
        first = 0 if kind.delta is None else max(start - kind.delta, 0) // ROW_GRID * ROW_GRID
        if stop > kind.keys:
            return FragmentRows(first, self.block_q)
        clear = 0 if kind.delta is None else max(stop - 1 - kind.delta, 0)
        return FragmentRows(first, min(max(cdiv(clear, ROW_GRID) * ROW_GRID, first), self.block_q))

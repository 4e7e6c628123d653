"""Which blocks of keys a block of queries visits, and how: records of int32, computed from the traced lengths.

Positions are those of the packed token axes.  Row r of a query block's window is aligned with key `aligned` + r of its
sequence (bottom-right), and sees key c iff

    first_key <= c < stop_key   and   aligned + r - left <= c <= aligned + r + right.

Keys are taken in windows of `span` rows.  Under an upper bound they count from the diagonal: window 0 begins at the
key that row 0 sees last, moved up to the 8-row grid, and window j lies j spans before it.  So whatever the lengths
are, a row's last key in window 0 is its own number, less at most 7: the bodies on the diagonal can be unrolled.
Without an upper bound they count from the first key, the last one being window 0.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from flywheel.packing import GROUP, Packing, clean, snap

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Int32

    from flywheel.ragged.tiling import Tiling


class Record(NamedTuple):
    """One query block; the kernel reads the fields one after another from scalar memory.

    Attributes:
        group: first group of the window of queries.
        groups: groups in it.
        carried: rows before the block's first own row.
        stop: one past its last own row.
        aligned: the key with which row 0 of the window is aligned; maybe negative.
        first_key: the first key that some row sees.
        stop_key: one past the last; equal to first_key if no row sees a key.
        window: first group of key window 0; maybe negative.
        begin: number of the first visited window, descending to `end`.
        end: number of the last visited window.
        diagonal: whether window 0 is visited and has the geometry of the bodies on the diagonal.
        short: whether the block is one of a short sequence.
    """

    group: Any
    groups: Any
    carried: Any
    stop: Any
    aligned: Any
    first_key: Any
    stop_key: Any
    window: Any
    begin: Any
    end: Any
    diagonal: Any
    short: Any


FIELDS = len(Record._fields)


class Step(NamedTuple):
    """One window of keys against one block of queries; rows and keys counted from the windows' first.

    Attributes:
        start: the key window's first key, on the 8-row grid.
        lo: its first key that some row sees.
        hi: one past the last.
        shift: row r is aligned with key r + shift.
        whole: 1 if every row sees all keys lo .. span - 1 of the window, lo < 8; but for rows r < 7, which may not
            see its last keys.
    """

    start: Any
    lo: Any
    hi: Any
    shift: Any
    whole: Any


class Keys(NamedTuple):
    """Where each sequence's keys lie.

    Attributes:
        begin: the first key.
        end: one past the last.
    """

    begin: Int32[Array, " sequences"]
    end: Int32[Array, " sequences"]


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What is static.

    Attributes:
        queries: how the query axis is cut.
        left: keys before its aligned one that a row sees; None: all.
        right: keys after it; None: all.
        tiling: block sizes.
    """

    queries: Packing
    left: int | None
    right: int | None
    tiling: Tiling

    @property
    def span(self) -> int:
        """Keys from one window to the next: as many as rows from one block to the next, so that both end together."""
        return self.queries.block

    @property
    def slack(self) -> int:
        """Keys at the end of a fragment that rows after it may not see, in whole register tiles.

        A row's bound in window 0 lies up to 7 before its own number, or 14 where windows count from a sequence's first
        token; and there a window ends 8 keys before the block does.
        """
        return 2 * GROUP if self.queries.own_origin else GROUP

    def records(self, cu_seqlens_q: Int32[Array, " n1"], keys: Keys) -> tuple[Array, Array]:
        """`[(blocks + 1) * FIELDS]` words, and `[2]`: how many steps and how many blocks there are."""
        blocks = self.queries.blocks(cu_seqlens_q)
        q_bounds = clean(cu_seqlens_q, self.queries.tokens)
        nothing = jnp.zeros((1,), jnp.int32)
        begins, ends = (jnp.concatenate([x, nothing]) for x in keys)
        q_ends = jnp.concatenate([q_bounds[1:], nothing])
        of = blocks.sequence
        aligned = GROUP * blocks.group + ends[of] - q_ends[of]
        first_key, stop_key = self._keys(aligned, blocks.carried, blocks.stop, begins[of], ends[of])
        record = self._windows(blocks, aligned, first_key, stop_key)
        used = jnp.asarray(np.arange(self.queries.max_blocks, dtype=np.int32)) < blocks.total
        visits = jnp.where(record.short == 1, 1, self.tiling.unit * (record.begin - record.end + 1))
        words = jnp.stack([jnp.where(used, field, 0).astype(jnp.int32) for field in record], axis=1)
        steps = jnp.sum(jnp.where(used, visits, 0), dtype=jnp.int32)
        return jnp.pad(words, ((0, 1), (0, 0))).reshape(-1), jnp.stack([steps, blocks.total])

    def _keys(self, aligned: Array, carried: Array, stop: Array, begin: Array, end: Array) -> tuple[Array, Array]:
        """First and one past the last key that some row of a block sees; (0, 0) for none."""
        first = begin if self.left is None else jnp.maximum(begin, aligned + carried - self.left)
        last = end if self.right is None else jnp.minimum(end, aligned + stop + self.right)
        some = first < last
        return jnp.where(some, first, 0), jnp.where(some, last, 0)

    def _windows(self, blocks: Any, aligned: Array, first_key: Array, stop_key: Array) -> Record:  # noqa: ANN401  Blocks
        size, empty = self.span, first_key >= stop_key
        lowest = snap(first_key)
        rows = blocks.stop - blocks.carried + GROUP if self.queries.own_origin else blocks.stop
        if self.right is None:
            begin, end = _cdiv(stop_key - lowest, size) - 1, jnp.zeros_like(lowest)
            window = lowest + begin * size
            diagonal = jnp.zeros_like(empty)
            short = (begin == 0) & (rows <= self.tiling.short) & (stop_key - lowest <= self.tiling.short)
            short &= jnp.bool_(self.left is None)
        else:
            # Blocks that count from a sequence's own first token take their keys from that token's on, so that nothing
            # depends on where it lies in its group.
            origin = aligned + blocks.carried if self.queries.own_origin else aligned
            window = snap(origin + self.right + GROUP - 1)
            begin = jnp.maximum(_cdiv(window - first_key, size), 0)
            end = jnp.maximum(_cdiv(window - stop_key + 1, size), 0)
            # Its bodies know no last key, a row's own bound must be the only one; and no rows without a key.
            diagonal = (end == 0) & (lowest <= window) & (stop_key == aligned + blocks.stop + self.right)
            diagonal &= first_key <= aligned + blocks.carried + self.right
            if self.left is not None:
                diagonal &= jnp.maximum(window, first_key) >= aligned + blocks.stop - 1 - self.left
            short = diagonal & (begin == 0) & (rows <= self.tiling.short)
        window, begin, end = (jnp.where(empty, 0, x) for x in (window, begin, end))
        return Record(
            group=blocks.group,
            groups=blocks.groups,
            carried=blocks.carried,
            stop=blocks.stop,
            aligned=aligned,
            first_key=first_key,
            stop_key=stop_key,
            window=lax.shift_right_arithmetic(window, jnp.int32(3)),
            begin=begin,
            end=end,
            diagonal=diagonal & ~empty,
            short=short & ~empty,
        )

    def step(self, record: Record, j: Any) -> Step:  # noqa: ANN401  int32, maybe traced
        """Key window j of a query block."""
        size = self.span
        window = GROUP * record.window
        start = jnp.maximum(window - j * size, snap(record.first_key))
        lo = jnp.maximum(record.first_key - start, 0)
        hi = jnp.minimum(window - (j - 1) * size, record.stop_key) - start
        shift = record.aligned - start
        whole = (hi == size) & (lo < GROUP)
        if self.right is not None:
            whole &= j > 0
        if self.left is not None:
            whole &= lo >= record.stop - 1 + shift - self.left
        return Step(start, lo, hi, shift, whole.astype(jnp.int32))


def _cdiv(a: Array, b: int) -> Array:
    """ceil(a / b), rounded to zero for negative a."""
    return lax.div(a + jnp.int32(b - 1), jnp.int32(b))

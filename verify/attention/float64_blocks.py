"""Which rows and keys are evaluated together in float64, and what is known of a KV head's keys whatever the rows.

A block is some rows of query heads that share one KV head and one sink; a row sees a range of its keys.  The oracle and
the contract go through the same blocks, in one pass where both are asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import numpy as np

from verify.attention.problem import View, widen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Bool, Float64, Int

    from verify.attention.problem import AttentionProblem

# Scores, and rows, handled at a time: few enough for the cache, and under a causal mask few that nobody sees.
BLOCK_ELEMENTS = 1 << 16
MOST_ROWS, FEWEST_ROWS = 512, 64

# Significant bits of a BF16 number, and the bits of a float64 that hold its exponent.
BF16_DIGITS = 8
EXPONENT_BITS = np.int64(0x7FF << 52)


@dataclasses.dataclass(frozen=True, eq=False)
class KVHead:
    """Some keys of one KV head: their finite part (other entries as 0), and maxima over the first 1, 2, ... keys."""

    keys: Float64[np.ndarray, "kv_len head_dim"]
    values: Float64[np.ndarray, "kv_len v_dim"]
    raw_keys: Float64[np.ndarray, "kv_len head_dim"]
    raw_values: Float64[np.ndarray, "kv_len v_dim"]
    sizes: Float64[np.ndarray, "kv_len v_dim"]
    norms: Float64[np.ndarray, " kv_len"]
    odd_keys: Int[np.ndarray, " odd"]
    odd_values: Int[np.ndarray, " odd"]

    @classmethod
    def of(cls, raw_keys: np.ndarray, raw_values: np.ndarray) -> KVHead:
        """Split keys and values into what is finite and where it is not."""
        odd_keys, keys = finite_part(raw_keys)
        odd_values, values = finite_part(raw_values)
        return cls(
            keys=keys,
            values=values,
            raw_keys=raw_keys,
            raw_values=raw_values,
            sizes=np.abs(values),
            norms=norms(keys),
            odd_keys=odd_keys,
            odd_values=odd_values,
        )

    @functools.cached_property
    def key_sizes(self) -> Float64[np.ndarray, "kv_len head_dim"]:
        """Sizes of the keys' components."""
        return np.abs(self.keys)

    @functools.cached_property
    def grains(self) -> Float64[np.ndarray, " kv_len"]:
        """`row_grains` of the keys."""
        return row_grains(self.keys)

    @functools.cached_property
    def prefix_norms(self) -> Float64[np.ndarray, " kv_len"]:
        """Per key the largest norm up to it."""
        return np.maximum.accumulate(self.norms)

    @functools.cached_property
    def prefix_sums(self) -> Float64[np.ndarray, "kv_len v_dim"]:
        """Per key and lane the sizes of the values up to it, added up."""
        return np.cumsum(self.sizes, axis=0)

    @functools.cached_property
    def prefix_low(self) -> Float64[np.ndarray, "kv_len v_dim"]:
        """Per key and lane the least value up to it."""
        return running(np.minimum, self.values)

    @functools.cached_property
    def prefix_high(self) -> Float64[np.ndarray, "kv_len v_dim"]:
        """Per key and lane the largest value up to it."""
        return running(np.maximum, self.values)


@dataclasses.dataclass(frozen=True, eq=False)
class LogitRule:
    """What turns scores into weights, besides the keys themselves."""

    scale: float
    softcap: float | None
    sink: float | None


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """Rows of one query head; row i sees keys start[i] .. stop[i] - 1 of its KV head."""

    q: Float64[np.ndarray, "rows head_dim"]
    head: KVHead
    start: Int[np.ndarray, " rows"]
    stop: Int[np.ndarray, " rows"]
    rule: LogitRule

    @functools.cached_property
    def empty(self) -> Bool[np.ndarray, " rows"]:
        """Rows that see no key."""
        return self.start >= self.stop

    @functools.cached_property
    def first(self) -> int:
        """The first key that a row of the block sees."""
        return int(self.start[~self.empty].min(initial=self.last))

    @functools.cached_property
    def last(self) -> int:
        """One past the last."""
        return int(self.stop[~self.empty].max(initial=0))

    @property
    def keys(self) -> slice:
        """The keys that some row of the block sees."""
        return slice(self.first, self.last)

    @property
    def width(self) -> int:
        """How many keys these are."""
        return self.last - self.first

    @property
    def terms(self) -> int:
        """Terms of a row's sums at most: its keys, and the sink."""
        return self.width + (self.rule.sink is not None)

    @functools.cached_property
    def norms(self) -> Float64[np.ndarray, " rows"]:
        """Per row the largest norm among the keys it sees (of a row without keys: any)."""
        return self._over_keys(np.maximum, self.head.norms, "prefix_norms")

    @functools.cached_property
    def low(self) -> Float64[np.ndarray, "rows v_dim"]:
        """Per row and lane the least visible value; a sink is a value of 0."""
        low = self._over_keys(np.minimum, self.head.values, "prefix_low")
        return low if self.rule.sink is None else np.minimum(low, 0.0)

    @functools.cached_property
    def high(self) -> Float64[np.ndarray, "rows v_dim"]:
        """Per row and lane the largest visible value; a sink is a value of 0."""
        high = self._over_keys(np.maximum, self.head.values, "prefix_high")
        return high if self.rule.sink is None else np.maximum(high, 0.0)

    @functools.cached_property
    def sums(self) -> Float64[np.ndarray, "rows v_dim"]:
        """Per row and lane at least the sum of the visible values' sizes: keys before a window only add to it."""
        return self._up_to_last("prefix_sums")

    @functools.cached_property
    def _hidden(self) -> list[tuple[slice, Bool[np.ndarray, "rows keys"]]]:
        """Columns of the block that some row does not see, and which do not."""
        keys = np.arange(self.first, self.last)[None, :]
        tail = max(int(self.stop.min(initial=self.last)) - self.first, 0)
        head = int(self.start.max(initial=0)) - self.first
        parts = []
        if tail < self.width:
            parts.append((slice(tail, None), keys[:, tail:] >= self.stop[:, None]))
        if head > 0:
            parts.append((slice(head), keys[:, :head] < self.start[:, None]))
        return parts

    def hide(self, x: np.ndarray, value: float) -> None:
        """Put a value where a row does not see the key."""
        for columns, hidden in self._hidden:
            np.copyto(x[:, columns], value, where=hidden)

    def _up_to_last(self, prefix: str) -> np.ndarray:
        """What a KV head knows of the keys up to each row's last; of a row without keys anything, 0 without any key."""
        known = getattr(self.head, prefix)
        if not len(known):
            return np.zeros((len(self.stop), *known.shape[1:]))
        return known.take(np.maximum(self.stop, 1) - 1, axis=0)

    def _over_keys(self, ufunc: np.ufunc, x: np.ndarray, prefix: str) -> np.ndarray:
        if not self.start.any():
            return self._up_to_last(prefix)
        return range_reduce(ufunc, x[self.keys], self.start - self.first, self.stop - self.first)

    def take(self, rows: np.ndarray) -> Block:
        """Some rows of the block."""
        return dataclasses.replace(self, q=self.q[rows], start=self.start[rows], stop=self.stop[rows])


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """Some rows of some heads in arrays `[batch, heads, q_len, ...]`; `part` of the rows of a view."""

    batch: int
    heads: list[int]
    view: View
    part: slice

    @functools.cached_property
    def index(self) -> tuple[int, slice | np.ndarray, slice | np.ndarray]:
        """For `array[index]`; slices where that is possible, which numpy copies faster."""
        first, last, rows = self.heads[0], self.heads[-1], self.view.rows
        if isinstance(rows, slice):  # all of them
            if self.heads == list(range(first, last + 1)):
                return self.batch, slice(first, last + 1), self.part
            rows = np.arange(self.part.stop)
        rows = rows[self.part]
        return self.batch, np.array(self.heads)[:, None], rows[None, :]

    def take(self, array: np.ndarray) -> np.ndarray:
        """The rows, of one head after the other."""
        found = array[self.index]
        return found.reshape(found.shape[0] * found.shape[1], *found.shape[2:])

    def put(self, array: np.ndarray, found: np.ndarray) -> None:
        """Write the rows, given of one head after the other."""
        heads = len(self.heads)
        array[self.index] = found.reshape(heads, len(found) // heads, *found.shape[1:])

    def each(self, x: np.ndarray) -> np.ndarray:
        """What holds per row of the view, for each head."""
        return np.concatenate([x[self.part]] * len(self.heads))


def blocks(
    problem: AttentionProblem,
    *,
    rows_per_block: int | None = None,
    visible: Int[np.ndarray, " q_len"] | None = None,
    dtype: type[np.floating] = np.float64,
) -> Iterator[tuple[Place, Block]]:
    """All rows of a problem; arguments as for `oracle_float64.attention`."""
    for batch in range(problem.batch):
        if visible is None:
            views = problem.views(batch)
        else:
            views = [View(slice(None), slice(None), np.zeros_like(visible), visible)]
        for view in views:
            for kv_head, heads in alike(problem):
                keys, values = (widen(x[batch, kv_head, view.keys]) for x in (problem.k, problem.v))
                head = KVHead.of(keys.astype(dtype, copy=False), values.astype(dtype, copy=False))
                rule = LogitRule(problem.scale, problem.softcap, problem.sink(heads[0]))
                for part in _row_blocks(view, len(view.start), rows_per_block, len(heads)):
                    place = Place(batch, heads, view, part)
                    q = widen(place.take(problem.q)).astype(dtype, copy=False)
                    yield place, Block(q, head, place.each(view.start), place.each(view.stop), rule)


def _row_blocks(view: View, rows: int, rows_per_block: int | None, heads: int) -> Iterator[slice]:
    """Consecutive rows that are handled together; unless told, as many as keep a block within BLOCK_ELEMENTS."""
    begin = 0
    fewest = max(FEWEST_ROWS // heads, 1)
    while begin < rows:
        count = min(rows_per_block or MOST_ROWS, rows - begin)
        while rows_per_block is None and count > fewest:
            part = slice(begin, begin + count)
            extent = int(view.stop[part].max() - view.start[part].min())
            if count * heads * extent <= BLOCK_ELEMENTS:
                break
            count = max(count // 2, fewest)
        yield slice(begin, begin + count)
        begin += count


def alike(problem: AttentionProblem) -> Iterator[tuple[int, list[int]]]:
    """KV heads with the query heads that share them and have one sink: their rows can go through one block."""
    groups: dict[tuple[int, str], list[int]] = {}
    for head in range(problem.heads):
        groups.setdefault((problem.kv_head(head), repr(problem.sink(head))), []).append(head)
    for (kv_head, _), heads in groups.items():
        yield kv_head, heads


def range_reduce(ufunc: np.ufunc, x: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Minimum or maximum (`ufunc`) of x[start[i]:stop[i]] along the first axis for each i; 0 where that is empty.

    After j doublings, entry t holds the result over t .. t + 2**j - 1; two of them cover any range of 2**j to
    2**(j+1) entries.
    """
    result = np.zeros((len(start), *x.shape[1:]), dtype=x.dtype)
    lengths = np.maximum(stop - start, 0)
    step = 1
    while (lengths >= step).any():
        rows = np.flatnonzero((lengths >= step) & (lengths < 2 * step))
        result[rows] = ufunc(x[start[rows]], x[stop[rows] - step])
        x = ufunc(x[:-step], x[step:])
        step *= 2
    return result


def finite_part(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the rows that hold a non-finite entry, and the array with those entries as 0."""
    finite = np.isfinite(raw)
    if finite.all():
        return np.empty(0, dtype=np.int64), raw
    return np.flatnonzero(~finite.all(axis=1)), np.where(finite, raw, raw.dtype.type(0))


def running(ufunc: np.ufunc, x: np.ndarray) -> np.ndarray:
    """Minimum or maximum over the first 1, 2, ... rows; several times faster than `accumulate`.

    Within all runs of about sqrt(rows) rows at once, then from run to run, then of each run with all before it.
    """
    rows, lanes = x.shape
    length = max(math.isqrt(rows), 1)
    whole = rows - rows % length
    result = x.copy()
    runs = result[:whole].reshape(whole // length, length, lanes)
    for row in range(1, length):
        ufunc(runs[:, row], runs[:, row - 1], out=runs[:, row])
    for run in range(1, len(runs)):
        ufunc(runs[run], runs[run - 1, -1], out=runs[run])
    for row in range(max(whole, 1), rows):
        ufunc(result[row], result[row - 1], out=result[row])
    return result


def row_grains(x: np.ndarray) -> np.ndarray:
    """Per row a power of two of which each BF16 entry is a multiple; infinite for a row of zeros."""
    words = x.astype(np.float64, copy=False).view(np.int64)
    powers = (words & EXPONENT_BITS).view(np.float64)  # of an entry in [2**n, 2**(n + 1)), 2**n
    return np.where(powers == 0.0, np.inf, powers).min(axis=1, initial=np.inf) * 2.0 ** (1 - BF16_DIGITS)


def norms(x: np.ndarray) -> np.ndarray:
    """Euclidean norms of the rows."""
    return np.sqrt(np.einsum("nd,nd->n", x, x))

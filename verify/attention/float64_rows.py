"""A block of rows of f in float64, with proved bounds; lemma numbers are those of docs/oracle-bounds.md."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Bool, Float64, Int

    from verify.attention.problem import AttentionProblem, View

UNIT = 2.0**-53
FUNCTION_ULPS = 2.0
# Relative error of numpy's exp, log and tanh: an ulp is at most 2 UNIT; the excess covers dividing by 1 - error.
FUNCTION_ERROR = 2.0 * FUNCTION_ULPS * UNIT * 1.001
# Absolute error of one underflowing operation, generously: 2^-1022 is enough (lemma 1).
TINY = 2.0**-1020
# Weights below exp(FLUSHED_LOG) count as 0, each with an error of at most FLUSHED_WEIGHT (lemma 3): subnormal numbers
# make exp and products many times slower.
FLUSHED_LOG = -694.0
FLUSHED_WEIGHT = 2.0**-1000
# exp(x) is below 2^-1022 from here on, so that the rounding of x - max no longer matters (lemma 3).
EXP_RANGE = 745.0
# Roundings of softcap * tanh(z / softcap), relative to min(softcap, |z|): lemma 9.
CAP_ERROR = FUNCTION_ERROR + 3.0 * UNIT
# Above this relative error of a weight, a row is bounded key by key (lemma 6) rather than as a whole (lemma 5).
# It decides which proof is used, never whether the bound holds.
LOOSE = 2.0**-20
# Above this error of a row's largest logit, relative to its size, the keys that may hold it are looked at alone.  It
# decides which proof is used, never whether the bound holds.
VAGUE = 2.0**-40
# Logits beyond this size are left to ball arithmetic, since sums of them could overflow.
LARGEST_LOGIT = 2.0**1020


def gamma(terms: int) -> float:
    """Higham's gamma_n = n u / (1 - n u): relative error of `terms` successive roundings."""
    return terms * UNIT / (1.0 - terms * UNIT)


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
        odd_keys, keys = _split(raw_keys)
        odd_values, values = _split(raw_values)
        return cls(
            keys=keys,
            values=values,
            raw_keys=raw_keys,
            raw_values=raw_values,
            sizes=np.abs(values),
            norms=_norms(keys),
            odd_keys=odd_keys,
            odd_values=odd_values,
        )

    @functools.cached_property
    def key_sizes(self) -> Float64[np.ndarray, "kv_len head_dim"]:
        """Sizes of the keys' components."""
        return np.abs(self.keys)

    @functools.cached_property
    def prefix_norms(self) -> Float64[np.ndarray, " kv_len"]:
        """Per key the largest norm up to it."""
        return np.maximum.accumulate(self.norms)

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

    def _over_keys(self, ufunc: np.ufunc, x: np.ndarray, prefix: str) -> np.ndarray:
        if not self.start.any():
            return getattr(self.head, prefix)[np.maximum(self.stop, 1) - 1]
        return range_reduce(ufunc, x[self.keys], self.start - self.first, self.stop - self.first)

    def take(self, rows: np.ndarray) -> Block:
        """Some rows of the block."""
        return dataclasses.replace(self, q=self.q[rows], start=self.start[rows], stop=self.stop[rows])


@dataclasses.dataclass(frozen=True, eq=False)
class Bounded:
    """Values of f for some rows, each with a bound of its error (LSE and maximum in nats)."""

    out: Float64[np.ndarray, "rows v_dim"]
    out_error: Float64[np.ndarray, "rows v_dim"]
    lse: Float64[np.ndarray, " rows"]
    lse_error: Float64[np.ndarray, " rows"]
    max_logit: Float64[np.ndarray, " rows"]
    max_logit_error: Float64[np.ndarray, " rows"]

    @classmethod
    def blank(cls, shape: tuple[int, ...], v_dim: int) -> Bounded:
        """Zeros, to be filled block by block."""
        return cls(*(np.zeros(s) for s in ((*shape, v_dim), (*shape, v_dim), shape, shape, shape, shape)))

    def put(self, rows: np.ndarray | Place, other: Bounded) -> None:
        """Write the values of some rows, or of a place: of several heads one after the other."""
        for field in dataclasses.fields(self):
            into, found = getattr(self, field.name), getattr(other, field.name)
            if isinstance(rows, Place):
                rows.put(into, found)
            else:
                into[rows] = found


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


def _split(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the rows that hold a non-finite entry, and the array with those entries as 0."""
    finite = np.isfinite(raw)
    if finite.all():
        return np.empty(0, dtype=np.int64), raw
    return np.flatnonzero(~finite.all(axis=1)), np.where(finite, raw, raw.dtype.type(0))


def alike(problem: AttentionProblem) -> Iterator[tuple[int, list[int]]]:
    """KV heads with the query heads that share them and have one sink: their rows can go through one block."""
    groups: dict[tuple[int, str], list[int]] = {}
    for head in range(problem.heads):
        groups.setdefault((problem.kv_head(head), repr(problem.sink(head))), []).append(head)
    for (kv_head, _), heads in groups.items():
        yield kv_head, heads


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


def flushed_exp(x: np.ndarray) -> np.ndarray:
    """exp(x), and 0 below FLUSHED_LOG.  Overwrites x."""
    flushed = x < FLUSHED_LOG
    if not flushed.any():
        return np.exp(x, out=x)
    np.maximum(x, FLUSHED_LOG, out=x)
    np.exp(x, out=x)
    np.copyto(x, 0.0, where=flushed)
    return x


def _norms(x: np.ndarray) -> np.ndarray:
    return np.sqrt(np.einsum("nd,nd->n", x, x))


def attend(block: Block) -> Bounded:
    """One block of rows: values, bounds, and the classes of what is not finite."""
    sink = block.rule.sink
    if block.width == 0:
        result = Bounded.blank((len(block.q),), block.head.values.shape[1])
        _set_class(result, block.empty, 0.0, -np.inf if sink is None else sink)
        result.max_logit[:] = -np.inf
        if sink is not None and not np.isfinite(sink):
            _set_class(result, block.empty, np.nan, np.nan)
        return result
    odd_rows, q = _split(block.q)
    finite = dataclasses.replace(block, q=q)
    reach = np.where(block.empty, 0.0, _reach(finite))
    beyond = ~(reach < LARGEST_LOGIT)
    logits, floor = _logits(finite, block.q, odd_rows, beyond)
    largest = logits.max(axis=1)
    largest_error = _largest_error(finite, logits, largest, np.where(beyond, 0.0, reach))
    if sink is not None:
        logits, floor = np.column_stack([logits, np.full(len(q), sink)]), np.minimum(floor, sink)
    top = largest if sink is None else np.maximum(largest, sink)
    undefined = ~np.isfinite(top)  # NaN, +inf, or nothing but -inf
    nothing = block.empty & (top == -np.inf)
    undefined &= ~nothing
    alive = (logits[:, : block.width] > -np.inf) if block.head.odd_values.size else None
    skip = undefined | nothing | beyond
    if skip.any():
        logits[skip] = 0.0
        top = np.where(skip, 0.0, top)
        floor = np.where(skip, 0.0, floor)
    error = _row_error(finite, np.where(skip, 0.0, reach), top, floor)
    tight = np.flatnonzero(error.loose & ~skip)
    single = None
    if tight.size:
        part = finite.take(tight)
        single = _key_by_key(part, logits[tight, part.first - block.first : part.last - block.first])
    if tight.size < len(q) - np.count_nonzero(skip) or not tight.size:
        result = _whole_rows(finite, logits, top, error)
    else:
        result = Bounded.blank((len(q),), block.head.values.shape[1])
    result.max_logit[:], result.max_logit_error[:] = largest, largest_error
    if single is not None:
        result.put(tight, single)
    if skip.any():
        _unreached(result, block, beyond)
        _set_class(result, undefined, np.nan, np.nan)
        _set_class(result, nothing, 0.0, -np.inf)
    odd = ~np.isfinite(largest)
    result.max_logit[odd], result.max_logit_error[odd] = largest[odd], 0.0
    if alive is not None:
        _set_value_classes(result, block, alive, ~undefined & ~nothing)
    return result


def _logits(block: Block, raw_q: np.ndarray, odd_rows: np.ndarray, beyond: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Final logits with -inf where masked, and per row a lower bound of its finite ones (lemmas 2 and 9).

    Rows `beyond` the range of float64 get logits of 0, so that only what the inputs force is NaN or infinite.
    """
    keys, scale = block.keys, block.rule.scale
    logits = block.q @ block.head.keys[keys].T
    logits[beyond] = 0.0
    logits *= scale
    with np.errstate(invalid="ignore"):
        floor = logits.min(axis=1)
        for row in odd_rows:
            logits[row] = (raw_q[row] * block.head.raw_keys[keys]).sum(axis=1) * scale
        for key in _within(block.head.odd_keys, keys):
            logits[:, key - keys.start] = (raw_q * block.head.raw_keys[key]).sum(axis=1) * scale
    if block.rule.softcap is not None:
        logits = _capped(logits, block.rule.softcap)
        # |capped| <= |logit|; a score of -inf is capped too.
        odd = bool(odd_rows.size or block.head.odd_keys.size)
        floor = np.full_like(floor, -block.rule.softcap) if odd else np.maximum(floor, -block.rule.softcap)
    _hide(block, logits)
    return logits, floor


def _hide(block: Block, logits: np.ndarray) -> None:
    """Set what a row does not see to -inf."""
    keys = np.arange(block.first, block.last)[None, :]
    left, right = int(block.start.max()), int(block.stop.min())
    if block.empty.any():
        logits[block.empty] = -np.inf
    if right < block.last:
        tail = max(right - block.first, 0)
        np.copyto(logits[:, tail:], -np.inf, where=keys[:, tail:] >= block.stop[:, None])
    if left > block.first:
        head = left - block.first
        np.copyto(logits[:, :head], -np.inf, where=keys[:, :head] < block.start[:, None])


def _capped(logits: np.ndarray, softcap: float) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return softcap * np.tanh(logits / softcap)


def _within(keys: np.ndarray, chosen: slice) -> np.ndarray:
    return keys[(keys >= chosen.start) & (keys < chosen.stop)]


def _reach(block: Block, norms: np.ndarray | None = None) -> np.ndarray:
    """Per row an upper bound of |scale| sum_d |q_d k_d| over its visible keys, or over keys of these norms at most."""
    norms = block.norms if norms is None else norms
    with np.errstate(over="ignore"):  # Cauchy-Schwarz
        return (abs(block.rule.scale) * (_norms(block.q) * norms) * _slack(block)).astype(np.float64)


def _largest_error(block: Block, logits: np.ndarray, largest: np.ndarray, reach: np.ndarray) -> np.ndarray:
    """Per row the error of its largest logit: the largest error of any, or (lemma 11) of the keys that may hold it."""
    error = _reach_error(block, reach) * _slack(block)
    vague = np.flatnonzero(np.isfinite(largest) & (error > VAGUE * np.abs(largest)))
    if vague.size:
        # Four errors where two are meant, and a rounding of the difference.
        least = largest[vague] - 4.0 * error[vague] - 4.0 * UNIT * np.abs(largest[vague])
        may = logits[vague] >= least[:, None]
        norms = np.where(may, block.head.norms[None, block.keys], 0.0).max(axis=1)
        part = block.take(vague)
        error[vague] = np.minimum(error[vague], _reach_error(part, _reach(part, norms)) * _slack(block))
    return error


def _reach_error(block: Block, reach: np.ndarray) -> np.ndarray:
    """Per row a bound of a final logit's error (lemmas 2 and 9)."""
    error = reach * gamma(block.q.shape[1] + 1) + TINY
    cap = block.rule.softcap
    return error if cap is None else error + CAP_ERROR * np.minimum(reach, cap) + TINY * (1.0 + cap)


def _slack(block: Block) -> float:
    """Covers the rounding of the bound itself: fewer than 4 (terms + head_dim + 64) relative roundings (lemma 4)."""
    return 1.0 + 4.0 * (block.terms + block.q.shape[1] + 64) * UNIT


@dataclasses.dataclass(frozen=True, eq=False)
class _RowError:
    """Per row: error of its logits, one relative error of all its weights, and whether that needs lemma 6 instead."""

    shift: Float64[np.ndarray, " rows"]
    relative: Float64[np.ndarray, " rows"]
    loose: Bool[np.ndarray, " rows"]


def _row_error(block: Block, reach: np.ndarray, top: np.ndarray, floor: np.ndarray) -> _RowError:
    """The error of a row's weights by its largest logit, `top`, and its least, `floor` (lemma 5)."""
    shift = _reach_error(block, reach)
    relative = 2.0 * shift + 1.01 * UNIT * np.minimum(top - floor, EXP_RANGE) + TINY
    loose = ~(relative <= LOOSE)
    return _RowError(shift, np.where(loose, LOOSE, relative), loose)


def _whole_rows(block: Block, logits: np.ndarray, top: np.ndarray, row_error: _RowError) -> Bounded:
    """Lemma 5: one relative error for all weights of a row, void where it is loose.  Overwrites `logits`."""
    terms, sizes = block.terms, block.head.sizes[block.keys]
    relative, shift = row_error.relative, row_error.shift
    weight_error = relative * (1.0 + relative) + FUNCTION_ERROR * (1.0 + 2.0 * relative) + gamma(terms)

    logits -= top[:, None]
    weights = flushed_exp(logits)
    total = weights.sum(axis=1)
    weights = weights[:, : block.width]
    total_error = weight_error * total + terms * FLUSHED_WEIGHT
    product_error = weights @ sizes
    product_error *= weight_error[:, None]
    product_error += terms * FLUSHED_WEIGHT * (1.0 + sizes.max(initial=0.0))
    least = np.maximum(1.0, total - total_error)
    out, out_error = _quotient(block, _Sums(weights, total, total_error, product_error, least))
    lse, lse_error = _log_sum(block, top, total, shift + total_error / least)
    return Bounded(out, out_error, lse, lse_error, np.zeros_like(lse), np.zeros_like(lse))


@dataclasses.dataclass(frozen=True, eq=False)
class _Sums:
    """Weights of a block with their sum: errors of both sums of products, and a lower bound of the exact sum."""

    weights: Float64[np.ndarray, "rows width"]
    total: Float64[np.ndarray, " rows"]
    total_error: Float64[np.ndarray, " rows"]
    product_error: Float64[np.ndarray, "rows head_dim"]
    least: Float64[np.ndarray, " rows"]


def _quotient(block: Block, sums: _Sums) -> tuple[np.ndarray, np.ndarray]:
    """Lemma 4: the division, and the fact that f is a weighted mean of the visible values."""
    out = sums.weights @ block.head.values[block.keys]
    out /= sums.total[:, None]
    size = np.abs(out)
    error = size * sums.total_error[:, None]
    error += sums.product_error
    error /= sums.least[:, None]
    size *= 2.0 * UNIT
    error += size
    error += TINY
    error *= _slack(block)
    low, high = block.low, block.high
    np.maximum(out, low, out=out)
    np.minimum(out, high, out=out)
    farthest = np.subtract(high, out, out=size)
    np.maximum(farthest, out - low, out=farthest)
    farthest *= 1.0 + 4.0 * UNIT
    return out, np.fmin(error, farthest, out=error)  # fmin: an infinite error times a zero value is NaN


def _log_sum(block: Block, top: np.ndarray, total: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sum top + ln(total), with `error` the part that stems from top and total (lemma 7)."""
    logarithm = np.log(total)
    lse = top + logarithm
    return lse, (error + FUNCTION_ERROR * logarithm + 1.01 * UNIT * np.abs(lse) + TINY) * _slack(block)


def _key_by_key(block: Block, logits: np.ndarray) -> Bounded:
    """Lemma 6: each weight with its own error, for rows with logits so large that one error for all says nothing.

    Overwrites `logits`, those of the block's own keys.
    """
    slack, sink = _slack(block), block.rule.sink
    shift = _key_errors(block)
    np.copyto(shift, 0.0, where=logits == -np.inf)  # hidden, or of weight 0
    largest = logits.max(axis=1)
    # The largest of the exact logits lies between the largest lower end and the largest upper end.
    moved = logits + shift
    above = moved.max(axis=1)
    np.subtract(logits, shift, out=moved)
    below = moved.max(axis=1)
    with np.errstate(invalid="ignore"):  # a row that sees a sink only
        largest_error = np.maximum(above - largest, largest - below)
    largest_error += 4.0 * UNIT * np.abs(largest)
    if sink is not None:
        logits = np.column_stack([logits, np.full(len(logits), sink)])
        shift = np.column_stack([shift, np.full(len(logits), TINY)])
        above, below = np.maximum(above, sink + TINY), np.maximum(below, sink - TINY)
    rows = np.arange(len(logits))
    anchor = logits.argmax(axis=1)
    top = logits[rows, anchor]
    of_anchor = shift[rows, anchor]
    logits -= top[:, None]
    gap, doubt = logits, shift
    doubt += of_anchor[:, None]
    rounding = np.minimum(-gap, LARGEST_LOGIT)
    rounding *= 1.01 * UNIT
    doubt += rounding
    doubt += TINY
    doubt *= slack
    doubt[rows, anchor] = 0.0
    weights = flushed_exp(gap.copy())
    terms, width = block.terms, block.width
    with np.errstate(over="ignore", invalid="ignore"):
        most = flushed_exp(np.add(gap, doubt, out=rounding))
        most *= 1.0 + 2.0**-40
        deviation = np.subtract(most, weights, out=most)  # e^h - 1 >= 1 - e^-h: the upper side is the wider one
        deviation[rows, anchor] = 0.0
        fewest = flushed_exp(np.subtract(gap, doubt, out=doubt))
        fewest *= 1.0 - 2.0**-40
        total = weights.sum(axis=1)
        total_error = deviation.sum(axis=1) + gamma(terms) * total + terms * FLUSHED_WEIGHT
        sizes = block.head.sizes[block.keys]
        least = np.maximum(1.0, fewest.sum(axis=1) * (1.0 - 2.0**-40))
        # max_k z_k <= lse <= max_k z_k + ln(count), whatever the weights.
        above += np.log(terms)
        weights, deviation = weights[:, :width], deviation[:, :width]
        deviation += gamma(terms) * weights
        product_error = deviation @ sizes
        product_error += terms * FLUSHED_WEIGHT * (1.0 + sizes.max(initial=0.0))
        out, out_error = _quotient(block, _Sums(weights, total, total_error, product_error, least))
        lse, lse_error = _log_sum(block, top, total, of_anchor + total_error / least)
        widest = np.maximum(above - lse, lse - below) + 8.0 * UNIT * (np.abs(above) + np.abs(below))
    return Bounded(out, out_error, lse, np.fmin(lse_error, widest), largest, largest_error)


def _key_errors(block: Block) -> np.ndarray:
    """Per key a bound of its final logit's error (lemmas 2 and 9)."""
    keys, rule = block.keys, block.rule
    size = np.abs(block.q) @ block.head.key_sizes[keys].T
    size *= abs(rule.scale)
    shift = size * gamma(block.q.shape[1] + 1)
    shift += TINY
    shift *= _slack(block)
    if rule.softcap is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            # Far out, the tangent is flat: its slope is at most 4 exp(-2 x) at distance x from 0.
            nearest = np.maximum(np.abs(block.q @ block.head.keys[keys].T * rule.scale) - shift, 0.0) / rule.softcap
            slope = np.minimum(1.0, 4.01 * np.exp(-2.0 * np.minimum(nearest, EXP_RANGE)))
            size = np.minimum(size * _slack(block), rule.softcap)
        shift = np.minimum(shift * slope, 2.0 * rule.softcap)
        shift += (CAP_ERROR * size + TINY * (1.0 + rule.softcap)) * _slack(block)
    return shift


def _unreached(result: Bounded, block: Block, rows: np.ndarray) -> None:
    """Rows whose logits may overflow float64: any visible value is as good as another, and the LSE is not known."""
    low, high = block.low, block.high
    result.out[rows] = low[rows]
    result.out_error[rows] = ((high - low) * (1.0 + 4.0 * UNIT))[rows]
    result.lse[rows] = 0.0
    result.lse_error[rows] = np.inf
    result.max_logit[rows] = 0.0
    result.max_logit_error[rows] = np.inf


def _set_class(result: Bounded, rows: np.ndarray, out: float, lse: float) -> None:
    result.out[rows] = out
    result.out_error[rows] = 0.0
    result.lse[rows] = lse
    result.lse_error[rows] = 0.0


def _set_value_classes(result: Bounded, block: Block, alive: np.ndarray, rows: np.ndarray) -> None:
    """NaN or an infinity where a value that is seen with a score above -inf is not finite."""
    odd = _within(block.head.odd_values, block.keys)
    seen = alive[:, odd - block.first].astype(np.float64)
    values = block.head.raw_values[odd]
    plus, minus, nan = (
        seen @ kind.astype(np.float64) > 0 for kind in (values == np.inf, values == -np.inf, np.isnan(values))
    )
    for kind, value in ((plus, np.inf), (minus, -np.inf), (nan | (plus & minus), np.nan)):
        where = kind & rows[:, None]
        result.out[where] = value
        result.out_error[where] = 0.0

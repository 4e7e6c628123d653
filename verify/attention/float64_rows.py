"""A block of rows of f in float64, with proved bounds; lemma numbers are those of docs/oracle-bounds.md."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import numpy as np

from verify.attention.float64_blocks import Place, finite_part, norms, row_grains
from verify.attention.reference import Reference

if TYPE_CHECKING:
    from jaxtyping import Bool, Float64, Int

    from verify.attention.float64_blocks import Block

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
VAGUE = 2.0**-34
# Logits beyond this size are left to ball arithmetic, since sums of them could overflow.
LARGEST_LOGIT = 2.0**1020


def gamma(terms: int) -> float:
    """Higham's gamma_n = n u / (1 - n u): relative error of `terms` successive roundings."""
    return terms * UNIT / (1.0 - terms * UNIT)


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

    def reference(self) -> Reference:
        """All rows of a problem as a reference."""
        return Reference(
            self.out,
            self.out_error,
            self.lse,
            self.lse_error,
            "float64",
            max_logit=self.max_logit,
            max_logit_error=self.max_logit_error,
        )

    def put(self, rows: np.ndarray | Place, other: Bounded) -> None:
        """Write the values of some rows, or of a place: of several heads one after the other."""
        for field in dataclasses.fields(self):
            into, found = getattr(self, field.name), getattr(other, field.name)
            if isinstance(rows, Place):
                rows.put(into, found)
            else:
                into[rows] = found


def flushed_exp(x: np.ndarray) -> np.ndarray:
    """exp(x), and 0 below FLUSHED_LOG.  Overwrites x."""
    flushed = x < FLUSHED_LOG
    if not flushed.any():
        return np.exp(x, out=x)
    np.maximum(x, FLUSHED_LOG, out=x)
    np.exp(x, out=x)
    np.copyto(x, 0.0, where=flushed)
    return x


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """Logits and weights of a block's rows, each formed when it is first asked for.

    Rows of which nothing is computed (`skipped`) have logits of 0 where weights are formed.

    Attributes:
        block: rows and keys, queries as their finite part.
        raw_q: queries as they are.
        odd_rows: rows that hold a non-finite entry.
    """

    block: Block
    raw_q: Float64[np.ndarray, "rows head_dim"]
    odd_rows: Int[np.ndarray, " odd"]

    @classmethod
    def of(cls, block: Block) -> Scores:
        """The scores of a block."""
        odd_rows, q = finite_part(block.q)
        return cls(block if q is block.q else dataclasses.replace(block, q=q), block.q, odd_rows)

    @functools.cached_property
    def reach(self) -> Float64[np.ndarray, " rows"]:
        """Per row an upper bound of |scale| sum_d |q_d k_d|."""
        return np.where(self.block.empty, 0.0, _reach(self.block))

    @functools.cached_property
    def beyond(self) -> Bool[np.ndarray, " rows"]:
        """Rows whose logits float64 may not reach."""
        return ~(self.reach < LARGEST_LOGIT)

    @functools.cached_property
    def _formed(self) -> tuple[np.ndarray, np.ndarray]:
        return _logits(self.block, self.raw_q, self.odd_rows, self.beyond)

    @property
    def logits(self) -> Float64[np.ndarray, "rows width"]:
        """Final logits, -inf where a row does not see the key."""
        return self._formed[0]

    @functools.cached_property
    def largest(self) -> Float64[np.ndarray, " rows"]:
        """Largest logit of each row, without the sink."""
        return self.logits.max(axis=1)

    @functools.cached_property
    def _largest_or_sink(self) -> Float64[np.ndarray, " rows"]:
        sink = self.block.rule.sink
        return self.largest if sink is None else np.maximum(self.largest, sink)

    @functools.cached_property
    def nothing(self) -> Bool[np.ndarray, " rows"]:
        """Rows that see neither a key nor a sink."""
        return self.block.empty & (self._largest_or_sink == -np.inf)

    @functools.cached_property
    def undefined(self) -> Bool[np.ndarray, " rows"]:
        """Rows with a NaN or +inf among their logits, or nothing but -inf."""
        return ~np.isfinite(self._largest_or_sink) & ~self.nothing

    @functools.cached_property
    def skipped(self) -> Bool[np.ndarray, " rows"]:
        """Rows that need no sums."""
        return self.undefined | self.nothing | self.beyond

    @functools.cached_property
    def any_skipped(self) -> bool:
        """Whether there are such rows."""
        return bool(self.skipped.any())

    @functools.cached_property
    def top(self) -> Float64[np.ndarray, " rows"]:
        """What is subtracted from the logits of each row: its largest, of the sink too."""
        return np.where(self.skipped, 0.0, self._largest_or_sink) if self.any_skipped else self._largest_or_sink

    @functools.cached_property
    def floor(self) -> Float64[np.ndarray, " rows"]:
        """Per row a lower bound of its finite logits."""
        sink, floor = self.block.rule.sink, self._formed[1]
        floor = floor if sink is None else np.minimum(floor, sink)
        return np.where(self.skipped, 0.0, floor) if self.any_skipped else floor

    @functools.cached_property
    def weights(self) -> Float64[np.ndarray, "rows terms"]:
        """exp(logit - top); a sink's stands in a column of its own, the last."""
        shifted = self.logits - self.top[:, None]
        if self.block.rule.sink is not None:
            shifted = np.column_stack([shifted, self.block.rule.sink - self.top])
        if self.any_skipped:
            shifted[self.skipped] = 0.0
        return flushed_exp(shifted)

    @functools.cached_property
    def magnitude(self) -> Float64[np.ndarray, "rows width"]:
        """sum_d |q_d k_d| of each pair, 0 where a row does not see the key."""
        block = self.block
        found = np.abs(block.q) @ block.head.key_sizes[block.keys].T
        block.hide(found, 0.0)
        return found

    @functools.cached_property
    def total(self) -> Float64[np.ndarray, " rows"]:
        """Sum of the weights."""
        return self.weights.sum(axis=1)

    @functools.cached_property
    def weighted_sizes(self) -> Float64[np.ndarray, "rows v_dim"]:
        """Sum of weight times |value| over the keys."""
        block = self.block
        return self.weights[:, : block.width] @ block.head.sizes[block.keys]


def attend(scores: Scores) -> Bounded:
    """One block of rows: values, bounds, and the classes of what is not finite."""
    block = scores.block
    sink = block.rule.sink
    if block.width == 0:
        result = Bounded.blank((len(block.q),), block.head.values.shape[1])
        _set_class(result, block.empty, 0.0, -np.inf if sink is None else sink)
        result.max_logit[:] = -np.inf
        if sink is not None and not np.isfinite(sink):
            _set_class(result, block.empty, np.nan, np.nan)
        return result
    error = _row_error(scores)
    tight = np.flatnonzero(error.loose & ~scores.skipped)
    single = None
    if tight.size:
        part = block.take(tight)
        keys = slice(part.first - block.first, part.last - block.first)
        single = _key_by_key(part, scores.logits[tight, keys], scores.magnitude[tight, keys])
    if tight.size < len(block.q) - np.count_nonzero(scores.skipped) or not tight.size:
        result = _whole_rows(scores, error)
    else:
        result = Bounded.blank((len(block.q),), block.head.values.shape[1])
    result.max_logit[:], result.max_logit_error[:] = scores.largest, _largest_error(scores)
    if single is not None:
        result.put(tight, single)
    if scores.any_skipped:
        _unreached(result, block, scores.beyond)
        _set_class(result, scores.undefined, np.nan, np.nan)
        _set_class(result, scores.nothing, 0.0, -np.inf)
    odd = ~np.isfinite(scores.largest)
    result.max_logit[odd], result.max_logit_error[odd] = scores.largest[odd], 0.0
    if block.head.odd_values.size:
        _set_value_classes(result, block, scores.logits > -np.inf, ~scores.undefined & ~scores.nothing)
    return result


def _logits(block: Block, raw_q: np.ndarray, odd_rows: np.ndarray, beyond: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Final logits with -inf where masked, and per row a lower bound of its finite ones (lemmas 2 and 9).

    Rows `beyond` the range of float64 get logits of 0, so that only what the inputs force is NaN or infinite.
    """
    keys, scale = block.keys, block.rule.scale
    logits = block.q @ block.head.keys[keys].T
    if beyond.any():
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
    block.hide(logits, -np.inf)
    return logits, floor


def _capped(logits: np.ndarray, softcap: float) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return softcap * np.tanh(logits / softcap)


def _within(keys: np.ndarray, chosen: slice) -> np.ndarray:
    return keys[(keys >= chosen.start) & (keys < chosen.stop)]


def _reach(block: Block, sizes: np.ndarray | None = None) -> np.ndarray:
    """Per row an upper bound of |scale| sum_d |q_d k_d| over its visible keys, or over keys of these norms at most."""
    with np.errstate(over="ignore"):  # Cauchy-Schwarz
        return (abs(block.rule.scale) * _norms_product(block, block.norms if sizes is None else sizes)).astype(
            np.float64
        )


def _largest_error(scores: Scores) -> np.ndarray:
    """Per row the error of its largest logit: the largest error of any, or (lemma 11) of the keys that may hold it."""
    block, largest = scores.block, scores.largest
    error = _reach_error(block, np.where(scores.beyond, 0.0, scores.reach)) * _slack(block)
    vague = np.flatnonzero(np.isfinite(largest) & (error > VAGUE * np.abs(largest)))
    if vague.size:
        # Four errors where two are meant, and a rounding of the difference.
        least = largest[vague] - 4.0 * error[vague] - 4.0 * UNIT * np.abs(largest[vague])
        may = scores.logits[vague] >= least[:, None]
        own = _error_among(block.take(vague), may, np.arange(block.first, block.last))
        error[vague] = np.minimum(error[vague], own * _slack(block))
    return error


def _error_among(block: Block, may: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Per row a bound of a final logit's error among the keys that are marked (lemma 12: where scores are exact)."""
    sizes = np.where(may, block.head.norms[None, keys], 0.0).max(axis=1)
    reach = _reach(block, sizes)
    error = _reach_error(block, reach)
    if block.rule.softcap is not None:
        return error
    grains = row_grains(block.q) * np.where(may, block.head.grains[None, keys], np.inf).min(axis=1)
    exact = _norms_product(block, sizes) <= grains / UNIT
    return np.where(exact, reach * (2.0 * UNIT) + TINY, error)


def _norms_product(block: Block, sizes: np.ndarray) -> np.ndarray:
    """At least sum_d |q_d k_d| of keys of these norms at most."""
    return norms(block.q) * sizes * _slack(block)


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


def _row_error(scores: Scores) -> _RowError:
    """The error of a row's weights by its largest logit and its least (lemma 5)."""
    shift = _reach_error(scores.block, np.where(scores.skipped, 0.0, scores.reach))
    relative = 2.0 * shift + 1.01 * UNIT * np.minimum(scores.top - scores.floor, EXP_RANGE) + TINY
    loose = ~(relative <= LOOSE)
    return _RowError(shift, np.where(loose, LOOSE, relative), loose)


def _whole_rows(scores: Scores, row_error: _RowError) -> Bounded:
    """Lemma 5: one relative error for all weights of a row, void where it is loose."""
    block, total = scores.block, scores.total
    terms, sizes = block.terms, block.head.sizes[block.keys]
    relative, shift = row_error.relative, row_error.shift
    weight_error = relative * (1.0 + relative) + FUNCTION_ERROR * (1.0 + 2.0 * relative) + gamma(terms)
    total_error = weight_error * total + terms * FLUSHED_WEIGHT
    product_error = scores.weighted_sizes * weight_error[:, None]
    product_error += terms * FLUSHED_WEIGHT * (1.0 + sizes.max(initial=0.0))
    least = np.maximum(1.0, total - total_error)
    weights = scores.weights[:, : block.width]
    out, out_error = _quotient(block, _Sums(weights, total, total_error, product_error, least))
    lse, lse_error = _log_sum(block, scores.top, total, shift + total_error / least)
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
    """Lemma 4: the division, and the fact that f is a weighted mean of the visible values.

    Overwrites the products' errors.
    """
    out = sums.weights @ block.head.values[block.keys]
    out /= sums.total[:, None]
    slack, least = _slack(block), sums.least[:, None]
    error = np.abs(out)
    error *= (sums.total_error[:, None] / least + 2.0 * UNIT) * slack
    error += TINY * slack
    error += np.multiply(sums.product_error, slack / least, out=sums.product_error)
    low, high = block.low, block.high
    np.maximum(out, low, out=out)
    np.minimum(out, high, out=out)
    farthest = np.subtract(high, out, out=sums.product_error)
    np.maximum(farthest, out - low, out=farthest)
    farthest *= 1.0 + 4.0 * UNIT
    return out, np.fmin(error, farthest, out=error)  # fmin: an infinite error times a zero value is NaN


def _log_sum(block: Block, top: np.ndarray, total: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sum top + ln(total), with `error` the part that stems from top and total (lemma 7)."""
    logarithm = np.log(total)
    lse = top + logarithm
    return lse, (error + FUNCTION_ERROR * logarithm + 1.01 * UNIT * np.abs(lse) + TINY) * _slack(block)


def _key_by_key(block: Block, logits: np.ndarray, magnitude: np.ndarray) -> Bounded:
    """Lemma 6: each weight with its own error, for rows with logits so large that one error for all says nothing.

    Overwrites `logits` and `magnitude`, those of the block's own keys.
    """
    slack, sink = _slack(block), block.rule.sink
    shift = _key_errors(block, magnitude)
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


def _key_errors(block: Block, size: np.ndarray) -> np.ndarray:
    """Per key a bound of its final logit's error (lemmas 2 and 9); `size`, which it overwrites: sum_d |q_d k_d|."""
    keys, rule = block.keys, block.rule
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

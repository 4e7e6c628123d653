"""The numerical contract of static-anchor attention: |kernel - f| <= bound, per element, with no free constant.

The derivation is docs/attention-contract.md; the names below are its names.  The bound holds for the fast path and for
the replay, for any order of summation, and for every rounding that the device model allows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import numpy as np

from verify.attention.float64_rows import Place, alike, flushed_exp, range_reduce, running
from verify.attention.problem import widen
from verify.devices import BF16_UNIT_ROUNDOFF, DeviceModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Bool, Float64

    from verify.attention.problem import AttentionProblem, View
    from verify.attention.reference import Reference

LOG2_E = math.log2(math.e)
LN2 = math.log(2.0)

BIAS = 32
"""log2 units: the contract's promise about flushing.  A kernel that flushes more than a bias of 32 does breaks it."""

LARGEST_EXPONENT = 128.0
"""|t| of every exp2 whose result is a normal number."""

DOMAIN_LIMIT = 2.0**127

CONVEX_KEYS = 2**28
"""Keys of a row up to which its flushed weights, magnified by every rounding of the sums, are within what the convex
bound charges (lemma `convex_bound`).  Longer rows have no finite bound: sums of so many terms may have lost every
digit."""

EVALUATION_DOUBT = 2.0**-42
"""nats: what subtracting logits and a normaliser of at most 745 in size does to a share in float64."""

OVERFLOWING = 700.0
"""nats: a share multiplied by exp(OVERFLOWING) makes any first-order bound infinite."""

NEGLIGIBLE = 2.0**-20
"""nats: below it the doubt of a row's worst score stands for every key's; it moves the bound by less than 2**-18."""

EVALUATION_SLACK = 1.0 + 2.0**-20
"""The bound is evaluated in float64.  Its sums have at most 2**30 non-negative terms, each relative error at most
2**-52 (2**30 + 100) < 2**-21; one factor covers numerator and denominator."""


@dataclasses.dataclass(frozen=True, eq=False)
class ContractBound:
    """Elementwise bounds on |kernel - f|.

    Attributes:
        out: for the output, `[batch, heads, q_len, v_dim]`.
        lse: for the LSE in nats, `[batch, heads, q_len]`.
        inside_domain: rows on which the contract promises something, `[batch, heads, q_len]`.
        max_logit: for the largest logit of each row in nats, `[batch, heads, q_len]`.
    """

    out: Float64[np.ndarray, "batch heads q_len v_dim"]
    lse: Float64[np.ndarray, "batch heads q_len"]
    inside_domain: Bool[np.ndarray, "batch heads q_len"]
    max_logit: Float64[np.ndarray, "batch heads q_len"]

    @property
    def head_max_logit(self) -> Float64[np.ndarray, "batch heads"]:
        """For the largest logit of each head over all its rows: a maximum moves by no more than its arguments do."""
        return self.max_logit.max(axis=-1, initial=0.0)


def gamma(n: np.ndarray | float, u: float) -> np.ndarray | float:
    """e**(n u) - 1 >= |prod (1 + d_i) - 1| for n factors, |d_i| <= u; unlike n u / (1 - n u) it holds for every n."""
    return np.expm1(n * u)


def contract_bound(
    problem: AttentionProblem,
    device: DeviceModel,
    *,
    rows_per_block: int = 128,
    weight_unit: float = BF16_UNIT_ROUNDOFF,
    query_error: Float64[np.ndarray, "batch heads q_len head_dim"] | None = None,
    reference: Reference | None = None,
) -> ContractBound:
    """Evaluate the contract on one problem.

    Memory is bounded by `rows_per_block` rows of scores; cost grows as attention does (a causal row block looks at its
    visible keys only).  Rows outside the domain get an infinite bound and inside_domain False.  `weight_unit` is the
    unit roundoff with which P enters P V: that of BF16, or of an FP32 product where P stays in FP32.  `query_error` is
    how far the kernel's queries may be from the problem's, where it makes them itself (rotary embedding): a score moves
    by at most |scale| sum_d error_d |k_d|.  `reference` is the exact output of the same problem with its proved error,
    if that is known already.
    """
    shape = problem.q.shape[:3]
    exact = None if reference is None else _known_output(reference)
    found = _Bounds(np.zeros((*shape, problem.v_dim)), np.zeros(shape), np.ones(shape, dtype=bool), np.zeros(shape))
    k_all, v_all, q_all = (widen(x) for x in (problem.k, problem.v, problem.q))
    for b in range(problem.batch):
        for view in problem.views(b):
            for kv, heads in alike(problem):
                keys = _Keys(k_all[b, kv, view.keys], v_all[b, kv, view.keys])
                rule = _Rule.of(problem, heads[0], device, weight_unit)
                for part in _row_blocks(view, max(rows_per_block // len(heads), 1)):
                    place = Place(b, heads, view, part)
                    error = None if query_error is None else place.take(query_error)
                    start, stop = place.each(view.start), place.each(view.stop)
                    known = None if exact is None else (place.take(exact[0]), place.take(exact[1]))
                    found.put(place, _block_bound(place.take(q_all), keys, start, stop, rule, error, known))
    return ContractBound(found.out, found.lse, found.inside, found.max_logit)


def _known_output(reference: Reference) -> tuple[np.ndarray, np.ndarray]:
    """Output and its error; 0 where f is not finite and class decides."""
    finite = np.isfinite(reference.out)
    if finite.all():
        return reference.out, reference.out_error
    return np.where(finite, reference.out, 0.0), np.where(finite, reference.out_error, 0.0)


def _row_blocks(view: View, rows_per_block: int) -> Iterator[slice]:
    """Consecutive rows; fewer where they see keys far apart, so that a block never has many hidden pairs."""
    begin = 0
    while begin < len(view.start):
        count = min(rows_per_block, len(view.start) - begin)
        while count > 1:
            start, stop = view.start[begin : begin + count], view.stop[begin : begin + count]
            if stop.max() - start.min() <= 2 * ((stop - start).max() + count):
                break
            count //= 2
        yield slice(begin, begin + count)
        begin += count


@dataclasses.dataclass(frozen=True, eq=False)
class _Bounds:
    out: np.ndarray
    lse: np.ndarray
    inside: np.ndarray
    max_logit: np.ndarray

    def put(self, place: Place, other: _Bounds) -> None:
        """Write what holds at a place."""
        for field in dataclasses.fields(self):
            place.put(getattr(self, field.name), getattr(other, field.name))


@dataclasses.dataclass(frozen=True, eq=False)
class _Keys:
    """Keys and values of one KV head, with what does not depend on the rows."""

    k: np.ndarray
    v: np.ndarray

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """Sizes of the keys' components."""
        return np.abs(self.k)

    @functools.cached_property
    def values(self) -> np.ndarray:
        """Values, 0 where they are not finite."""
        finite = np.isfinite(self.v)
        return self.v if finite.all() else np.where(finite, self.v, 0.0)

    @functools.cached_property
    def finite(self) -> np.ndarray:
        """Keys without NaN or infinity."""
        return np.isfinite(self.k).all(axis=1)

    @functools.cached_property
    def summed(self) -> np.ndarray:
        """Per key and lane: sizes of the values up to it, added up."""
        return np.cumsum(np.abs(self.values), axis=0)

    @functools.cached_property
    def highest(self) -> np.ndarray:
        """The largest value up to each key."""
        return running(np.maximum, self.values)

    @functools.cached_property
    def lowest(self) -> np.ndarray:
        """The least value up to each key."""
        return running(np.minimum, self.values)


@dataclasses.dataclass(frozen=True)
class _Rule:
    """What makes logits of scores in one head, and the device that does it."""

    scale: float
    softcap: float | None
    sink: float | None
    device: DeviceModel
    weight_unit: float

    @classmethod
    def of(cls, problem: AttentionProblem, head: int, device: DeviceModel, weight_unit: float) -> _Rule:
        return cls(problem.scale, problem.softcap, problem.sink(head), device, weight_unit)

    @property
    def inside_domain(self) -> bool:
        """The sink and the constants of the soft cap are FP32 numbers with room."""
        sizes = [] if self.sink is None else [abs(self.sink) * LOG2_E]
        constants = []
        if self.softcap is not None:
            constants = [self.softcap, self.softcap * LOG2_E, *([abs(self.scale) / self.softcap] if self.scale else [])]
        small = self.device.smallest_normal
        return all(size <= DOMAIN_LIMIT for size in sizes) and all(small <= c <= DOMAIN_LIMIT for c in constants)


@dataclasses.dataclass(frozen=True, eq=False)
class _Rows:
    """Some rows of one head, in float64, with K keys; a sink is the last of them, of value 0.

    Attributes:
        counts: how many keys each row sees.
        v: values, zeros for what is not finite.
        share: P' of each key: P up to a factor within exp(+-doubt).
        log_share: ln P', which does not underflow.
        sigma: error of each score in log2 units.
        doubt: of ln P', per key or per row.
        lse: natural log.
        device: the machine.
        highest: per row and lane the largest visible value.
        lowest: the least.
        total_v: at least the sum of the visible values' sizes.
        weight_unit: of P as it enters P V.
        exponent: ln 2 (sigma + shift) + doubt per key, where `sigma` is the largest of each row; None: not yet formed.
    """

    counts: np.ndarray
    v: np.ndarray
    share: np.ndarray
    log_share: np.ndarray
    sigma: np.ndarray
    doubt: np.ndarray
    lse: np.ndarray
    device: DeviceModel
    highest: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    lowest: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    total_v: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    weight_unit: float = BF16_UNIT_ROUNDOFF
    exponent: np.ndarray | None = None

    @functools.cached_property
    def summing(self) -> np.ndarray:
        """Relative error of a sum over the row in any order: n keys, up to 128 partial sums, two products to spare."""
        u = max(self.device.unit_roundoff, self.device.dot_unit_roundoff)
        return np.asarray(gamma(self.counts + 130.0, u))

    @functools.cached_property
    def shared_weight_error(self) -> np.ndarray:
        """rho_k P_k: by how much a weight that is not flushed may be off, as a share of the row."""
        exponent = self.exponent
        if exponent is None:
            exponent = self.sigma + _shift_error(self.device)
            exponent *= LN2
            exponent += self.doubt
        exp2 = self.device.exp2_relative
        if exponent.max() < 1.0:
            return _small_growth(self.share, exponent, exp2 * math.e)
        grown = _grown(self.share, self.log_share, exponent)
        large = grown * (1.0 + exp2)
        grown += self.share * (exp2 * math.e)
        np.copyto(grown, large, where=~(exponent < 1.0))
        return grown

    @functools.cached_property
    def shared_weight_errors(self) -> np.ndarray:
        """Their sum per row."""
        return self.shared_weight_error.sum(axis=1)

    @property
    def flushed_weight(self) -> float:
        """What flushing one weight moves, as a share of the row: 2 omega over a sum of at least SUM_FLOOR / 2.

        Twice that, for the roundings that follow and magnify it where they are large.
        """
        return 8.0 * 2.0 ** (BIAS + 2) * self.device.smallest_normal

    @property
    def flushed_products(self) -> np.ndarray:
        """The same for a product p v, the partial sum it enters and a rescaling of that: three omega per key."""
        return 16.0 * 2.0 ** (BIAS + 2) * self.device.smallest_normal * self.counts * (1.0 + self.summing)


def _block_bound(
    q: np.ndarray,
    keys: _Keys,
    start: np.ndarray,
    stop: np.ndarray,
    rule: _Rule,
    query_error: np.ndarray | None = None,
    exact: tuple[np.ndarray, np.ndarray] | None = None,
) -> _Bounds:
    """Bounds for some rows over one KV head; row i sees the keys from start[i] up to stop[i].

    `exact` is their output with its error, if known.
    """
    sink, device = rule.sink, rule.device
    blind = stop <= start
    first = int(start.min(initial=len(keys.k)))
    run = slice(first, max(int(stop.max(initial=0)), first))
    k, values = keys.k[run], keys.values[run]
    if k.shape[0] == 0 and sink is None:
        nothing = np.zeros(q.shape[0])
        return _Bounds(np.zeros((q.shape[0], values.shape[1])), nothing, np.ones(q.shape[0], dtype=bool), nothing)
    with np.errstate(all="ignore"):
        sizes = keys.sizes[run].T
        magnitude = np.abs(q) @ sizes
        _hide(magnitude, 0.0, start - first, stop - first)
        reach = magnitude.max(axis=1, initial=0.0)
        finite = np.isfinite(q).all(axis=1) & _sees_finite(keys.finite[run], start - first, stop - first)
        inside = (finite & _has_room(reach, rule)) | blind
        inside &= rule.inside_domain | (blind & (sink is None))
        logits = q @ k.T
        logits *= rule.scale
        _hide(logits, -np.inf, start - first, stop - first)
        highest, lowest, total_v = _value_ranges(keys, run, start, stop)
        counts = np.maximum(stop - start, 0)
        if sink is not None:
            values = np.concatenate([values, np.zeros((1, values.shape[1]))])
            highest, lowest, counts = np.maximum(highest, 0.0), np.minimum(lowest, 0.0), counts + 1
        if rule.softcap is None and query_error is None and k.shape[0]:
            max_logit, weights = _plain_weights(logits, magnitude, reach, q.shape[1], rule)
        else:
            moved = None if query_error is None else query_error @ sizes
            scores = _scores(logits, magnitude, q.shape[1], rule, moved)
            max_logit = _max_logit_bound(scores, device)
            weights = _weights(scores if sink is None else scores.with_sink(sink, device))
        ranges = (highest, lowest, total_v, rule.weight_unit, weights.exponent)
        shares = (weights.share, weights.log_share, weights.sigma, weights.doubt, weights.lse)
        rows = _Rows(counts, values, *shares, device, *ranges)
        out, lse_bound = _out_bound(rows, exact), _lse_bound(rows)
        for bound in (out, lse_bound, max_logit):
            np.multiply(bound, EVALUATION_SLACK, out=bound)
            if not inside.all():
                bound[~inside] = np.inf
    # A row that sees no key adds up no product: its output is 0, and only a sink gives it an LSE.
    if blind.any():
        out[blind], max_logit[blind] = 0.0, 0.0
        if sink is None:
            lse_bound[blind] = 0.0
    return _Bounds(out, lse_bound, inside, max_logit)


def _hide(x: np.ndarray, value: float, start: np.ndarray, stop: np.ndarray) -> None:
    """Put a value where a row does not see the key: in the few columns that some row does not see."""
    index = np.arange(x.shape[1])[None, :]
    left, right = int(start.max(initial=0)), max(int(stop.min(initial=x.shape[1])), 0)
    if right < x.shape[1]:
        np.copyto(x[:, right:], value, where=index[:, right:] >= stop[:, None])
    if left > 0:
        np.copyto(x[:, :left], value, where=index[:, :left] < start[:, None])


def _sees_finite(finite: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Rows whose visible keys are all finite.

    A value that is not finite takes only its own lane out of the bound: f is not finite there, and class decides.
    """
    odd = np.flatnonzero(~finite)[None, :]
    return ((odd >= stop[:, None]) | (odd < start[:, None])).all(axis=1)


def _has_room(reach: np.ndarray, rule: _Rule) -> np.ndarray:
    """Rows whose largest sum_d |q_d k_d| of a visible pair, `reach`, leaves FP32 room; NaN leaves none."""
    return reach * max(1.0, abs(rule.scale) * LOG2_E) <= DOMAIN_LIMIT


@dataclasses.dataclass(frozen=True, eq=False)
class _Weights:
    """Fields of `_Rows` that scores decide; `sigma` may be the largest of each row where `exponent` is given."""

    share: np.ndarray
    log_share: np.ndarray
    sigma: np.ndarray
    doubt: np.ndarray
    lse: np.ndarray
    exponent: np.ndarray | None = None


def _weights(scores: _Scores) -> _Weights:
    """Shares of scores whose errors are known pair by pair."""
    share, log_share, lse = _shares(scores.logits)
    doubt = _evaluation_doubt(scores.doubt, share, log_share)
    return _Weights(share, log_share, scores.sigma, doubt, lse)


def _plain_weights(
    logits: np.ndarray, magnitude: np.ndarray, reach: np.ndarray, head_dim: int, rule: _Rule
) -> tuple[np.ndarray, _Weights]:
    """What `_scores`, `_max_logit_bound` and `_weights` give without a soft cap, in fewer passes.

    Errors of scores then are straight lines in `magnitude`, so that the largest of a row is that at its `reach`, and
    the exponent of a weight's error is one line too.  Overwrites logits and magnitude.
    """
    device, sink = rule.device, rule.sink
    slope, constant = _score_line(rule.scale, head_dim, device)
    doubt_slope = _doubt_slope(rule.scale, head_dim)
    line = magnitude * (LN2 * slope + doubt_slope)
    line += logits
    every = np.arange(len(logits))
    best = logits.argmax(axis=1)
    largest = logits[every, best]
    apart = line.max(axis=1) + (LN2 * constant + EVALUATION_DOUBT) - largest
    apart += doubt_slope * magnitude[every, best] + EVALUATION_DOUBT
    max_logit = _of_maximum(largest, apart, device)
    sigma = slope * reach + constant
    own = doubt_slope * reach + EVALUATION_DOUBT
    exponent = np.multiply(magnitude, LN2 * slope, out=line)
    exponent += LN2 * (constant + _shift_error(device))
    if sink is not None:
        of_sink = _sink_error(sink, device)
        sigma = np.maximum(sigma, of_sink)
        logits, exponent = _widened(logits, sink), _widened(exponent, LN2 * (of_sink + _shift_error(device)))
    negligible = bool(own.max() < NEGLIGIBLE)
    # Logarithms of shares are asked for where an exponent reaches 1; twice its size leaves room for roundings.
    largest_exponent = LN2 * (sigma.max() + _shift_error(device)) + 3.0 * own.max()
    small = negligible and bool(2.0 * largest_exponent < 1.0)
    share, log_share, lse = _shares(logits, logarithms=not small)
    if negligible:
        doubt = 3.0 * own[:, None]
    else:
        magnitude *= doubt_slope
        magnitude += EVALUATION_DOUBT
        doubt = _evaluation_doubt(
            magnitude if sink is None else _widened(magnitude, EVALUATION_DOUBT), share, log_share
        )
    exponent += doubt
    return max_logit, _Weights(share, log_share, sigma[:, None], doubt, lse, exponent)


def _widened(x: np.ndarray, value: float) -> np.ndarray:
    """One column more."""
    return np.column_stack([x, np.full(len(x), value)])


def _shares(logits: np.ndarray, *, logarithms: bool = True) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """P', ln P' (P' again unless the logarithms are asked for) and the LSE of each row.  Overwrites the logits.

    A share below exp(FLUSHED_LOG) counts as 0: with |v| < 2**128 that moves no sum by 2**-800, and every bound holds at
    least 2**-126 of flushing.
    """
    top = logits.max(axis=1, keepdims=True)
    logits -= top
    weights = flushed_exp(logits.copy() if logarithms else logits)
    total = weights.sum(axis=1, keepdims=True)
    weights /= total
    log_total = np.log(total)
    if logarithms:
        logits -= log_total
    return weights, logits, (top + log_total)[:, 0]


def _value_ranges(
    keys: _Keys, run: slice, start: np.ndarray, stop: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per row and lane: largest and least visible value, and at least the sum of the visible sizes; 0 without keys."""
    if run.start >= run.stop:
        nothing = np.zeros((len(start), keys.v.shape[1]))
        return nothing, nothing, nothing
    if not start.any():
        last = np.maximum(stop, 1) - 1
        return keys.highest.take(last, axis=0), keys.lowest.take(last, axis=0), keys.summed.take(last, axis=0)
    v, start, stop = keys.values[run], start - run.start, stop - run.start
    highest, lowest = (range_reduce(op, v, start, stop) for op in (np.maximum, np.minimum))
    # Keys before the window only add to the sum.
    return highest, lowest, np.cumsum(np.abs(v), axis=0)[np.maximum(stop, 1) - 1]


@dataclasses.dataclass(frozen=True, eq=False)
class _Scores:
    """Final logits of some rows, -inf where a row does not see the key.

    Attributes:
        logits: nats, as float64 gives them.
        sigma: |kernel's - exact| in log2 units.
        doubt: |logits - exact| in nats.
    """

    logits: np.ndarray
    sigma: np.ndarray
    doubt: np.ndarray

    def with_sink(self, sink: float, device: DeviceModel) -> _Scores:
        """One column more: the sink, converted to log2 units by one constant."""
        pairs = ((self.logits, sink), (self.sigma, _sink_error(sink, device)), (self.doubt, EVALUATION_DOUBT))
        return _Scores(*(_widened(part, value) for part, value in pairs))


def _sink_error(sink: float, device: DeviceModel) -> float:
    """sigma of a sink."""
    return abs(sink) * LOG2_E * float(gamma(3, device.unit_roundoff)) + 2.0 * device.smallest_normal


def _scores(logits: np.ndarray, magnitude: np.ndarray, head_dim: int, rule: _Rule, moved: np.ndarray | None) -> _Scores:
    """Logits with the soft cap, and their errors; `magnitude` is sum_d |q_d k_d| per pair."""
    if moved is not None:
        magnitude = magnitude + moved
    sigma = _score_error(magnitude, rule.scale, head_dim, rule.device)
    if moved is not None:
        sigma += abs(rule.scale) * LOG2_E * moved * EVALUATION_SLACK
    doubt = _doubt_slope(rule.scale, head_dim) * magnitude
    doubt += EVALUATION_DOUBT
    if rule.softcap is None:
        return _Scores(logits, sigma, doubt)
    cap, device, hidden = rule.softcap, rule.device, logits == -np.inf
    argument = np.where(hidden, 0.0, logits / cap)
    # The argument differs from the exact one by sigma in nats, two more constants, and a flush.
    two_more = float(gamma(3, device.unit_roundoff)) * 1.01
    apart = (
        LN2 * sigma + two_more * (np.abs(argument) * cap + LN2 * sigma) + doubt
    ) / cap + 2.0 * device.smallest_normal
    steepest = np.minimum(1.0, 4.0 * np.exp(-2.0 * np.maximum(np.abs(argument) - apart, 0.0)))
    moved = np.minimum(apart * steepest, 2.0)
    tangent = np.tanh(argument)
    relative = (1.0 + device.tanh_relative) * (1.0 + float(gamma(4, device.unit_roundoff))) - 1.0
    of_tangent = moved + relative * (np.abs(tangent) + moved) + 1.01 * device.tanh_absolute
    capped_sigma = cap * LOG2_E * of_tangent + 2.0 * (1.0 + cap) * device.smallest_normal
    # numpy's tanh errs by 2 ulp, quotient and product by half of one, relative to a tangent of at most 1.
    capped_doubt = np.minimum(doubt * steepest, 2.0 * cap) + 2.0**-50 * cap * np.abs(tangent) + EVALUATION_DOUBT
    return _Scores(np.where(hidden, -np.inf, cap * tangent), capped_sigma, capped_doubt)


def _max_logit_bound(scores: _Scores, device: DeviceModel) -> np.ndarray:
    """In nats: a maximum moves by at most max_k (z_k + e_k) - max_k z_k where each of its arguments moves by e_k."""
    rows = np.arange(len(scores.logits))
    if not scores.logits.shape[1]:
        return np.zeros(len(rows))
    upper = LN2 * scores.sigma
    upper += scores.doubt
    upper += scores.logits
    best = scores.logits.argmax(axis=1)
    largest, doubt = scores.logits[rows, best], scores.doubt[rows, best]
    return _of_maximum(largest, upper.max(axis=1) - largest + doubt, device)


def _of_maximum(largest: np.ndarray, apart: np.ndarray, device: DeviceModel) -> np.ndarray:
    """A maximum that moves by `apart` in log2 units, given in nats: three more roundings, and flushing."""
    return apart + float(gamma(3, device.unit_roundoff)) * (np.abs(largest) + apart) + 2.0 * device.smallest_normal


def _doubt_slope(scale: float, head_dim: int) -> float:
    """What float64 makes of a logit, relative to sum_d |q_d k_d|."""
    return (head_dim + 8) * 2.0**-53 * abs(scale)


def _score_error(magnitude: np.ndarray, scale: float, head_dim: int, device: DeviceModel) -> np.ndarray:
    """sigma: |computed - exact| of a score in log2 units; `magnitude` is sum_d |q_d k_d| per pair."""
    slope, constant = _score_line(scale, head_dim, device)
    sigma = slope * magnitude
    sigma += constant
    return sigma


def _score_line(scale: float, head_dim: int, device: DeviceModel) -> tuple[float, float]:
    """Slope and constant of sigma in sum_d |q_d k_d|."""
    log2_scale = abs(scale) * LOG2_E
    # head_dim - 1 additions, the rounding of the constant and of the product with it.
    relative = gamma(head_dim, device.dot_unit_roundoff) + gamma(3, device.unit_roundoff) * 1.01
    flushed = (2 * head_dim * log2_scale * 1.01 + 1) * device.smallest_normal
    return float(log2_scale * relative), flushed


def _grown(share: np.ndarray, log_share: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    """At least P' (exp(exponent) - 1); one exponential where it is large, since P' alone may underflow there.

    expm1(x) <= x + x**2 for 0 <= x <= 1.
    """
    grown = _small_growth(share, exponent)
    if not exponent.max() < 1.0:
        raised = log_share + exponent
        np.minimum(raised, OVERFLOWING, out=raised)
        np.copyto(grown, flushed_exp(raised), where=~(exponent < 1.0))
    return grown


def _small_growth(share: np.ndarray, exponent: np.ndarray, more: float = 0.0) -> np.ndarray:
    """P' (x + x**2 + more)."""
    small = exponent + 1.0
    small *= exponent
    small += more
    small *= share
    return small


def _evaluation_doubt(own: np.ndarray, share: np.ndarray, log_share: np.ndarray) -> np.ndarray:
    """In nats: how far ln P' may be from ln P because the logits and their sum were formed in float64.

    A key's own logit, and the normaliser: with computed shares P'_j and errors e_j of the logits, the sum is off by a
    factor of at most 1 + sum_j P'_j (exp(e_j) - 1).  Where every error is tiny, the row's largest stands for all.
    """
    largest = own.max(axis=1, keepdims=True)
    if largest.max() < NEGLIGIBLE:
        return 3.0 * largest
    of_sum = _log_of_relative(_grown(share, log_share, own).sum(axis=1, keepdims=True))
    return own + np.minimum(of_sum, 2.0 * OVERFLOWING)


def _shift_error(device: DeviceModel) -> float:
    """log2 units: t = s - a and t - BIAS are each rounded by u |t|, and |t| <= 128 + BIAS where the weight counts."""
    return device.unit_roundoff * 2 * (LARGEST_EXPONENT + BIAS) + device.smallest_normal


def _doubt_of_exact(rows: _Rows, spread: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """|sum_k P'_k v_k - f|: what float64 shares make of the exact output; never more than the spread of the values."""
    if rows.doubt.shape[1] == 1:
        return np.minimum(rows.doubt * (1.0 + rows.doubt) * largest, spread)
    return np.minimum(_grown(rows.share, rows.log_share, rows.doubt) @ np.abs(rows.v), spread)


def _out_bound(rows: _Rows, known: tuple[np.ndarray, np.ndarray] | None = None) -> np.ndarray:
    device, unit = rows.device, BF16_UNIT_ROUNDOFF
    v, n = rows.v, rows.counts.astype(np.float64)[:, None]
    summing = rows.summing[:, None]
    highest, lowest = rows.highest, rows.lowest
    largest = np.maximum(highest, -lowest)  # lowest <= highest
    spread = highest - lowest
    computed, doubt = (rows.share @ v, _doubt_of_exact(rows, spread, largest)) if known is None else known
    exact = np.abs(computed)
    exact += doubt
    rho_share = rows.shared_weight_error
    rounding_p = (1.0 + rows.weight_unit) * (1.0 + summing)
    alpha_share = rho_share * rounding_p
    alpha_share += rows.share * (rounding_p - 1.0)
    beta = rows.shared_weight_errors[:, None] * (1.0 + summing) + rows.share.sum(axis=1, keepdims=True) * summing
    flushed_products = rows.flushed_products[:, None]
    denominator = 1.0 - beta - n * rows.flushed_weight
    numerator = alpha_share @ np.abs(v)
    other = exact * beta
    numerator += other
    theta = np.multiply(exact, n, out=other)
    theta += rows.total_v
    theta *= rows.flushed_weight
    theta += flushed_products
    numerator += theta
    numerator /= denominator
    unbounded = ~(denominator[:, 0] > 0.0)
    if unbounded.any():
        numerator[unbounded] = np.inf
    farthest = np.subtract(computed, lowest, out=other)
    np.maximum(farthest, highest - computed, out=farthest)
    farthest += doubt
    convex = np.minimum(farthest, spread, out=farthest)
    skewed = _skew(summing, rows.weight_unit) * largest
    skewed += flushed_products
    convex += skewed
    convex[rows.counts > CONVEX_KEYS] = np.inf
    divided = np.fmin(numerator, convex, out=convex)
    more = np.add(exact, divided, out=skewed)
    more *= 2.0 * device.reciprocal_relative + 3.0 * device.unit_roundoff
    divided += more
    # The result is formed at half scale, where anything below smallest_normal is flushed.
    more = np.add(exact, divided, out=skewed)
    more *= unit
    more += 2.0 * device.smallest_normal
    divided += more
    return divided


def _skew(summing: np.ndarray, unit: float) -> np.ndarray:
    """(1 + unit)(1 + summing)**2 - 1: numerator and denominator err apart, and P is rounded in one of them only."""
    return unit + (1.0 + unit) * summing * (2.0 + summing)


def _lse_bound(rows: _Rows) -> np.ndarray:
    """In nats: the error of the sum, of the logarithm, and of putting the anchor back."""
    device = rows.device
    flushed = rows.counts * rows.flushed_weight
    beta = rows.shared_weight_errors * (1.0 + rows.summing) + rows.summing + flushed
    of_sum = _log_of_relative(beta)
    # Whatever the scores' errors are, they move the LSE by at most the largest of them.
    alone = np.expm1(LN2 * _shift_error(device)) + device.exp2_relative * math.e
    of_scores = LN2 * rows.sigma.max(axis=1) + _log_of_relative((1.0 + alone) * (1.0 + rows.summing) - 1.0 + flushed)
    log_size = LN2 * LARGEST_EXPONENT  # ln l lies within [-(BIAS + 2), 125] ln 2
    anchor_size = np.abs(rows.lse) + log_size
    rounding = device.log_relative * log_size + device.log_absolute + 5.0 * device.unit_roundoff * anchor_size
    return (np.fmin(of_sum, of_scores) + rounding) * (1.0 + 4.0 * device.unit_roundoff)


def _log_of_relative(relative: np.ndarray) -> np.ndarray:
    """|ln (1 + e)| for |e| <= relative; infinite from 1 on."""
    return np.where(relative < 1.0, -np.log1p(-np.minimum(relative, 1.0 - 2.0**-53)), np.inf)

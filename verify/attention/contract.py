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

from verify.attention.float64_blocks import blocks
from verify.attention.float64_rows import Bounded, Scores, attend, flushed_exp
from verify.devices import BF16_UNIT_ROUNDOFF, DeviceModel

if TYPE_CHECKING:
    from jaxtyping import Bool, Float64

    from verify.attention.float64_blocks import Block, Place
    from verify.attention.problem import AttentionProblem
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
    rows_per_block: int | None = None,
    weight_unit: float = BF16_UNIT_ROUNDOFF,
    query_error: Float64[np.ndarray, "batch heads q_len head_dim"] | None = None,
    reference: Reference | None = None,
) -> ContractBound:
    """Evaluate the contract on one problem.

    Memory is bounded by blocks of rows of scores, of `rows_per_block` rows if that is given; cost grows as attention
    does (a causal row block looks at its visible keys only).  Rows outside the domain get an infinite bound and
    inside_domain False.  `weight_unit` is the unit roundoff with which P enters P V: that of BF16, or of an FP32
    product where P stays in FP32.  `query_error` is how far the kernel's queries may be from the problem's, where it
    makes them itself (rotary embedding): a score moves by at most |scale| sum_d error_d |k_d|.  `reference` is the
    exact output of the same problem with its proved error; None: what the float64 oracle says of it.
    """
    if reference is None:
        evaluated = reference_and_bound(
            problem, device, rows_per_block=rows_per_block, weight_unit=weight_unit, query_error=query_error
        )
        return evaluated[1]
    found = _Bounds.blank(problem)
    for place, block in blocks(problem, rows_per_block=rows_per_block):
        known = _known(place.take(reference.out), place.take(reference.out_error))
        moved = None if query_error is None else place.take(query_error)
        found.put(place, _block_bound(Scores.of(block), _Rule.of(block, device, weight_unit), known, moved))
    return found.contract()


def reference_and_bound(
    problem: AttentionProblem,
    device: DeviceModel,
    *,
    rows_per_block: int | None = None,
    weight_unit: float = BF16_UNIT_ROUNDOFF,
    query_error: Float64[np.ndarray, "batch heads q_len head_dim"] | None = None,
) -> tuple[Reference, ContractBound]:
    """What `oracle_float64.attention` and `contract_bound` say, from the same scores: in two thirds of the time."""
    values, found = Bounded.blank(problem.q.shape[:3], problem.v_dim), _Bounds.blank(problem)
    for place, block in blocks(problem, rows_per_block=rows_per_block):
        scores = Scores.of(block)
        bounded = attend(scores)
        values.put(place, bounded)
        known = _known(bounded.out, bounded.out_error)
        moved = None if query_error is None else place.take(query_error)
        found.put(place, _block_bound(scores, _Rule.of(block, device, weight_unit), known, moved))
    return values.reference(), found.contract()


def _known(out: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Output and its error; 0 where f is not finite and class decides."""
    finite = np.isfinite(out)
    if finite.all():
        return out, error
    return np.where(finite, out, 0.0), np.where(finite, error, 0.0)


@dataclasses.dataclass(frozen=True, eq=False)
class _Bounds:
    out: np.ndarray
    lse: np.ndarray
    inside: np.ndarray
    max_logit: np.ndarray

    @classmethod
    def blank(cls, problem: AttentionProblem) -> _Bounds:
        """To be filled block by block."""
        shape = problem.q.shape[:3]
        return cls(np.zeros((*shape, problem.v_dim)), np.zeros(shape), np.ones(shape, dtype=bool), np.zeros(shape))

    def contract(self) -> ContractBound:
        """Of a whole problem."""
        return ContractBound(self.out, self.lse, self.inside, self.max_logit)

    def put(self, place: Place, other: _Bounds) -> None:
        """Write what holds at a place."""
        for field in dataclasses.fields(self):
            place.put(getattr(self, field.name), getattr(other, field.name))


@dataclasses.dataclass(frozen=True)
class _Rule:
    """What makes logits of scores in one head, and the device that does it."""

    scale: float
    softcap: float | None
    sink: float | None
    device: DeviceModel
    weight_unit: float

    @classmethod
    def of(cls, block: Block, device: DeviceModel, weight_unit: float) -> _Rule:
        return cls(block.rule.scale, block.rule.softcap, block.rule.sink, device, weight_unit)

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
class _Charges:
    """What rows of so many keys, a sink among them, are charged whatever is in them."""

    counts: np.ndarray
    device: DeviceModel

    @functools.cached_property
    def summing(self) -> np.ndarray:
        """Relative error of a sum over the row in any order: n keys, up to 128 partial sums, two products to spare."""
        u = max(self.device.unit_roundoff, self.device.dot_unit_roundoff)
        return np.asarray(gamma(self.counts + 130.0, u))

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

    def rounding_p(self, weight_unit: float) -> np.ndarray:
        """1 + the error of a weight's rounding as it enters P V and of the sum, together."""
        return (1.0 + weight_unit) * (1.0 + self.summing)


@dataclasses.dataclass(frozen=True, eq=False)
class _Rows:
    """What the bounds of some rows are made of, in float64.

    Attributes:
        charges: by the number of keys.
        weight_errors: sum_k rho_k P_k, by how much weights that are not flushed may be off, as a share of the row.
        weighted: sum_k alpha_k P_k |v_k|, the same for products with values, roundings of P and of the sum included.
        total: sum_k P_k as float64 has it.
        sigma: the largest error of a score, log2 units.
        lse: natural log.
        highest: per row and lane the largest visible value.
        lowest: the least.
        total_v: at least the sum of the visible values' sizes.
        weight_unit: of P as it enters P V.
    """

    charges: _Charges
    weight_errors: np.ndarray
    weighted: np.ndarray
    total: np.ndarray | float
    sigma: np.ndarray
    lse: np.ndarray
    highest: np.ndarray
    lowest: np.ndarray
    total_v: np.ndarray
    weight_unit: float = BF16_UNIT_ROUNDOFF


def _block_bound(
    scores: Scores, rule: _Rule, known: tuple[np.ndarray, np.ndarray], moved: np.ndarray | None = None
) -> _Bounds:
    """Bounds for the rows of a block; `known` is their output with its error, `moved` the error of their queries."""
    block, sink = scores.block, rule.sink
    blind, head = block.empty, block.head
    if block.width == 0 and sink is None:
        nothing = np.zeros(len(block.q))
        return _Bounds(
            np.zeros((len(block.q), head.values.shape[1])), nothing, np.ones(len(block.q), dtype=bool), nothing
        )
    with np.errstate(all="ignore"):
        reach = scores.magnitude.max(axis=1, initial=0.0)
        inside = (_sees_finite(scores) & _has_room(reach, rule)) | blind
        inside &= rule.inside_domain | (blind & (sink is None))
        charges = _Charges(np.maximum(block.stop - block.start, 0) + (sink is not None), rule.device)
        found = None
        if rule.softcap is None and sink is None and moved is None:
            found = _in_few_passes(scores, reach, charges, rule)
        if found is None:
            found = _pair_by_pair(scores, charges, rule, moved)
        rows, max_logit = found
        out, lse_bound = _out_bound(rows, known), _lse_bound(rows)
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


def _sees_finite(scores: Scores) -> np.ndarray:
    """Finite rows whose visible keys are all finite.

    A value that is not finite takes only its own lane out of the bound: f is not finite there, and class decides.
    """
    block = scores.block
    odd = block.head.odd_keys[None, :]
    finite = ((odd >= block.stop[:, None]) | (odd < block.start[:, None])).all(axis=1)
    finite[scores.odd_rows] = False
    return finite


def _has_room(reach: np.ndarray, rule: _Rule) -> np.ndarray:
    """Rows whose largest sum_d |q_d k_d| of a visible pair, `reach`, leaves FP32 room; NaN leaves none."""
    return reach * max(1.0, abs(rule.scale) * LOG2_E) <= DOMAIN_LIMIT


def _in_few_passes(
    scores: Scores, reach: np.ndarray, charges: _Charges, rule: _Rule
) -> tuple[_Rows, np.ndarray] | None:
    """What `_pair_by_pair` gives without a soft cap and a sink; None where scores are too large for it.

    Errors of scores then are straight lines in sum_d |q_d k_kd|, the exponent of a weight's error is one line too, and
    what it makes of the weight is a parabola.
    """
    block, device, magnitude = scores.block, rule.device, scores.magnitude
    head_dim = block.q.shape[1]
    slope, constant = _score_line(rule.scale, head_dim, device)
    doubt_slope = _doubt_slope(rule.scale, head_dim)
    sigma = slope * reach + constant
    own = doubt_slope * reach + EVALUATION_DOUBT
    # expm1(x) <= x + x**2 up to 1; twice the size leaves room for roundings.
    largest_exponent = LN2 * (sigma.max() + _shift_error(device)) + 3.0 * own.max()
    if not (own.max() < NEGLIGIBLE and 2.0 * largest_exponent < 1.0):
        return None
    line = magnitude * (LN2 * slope + doubt_slope)
    line += scores.logits
    apart = line.max(axis=1) + (LN2 * constant + EVALUATION_DOUBT) - scores.largest + own
    # With exponents x = a m + b in m = sum_d |q_d k_kd|: x + x**2 + more = (a m)**2 + (a + 2 a b) m + b + b**2 + more.
    a = LN2 * slope
    b = LN2 * (constant + _shift_error(device)) + 3.0 * own
    grown = np.multiply(magnitude, a * a, out=line)
    grown += (a + 2.0 * a * b)[:, None]
    grown *= magnitude
    grown += (b + b * b + device.exp2_relative * math.e)[:, None]
    grown *= scores.weights
    weighted = grown @ block.head.sizes[block.keys]
    rounding_p = charges.rounding_p(rule.weight_unit)
    weighted *= (rounding_p / scores.total)[:, None]
    weighted += scores.weighted_sizes * ((rounding_p - 1.0) / scores.total)[:, None]
    weight_errors, lse = grown.sum(axis=1) / scores.total, scores.top + np.log(scores.total)
    ranges = (block.high, block.low, block.sums, rule.weight_unit)
    return _Rows(charges, weight_errors, weighted, 1.0, sigma, lse, *ranges), _of_maximum(scores.largest, apart, device)


def _pair_by_pair(scores: Scores, charges: _Charges, rule: _Rule, moved: np.ndarray | None) -> tuple[_Rows, np.ndarray]:
    """What bounds are made of where each score has an error of its own, and the bound of the largest logit."""
    block, device = scores.block, rule.device
    sizes = block.head.key_sizes[block.keys].T
    logits = block.q @ block.head.keys[block.keys].T
    logits *= rule.scale
    block.hide(logits, -np.inf)
    each = _scores(logits, scores.magnitude, block.q.shape[1], rule, None if moved is None else moved @ sizes)
    max_logit = _max_logit_bound(each, device)
    values = block.head.sizes[block.keys]
    if rule.sink is not None:
        each = each.with_sink(rule.sink, device)
        values = np.concatenate([values, np.zeros((1, values.shape[1]))])
    share, log_share, lse = _shares(each.logits)
    exponent = each.sigma + _shift_error(device)
    exponent *= LN2
    exponent += _evaluation_doubt(each.doubt, share, log_share)
    weight_error = _weight_error(share, log_share, exponent, device)
    rounding_p = charges.rounding_p(rule.weight_unit)[:, None]
    alpha_share = weight_error * rounding_p
    alpha_share += share * (rounding_p - 1.0)
    rows = _Rows(
        charges,
        weight_error.sum(axis=1),
        alpha_share @ values,
        share.sum(axis=1, keepdims=True),
        each.sigma.max(axis=1),
        lse,
        block.high,
        block.low,
        block.sums,
        rule.weight_unit,
    )
    return rows, max_logit


def _weight_error(share: np.ndarray, log_share: np.ndarray, exponent: np.ndarray, device: DeviceModel) -> np.ndarray:
    """rho_k P_k: by how much a weight that is not flushed may be off, as a share of the row."""
    exp2 = device.exp2_relative
    if exponent.max() < 1.0:
        return _small_growth(share, exponent, exp2 * math.e)
    grown = _grown(share, log_share, exponent)
    large = grown * (1.0 + exp2)
    grown += share * (exp2 * math.e)
    np.copyto(grown, large, where=~(exponent < 1.0))
    return grown


def _widened(x: np.ndarray, value: float) -> np.ndarray:
    """One column more."""
    return np.column_stack([x, np.full(len(x), value)])


def _shares(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """P', ln P' and the LSE of each row.  Overwrites the logits.

    A share below exp(FLUSHED_LOG) counts as 0: with |v| < 2**128 that moves no sum by 2**-800, and every bound holds at
    least 2**-126 of flushing.
    """
    top = logits.max(axis=1, keepdims=True)
    logits -= top
    weights = flushed_exp(logits.copy())
    total = weights.sum(axis=1, keepdims=True)
    weights /= total
    log_total = np.log(total)
    logits -= log_total
    return weights, logits, (top + log_total)[:, 0]


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


def _out_bound(rows: _Rows, known: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Bounds of outputs that are known to within a doubt."""
    charges = rows.charges
    device, unit = charges.device, BF16_UNIT_ROUNDOFF
    n, summing = charges.counts.astype(np.float64)[:, None], charges.summing[:, None]
    highest, lowest = rows.highest, rows.lowest
    computed, doubt = known
    exact = np.abs(computed)
    exact += doubt
    beta = rows.weight_errors[:, None] * (1.0 + summing) + rows.total * summing
    flushed_products = charges.flushed_products[:, None]
    denominator = 1.0 - beta - n * charges.flushed_weight
    # What flushing moves is theta = (exact n + total_v) flushed_weight + flushed_products.
    numerator = exact * (beta + n * charges.flushed_weight)
    numerator += rows.weighted
    numerator += rows.total_v * charges.flushed_weight
    numerator += flushed_products
    numerator /= denominator
    unbounded = ~(denominator[:, 0] > 0.0)
    if unbounded.any():
        numerator[unbounded] = np.inf
    farthest = computed - lowest
    np.maximum(farthest, highest - computed, out=farthest)
    farthest += doubt
    convex = np.minimum(farthest, highest - lowest, out=farthest)
    largest = np.maximum(highest, -lowest)  # lowest <= highest
    largest *= _skew(summing, rows.weight_unit)
    largest += flushed_products
    convex += largest
    convex[charges.counts > CONVEX_KEYS] = np.inf
    # The division errs by a part of |f| + divided, and the rounding of the result by a part of what that leaves.  The
    # result is formed at half scale, where anything below smallest_normal is flushed.
    divided = np.fmin(numerator, convex, out=convex)
    dividing = 2.0 * device.reciprocal_relative + 3.0 * device.unit_roundoff
    divided *= (1.0 + dividing) * (1.0 + unit)
    exact *= dividing + unit + dividing * unit
    divided += exact
    divided += 2.0 * device.smallest_normal
    return divided


def _skew(summing: np.ndarray, unit: float) -> np.ndarray:
    """(1 + unit)(1 + summing)**2 - 1: numerator and denominator err apart, and P is rounded in one of them only."""
    return unit + (1.0 + unit) * summing * (2.0 + summing)


def _lse_bound(rows: _Rows) -> np.ndarray:
    """In nats: the error of the sum, of the logarithm, and of putting the anchor back."""
    charges, device = rows.charges, rows.charges.device
    flushed = charges.counts * charges.flushed_weight
    beta = rows.weight_errors * (1.0 + charges.summing) + charges.summing + flushed
    of_sum = _log_of_relative(beta)
    # Whatever the scores' errors are, they move the LSE by at most the largest of them.
    alone = np.expm1(LN2 * _shift_error(device)) + device.exp2_relative * math.e
    of_scores = LN2 * rows.sigma + _log_of_relative((1.0 + alone) * (1.0 + charges.summing) - 1.0 + flushed)
    log_size = LN2 * LARGEST_EXPONENT  # ln l lies within [-(BIAS + 2), 125] ln 2
    anchor_size = np.abs(rows.lse) + log_size
    rounding = device.log_relative * log_size + device.log_absolute + 5.0 * device.unit_roundoff * anchor_size
    return (np.fmin(of_sum, of_scores) + rounding) * (1.0 + 4.0 * device.unit_roundoff)


def _log_of_relative(relative: np.ndarray) -> np.ndarray:
    """|ln (1 + e)| for |e| <= relative; infinite from 1 on."""
    return np.where(relative < 1.0, -np.log1p(-np.minimum(relative, 1.0 - 2.0**-53)), np.inf)

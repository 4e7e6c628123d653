"""The numerical contract of static-anchor attention: |kernel - f| <= bound, per element, with no free constant.

The derivation is docs/attention-contract.md; the names below are its names.  The bound holds for the fast path and for
the replay, for any order of summation, and for every rounding that the device model allows.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from verify.attention.problem import widen
from verify.devices import BF16_UNIT_ROUNDOFF, DeviceModel

if TYPE_CHECKING:
    from jaxtyping import Bool, Float64

    from verify.attention.problem import AttentionProblem

LOG2_E = math.log2(math.e)
LN2 = math.log(2.0)

BIAS = 32
"""log2 units: the contract's promise about flushing.  A kernel that flushes more than a bias of 32 does breaks it."""

LARGEST_EXPONENT = 128.0
"""|t| of every exp2 whose result is a normal number."""

DOMAIN_LIMIT = 2.0**127

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
        out: for the output, `[batch, heads, q_len, head_dim]`.
        lse: for the LSE in nats, `[batch, heads, q_len]`.
        inside_domain: rows on which the contract promises something, `[batch, heads, q_len]`.
    """

    out: Float64[np.ndarray, "batch heads q_len head_dim"]
    lse: Float64[np.ndarray, "batch heads q_len"]
    inside_domain: Bool[np.ndarray, "batch heads q_len"]


def gamma(n: np.ndarray | float, u: float) -> np.ndarray | float:
    """e**(n u) - 1 >= |prod (1 + d_i) - 1| for n factors, |d_i| <= u; unlike n u / (1 - n u) it holds for every n."""
    return np.expm1(n * u)


def contract_bound(problem: AttentionProblem, device: DeviceModel, *, rows_per_block: int = 256) -> ContractBound:
    """Evaluate the contract on one problem.

    Memory is bounded by `rows_per_block` rows of scores; cost grows as attention does (a causal row block looks at its
    visible keys only).  Rows outside the domain get an infinite bound and inside_domain False.
    """
    shape = problem.q.shape
    out = np.zeros(shape)
    lse = np.zeros(shape[:3])
    inside = np.ones(shape[:3], dtype=bool)
    k_all, v_all, q_all = (widen(x) for x in (problem.k, problem.v, problem.q))
    for b in range(problem.batch):
        for h in range(problem.heads):
            kv = problem.kv_head(h)
            for start in range(0, problem.q_len, rows_per_block):
                rows = slice(start, min(start + rows_per_block, problem.q_len))
                counts = np.array([problem.visible(row) for row in range(rows.start, rows.stop)])
                keys = int(counts.max(initial=0))
                block = _block_bound(
                    q_all[b, h, rows], k_all[b, kv, :keys], v_all[b, kv, :keys], counts, problem.scale, device
                )
                out[b, h, rows], lse[b, h, rows], inside[b, h, rows] = block
    return ContractBound(out, lse, inside)


@dataclasses.dataclass(frozen=True, eq=False)
class _Rows:
    """Some rows of one head, in float64: K keys, the first `counts[i]` of them visible to row i.

    Attributes:
        counts: visible keys of each row.
        v: values, zeros for what is not finite.
        share: P' of each key: P up to a factor within exp(+-doubt).
        log_share: ln P', which does not underflow.
        sigma: error of each score in log2 units.
        doubt: of ln P', per key or per row.
        lse: natural log.
        device: the machine.
    """

    counts: np.ndarray
    v: np.ndarray
    share: np.ndarray
    log_share: np.ndarray
    sigma: np.ndarray
    doubt: np.ndarray
    lse: np.ndarray
    device: DeviceModel

    @property
    def summing(self) -> np.ndarray:
        """Relative error of a sum over the row in any order: n keys, 128 lanes added up, two products to spare."""
        u = max(self.device.unit_roundoff, self.device.dot_unit_roundoff)
        return np.asarray(gamma(self.counts + 130.0, u))

    @property
    def flushed_weight(self) -> float:
        """What flushing one weight moves, as a share of the row: 2 omega over a sum of at least SUM_FLOOR / 2."""
        return 4.0 * 2.0 ** (BIAS + 2) * self.device.smallest_normal

    @property
    def flushed_products(self) -> np.ndarray:
        """The same for a product p v, the partial sum it enters and a rescaling of that: three omega per key."""
        return 8.0 * 2.0 ** (BIAS + 2) * self.device.smallest_normal * self.counts

    def prefix(self, accumulated: np.ndarray) -> np.ndarray:
        """Rows of an accumulation over keys that end at each row's last visible key."""
        return accumulated[np.maximum(self.counts, 1) - 1]


def _block_bound(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, counts: np.ndarray, scale: float, device: DeviceModel
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bounds for some rows of one head; `counts[i]` keys are visible to row i."""
    empty = counts == 0
    if k.shape[0] == 0:
        return np.zeros((q.shape[0], v.shape[1])), np.zeros(q.shape[0]), np.ones(q.shape[0], dtype=bool)
    visible = np.arange(k.shape[0])[None, :] < counts[:, None]
    with np.errstate(all="ignore"):
        magnitude = np.where(visible, np.abs(q) @ np.abs(k).T, 0.0)
        # A value that is not finite takes only its own lane out of the bound: f is not finite there, and class decides.
        key_finite = np.isfinite(k).all(axis=1)
        pair_ok = (magnitude * max(1.0, abs(scale) * LOG2_E) <= DOMAIN_LIMIT) & key_finite[None, :]
        inside = np.isfinite(q).all(axis=1) & (pair_ok | ~visible).all(axis=1)
        z = q @ k.T
        z *= scale
        z[~visible] = -np.inf
        top = z.max(axis=1, keepdims=True)
        z -= top
        weights = np.exp(z)
        total = weights.sum(axis=1, keepdims=True)
        weights /= total
        z -= np.log(total)
        sigma = _score_error(magnitude, scale, q.shape[1], device)
        doubt = _evaluation_doubt(magnitude, weights, z, scale, q.shape[1])
        lse = (top + np.log(total))[:, 0]
        rows = _Rows(counts, np.where(np.isfinite(v), v, 0.0), weights, z, sigma, doubt, lse, device)
        out_bound = np.where(inside[:, None], _out_bound(rows) * EVALUATION_SLACK, np.inf)
        lse_bound = np.where(inside, _lse_bound(rows) * EVALUATION_SLACK, np.inf)
    return np.where(empty[:, None], 0.0, out_bound), np.where(empty, 0.0, lse_bound), inside | empty


def _score_error(magnitude: np.ndarray, scale: float, head_dim: int, device: DeviceModel) -> np.ndarray:
    """sigma: |computed - exact| of a score in log2 units; `magnitude` is sum_d |q_d k_d| per pair."""
    log2_scale = abs(scale) * LOG2_E
    # head_dim - 1 additions, the rounding of the constant and of the product with it.
    relative = gamma(head_dim, device.dot_unit_roundoff) + gamma(3, device.unit_roundoff) * 1.01
    flushed = (2 * head_dim * log2_scale * 1.01 + 1) * device.smallest_normal
    return log2_scale * relative * magnitude + flushed


def _grown(share: np.ndarray, log_share: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    """At least P' (exp(exponent) - 1); one exponential where it is large, since P' alone may underflow there.

    expm1(x) <= x + x**2 for 0 <= x <= 1.
    """
    if exponent.max() < 1.0:
        return share * (exponent * (1.0 + exponent))
    small = share * (exponent * (1.0 + exponent))
    return np.where(exponent < 1.0, small, np.exp(np.minimum(log_share + exponent, OVERFLOWING)))


def _evaluation_doubt(
    magnitude: np.ndarray, share: np.ndarray, log_share: np.ndarray, scale: float, head_dim: int
) -> np.ndarray:
    """In nats: how far ln P' may be from ln P because the scores and their sum were formed in float64.

    A key's own score, and the normaliser: with computed shares P'_j and errors e_j of the scores, the sum is off by a
    factor of at most 1 + sum_j P'_j (exp(e_j) - 1).  Where every error is tiny, the row's largest stands for all.
    """
    per_pair, constant = (head_dim + 8) * 2.0**-53 * abs(scale), 2.0**-42
    largest = per_pair * magnitude.max(axis=1, keepdims=True) + constant
    if largest.max() < NEGLIGIBLE:
        return 3.0 * largest
    own = per_pair * magnitude + constant
    of_sum = _log_of_relative(_grown(share, log_share, own).sum(axis=1, keepdims=True))
    return own + np.minimum(of_sum, 2.0 * OVERFLOWING)


def _shift_error(device: DeviceModel) -> float:
    """log2 units: t = s - a and t - BIAS are each rounded by u |t|, and |t| <= 128 + BIAS where the weight counts."""
    return device.unit_roundoff * 2 * (LARGEST_EXPONENT + BIAS) + device.smallest_normal


def _shared_weight_error(rows: _Rows) -> np.ndarray:
    """rho_k P_k: by how much a weight that is not flushed may be off, as a share of the row."""
    exponent = LN2 * (rows.sigma + _shift_error(rows.device)) + rows.doubt
    grown, exp2 = _grown(rows.share, rows.log_share, exponent), rows.device.exp2_relative
    if exponent.max() < 1.0:
        return grown + rows.share * (exp2 * math.e)
    return np.where(exponent < 1.0, grown + rows.share * (exp2 * math.e), grown * (1.0 + exp2))


def _doubt_of_exact(rows: _Rows, spread: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """|sum_k P'_k v_k - f|: what float64 shares make of the exact output; never more than the spread of the values."""
    if rows.doubt.shape[1] == 1:
        return np.minimum(rows.doubt * (1.0 + rows.doubt) * largest, spread)
    return np.minimum(_grown(rows.share, rows.log_share, rows.doubt) @ np.abs(rows.v), spread)


def _out_bound(rows: _Rows) -> np.ndarray:
    device, unit = rows.device, BF16_UNIT_ROUNDOFF
    v, abs_v, n = rows.v, np.abs(rows.v), rows.counts.astype(np.float64)[:, None]
    summing = rows.summing[:, None]
    computed = rows.share @ v
    highest, lowest = (rows.prefix(op.accumulate(v, axis=0)) for op in (np.maximum, np.minimum))
    largest = np.maximum(np.abs(highest), np.abs(lowest))
    spread = highest - lowest
    doubt = _doubt_of_exact(rows, spread, largest)
    exact = np.abs(computed) + doubt
    rho_share = _shared_weight_error(rows)
    rounding_p = (1.0 + unit) * (1.0 + summing)
    alpha_share = rho_share * rounding_p + rows.share * (rounding_p - 1.0)
    beta = (rho_share * (1.0 + summing) + rows.share * summing).sum(axis=1, keepdims=True)
    total_v = rows.prefix(np.cumsum(abs_v, axis=0))
    theta = rows.flushed_weight * (total_v + n * exact) + rows.flushed_products[:, None]
    denominator = 1.0 - beta - n * rows.flushed_weight
    numerator = alpha_share @ abs_v + exact * beta + theta
    first_order = np.where(denominator > 0.0, numerator / denominator, np.inf)
    farthest = np.minimum(np.maximum(highest - computed, computed - lowest) + doubt, spread)
    convex = farthest + _skew(summing) * largest + rows.flushed_products[:, None]
    inner = np.fmin(first_order, convex)
    divided = inner + (2.0 * device.reciprocal_relative + 3.0 * device.unit_roundoff) * (exact + inner)
    # The result is formed at half scale, where anything below smallest_normal is flushed.
    return divided + unit * (exact + divided) + 2.0 * device.smallest_normal


def _skew(summing: np.ndarray) -> np.ndarray:
    """(1 + unit)(1 + summing)**2 - 1: numerator and denominator err apart, and P is rounded in one of them only."""
    return BF16_UNIT_ROUNDOFF + (1.0 + BF16_UNIT_ROUNDOFF) * summing * (2.0 + summing)


def _lse_bound(rows: _Rows) -> np.ndarray:
    """In nats: the error of the sum, of the logarithm, and of putting the anchor back."""
    device = rows.device
    flushed = rows.counts * rows.flushed_weight
    beta = (_shared_weight_error(rows) * (1.0 + rows.summing[:, None])).sum(axis=1) + rows.summing + flushed
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

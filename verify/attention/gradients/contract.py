"""The numerical contract of a backward kernel: |kernel - exact| <= bound for dq, dk, dv and the sinks, per element.

The derivation is docs/gradient-contract.md; the names below are its names.  It is for a kernel that forms P anew from
FP32 scores and an FP32 log-sum-exp, multiplies BF16 matrices with FP32 accumulation, rounds P and dS to BF16 before
their products, and keeps delta in FP32; any order of summation.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from verify.attention.contract import DOMAIN_LIMIT, gamma
from verify.attention.gradients import oracle_float64
from verify.attention.gradients.problem import GradientProblem
from verify.devices import BF16_UNIT_ROUNDOFF

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Float64

    from verify.attention.contract import ContractBound
    from verify.attention.gradients.problem import Head
    from verify.attention.gradients.reference import Bounded, Gradients
    from verify.attention.problem import AttentionProblem
    from verify.devices import DeviceModel

DELTAS = ("output", "weights")

ROWS_AT_ONCE = 128

EVALUATION = 2.0**-30
"""What float64 loses of a sum of up to 2**20 products, relative to the sum of their sizes."""

SMALLEST_LOGARITHM = 110.0
"""nats: a weight below exp(-110) is flushed whatever its exponent's roundings are."""


@dataclasses.dataclass(frozen=True)
class Roundings:
    """Where a backward kernel rounds.

    Attributes:
        exponential: relative error of the exponential that makes P.
        weights: unit roundoff of P as it enters dV = P^T dO.
        d_weights: unit roundoff with which dP = dO V^T is kept; 0 if it stays in FP32.
        d_scores: unit roundoff of dS as it enters dQ = dS K and dK = dS^T Q.
        delta: "output": sum of dO times the forward output, rounded as the forward kernel rounds it; "weights": sum of
            P dP.
    """

    exponential: float
    weights: float = BF16_UNIT_ROUNDOFF
    d_weights: float = 0.0
    d_scores: float = BF16_UNIT_ROUNDOFF
    delta: str = "output"

    def __post_init__(self) -> None:
        if self.delta not in DELTAS:
            message = f"delta must be one of {', '.join(DELTAS)}, got {self.delta!r}"
            raise ValueError(message)


@dataclasses.dataclass(frozen=True, eq=False)
class GradientBound:
    """Elementwise bounds on |kernel - exact|; infinite where nothing is promised.

    Attributes:
        dq: `[batch, heads, q_len, head_dim]`.
        dk: `[batch, kv_heads, kv_len, head_dim]`.
        dv: `[batch, kv_heads, kv_len, v_dim]`.
        dsinks: `[heads]`; None for a problem without sinks.
    """

    dq: Float64[np.ndarray, "batch heads q_len head_dim"]
    dk: Float64[np.ndarray, "batch kv_heads kv_len head_dim"]
    dv: Float64[np.ndarray, "batch kv_heads kv_len v_dim"]
    dsinks: Float64[np.ndarray, " heads"] | None

    def parts(self) -> Iterator[tuple[str, np.ndarray]]:
        """The bounds by name."""
        for name in ("dq", "dk", "dv", "dsinks"):
            part = getattr(self, name)
            if part is not None:
                yield name, part


def gradient_bound(
    problem: AttentionProblem,
    d_out: np.ndarray,
    device: DeviceModel,
    forward: ContractBound,
    roundings: Roundings,
    reference: Gradients,
    *,
    d_lse: np.ndarray | None = None,
) -> GradientBound:
    """Evaluate the contract on one backward pass.

    Args:
        problem: the inputs of the forward pass.
        d_out: cotangent of the output, BF16 or FP32 `[batch, heads, q_len, v_dim]`.
        device: numerics of the machine.
        forward: what the forward pass is held to, whose output and LSE (nats) the backward pass reads.
        roundings: where the kernel rounds.
        reference: the derivatives, for their sizes.
        d_lse: cotangent of the natural-log LSE, or None for zero.
    """
    backward = GradientProblem.of(problem, d_out, d_lse)
    found = GradientBound(
        *(np.zeros(x.shape) for x in (problem.q, problem.k, problem.v)),
        dsinks=None if problem.sinks is None else np.zeros(problem.heads),
    )
    sizes = GradientBound(
        *(np.zeros(x.shape) for x in (problem.q, problem.k, problem.v)), dsinks=np.zeros(problem.heads)
    )
    rule = _Rule(device, roundings)
    group = problem.heads // problem.kv_heads
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(problem.batch, problem.heads):
            head = backward.head(b, h)
            for start in range(0, problem.q_len, ROWS_AT_ONCE):
                rows = slice(start, min(start + ROWS_AT_ONCE, problem.q_len))
                _add(found, sizes, head, _terms(head, rows, forward, (b, h), rule), (b, h, h // group, rows))
        counts = {"dq": problem.kv_len, "dk": problem.q_len * group, "dv": problem.q_len * group}
        for name, part in found.parts():
            count = counts.get(name, problem.q_len * problem.batch)
            scale = abs(problem.scale) if name in {"dq", "dk"} else 1.0
            total = rule.total(part, getattr(sizes, name), count, scale)
            part[...] = total if name == "dsinks" else rule.rounded(total, getattr(reference, name))
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class _Terms:
    """What a block of rows may add: errors and sizes of the terms, 0 where masked."""

    weights: np.ndarray
    weights_error: np.ndarray
    ds: np.ndarray
    ds_error: np.ndarray
    dsink: np.ndarray
    dsink_error: np.ndarray


def _add(
    found: GradientBound, sizes: GradientBound, head: Head, terms: _Terms, at: tuple[int, int, int, slice]
) -> None:
    """Sums of |term| and of the terms' errors, for every element that the rows add to."""
    batch, h, kv_head, rows = at
    q, k, d_out = np.abs(head.q[rows]), np.abs(head.k), np.abs(head.d_out[rows])
    for part, ds, weights in ((found, terms.ds_error, terms.weights_error), (sizes, terms.ds, terms.weights)):
        part.dq[batch, h, rows] = _product(ds, k)
        part.dk[batch, kv_head] += _product(ds.T, q)
        part.dv[batch, kv_head] += _product(weights.T, d_out)
    if found.dsinks is not None and sizes.dsinks is not None:
        found.dsinks[h] += terms.dsink_error.sum()
        sizes.dsinks[h] += terms.dsink.sum()


def _product(errors: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """A product in which an infinite error stays infinite, also times 0."""
    unknown = ~np.isfinite(errors)
    if not unknown.any():
        return errors @ numbers
    known = np.where(unknown, 0.0, errors) @ numbers
    return np.where(unknown.any(axis=1)[:, None], np.inf, known)


def _terms(head: Head, rows: slice, forward: ContractBound, at: tuple[int, int], rule: _Rule) -> _Terms:
    seen = head.seen(rows)
    d_out, v, d_lse = head.d_out[rows], head.v, np.abs(head.d_lse[rows])[:, None]
    largest = oracle_float64.largest_weights(head, rows)
    weights = largest.most
    out_bound, lse_bound = forward.out[at][rows], forward.lse[at][rows][:, None]
    of_logits, tangent = rule.logit_error(head, rows)
    weights_error = rule.weight_error(largest, of_logits, lse_bound)
    dp, reach = d_out @ v.T, np.abs(d_out) @ np.abs(v).T
    alpha = rule.product_error(np.abs(dp), reach, v.shape[1])
    delta = (largest.weights * dp).sum(axis=1, keepdims=True)
    doubt = EVALUATION * ((weights * reach).sum(axis=1, keepdims=True) + reach + d_lse)
    doubt += (largest.error * np.abs(dp)).sum(axis=1, keepdims=True)
    most_dp = np.abs(dp) + EVALUATION * reach
    of_delta = rule.delta_error(d_out, v, out_bound, weights, weights_error, most_dp, alpha)
    middle = np.abs(delta) + doubt.max(axis=1, initial=0.0, keepdims=True)
    u, tiny = rule.device.unit_roundoff, rule.device.smallest_normal
    beta = alpha + of_delta + 4.0 * u * (most_dp + alpha + middle + of_delta + d_lse) + 2.0 * tiny
    size = np.abs(dp - delta + head.d_lse[rows][:, None]) + doubt
    ds = weights * size
    error = (weights + weights_error) * beta + weights_error * size
    error += 2.0 * u * (weights + weights_error) * (size + beta) + tiny
    if head.softcap is not None:
        slope, slope_error = 1.0 - tangent.value**2, tangent.slope_error
        error = error * np.minimum(slope + slope_error, 1.0) + ds * slope_error
        ds = ds * np.minimum(slope + EVALUATION, 1.0)
        error += 4.0 * u * (ds + error) + tiny
    error += rule.roundings.d_scores * (ds + error) + 2.0 * tiny
    known = forward.inside_domain[at][rows][:, None]
    inside = known & (reach.max(axis=1, initial=0.0, keepdims=True, where=seen) <= DOMAIN_LIMIT)
    rounded = weights_error + rule.roundings.weights * (weights + weights_error) + 2.0 * tiny
    sink, sink_error = rule.sink(head, largest, lse_bound[:, 0], middle[:, 0] + d_lse[:, 0], of_delta[:, 0])
    reaches = seen.any(axis=1) if head.sink == -math.inf else np.ones(len(seen), dtype=bool)
    unknown = ~inside[:, 0] & reaches
    return _Terms(
        np.where(seen, weights, 0.0),
        np.where(seen, np.where(known, rounded, np.inf), 0.0),
        np.where(seen, ds, 0.0),
        np.where(seen, np.where(inside, error, np.inf), 0.0),
        sink,
        np.where(unknown, np.inf, sink_error),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Tangent:
    """|tanh(s / softcap)|, and what 1 - tanh^2 may be off by in the kernel."""

    value: np.ndarray
    slope_error: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Rule:
    """The machine and the kernel's roundings."""

    device: DeviceModel
    roundings: Roundings

    @property
    def u(self) -> float:
        """Of one addition, wherever it stands."""
        return max(self.device.unit_roundoff, self.device.dot_unit_roundoff)

    def logit_error(self, head: Head, rows: slice) -> tuple[np.ndarray, _Tangent]:
        """nats: |kernel's logit - exact|; sections 3 and 9 of the forward contract."""
        device, width = self.device, head.q.shape[1]
        scale, magnitude = abs(head.scale), np.abs(head.q[rows]) @ np.abs(head.k).T
        relative = gamma(width, device.dot_unit_roundoff) + 1.01 * gamma(4, device.unit_roundoff)
        error = scale * magnitude * relative + (3.0 * width * scale + 2.0) * device.smallest_normal
        if head.softcap is None:
            return error, _Tangent(np.zeros(0), np.zeros(0))
        cap = head.softcap
        argument = scale * np.abs(head.q[rows] @ head.k.T) / cap
        tangent = np.tanh(argument)
        constants = 1.01 * float(gamma(3, device.unit_roundoff))
        apart = (error + constants * (scale * magnitude + error)) / cap + 2.0 * device.smallest_normal
        steepest = np.minimum(1.0, 4.0 * np.exp(-2.0 * np.maximum(argument - apart, 0.0)))
        moved = np.minimum(apart * steepest, 2.0)
        own = (1.0 + device.tanh_relative) * (1.0 + float(gamma(4, device.unit_roundoff))) - 1.0
        of_tangent = moved + own * (tangent + moved) + 1.01 * device.tanh_absolute
        capped = cap * of_tangent + 2.0 * (1.0 + cap) * device.smallest_normal
        slope = of_tangent * (2.0 * tangent + of_tangent) + 3.0 * device.unit_roundoff
        return capped, _Tangent(tangent, np.minimum(slope, 1.0))

    def weight_error(self, largest: oracle_float64.Weights, of_logits: np.ndarray, lse_bound: np.ndarray) -> np.ndarray:
        """|P^ - P| of the weights as they are formed in FP32 from logits and an LSE."""
        u, tiny = self.device.unit_roundoff, self.device.smallest_normal
        shift = u * (2.0 * SMALLEST_LOGARITHM + 4.0 * np.abs(largest.lse)[:, None]) + tiny
        exponent = of_logits + lse_bound + shift
        relative = np.expm1(exponent) + np.exp(exponent) * self.roundings.exponential
        relative += 4.0 * u * (1.0 + relative)
        return largest.most * relative + 4.0 * tiny

    def product_error(self, size: np.ndarray, reach: np.ndarray, width: int) -> np.ndarray:
        """alpha: |dP^ - dP|."""
        tiny = self.device.smallest_normal
        error = reach * (float(gamma(width, self.device.dot_unit_roundoff)) + 2.0 * self.device.unit_roundoff)
        error += (2.0 * width + 1.0) * tiny
        return error + self.roundings.d_weights * (size + EVALUATION * reach + error) + tiny

    def delta_error(
        self,
        d_out: np.ndarray,
        v: np.ndarray,
        out_bound: np.ndarray,
        weights: np.ndarray,
        weights_error: np.ndarray,
        most_dp: np.ndarray,
        alpha: np.ndarray,
    ) -> np.ndarray:
        """|delta^ - delta| per row, by the way that the kernel takes."""
        tiny = self.device.smallest_normal
        if self.roundings.delta == "output":
            most = weights @ np.abs(v) + out_bound
            summing = float(gamma(v.shape[1] + 2, self.u))
            error = np.abs(d_out) * (out_bound + summing * most) + 2.0 * tiny
        else:
            summing = float(gamma(weights.shape[1] + 10, self.u))
            error = weights_error * (most_dp + alpha) + weights * alpha
            error += summing * (weights + weights_error) * (most_dp + alpha) + 2.0 * tiny
        return error.sum(axis=1, keepdims=True)

    def sink(
        self,
        head: Head,
        largest: oracle_float64.Weights,
        lse_bound: np.ndarray,
        middle: np.ndarray,
        of_delta: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Size and error of each row's share of the sink's derivative."""
        if head.sink == -math.inf:
            return np.zeros(len(middle)), np.zeros(len(middle))
        u, tiny = self.device.unit_roundoff, self.device.smallest_normal
        most = largest.sink
        shift = u * (4.0 * abs(head.sink) + 2.0 * SMALLEST_LOGARITHM + 4.0 * np.abs(largest.lse)) + tiny
        exponent = lse_bound + shift
        error = most * (np.expm1(exponent) + np.exp(exponent) * self.roundings.exponential) + 4.0 * (u * most + tiny)
        beta = of_delta + 3.0 * u * (middle + of_delta) + tiny
        return most * middle, (most + error) * beta + error * middle + 2.0 * u * (most + error) * (middle + beta) + tiny

    def total(self, error: np.ndarray, size: np.ndarray, count: int, scale: float) -> np.ndarray:
        """The sum's own roundings, and the scale's; infinite beyond FP32's range."""
        tiny, summing = self.device.smallest_normal, float(gamma(count + 8, self.u))
        most = (size + error) * scale
        total = error * scale + summing * most + (3.0 * count + 4.0) * (1.0 + scale) * tiny
        beyond = ~(np.maximum(most, size + error) * (1.0 + summing) <= DOMAIN_LIMIT)
        return np.where(beyond, np.inf, total * (1.0 + 2.0**-20))

    def rounded(self, total: np.ndarray, exact: Bounded) -> np.ndarray:
        """With the rounding of the result to BF16; what is undefined keeps a finite bound that nobody asks for."""
        size = np.where(np.isnan(exact.value), 0.0, np.abs(exact.value) + exact.error)
        return (total + BF16_UNIT_ROUNDOFF * (size + total) + 2.0 * self.device.smallest_normal) * (1.0 + 2.0**-20)

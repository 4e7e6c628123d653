"""What a device may make of convolution, activations, norms and gates: errors of the delta rule's inputs, elementwise.

docs/gdn-contract.md, section 3.  Values come from the float64 stages; their own errors are added.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from verify.gdn.float64_stages import SILU_SLOPE, Approx, convolution, log_decay, norms, rule_inputs, sigmoid, silu
from verify.gdn.inverse_levels import SPLIT_UNIT, half_spacing
from verify.gdn.layout import convolved_rows, finite, numeric
from verify.gdn.problem import BF16, DeltaRuleProblem, GdnProblem

if TYPE_CHECKING:
    from verify.devices import DeviceModel
    from verify.gdn.problem import Problem
    from verify.gdn.steps import ChunkSteps

LARGEST_FP32 = 2.0**128
LARGEST_SQUARES = 2.0**127
"""Beyond it, a sum of squares may overflow in FP32: outside the domain."""


@dataclasses.dataclass(frozen=True, eq=False)
class FrontBound:
    """The delta rule's inputs (exact), and how far a device's FP32 values may be from them.

    Attributes:
        q, k: `[tokens, n_kq, d_k]`; q without the scale.
        v: `[tokens, n_v, d_v]`.
        beta: `[tokens, n_v]`.
        g: `[tokens, n_v]` or `[tokens, n_v, d_k]`, nats.
        unit_keys: the exact keys have norms of at most 1 and beta lies in [0, 2].
        inside: `[tokens, n_kq]`, sums of squares do not overflow.
    """

    q: Approx
    k: Approx
    v: Approx
    beta: Approx
    g: Approx
    unit_keys: bool
    inside: np.ndarray


def gamma(n: float, u: float) -> float:
    """e**(n u) - 1 >= |prod (1 + d_i) - 1| for n factors, |d_i| <= u."""
    return float(np.expm1(n * u))


def front(problem: Problem, sequence: int, steps: ChunkSteps, device: DeviceModel) -> FrontBound:
    """Everything before the recurrence, for one sequence."""
    exact = rule_inputs(problem, sequence)
    if isinstance(problem, DeltaRuleProblem):
        inside = np.ones(exact.k.value.shape[:2], dtype=bool)
        return FrontBound(exact.q, exact.k, exact.v, exact.beta, exact.g, exact.unit_keys, inside)
    u, span = device.unit_roundoff, problem.sequences.span(sequence)
    y = _convolution(problem, sequence, steps, device)
    z = _silu(y, steps.silu, device) if problem.activation == "silu" else y
    (q, k, v), (dq, dk, dv) = problem.split(z.value), problem.split(z.error)
    queries, keys = Approx(q, dq), Approx(k, dk)
    squares = np.maximum(*(norms(np.abs(x.value) + x.error, -1) for x in (queries, keys))) ** 2
    if problem.norm_eps is not None:
        queries, keys = (_l2norm(x, problem.norm_eps, device) for x in (queries, keys))
    logits = sigmoid(numeric(problem.b[span]))
    own = (device.sigmoid_relative + 3 * u) * logits.value + device.smallest_normal
    of_beta = abs(problem.beta_scale) * (logits.error + own) + device.smallest_normal  # the product may be flushed
    beta = Approx(problem.beta_scale * logits.value, of_beta)
    g = _log_decay(problem, span, device)
    return FrontBound(
        _plus(queries, exact.q),
        _plus(keys, exact.k),
        _plus(Approx(v, dv), exact.v),
        _plus(beta, exact.beta),
        _plus(g, exact.g),
        exact.unit_keys,
        squares <= LARGEST_SQUARES,
    )


def _plus(found: Approx, exact: Approx) -> Approx:
    return Approx(exact.value, found.error + exact.error)


def _convolution(problem: GdnProblem, sequence: int, steps: ChunkSteps, device: DeviceModel) -> Approx:
    rows, taps = convolved_rows(problem, sequence), np.abs(finite(problem.taps))
    exact = convolution(rows, problem)
    size = np.zeros_like(exact.value)
    rounded = np.zeros_like(size)
    whole = problem.taps.dtype == BF16 and problem.qkv.dtype == BF16
    for tap, weights in enumerate(taps):
        terms = np.abs(rows[tap : tap + len(size)]) * weights
        size += terms
        if steps.convolution == "bf16":
            rounded += half_spacing(terms)
        elif not whole:  # a product of more than 16 bits is no sum of two BF16 numbers
            rounded += SPLIT_UNIT * terms
    if problem.bias is not None:
        size += np.abs(finite(problem.bias))
    summing = gamma(2 * problem.width + 1, max(device.dot_unit_roundoff, device.unit_roundoff))
    flushed = (2 * problem.width + 1) * device.smallest_normal
    return Approx(exact.value, exact.error + rounded + summing * (size + rounded) + flushed)


def _silu(y: Approx, form: str, device: DeviceModel) -> Approx:
    u, omega = device.unit_roundoff, device.smallest_normal
    exact = silu(Approx.exact(y.value))
    moved = silu(y).error  # slope times error, and float64's own
    size = np.abs(y.value) + y.error
    near = np.abs(exact.value) + moved
    if form == "sigmoid":
        own = (device.sigmoid_relative + 3 * u) * near
    else:
        # 1 + tanh may cancel: its error is absolute, and is multiplied by y / 2.
        tangent = np.tanh(size / 2)
        own = 0.5 * size * ((device.tanh_relative + u) * tangent + device.tanh_absolute) + 3 * u * near
    return Approx(exact.value, moved + own + omega * (1.0 + SILU_SLOPE * size))


def _l2norm(z: Approx, eps: float, device: DeviceModel) -> Approx:
    """x rsqrt(sum x^2 + eps), by the slopes of the exact map; q is scaled later."""
    u, omega, d = device.unit_roundoff, device.smallest_normal, z.value.shape[-1]
    x = np.abs(z.value)
    squares = np.einsum("...d,...d->...", x, x)[..., None]
    moved = norms(z.error, -1)[..., None]
    nearest = np.maximum(np.sqrt(squares) - moved, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        steepest = 1.0 / np.sqrt(nearest**2 + eps)
        inverse = np.where(squares + eps > 0.0, 1.0 / np.sqrt(squares + eps), 0.0)
        # Squares below the smallest normal number may be flushed, d of them and their sums.
        relative = device.rsqrt_relative + 0.51 * gamma(d + 2, u) + 3 * u + 2 * d * omega * steepest**2  # a root
        error = z.error * steepest + x * moved * steepest**2
        error = error * (1.0 + relative) + x * inverse * relative + omega
    return Approx(z.value * inverse, np.minimum(np.where(np.isnan(error), np.inf, error), 3.0))


def _log_decay(problem: GdnProblem, span: slice, device: DeviceModel) -> Approx:
    """-exp(a_log) softplus(a + dt_bias), however it is formed: each factor within its relative error.

    As exp(a_log + ln softplus), the logarithm's own error and the sum's rounding are in proportion to its size.
    """
    u = device.unit_roundoff
    exact = log_decay(problem, span)
    x = numeric(problem.a[span]) + finite(problem.dt_bias)
    # What rounding x does to softplus, relatively: u |x| where it is exponential, u where it is x itself.
    reach = np.where(x < 0, np.where(np.isinf(x), 0.0, np.abs(x)), 1.0)
    shape = (-1,) + (1,) * (problem.a.ndim - 2)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        a_log = np.abs(finite(problem.a_log)).reshape(shape)
        softplus = device.exp_relative + device.log_relative + device.log_absolute + 4 * u
        logarithm = np.abs(np.log(np.logaddexp(0.0, np.minimum(x, LARGEST_FP32))))
        logarithm = np.where(np.isfinite(logarithm), logarithm, 0.0)  # softplus is 0 in float64
        reach = np.maximum(reach, logarithm)
        exponent = u * (3 * reach + 3 * a_log) + device.log_relative * logarithm + device.log_absolute
        relative = np.expm1(exponent + 2 * device.exp_relative + softplus + 4 * u)
        size = np.where(np.isinf(exact.value), 0.0, np.abs(exact.value))
        return Approx(exact.value, exact.error + size * relative + device.smallest_normal * (size > 0))

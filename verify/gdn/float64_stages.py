"""From the kernel's inputs to what the delta rule reads, in float64, each value with a proved error.

The derivation is docs/gdn-oracle-bounds.md; lemma numbers are those of that page.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from verify.gdn.layout import convolved_rows, finite, numeric
from verify.gdn.problem import DeltaRuleProblem, GdnProblem

if TYPE_CHECKING:
    from jaxtyping import Float64

    from verify.gdn.problem import Problem

UNIT = 2.0**-53
TINY = 2.0**-400
"""Stands for what underflow may cost; far above it, since products of numbers near it are slow, and far below FP32."""
FUNCTION_ERROR = 4.004 * UNIT
"""Relative error of numpy's exp, log and log1p in terms of the computed value: 2 ulp (tested)."""
SIGMOID_ERROR = 14 * UNIT
SILU_ERROR = 16 * UNIT
SILU_SLOPE = 1.1
"""The largest slope of x / (1 + exp(-x)) is 1.0998."""
LEAST_SQUARES = 2.0**-900
"""Below it, underflow decides what a sum of squares is."""
SLACK = 1.0 + 2.0**-20
"""Covers the rounding of a bound's own evaluation in float64: sums of fewer than 2**30 non-negative terms."""


def gamma(n: int) -> float:
    """n u / (1 - n u)."""
    return n * UNIT / (1.0 - n * UNIT)


def norms(x: np.ndarray, axis: int) -> np.ndarray:
    """At least the Euclidean norms along an axis, also where squares underflow."""
    return roots((x * x).sum(axis=axis))


def roots(squares: np.ndarray) -> np.ndarray:
    """At least the square roots of sums of squares; sums below LEAST_SQUARES may be anything below it."""
    return np.where(squares < LEAST_SQUARES, 2.0**-450, np.sqrt(squares)) * (1.0 + 2.0**-40)


@dataclasses.dataclass(frozen=True, eq=False)
class Approx:
    """Numbers with a bound of their errors, elementwise."""

    value: np.ndarray
    error: np.ndarray

    @classmethod
    def exact(cls, value: np.ndarray) -> Approx:
        """Numbers that are what they are."""
        return cls(value, np.zeros_like(value))


@dataclasses.dataclass(frozen=True, eq=False)
class RuleInputs:
    """What the delta rule reads for one sequence.

    Attributes:
        q, k: `[tokens, n_kq, d_k]`.
        v: `[tokens, n_v, d_v]`.
        beta: `[tokens, n_v]`.
        g: log-decay in nats, `[tokens, n_v]` or `[tokens, n_v, d_k]`; zeros without decay.
        unit_keys: the exact keys have norms of at most 1 and beta lies in [0, 2].
    """

    q: Approx
    k: Approx
    v: Approx
    beta: Approx
    g: Approx
    unit_keys: bool


def rule_inputs(problem: Problem, sequence: int) -> RuleInputs:
    """Everything before the recurrence, for one sequence."""
    span = problem.sequences.span(sequence)
    if isinstance(problem, DeltaRuleProblem):
        q, k, v, beta = (Approx.exact(finite(x[span])) for x in (problem.q, problem.k, problem.v, problem.beta))
        decay = np.zeros((len(q.value), problem.n_v)) if problem.g is None else numeric(problem.g[span])
        return RuleInputs(q, k, v, beta, Approx.exact(decay), unit_keys=False)
    y = convolution(convolved_rows(problem, sequence), problem)
    z = silu(y) if problem.activation == "silu" else y
    (q, k, v), (dq, dk, dv) = problem.split(z.value), problem.split(z.error)
    queries, keys = Approx(q, dq), Approx(k, dk)
    if problem.norm_eps is not None:
        queries, keys = (l2norm(x, problem.norm_eps) for x in (queries, keys))
    beta = sigmoid(numeric(problem.b[span]))
    scaled = Approx(
        problem.beta_scale * beta.value,
        abs(problem.beta_scale) * (beta.error + 2 * UNIT * beta.value) + TINY,
    )
    unit = problem.norm_eps is not None and 0.0 <= problem.beta_scale <= 2.0
    return RuleInputs(queries, keys, Approx(v, dv), scaled, log_decay(problem, span), unit_keys=unit)


def convolution(rows: Float64[np.ndarray, "tokens_plus_width_minus_1 dim"], problem: GdnProblem) -> Approx:
    """Lemma 2: products of 24-bit numbers are exact, the sum of `width` products and the bias is rounded."""
    taps = finite(problem.taps)
    tokens = len(rows) - problem.width + 1
    bias = np.zeros(rows.shape[1]) if problem.bias is None else finite(problem.bias)
    value = np.tile(bias, (tokens, 1))
    size = np.abs(value)
    for tap, weights in enumerate(taps):
        terms = rows[tap : tap + tokens] * weights
        value += terms
        size += np.abs(terms)
    return Approx(value, gamma(problem.width + 1) * size * SLACK)


def sigmoid(x: Float64[np.ndarray, "*shape"]) -> Approx:
    """Lemma 3: 1 / (1 + exp(-x)) of exact numbers, infinities included."""
    value = _sigmoid(x)
    return Approx(value, SIGMOID_ERROR * value + TINY)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def silu(y: Approx) -> Approx:
    """Lemma 4."""
    x, error = y.value, y.error
    s = _sigmoid(x)
    value = x * s
    slope = np.minimum(SILU_SLOPE, s * np.exp(np.minimum(error, 1.0)) * (1.0 + np.abs(x) + error))
    slope = np.where((x < 0) & (error < 1.0), slope, SILU_SLOPE)
    return Approx(value, (slope * error + SILU_ERROR * np.abs(value) + TINY * (1.0 + np.abs(x))) * SLACK)


def l2norm(z: Approx, eps: float) -> Approx:
    """Lemma 5: z / sqrt(sum z^2 + eps) along the last axis; the zero vector stays zero."""
    x = z.value
    squares = np.einsum("...d,...d->...", x, x)[..., None]
    with np.errstate(divide="ignore"):
        inverse = 1.0 / np.sqrt(squares + eps)
    inverse = np.where(np.isfinite(inverse), inverse, 0.0)
    value = x * inverse
    moved = np.where(z.error.any(axis=-1), norms(z.error, -1), 0.0)[..., None]
    nearest = np.maximum(np.sqrt(squares) * (1.0 - 2.0**-40) - moved, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        steepest = 1.0 / np.sqrt(nearest**2 + eps)
        error = z.error * steepest + np.abs(x) * moved * steepest**2
    error = np.where(moved == 0.0, 0.0, np.where(np.isnan(error), np.inf, error))
    error = error + gamma(x.shape[-1] + 6) * np.abs(value) + TINY
    lost = (squares + eps < LEAST_SQUARES) & ((squares > 0.0) | (np.abs(x).max(axis=-1, keepdims=True) > 0.0))
    error = np.where(lost, np.inf, error)
    return Approx(value, np.minimum(error * SLACK, 2.0))  # both lie in [-1, 1]


def log_decay(problem: GdnProblem, span: slice) -> Approx:
    """Lemma 6: -exp(a_log) softplus(a + dt_bias), through the logarithm, so that neither factor overflows."""
    shape = (-1,) + (1,) * (problem.a.ndim - 2)
    a_log = finite(problem.a_log).reshape(shape)
    x = numeric(problem.a[span]) + finite(problem.dt_bias)
    size = np.abs(x)
    small = np.exp(-size)
    softplus = np.log1p(small) + np.maximum(x, 0.0)
    with np.errstate(divide="ignore"):
        logarithm = np.where(x < FAR, x, np.log(softplus))
    # ln softplus has a slope of at most 1; what is dropped below FAR is less than exp(FAR).
    doubt = UNIT * np.where(x < 0, size, 1.0) + 16 * UNIT
    total = a_log + logarithm
    doubt = doubt + UNIT * (np.abs(logarithm) * 5 + np.abs(total) * 2)
    doubt = np.where(np.isnan(total), np.inf, doubt)
    with np.errstate(over="ignore", invalid="ignore"):
        value = -np.exp(total)
        error = -value * (np.expm1(np.minimum(doubt, 700.0)) + 2 * FUNCTION_ERROR) + TINY
        settled = np.isinf(x) | (np.isinf(value) & (total - doubt > SURELY_RESET))
    value = np.where(np.isinf(x), np.where(x > 0, -np.inf, 0.0), value)
    return Approx(value, np.where(settled, 0.0, np.where(np.isnan(error), np.inf, error) * SLACK))


FAR = -40.0
SURELY_RESET = 7.0
"""exp(7) = 1096 nats: a decay of less than 2**-1500, which TINY covers."""


def decay_of(g: Approx) -> Approx:
    """Lemma 7: exp(g) <= 1."""
    value = np.exp(g.value)
    with np.errstate(invalid="ignore"):
        above = np.exp(np.minimum(g.value + g.error, 0.0))
        below = np.exp(g.value - g.error)
    error = np.where(np.isneginf(g.value) & (g.error == 0.0), 0.0, above - below + 16 * UNIT * above)
    error = np.where((g.value == 0.0) & (g.error == 0.0), 0.0, error)
    error = np.where(np.isnan(error), 1.0, np.minimum(error, 1.0))
    return Approx(
        value, np.where(np.isneginf(g.value) & (g.error == 0.0), TINY, error + np.where(error > 0, TINY, 0.0))
    )

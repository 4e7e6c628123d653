"""Whether errors lean to one side, or are larger than roundings may be on average.

A kernel whose roundings are biased passes every max-error test and still ruins training.  Two statistics of errors e_i
normalised by their bound (or by half an ulp) show it; each has a false-alarm rate that is proved, for any number of
elements, under a stated hypothesis about a correct kernel.

**Sum.**  Elements of one row share roundings (of its weights, of its sum), so the rows are the independent units: let
S_r be the sum of the errors of row r.  Hypothesis: given their sizes, the signs of the S_r are independent and fair
(round-to-nearest on data without structure; rows that repeat each other break it, and so do problems in which
every rounding is a tie).  By Hoeffding's inequality for fair signs,

    P(|sum_r S_r| >= t sqrt(sum_r S_r^2)) <= 2 exp(-t^2 / 2),

whatever the sizes (a self-normalised sum; Efron, "Student's t-test under symmetry conditions", 1969).

**Sum of squares**, for errors normalised by their bound, hence in [-1, 1].  A bound is a sum of half-widths b_j of
single roundings.  Hypothesis: roundings are uncorrelated, have mean 0, and vary no more than the uniform distribution
on their interval (variance b_j^2 / 3); then E e^2 <= sum b_j^2 / (3 (sum b_j)^2) <= 1/3.  Row means M_r of e^2 lie in
[0, 1] and, rows being independent, Chernoff's bound in Hoeffding's form gives for x > 1/3 and n rows

    P(mean_r M_r >= x) <= exp(-n KL(x || 1/3)),    KL(x || p) = x ln(x / p) + (1 - x) ln((1 - x) / (1 - p)).

Each statistic gets half of the false-alarm rate.  An alarm is evidence, never a verdict of its own: the hypotheses are
about data, and adversarial cases break them on purpose.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float64, Int

    from verify.measures import Worst

FALSE_ALARM_RATE = 1e-9
UNIFORM_VARIANCE = 1.0 / 3.0


@dataclasses.dataclass(frozen=True)
class Bias:
    """Statistics of normalised errors; see the module docstring.

    Attributes:
        normalised_by: "bound" or "half an ulp".
        elements: how many errors.
        rows: how many independent rows they form.
        total: sum of the normalised errors.
        squares: sum of their squares.
        lean: |sum of row sums| / sqrt(sum of squared row sums), without a unit.
        lean_limit: what `lean` stays below for an unbiased kernel.
        mean_square: mean over rows of the row's mean squared error.
        mean_square_limit: what `mean_square` stays below; inf where the statistic does not apply (half an ulp).
        false_alarm_rate: probability that either alarm is raised on a kernel that meets the hypotheses, at most.
        worst: the element with the largest normalised error in size, with its sign (None from `bias` alone, which
            does not see the elements).
    """

    normalised_by: str
    elements: int
    rows: int
    total: float
    squares: float
    lean: float
    lean_limit: float
    mean_square: float
    mean_square_limit: float
    false_alarm_rate: float
    worst: Worst | None = None

    @property
    def alarm(self) -> bool:
        """Whether either statistic is beyond its limit."""
        return not (self.lean < self.lean_limit and self.mean_square < self.mean_square_limit)


def bias(
    normalised: Float64[np.ndarray, " n"],
    rows: Int[np.ndarray, " n"],
    *,
    normalised_by: str,
    false_alarm_rate: float = FALSE_ALARM_RATE,
) -> Bias:
    """Statistics of finite normalised errors, of which equal `rows` mark those of one row (in ascending order).

    Raises:
        ValueError: no errors, errors that are not finite, or a false-alarm rate outside (0, 1).
    """
    if not 0.0 < false_alarm_rate < 1.0:
        message = f"false_alarm_rate must lie between 0 and 1, got {false_alarm_rate}"
        raise ValueError(message)
    if normalised.size == 0 or not np.isfinite(normalised).all():
        message = f"normalised must hold finite errors, got {normalised.size} errors"
        raise ValueError(message)
    starts = np.concatenate([[0], np.flatnonzero(rows[1:] != rows[:-1]) + 1])
    sums = np.add.reduceat(normalised, starts)
    squares = normalised * normalised
    row_squares = np.add.reduceat(squares, starts)
    sizes = np.diff(starts, append=normalised.size)
    norm = math.sqrt(float(np.dot(sums, sums)))
    total = float(sums.sum())
    half_rate = false_alarm_rate / 2.0
    bounded = normalised_by == "bound"
    return Bias(
        normalised_by=normalised_by,
        elements=normalised.size,
        rows=len(starts),
        total=total,
        squares=float(row_squares.sum()),
        lean=abs(total) / norm if norm > 0.0 else 0.0,
        lean_limit=math.sqrt(2.0 * math.log(2.0 / half_rate)),
        mean_square=float((row_squares / sizes).mean()),
        mean_square_limit=_mean_square_limit(len(starts), half_rate) if bounded else math.inf,
        false_alarm_rate=false_alarm_rate,
    )


@functools.lru_cache(maxsize=256)
def _mean_square_limit(rows: int, rate: float) -> float:
    """The x > 1/3 with exp(-rows KL(x || 1/3)) = rate; inf if even x = 1 is likelier than that."""
    budget = -math.log(rate) / rows
    if _divergence(1.0) < budget:
        return math.inf
    low, high = UNIFORM_VARIANCE, 1.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _divergence(middle) < budget else (low, middle)
    return high


def _divergence(x: float) -> float:
    """KL(x || 1/3) in nats."""
    rest = 1.0 - x
    return x * math.log(x / UNIFORM_VARIANCE) + (
        rest * math.log(rest / (1.0 - UNIFORM_VARIANCE)) if rest > 0.0 else 0.0
    )

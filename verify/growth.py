"""Growth over tokens: whether errors rise with the position of a row, as accumulated rounding does and noise does not.

The worst share of the bound of each row (or the worst error in half ulps, without a bound) is fitted by least squares
as share = a * position**slope, on logarithms.  A bound that grows as the error may grow gives a slope near 0; an error
that accumulates faster than its bound gives a positive one.  The slope's standard error says how much is chance.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from verify.measures import SIGNIFICANT_BITS, compared_bound, half_ulps, shares

if TYPE_CHECKING:
    from jaxtyping import Float64

    from verify.measures import Errors, Worst

FEWEST_ROWS = 3
CERTAIN_ERRORS = 5.0
"""Standard errors by which a slope must be positive to count (see the ledger)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Growth:
    """How errors depend on the row.

    Attributes:
        rows: positions with an error above 0, ascending; the first row has position 1.
        profile: the largest normalised error at each of them.
        normalised_by: "bound" or "half an ulp".
        slope: exponent of the position, NaN with fewer than three rows or one position.
        standard_error: of the slope, from the scatter of the logarithms.
        worst: where the normalised error is largest: index, both values, exact bits.
    """

    rows: np.ndarray
    profile: Float64[np.ndarray, " rows"]
    normalised_by: str
    slope: float
    standard_error: float
    worst: Worst

    @property
    def certain(self) -> bool:
        """The slope is positive by more than five standard errors: chance alone does it once in 3.5 million fits."""
        return self.slope > CERTAIN_ERRORS * self.standard_error

    def __str__(self) -> str:
        text = f"error ~ position^{self.slope:.2f} (+- {self.standard_error:.2f}), in units of {self.normalised_by}"
        return f"{text}, worst at {self.worst}"


def growth(found: Errors, bound: Float64[np.ndarray, "*shape"] | None = None, *, axis: int = 2) -> Growth:
    """Fit the growth of elementwise errors along the token axis.

    Args:
        found: the errors; pairs that differ in class count as worst, and are left out of the fit.
        bound: what they may be, of the shape of the compared arrays; None measures in half ulps.
        axis: the token axis of the compared arrays.

    Raises:
        ValueError: there is no such axis.
        ComparisonError: the bound has another shape.
    """
    if not 0 <= axis < len(found.shape):
        message = f"axis must be one of 0..{len(found.shape) - 1}, got {axis}"
        raise ValueError(message)
    if bound is None:
        normalised = found.spread(found.absolute / half_ulps(found.want, SIGNIFICANT_BITS[found.got.dtype]))
    else:
        normalised = shares(found, compared_bound(found, bound))
    flat = np.arange(found.got.size) if found.where is None else found.where
    position = np.unravel_index(flat, found.shape)[axis]
    usable = np.isfinite(normalised)
    profile = np.zeros(found.shape[axis])
    np.maximum.at(profile, position[usable], normalised[usable])
    rows = np.flatnonzero(profile) + 1
    slope, standard_error = _fit(rows.astype(np.float64), profile[rows - 1])
    named = "half an ulp" if bound is None else "bound"
    return Growth(rows, profile[rows - 1], named, slope, standard_error, found.worst(normalised))


def _fit(position: np.ndarray, size: np.ndarray) -> tuple[float, float]:
    """Slope of log size over log position, and its standard error."""
    if position.size < FEWEST_ROWS:
        return math.nan, math.nan
    x, y = np.log(position), np.log(size)
    centred = x - x.mean()
    spread = float(centred @ centred)
    if spread == 0.0:
        return math.nan, math.nan
    slope = float(centred @ y) / spread
    residual = y - y.mean() - slope * centred
    return slope, math.sqrt(float(residual @ residual) / (position.size - 2) / spread)

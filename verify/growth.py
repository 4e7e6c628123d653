"""Growth over tokens: whether errors rise with a row's position, as accumulated rounding does and noise does not.

Two views of the errors normalised by their bound (by half an ulp, without one).  The worst of each power-of-two range
of positions (token 0, token 1, 2 to 3, 4 to 7 ...) shows where errors get large, element by element.  And a
least-squares fit of the worst of each row as share = a * (token + 1)**slope, on logarithms, says how fast: a bound that
grows as the error may grow gives a slope near 0, an error that accumulates faster than its bound a positive one.  The
slope's standard error says how much is chance.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float64

    from verify.measures import Errors, Worst

FEWEST_ROWS = 3
CERTAIN_ERRORS = 5.0
"""Standard errors by which a slope must be positive to count (see the ledger)."""


@dataclasses.dataclass(frozen=True)
class Range:
    """Tokens first .. last, and the worst normalised error among them (a mismatch of class before any other)."""

    first: int
    last: int
    worst: Worst


@dataclasses.dataclass(frozen=True)
class Growth:
    """How errors depend on the token.

    Attributes:
        ranges: one per power of two in which something was compared, ascending.
        normalised_by: "bound" or "half an ulp".
        slope: exponent of the position; NaN where fewer than three rows have an error above 0.
        standard_error: of the slope, from the scatter of the logarithms.
    """

    ranges: tuple[Range, ...]
    normalised_by: str
    slope: float
    standard_error: float

    @property
    def certain(self) -> bool:
        """The slope is positive by more than five standard errors: chance alone does it once in 3.5 million fits."""
        return self.slope > CERTAIN_ERRORS * self.standard_error

    @property
    def worst(self) -> Worst:
        """The largest of all: index, both values, exact bits."""
        found = [item.worst for item in self.ranges]
        return found[int(np.argmax([worst.value for worst in found]))]

    def __str__(self) -> str:
        text = f"error ~ position^{self.slope:.2f} (+- {self.standard_error:.2f}), in units of {self.normalised_by}"
        return f"{text}, worst at {self.worst}"


def growth(found: Errors, normalised: Float64[np.ndarray, " n"], *, axis: int, normalised_by: str) -> Growth:
    """The growth of elementwise errors along the token axis.

    Args:
        found: the errors.
        normalised: their sizes in units of what they may be, with NaN or inf where the classes differ; those are left
            out of the fit.
        axis: the token axis of the compared arrays.
        normalised_by: what the unit is.

    Raises:
        ValueError: there is no such axis.
    """
    if not 0 <= axis < len(found.shape):
        message = f"axis must be one of 0..{len(found.shape) - 1}, got {axis}"
        raise ValueError(message)
    by_token = _by_token(found, normalised, axis)
    finite = by_token.max(axis=1, initial=0.0)
    if not np.isfinite(finite).all():
        finite = np.where(np.isfinite(by_token), by_token, 0.0).max(axis=1, initial=0.0)
    rows = np.flatnonzero(finite > 0.0)
    slope, standard_error = _fit(rows + 1.0, finite[rows])
    return Growth(tuple(_ranges(found, normalised, by_token, axis)), normalised_by, slope, standard_error)


_ABSENT = -1.0
"""Below every error: what stands for an element that was not compared."""


def _by_token(found: Errors, normalised: np.ndarray, axis: int) -> Float64[np.ndarray, "tokens others"]:
    whole = normalised
    if found.where is not None:
        whole = np.full(math.prod(found.shape), _ABSENT)
        whole[found.where] = normalised
    return np.moveaxis(whole.reshape(found.shape), axis, 0).reshape(found.shape[axis], -1)


def _ranges(found: Errors, normalised: np.ndarray, by_token: np.ndarray, axis: int) -> list[Range]:
    tokens, ranges, first = len(by_token), [], 0
    others = [size for number, size in enumerate(found.shape) if number != axis]
    while first < tokens:
        stop = min(1 if first == 0 else 2 * first, tokens)
        token, other = divmod(int(by_token[first:stop].argmax()), by_token.shape[1])
        if by_token[first + token, other] != _ABSENT:
            index = [int(i) for i in np.unravel_index(other, others)]
            index.insert(axis, first + token)
            flat = int(np.ravel_multi_index(index, found.shape))
            position = flat if found.where is None else int(np.searchsorted(found.where, flat))
            ranges.append(Range(first, stop - 1, found.at(position, normalised)))
        first = stop
    return ranges


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

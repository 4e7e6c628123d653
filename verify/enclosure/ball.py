"""Midpoint-radius arrays in float64 that are safe outwards.

A `Ball` stands for every array x with |x - mid| <= rad, elementwise.  An operation returns a ball with f(x) for all x
of its operands, and its own rounding in float64 is part of it:

- A midpoint is one float64 operation (or a sum of n): it errs by at most UNIT times its size (gamma(n) times the sum of
  the sizes) and by less than TINY where something underflows; both go to the radius.
- A radius is a sum of at most 2**20 products of non-negative numbers, nested a few deep: it errs by less than 2**-31
  relative to its value, and by less than TINY where something underflows.  `_out` multiplies by SLACK = 1 + 2**-30 and
  adds TINY; but a radius that is exactly 0 with an exact midpoint (masked elements, given numbers) stays 0.
- Every underflow loses less than the smallest normal float64 number, 2**-1022 (and flushing loses no more), in at most
  2**20 terms: TINY = 2**-1000 covers it, and is far below any FP32 number.
- A midpoint or a radius that is not finite means that nothing is known: (0, inf).

Sums of n terms for n < 2**20; numpy adds in whatever order.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Bool, Float64

UNIT = 2.0**-53
TINY = 2.0**-1000
SLACK = 1.0 + 2.0**-30
_quiet = np.errstate(over="ignore", invalid="ignore", under="ignore")
"""An overflow makes a ball unknown, which is what it should."""


def gamma(n: int) -> float:
    """n u / (1 - n u) of float64."""
    return n * UNIT / (1.0 - n * UNIT)


@dataclasses.dataclass(frozen=True, eq=False)
class Ball:
    """All arrays within `rad` of `mid`, elementwise."""

    mid: Float64[np.ndarray, "*shape"]
    rad: Float64[np.ndarray, "*shape"]

    @classmethod
    def exact(cls, x: np.ndarray | float) -> Ball:
        """One array: numbers that float64 holds (BF16 and FP32 numbers are)."""
        mid = np.asarray(x, dtype=np.float64)
        return cls(mid, np.zeros(mid.shape))

    @classmethod
    @_quiet
    def between(cls, low: np.ndarray, high: np.ndarray) -> Ball:
        """Everything from `low` to `high`, elementwise."""
        mid = 0.5 * low + 0.5 * high
        rad = np.maximum(high - mid, mid - low)
        return cls(*_known(mid, _out(rad + UNIT * np.abs(mid), rad > 0.0)))

    @property
    def low(self) -> Float64[np.ndarray, "*shape"]:
        """Not above any element."""
        return np.where(self.rad > 0.0, np.nextafter(self.mid - self.rad, -np.inf), self.mid)

    @property
    def high(self) -> Float64[np.ndarray, "*shape"]:
        """Not below any element."""
        return np.where(self.rad > 0.0, np.nextafter(self.mid + self.rad, np.inf), self.mid)

    @property
    def size(self) -> Float64[np.ndarray, "*shape"]:
        """Not below any element's absolute value."""
        return (np.abs(self.mid) + self.rad) * (1.0 + 4 * UNIT)

    @property
    def least_size(self) -> Float64[np.ndarray, "*shape"]:
        """Not above any element's absolute value."""
        return np.maximum((np.abs(self.mid) - self.rad) * (1.0 - 4 * UNIT), 0.0)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of both arrays."""
        return self.mid.shape

    def __getitem__(self, index: object) -> Ball:
        return Ball(self.mid[index], self.rad[index])  # type: ignore[index]

    def reshape(self, *shape: int) -> Ball:
        """The same elements in another shape."""
        return Ball(self.mid.reshape(shape), self.rad.reshape(shape))

    @property
    def T(self) -> Ball:  # noqa: N802  as numpy
        """Transposed."""
        return Ball(self.mid.T, self.rad.T)

    def contains(self, x: np.ndarray) -> Bool[np.ndarray, "*shape"]:
        """Which elements of x lie inside; NaN lies nowhere but where nothing is known."""
        wide = np.asarray(x, dtype=np.float64)
        with np.errstate(invalid="ignore"):
            return np.isinf(self.rad) | (np.abs(wide - self.mid) <= self.rad * (1.0 + 4 * UNIT))

    @_quiet
    def widened(self, by: np.ndarray | float) -> Ball:
        """With `by` more on either side."""
        extra = np.broadcast_to(by, self.shape)
        return Ball(*_known(self.mid, np.where(extra > 0.0, _out(self.rad + extra, extra > 0.0), self.rad)))

    def __neg__(self) -> Ball:
        return Ball(-self.mid, self.rad)

    @_quiet
    def __add__(self, other: Ball) -> Ball:
        mid = self.mid + other.mid
        touched = (self.rad + other.rad > 0.0) | ((self.mid != 0.0) & (other.mid != 0.0))
        return Ball(*_known(mid, _out(self.rad + other.rad + UNIT * np.abs(mid), touched)))

    def __sub__(self, other: Ball) -> Ball:
        return self + (-other)

    @_quiet
    def __mul__(self, other: Ball) -> Ball:
        mid = self.mid * other.mid
        rad = self.rad * (np.abs(other.mid) + other.rad) + np.abs(self.mid) * other.rad + UNIT * np.abs(mid)
        nothing = (self.is_zero & np.isfinite(other.rad)) | (other.is_zero & np.isfinite(self.rad))
        return Ball(*_known(np.where(nothing, 0.0, mid), np.where(nothing, 0.0, _out(rad, ~nothing))))

    @_quiet
    def __matmul__(self, other: Ball) -> Ball:
        n = self.shape[-1]
        left, right = np.abs(self.mid), np.abs(other.mid)
        rad = self.rad @ (right + other.rad) + left @ other.rad + gamma(n + 1) * (left @ right)
        touched = (~self.is_zero).astype(np.float64) @ (~other.is_zero).astype(np.float64) > 0.0
        return Ball(*_known(self.mid @ other.mid, _out(rad, touched)))

    @property
    def is_zero(self) -> Bool[np.ndarray, "*shape"]:
        """Elements that are exactly 0."""
        return (self.mid == 0.0) & (self.rad == 0.0)

    @_quiet
    def sum(self, axis: int, *, keepdims: bool = False) -> Ball:
        """The exact sum along an axis."""
        mid = self.mid.sum(axis=axis, keepdims=keepdims)
        n = self.shape[axis]
        rad = self.rad.sum(axis=axis, keepdims=keepdims)
        size = np.abs(self.mid).sum(axis=axis, keepdims=keepdims)
        return Ball(*_known(mid, _out(rad + gamma(n) * size, (rad > 0.0) | (size > 0.0))))

    def max(self, axis: int, *, keepdims: bool = False) -> Ball:
        """The maximum along an axis."""
        return Ball.between(self.low.max(axis=axis, keepdims=keepdims), self.high.max(axis=axis, keepdims=keepdims))

    def cut(self, low: np.ndarray | float, high: np.ndarray | float) -> Ball:
        """What lies between `low` and `high`, where the elements are known to (an intersection)."""
        a, b = np.maximum(self.low, low), np.minimum(self.high, high)
        found = Ball.between(np.minimum(a, b), np.maximum(a, b))
        better = (found.rad < self.rad) & (a <= b)
        return Ball(np.where(better, found.mid, self.mid), np.where(better, found.rad, self.rad))


def _out(rad: np.ndarray, touched: np.ndarray) -> np.ndarray:
    """A radius that covers its own evaluation; untouched elements are exact."""
    return np.where(touched, rad * SLACK + TINY, 0.0)


def _known(mid: np.ndarray, rad: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(0, inf) for what is not finite."""
    ok = np.isfinite(mid) & np.isfinite(rad)
    return np.where(ok, mid, 0.0), np.where(ok, rad, np.inf)


def where(which: np.ndarray, yes: Ball, no: Ball) -> Ball:
    """Elementwise choice."""
    return Ball(np.where(which, yes.mid, no.mid), np.where(which, yes.rad, no.rad))


def maximum(left: Ball, right: Ball) -> Ball:
    """Elementwise maximum."""
    return Ball.between(np.maximum(left.low, right.low), np.maximum(left.high, right.high))


def concatenate(balls: list[Ball], axis: int) -> Ball:
    """One behind the other."""
    return Ball(np.concatenate([x.mid for x in balls], axis), np.concatenate([x.rad for x in balls], axis))


def monotone(function: np.ufunc, x: Ball, error: float) -> Ball:
    """An increasing function, of which numpy gives values with a relative `error` (tested for those used)."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        low, high = function(x.low), function(x.high)
        low, high = low - error * np.abs(low), high + error * np.abs(high)
        odd = np.isnan(low) | np.isnan(high)
        found = Ball.between(np.where(odd, -np.inf, low), np.where(odd, np.inf, high))
    return found.widened(TINY)

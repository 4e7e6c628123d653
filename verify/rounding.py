"""Rounding float64 numbers to the formats of the kernels, once.

Casting float64 to BF16 through FP32 rounds twice: 1 + 2**-8 + 2**-40 would become 1, and is nearer to 1 + 2**-7.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float64


@dataclasses.dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    Attributes:
        name: as numpy and JAX call it.
        precision: significant bits, the hidden one included.
        least_exponent: of the smallest normal number.
        largest: finite number.
    """

    name: str
    precision: int
    least_exponent: int
    largest: float

    @property
    def unit_roundoff(self) -> float:
        """|nearest(x) - x| <= unit_roundoff |x| for x in the normal range."""
        return 2.0**-self.precision

    @property
    def smallest_normal(self) -> float:
        """2 to the least exponent."""
        return 2.0**self.least_exponent


FP32 = Format("float32", 24, -126, (2.0 - 2.0**-23) * 2.0**127)
BF16 = Format("bfloat16", 8, -126, (2.0 - 2.0**-7) * 2.0**127)
FP16 = Format("float16", 11, -14, 65504.0)
FORMATS = {each.name: each for each in (FP32, BF16, FP16)}


def spacing(x: Float64[np.ndarray, "*shape"], to: Format) -> Float64[np.ndarray, "*shape"]:
    """The distance of the format's numbers in the binade of |x|; that of the smallest normal number below it."""
    _, exponent = np.frexp(np.where(np.isfinite(x), x, 1.0))
    return np.ldexp(1.0, np.maximum(exponent - 1, to.least_exponent) - to.precision + 1)


def nearest(x: Float64[np.ndarray, "*shape"], to: Format) -> Float64[np.ndarray, "*shape"]:
    """Round to nearest, ties to even; subnormal results are kept, overflow gives an infinity."""
    if to is FP32:  # numpy's conversion rounds once
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(x).astype(np.float32).astype(np.float64)
    step = spacing(x, to)
    return _limited(np.rint(x / step) * step, x, to)


def down(x: Float64[np.ndarray, "*shape"], to: Format) -> Float64[np.ndarray, "*shape"]:
    """The largest number of the format that is not above x: finite above the largest, -inf below the least."""
    step = spacing(x, to)
    return np.minimum(_limited(np.floor(x / step) * step, x, to), np.where(np.isposinf(x), np.inf, to.largest))


def up(x: Float64[np.ndarray, "*shape"], to: Format) -> Float64[np.ndarray, "*shape"]:
    """The least number of the format that is not below x."""
    return -down(-x, to)


def stochastic(
    x: Float64[np.ndarray, "*shape"], to: Format, rng: np.random.Generator, *, fair: bool = False
) -> Float64[np.ndarray, "*shape"]:
    """One of x's two neighbours: the nearer one more often, so that the mean is x; or (`fair`) both equally often."""
    below, above = down(x, to), up(x, to)
    width = np.where(above > below, above - below, 1.0)
    with np.errstate(invalid="ignore"):
        share = np.where(np.isfinite(width), (x - below) / width, 0.5)
    chance = np.where(above > below, 0.5, 0.0) if fair else share
    return np.where(rng.random(np.shape(x)) < chance, above, below)


def _limited(rounded: np.ndarray, x: np.ndarray, to: Format) -> np.ndarray:
    """Infinities beyond the largest number; NaN and infinities as they were."""
    over = np.where(np.abs(rounded) > to.largest, np.copysign(np.inf, rounded), rounded)
    return np.where(np.isfinite(x), over, x)

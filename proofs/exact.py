"""Floating-point arithmetic in exact rationals, and balls around what is irrational.

FP32 and BF16 numbers are `Fraction`s here.  Rounding is to nearest, ties to even, with an unbounded exponent range: a
lemma that needs a result to be finite or normal compares it with the format's limits itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
from fractions import Fraction
from typing import TYPE_CHECKING

from flint import arb, ctx

if TYPE_CHECKING:
    from collections.abc import Generator

_BALL_BITS = 256


@dataclasses.dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    Attributes:
        precision: bits of the significand, the leading one included.
        min_exponent: exponent of the smallest normal number.
        max_exponent: exponent of the largest power of two.
    """

    precision: int
    min_exponent: int
    max_exponent: int

    @property
    def smallest_normal(self) -> Fraction:
        """The smallest positive normal number."""
        return power_of_two(self.min_exponent)

    @property
    def largest(self) -> Fraction:
        """The largest finite number."""
        return (2 - power_of_two(1 - self.precision)) * power_of_two(self.max_exponent)

    @property
    def unit_roundoff(self) -> Fraction:
        """u: |nearest(x) - x| <= u |x|."""
        return power_of_two(-self.precision)

    def nearest(self, x: Fraction) -> Fraction:
        """x rounded to nearest, ties to even; the exponent range is not looked at."""
        if x == 0:
            return x
        quantum = power_of_two(floor_log2(abs(x)) - self.precision + 1)
        return round(x / quantum) * quantum

    def holds(self, x: Fraction) -> bool:
        """Whether x is zero or a normal number of the format."""
        return x == 0 or (self.smallest_normal <= abs(x) <= self.largest and self.nearest(x) == x)


FP32 = Format(24, -126, 127)
BF16 = Format(8, -126, 127)


def power_of_two(n: int) -> Fraction:
    """2**n, exactly."""
    return Fraction(2**n) if n >= 0 else Fraction(1, 2**-n)


def floor_log2(x: Fraction) -> int:
    """The exponent e of a positive x: 2**e <= x < 2**(e + 1)."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if power_of_two(e) <= x else e - 1


def next_power_of_two(x: Fraction) -> Fraction:
    """The smallest power of two that is at least a positive x."""
    below = power_of_two(floor_log2(x))
    return below if below == x else 2 * below


@contextlib.contextmanager
def ball_precision() -> Generator[None]:
    """Balls of 256 bits inside the block."""
    before = ctx.prec
    ctx.prec = _BALL_BITS
    try:
        yield
    finally:
        ctx.prec = before


def ball(x: Fraction | float) -> arb:
    """A ball around a rational, or around the rational that a float is."""
    exact = Fraction(x)
    return arb(exact.numerator) / arb(exact.denominator)


def log2_ball(x: Fraction | float) -> arb:
    """log2 of a positive rational."""
    return ball(x).log() / arb(2).log()

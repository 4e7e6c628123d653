"""What a device may make of each operation, as operations on balls.

Every result is one FP32 register: within the device model's envelope of the exact result for some element of the
operands.  `_register` adds what the format does: a result that may be smaller than omega = `smallest_normal` may become
zero, or be read as zero later, so such a ball is widened by omega, which makes it contain zero; a result that may be
larger than the largest FP32 number is not known any more.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from verify.enclosure.ball import TINY, UNIT, Ball, concatenate, monotone
from verify.gdn.inverse_levels import Arithmetic, half_spacing
from verify.rounding import BF16, FP32, nearest

if TYPE_CHECKING:
    from verify.devices import DeviceModel

NUMPY = 2.0**-49
"""Relative error of numpy's exp, exp2, tanh and log in float64: 8 ulp; the tests find less than 2."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """The operations of one device model.

    Attributes:
        device: the model.
        tight: False: rounding to BF16 widens a ball by half a spacing, so that the exact answer stays inside too.
            True: it rounds the ball, whose ends mostly round to one number: what a device returns is then enclosed up
            to the noise of its FP32 operations, and the exact answer lies outside.
    """

    device: DeviceModel
    tight: bool = False

    def _register(self, exact: Ball, relative: float = 0.0, absolute: float = 0.0) -> Ball:
        """An FP32 result within `relative` and `absolute` of the exact one."""
        found = exact.widened(np.where(exact.is_zero, 0.0, relative * exact.size + absolute))
        omega = self.device.smallest_normal
        found = found.widened(np.where((found.least_size < omega) & ~found.is_zero, omega, 0.0))
        unknown = ~(found.size <= FP32.largest)
        return Ball(np.where(unknown, 0.0, found.mid), np.where(unknown, np.inf, found.rad))

    def constant(self, value: float) -> Ball:
        """A real number (known to 2**-50) as an FP32 constant."""
        size = abs(value) * (self.device.unit_roundoff + 2.0**-50)
        return Ball.exact(value).widened(size if value else 0.0)

    def add(self, left: Ball, right: Ball) -> Ball:
        """A sum of two."""
        return self._register(left + right, self.device.unit_roundoff)

    def sub(self, left: Ball, right: Ball) -> Ball:
        """A difference."""
        return self._register(left - right, self.device.unit_roundoff)

    def mul(self, left: Ball, right: Ball) -> Ball:
        """An elementwise product."""
        return self._register(left * right, self.device.unit_roundoff)

    def doubled(self, x: Ball, factor: float) -> Ball:
        """x times a power of two: exact but for underflow and overflow."""
        return self._register(Ball(x.mid * factor, x.rad * factor))

    def sum(self, x: Ball, axis: int, *, keepdims: bool = False, spare: int = 0) -> Ball:
        """A sum in any order, of which terms that are exactly 0 are no part: they round nothing.

        With n terms each passes through at most n - 1 additions, `spare` more, and n results may be flushed.
        """
        n = (~x.is_zero).sum(axis=axis, keepdims=keepdims)
        u, size = self.device.unit_roundoff, x.size.sum(axis=axis, keepdims=keepdims)
        return self._summed(x.sum(axis, keepdims=keepdims), np.maximum(n - 1 + spare, 0) * u, size, n)

    def _summed(self, exact: Ball, roundings: np.ndarray, size: np.ndarray, n: np.ndarray) -> Ball:
        growth = np.expm1(roundings) * (1.0 + 2.0**-40)
        flushed = n * self.device.smallest_normal * (1.0 + growth)
        found = exact.widened(np.where(n > 0, growth * size * (1.0 + 2.0**-30) + np.where(n > 1, flushed, 0.0), 0.0))
        return self._register(found)

    def dot(self, left: Ball, right: Ball, *, spare: int = 0) -> Ball:
        """A matrix product of BF16 operands: exact products (or flushed), FP32 sums in any order."""
        n = (~left.is_zero).astype(np.float64) @ (~right.is_zero).astype(np.float64)
        size = left.size @ right.size
        return self._summed(left @ right, np.maximum(n - 1 + spare, 0) * self.device.dot_unit_roundoff, size, 2 * n)

    def product(self, left: Ball, right: Ball, precision: str, *, partial: int = 3) -> Ball:
        """A matrix product of FP32 matrices: operands rounded to BF16, or split in two (`bf16x3`).

        `partial` partial products of split operands are one sum.
        """
        a, b = self.entering(left, precision), self.entering(right, precision)
        if precision == "bf16":
            return self.dot(a, b)
        return self._register((a @ b).widened(self.arithmetic(precision).accumulated(a.size, b.size, partial=partial)))

    def onto(self, addend: Ball, found: Ball, left: Ball, right: Ball, precision: str) -> Ball:
        """An addend plus a product that was `found`: the compiler may make it the product's accumulator."""
        growth = self.arithmetic(precision).joined(addend.size, left.size * OPERAND_SIZE, right.size * OPERAND_SIZE)
        return self._register((addend + found).widened(growth * (1.0 + 2.0**-30)))

    def entering(self, x: Ball, precision: str) -> Ball:
        """What stands for x in a product: rounded to BF16, or the sum of two BF16 numbers."""
        if precision == "bf16":
            return self.to_bf16(x)
        known, arithmetic = x.rad == 0.0, self.arithmetic(precision)
        by = np.where(known, arithmetic.known(np.where(known, x.mid, 0.0)), arithmetic.rounded(x.size))
        return x.widened(by)

    def arithmetic(self, precision: str) -> Arithmetic:
        """The inverse's contract has the same products."""
        return Arithmetic(precision, self.device)

    def to_bf16(self, x: Ball) -> Ball:
        """Rounded to nearest."""
        if not self.tight:
            kept = (x.rad == 0.0) & (nearest(x.mid, BF16) == x.mid)
            return self._register(x.widened(np.where(kept, 0.0, half_spacing(x.size))))
        with np.errstate(over="ignore", invalid="ignore"):
            found = Ball.between(nearest(x.low, BF16), nearest(x.high, BF16))
        return self._register(found)

    def exp2(self, x: Ball) -> Ball:
        """2**x; below the normal range anything from 0 to omega."""
        return self._function(np.exp2, x, self.device.exp2_relative)

    def exp(self, x: Ball) -> Ball:
        """The natural exponential; that of 0 is 1, on every device."""
        found = self._function(np.exp, x, self.device.exp_relative)
        return _one_at_zero(found, x)

    def log(self, x: Ball) -> Ball:
        """Natural logarithm."""
        return self._function(np.log, x, self.device.log_relative, self.device.log_absolute)

    def tanh(self, x: Ball) -> Ball:
        """Hyperbolic tangent; that of 0 is 0."""
        found = self._function(np.tanh, x, self.device.tanh_relative, self.device.tanh_absolute)
        return Ball(np.where(x.is_zero, 0.0, found.mid), np.where(x.is_zero, 0.0, found.rad))

    def sigmoid(self, x: Ball, roundings: int = 0) -> Ball:
        """1 / (1 + exp(-x)), with some roundings more."""
        found = -monotone(_minus_sigmoid, -x, NUMPY)  # type: ignore[arg-type]
        return self._register(found, self.device.sigmoid_relative + roundings * self.device.unit_roundoff)

    def rsqrt(self, x: Ball) -> Ball:
        """1 / sqrt(x); not known where x may be 0 or less."""
        with np.errstate(divide="ignore", invalid="ignore"):
            found = _decreasing(1.0 / np.sqrt(x.high), 1.0 / np.sqrt(np.maximum(x.low, 0.0)))
        return self._register(found, self.device.rsqrt_relative)

    def quotient(self, x: Ball, y: Ball) -> Ball:
        """x / y exactly; not known where y may be 0 or less."""
        with np.errstate(divide="ignore"):
            return x * _decreasing(1.0 / y.high, 1.0 / np.maximum(y.low, 0.0))

    def divided(self, exact: Ball, roundings: int) -> Ball:
        """An exact quotient as the device makes it: times a reciprocal, with some roundings."""
        relative = (1.0 + self.device.reciprocal_relative) * (1.0 + self.device.unit_roundoff) ** roundings - 1.0
        return self._register(exact, relative * (1.0 + 2.0**-20))

    def _function(self, function: np.ufunc, x: Ball, relative: float, absolute: float = 0.0) -> Ball:
        return self._register(monotone(function, x, NUMPY), relative, absolute)


def _minus_sigmoid(x: np.ndarray) -> np.ndarray:
    """-1 / (1 + exp(x)): increasing."""
    small = np.exp(-np.abs(x))
    return -np.where(x <= 0, 1.0, small) / (1.0 + small)


def _decreasing(low: np.ndarray, high: np.ndarray) -> Ball:
    """From values of a decreasing function at both ends: two float64 roundings each."""
    slack = 4 * UNIT
    return Ball.between(low * (1.0 - slack), high * (1.0 + slack)).widened(TINY)


def _one_at_zero(found: Ball, x: Ball) -> Ball:
    return Ball(np.where(x.is_zero, 1.0, found.mid), np.where(x.is_zero, 0.0, found.rad))


def stacked(upper: Ball, lower: Ball) -> Ball:
    """One matrix above another."""
    return concatenate([upper, lower], 0)


OPERAND_SIZE = 1.0 + 2.0**-7
"""What enters a product is at most so much larger than the number itself, which is rounded to BF16 or to hi + lo."""
LOG2_E = math.log2(math.e)
LN2 = math.log(2.0)

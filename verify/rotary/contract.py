"""The numerical contract of a kernel that rotates in FP32: |kernel - f| <= bound, per element.

The kernel multiplies a position by an inverse frequency that it holds in FP32, takes cosine and sine, and rotates.  The
phase of a good kernel is off by up to position * frequency * (frequency_error + u): the bound has to grow with the
position times 2^-24, or good kernels fail at long context.  The derivation is docs/oracle-bounds-rotary.md (R6).
Frequencies or positions in BF16 miss it by orders of magnitude.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from verify.attention.problem import BF16
from verify.devices import BF16_UNIT_ROUNDOFF
from verify.rotary.oracle_float64 import TOKENS_AT_ONCE, phases

if TYPE_CHECKING:
    from jaxtyping import Bool, Float64

    from verify.devices import DeviceModel
    from verify.rotary.problem import RotaryProblem, Rotated

FP32_UNIT = 2.0**-24

RECIPROCAL_OF_POWER = 2.0 * FP32_UNIT
"""Relative error of an inverse frequency taken as 1 / base**(2 i / d): power and quotient round once each, the exponent
is exact (d a power of two).  Covers a table rounded to FP32 (one rounding) too.  A kernel that takes
exp(-log(base) * 2 i / d) has to declare more: up to 13 * 2^-24 was measured on XLA:CPU at base 1e5."""


@dataclasses.dataclass(frozen=True, eq=False)
class RotaryBound:
    """What the contract allows.

    Attributes:
        out: bound of |kernel - f|, `[batch, heads, tokens, head_dim]`; infinite where f is undefined.
        phase: bound of the phase's error in radians, `[batch, tokens, pairs]`.
    """

    out: Float64[np.ndarray, "batch heads tokens head_dim"]
    phase: Float64[np.ndarray, "batch tokens pairs"]

    def admits(self, got: np.ndarray, reference: Rotated) -> Bool[np.ndarray, "batch heads tokens head_dim"]:
        """Elements of a kernel's output within the bound of the reference; NaN only where f is undefined.

        Raises:
            ValueError: the output has another shape.
        """
        if got.shape != self.out.shape:
            message = f"got must have shape {self.out.shape}, got {got.shape}"
            raise ValueError(message)
        near = np.abs(got.astype(np.float64) - reference.out) <= self.out + reference.error
        return near | np.isnan(reference.out)


def contract(
    problem: RotaryProblem,
    device: DeviceModel,
    *,
    frequency_error: float = RECIPROCAL_OF_POWER,
    out_dtype: np.dtype | None = None,
) -> RotaryBound:
    """Evaluate the contract.

    Args:
        problem: the inputs.
        device: numerics of FP32.
        frequency_error: relative error of the inverse frequencies that the kernel uses.
        out_dtype: FP32, or BF16 for a result that is rounded once more; None for that of x.

    Raises:
        ValueError: out_dtype is neither.
    """
    dtype = problem.x.dtype if out_dtype is None else np.dtype(out_dtype)
    if dtype not in (BF16, np.dtype(np.float32)):
        message = f"out_dtype must be bfloat16 or float32, got {dtype}"
        raise ValueError(message)
    bound = RotaryBound(np.zeros(problem.x.shape), np.zeros((problem.batch, problem.tokens, problem.pairs)))
    x = np.abs(problem.numbers())
    first, second = problem.lanes()
    for batch in range(problem.batch):
        positions = problem.position(batch)
        for start in range(0, problem.tokens, TOKENS_AT_ONCE):
            rows = slice(start, min(start + TOKENS_AT_ONCE, problem.tokens))
            rule = _Rule.of(problem, positions[rows], device, frequency_error, dtype)
            bound.phase[batch, rows] = rule.phase
            a, b = x[batch, :, rows, first], x[batch, :, rows, second]
            bound.out[batch, :, rows, first] = rule.lane(a, b)
            bound.out[batch, :, rows, second] = rule.lane(b, a)
    passing = slice(problem.width, None)
    bound.out[..., passing] = _passed(x[..., passing], problem.x.dtype, dtype)
    # A subnormal number may be read as zero, or pass as it is.
    read_as_zero = (x[..., passing] == 0.0) & (problem.x[..., passing] != 0)
    bound.out[..., passing][read_as_zero] = device.smallest_normal
    bound.out[~np.isfinite(bound.out)] = np.inf
    return bound


def _passed(x: np.ndarray, source: np.dtype, target: np.dtype) -> np.ndarray:
    """Lanes that are not rotated: exact, but for the rounding of FP32 to BF16."""
    return BF16_UNIT_ROUNDOFF * x if target == BF16 and source != BF16 else np.zeros(x.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class _Rule:
    """Lemma R6 for some tokens: what cosine and sine may be off by, and the roundings that follow."""

    phase: np.ndarray
    cos: np.ndarray
    sin: np.ndarray
    cos_error: np.ndarray
    sin_error: np.ndarray
    device: DeviceModel
    dtype: np.dtype

    @classmethod
    def of(
        cls,
        problem: RotaryProblem,
        positions: np.ndarray,
        device: DeviceModel,
        frequency_error: float,
        dtype: np.dtype,
    ) -> _Rule:
        exponents = np.arange(problem.pairs) * (-2.0 / max(problem.width, 1))
        # Rounded up by far more than numpy's power errs; a phase enters its own error only.
        phase = positions[:, None] * (problem.base**exponents * (1.0 + 2.0**-40))
        largest = phase * (1.0 + frequency_error)
        # Half an ulp of the product: u times the largest power of two that is not above it.
        _, exponent = np.frexp(largest)
        rounding = device.unit_roundoff * np.ldexp(1.0, exponent - 1) + device.smallest_normal
        error = (phase * frequency_error + rounding) * (positions > 0)[:, None]
        table = phases(problem.base, problem.width, positions)
        cos, sin = np.abs(table.cos) + table.cos_error, np.abs(table.sin) + table.sin_error
        second_order = 0.5 * np.square(error)
        return cls(
            phase=error,
            cos=cos,
            sin=sin,
            cos_error=np.minimum(sin * error + second_order, 1.0 + cos) + device.cos_absolute,
            sin_error=np.minimum(cos * error + second_order, 1.0 + sin) + device.sin_absolute,
            device=device,
            dtype=dtype,
        )

    def lane(self, one: np.ndarray, two: np.ndarray) -> np.ndarray:
        """The bound of one * cos +- two * sin, for sizes of one and two."""
        u, tiny = self.device.unit_roundoff, self.device.smallest_normal
        with np.errstate(invalid="ignore"):
            left, right = one * (self.cos + self.cos_error), two * (self.sin + self.sin_error)
            error = one * self.cos_error + two * self.sin_error + (2.0 * u + u * u) * (left + right) + 3.0 * tiny
            if self.dtype == BF16:
                error += BF16_UNIT_ROUNDOFF * (left + right + error) + tiny
        return error * (1.0 + 2.0**-40)

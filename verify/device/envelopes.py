"""Measuring the envelopes of the transcendental functions that a device model claims.

Three spaces of arguments: every BF16 number with the function in FP32 (what a kernel does after it has widened its
input), every BF16 number with the function in BF16, and FP32 numbers of every binade: every n-th of them here, all of
them in `verify.device.exhaustive`.

The reference is numpy's float64 function, whose own error is below 2**-50 of the value (of 1, for sine and cosine): a
few of float64's ulps, of which an FP32 ulp holds 2**29, so that a measured figure is known to 2**-26 ulp.  A test holds
numpy to that by arbitrary precision, binade by binade.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from verify.devices import ULP, ULP_BELOW_ONE, DeviceModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SAMPLE = 257
"""A sample takes every 257th number of a binade: odd, so that it meets all trailing bits."""

LARGEST_FP32 = float(np.finfo(np.float32).max)
BF16_DIGITS = 8

_CHUNK = 1 << 22
_REFERENCE_SLACK = 2.0**-50


@dataclasses.dataclass(frozen=True)
class Function:
    """One function whose envelope a model claims.

    Attributes:
        name: as in `DeviceModel.bf16_ulp`; the model's fields are `<name>_relative` and, if any, `<name>_absolute`.
        device: what runs on the backend.
        exact: the same in float64.
        binades: exponents of the arguments on which it is measured; below them it differs from its value at 0 by less
            than any envelope, above them it overflows or is constant.
        negative: defined for negative arguments too.
        largest: beyond it no model claims anything; None if the function is claimed for every argument.
        by_processor: it starts from an approximate instruction whose bits differ between processors, so that a figure
            measured on one is not another's.
    """

    name: str
    device: Callable[[jax.Array], jax.Array]
    exact: Callable[[np.ndarray], np.ndarray]
    binades: range
    negative: bool
    largest: float | None = None
    by_processor: bool = False

    def relative(self, model: DeviceModel) -> float | None:
        """The relative envelope that the model claims; None if the absolute one stands alone."""
        return getattr(model, f"{self.name}_relative", None)

    def absolute(self, model: DeviceModel) -> float:
        """The absolute part, 0 if the model claims none."""
        return getattr(model, f"{self.name}_absolute", 0.0)

    def claimed(self, model: DeviceModel) -> tuple[float, float]:
        """What a measured figure is compared with, and the unit it is shown in."""
        relative = self.relative(model)
        return (self.absolute(model), ULP_BELOW_ONE) if relative is None else (relative, ULP)


FUNCTIONS = {
    function.name: function
    for function in (
        Function("exp2", jnp.exp2, np.exp2, range(-30, 7), negative=True),
        Function("exp", jnp.exp, np.exp, range(-30, 7), negative=True),
        Function("log", jnp.log, np.log, range(-126, 128), negative=False),
        Function("tanh", jnp.tanh, np.tanh, range(-126, 8), negative=True),
        Function("rsqrt", lax.rsqrt, lambda x: 1.0 / np.sqrt(x), range(-126, 128), negative=False, by_processor=True),
        Function("reciprocal", lambda x: 1.0 / x, lambda x: 1.0 / x, range(-126, 127), negative=True),
        Function("sigmoid", jax.nn.sigmoid, lambda x: 1.0 / (1.0 + np.exp(-x)), range(-30, 7), negative=True),
        Function("sin", jnp.sin, np.sin, range(-30, 20), negative=True, largest=2.0**20),
        Function("cos", jnp.cos, np.cos, range(-30, 20), negative=True, largest=2.0**20),
    )
}


@dataclasses.dataclass(frozen=True)
class Envelope:
    """The largest error of one function, and where.

    Attributes:
        name: of the function.
        arguments: which numbers were tried: "FP32", "BF16 in FP32" or "BF16".
        count: how many.
        exhaustive: whether these were all.
        worst: the largest relative error beyond the absolute part (absolute error, where the model claims no relative
            one), reference slack included; for "BF16" in BF16 ulp.
        at: the argument.
        claimed: what the device model allows there.
        unit: what `worst` and `claimed` are shown in: ULP for FP32 (ULP_BELOW_ONE if absolute), 1 for BF16.
    """

    name: str
    arguments: str
    count: int
    exhaustive: bool
    worst: float
    at: float
    claimed: float
    unit: float

    @property
    def holds(self) -> bool:
        """Whether the model's claim covers it."""
        return self.worst <= self.claimed

    @property
    def worst_ulp(self) -> float:
        """In units of 2**-23 of the value (FP32; sine and cosine: 2**-24), or in BF16 ulp."""
        return self.worst / self.unit

    @property
    def claimed_ulp(self) -> float:
        """The claim in the same unit."""
        return self.claimed / self.unit


def measure_fp32(
    function: Function,
    model: DeviceModel,
    *,
    stride: int = SAMPLE,
    progress: Callable[[float], None] | None = None,
) -> Envelope:
    """The function at every `stride`-th FP32 argument of each of its binades; 1 takes every argument."""
    compiled = jax.jit(function.device)
    worst, at, count = 0.0, 0.0, 0
    signs = 2 if function.negative else 1
    chunks = signs * len(function.binades) * ((1 << 23) // _CHUNK)
    for number, x in enumerate(_binade_chunks(function, stride)):
        error = excess(np.asarray(compiled(x)), x, function, model)
        position = int(error.argmax())
        count += x.size
        if error[position] > worst:
            worst, at = float(error[position]), float(x[position])
        if progress is not None:
            progress((number + 1) / chunks)
    return fp32_envelope(function, model, count, worst, at, exhaustive=stride == 1)


def fp32_envelope(
    function: Function, model: DeviceModel, count: int, worst: float, at: float, *, exhaustive: bool
) -> Envelope:
    """What was found at FP32 arguments, against the model's claim."""
    claimed, unit = function.claimed(model)
    return Envelope(function.name, "FP32", count, exhaustive, worst + _REFERENCE_SLACK, at, claimed, unit)


def measure_widened(function: Function, model: DeviceModel) -> Envelope:
    """The function in FP32 at every BF16 argument."""
    x = bf16_arguments(function).astype(np.float32)
    error = excess(np.asarray(jax.jit(function.device)(x)), x, function, model)
    position = int(error.argmax())
    found = fp32_envelope(function, model, x.size, float(error[position]), float(x[position]), exhaustive=True)
    return dataclasses.replace(found, arguments="BF16 in FP32")


def measure_bf16(function: Function, model: DeviceModel) -> Envelope:
    """The function in BF16 at every BF16 argument, in BF16 ulp: 0.5 is a correctly rounded result."""
    x = bf16_arguments(function)
    got = np.asarray(jax.jit(function.device)(x)).astype(np.float64)
    with np.errstate(all="ignore"):
        want = function.exact(x.astype(np.float64))
        # A result that rounds to infinity or may be flushed says nothing about the function.
        counts = (np.abs(want) >= 2.0 * model.smallest_normal) & (np.abs(want) < LARGEST_FP32 / 2.0)
        _, exponent = np.frexp(want)
        error = np.where(counts, np.abs(got - want) / np.ldexp(1.0, exponent - BF16_DIGITS), 0.0)
    error = np.where(np.isnan(error), np.inf, error)
    position = int(error.argmax())
    worst = float(error[position])
    claimed = model.bf16_ulp[function.name]
    return Envelope(
        function.name, "BF16", x.size, exhaustive=True, worst=worst, at=float(x[position]), claimed=claimed, unit=1.0
    )


def bf16_arguments(function: Function) -> np.ndarray:
    """Every normal BF16 number on which the function is claimed."""
    x = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    wide = x.astype(np.float32)
    chosen = (np.abs(wide) <= (function.largest or LARGEST_FP32)) & (np.abs(wide) >= 2.0**-126)
    return x[chosen if function.negative else chosen & (wide > 0.0)]


def _binade_chunks(function: Function, stride: int) -> Iterator[np.ndarray]:
    for exponent in function.binades:
        start = (exponent + 127) << 23
        for offset in range(0, 1 << 23, _CHUNK):
            words = np.uint32(start + offset) + np.arange(0, _CHUNK, stride, dtype=np.uint32)
            magnitude = words.view(np.float32)
            yield magnitude
            if function.negative:
                yield -magnitude


def excess(got: np.ndarray, x: np.ndarray, function: Function, model: DeviceModel) -> np.ndarray:
    """What remains of |got - exact| beyond the absolute part, relative to the value; 0 where f is no normal number.

    Where the model claims an absolute envelope alone, |got - exact| itself.
    """
    relative = function.relative(model)
    with np.errstate(all="ignore"):
        want = function.exact(x.astype(np.float64))
        distance = got.astype(np.float64)
        distance -= want
        np.abs(distance, out=distance)
        if relative is None:
            return np.where(np.isnan(distance), np.inf, distance)
        size = np.abs(want, out=want)
        # A result that the envelope lets fall below the normal range may be flushed: the bounds charge that apart.
        normal = size >= model.smallest_normal / (1.0 - relative)
        normal &= size <= LARGEST_FP32 / (1.0 + relative)
        distance -= function.absolute(model)
        distance /= size
    distance[~normal] = 0.0
    np.maximum(distance, 0.0, out=distance)
    return np.where(np.isnan(distance), np.inf, distance)

"""Measuring the transcendental envelopes that a device model claims, on the backend this process runs on.

`exp2` is measured over every FP32 argument whose result is normal; arguments below 2**-30 in magnitude differ from
them by less than the envelope.  The reference is numpy's float64 function, whose own error is below 2**-50.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from verify.devices import ULP, DeviceModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CHUNK = 1 << 22
_BINADES = range(-30, 7)
_REFERENCE_SLACK = 2.0**-50


@dataclasses.dataclass(frozen=True)
class Envelope:
    """The largest relative error of one function, and where.

    Attributes:
        name: of the function.
        arguments: how many were tried.
        exhaustive: whether these were all.
        worst: the largest relative error, reference slack included.
        at: the argument.
        claimed: what the device model allows there.
    """

    name: str
    arguments: int
    exhaustive: bool
    worst: float
    at: float
    claimed: float

    @property
    def holds(self) -> bool:
        """Whether the model's claim covers what was measured."""
        return self.worst <= self.claimed

    @property
    def worst_ulp(self) -> float:
        """In units of 2**-23 of the value."""
        return self.worst / ULP


def _words(first: int, count: int) -> np.ndarray:
    return (np.uint32(first) + np.arange(count, dtype=np.uint32)).view(np.float32)


def _binade_chunks(*, stride: int) -> Iterator[np.ndarray]:
    for exponent in _BINADES:
        start = (exponent + 127) << 23
        for offset in range(0, 1 << 23, _CHUNK):
            magnitude = _words(start + offset, _CHUNK)[::stride]
            yield magnitude
            yield -magnitude


def measure_exp2(model: DeviceModel, *, exhaustive: bool, progress: Callable[[float], None] | None = None) -> Envelope:
    """exp2 over (-126, 128): every argument, or every 257th of each binade."""
    compiled = jax.jit(jnp.exp2)
    worst, at, tried = 0.0, 0.0, 0
    chunks = 2 * len(_BINADES) * (1 << 23) // _CHUNK
    for number, x in enumerate(_binade_chunks(stride=1 if exhaustive else 257)):
        want = np.exp2(x.astype(np.float64))
        # A result that the envelope lets fall below the normal range may be flushed: the bounds charge that apart.
        normal = want * (1.0 - model.exp2_relative) >= model.smallest_normal
        error = _relative(np.asarray(compiled(x)), want, normal)
        position = int(error.argmax())
        tried += x.size
        if error[position] > worst:
            worst, at = float(error[position]), float(x[position])
        if progress is not None:
            progress((number + 1) / chunks)
    worst += _REFERENCE_SLACK
    return Envelope("exp2", tried, exhaustive=exhaustive, worst=worst, at=at, claimed=model.exp2_relative)


def measure_log(model: DeviceModel) -> Envelope:
    """The natural logarithm on [2**-36, 2**126], 4096 arguments per binade, against relative plus absolute envelope."""
    x = np.concatenate([_words((e + 127) << 23, 1 << 23)[::2048] for e in range(-36, 126)])
    got = np.asarray(jax.jit(jnp.log)(x)).astype(np.float64)
    want = np.log(x.astype(np.float64))
    # What remains once the absolute part is taken off, relative to the value; the model's claim is then relative too.
    excess = np.maximum(np.abs(got - want) - model.log_absolute, 0.0) / np.maximum(np.abs(want), 2.0**-30)
    return _sampled("log", x, excess, model.log_relative)


def measure_reciprocal(model: DeviceModel) -> Envelope:
    """0.5 / x on [2**-36, 2**125], 4096 arguments per binade."""
    x = np.concatenate([_words((e + 127) << 23, 1 << 23)[::2048] for e in range(-36, 125)])
    got = np.asarray(jax.jit(lambda a: 0.5 / a)(x)).astype(np.float64)
    error = _relative(got, 0.5 / x.astype(np.float64), np.ones(x.shape, dtype=bool))
    return _sampled("0.5 / x", x, error, model.reciprocal_relative)


def _sampled(name: str, x: np.ndarray, errors: np.ndarray, claimed: float) -> Envelope:
    position = int(errors.argmax())
    worst, at = float(errors[position]), float(x[position])
    return Envelope(name, x.size, exhaustive=False, worst=worst, at=at, claimed=claimed)


def _relative(got: np.ndarray, want: np.ndarray, where: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        error = np.abs(got.astype(np.float64) - want) / want
    return np.where(where, np.where(np.isnan(error), np.inf, error), 0.0)

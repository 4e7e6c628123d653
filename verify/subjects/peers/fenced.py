"""Peers inside a fence: what is known of them lies outside, so that campaigns look past it.

A campaign against a kernel with a known fault finds it again and again.  These are the same kernels with a domain that
leaves out rows whose known behaviour docs/findings.md records:

- rows without a visible key, which splash and flash attention call undefined or do not visit;
- values so large that the sum of p v overflows before the division by l;
- beyond |v| <= 2^12, flywheel-tpu's source makes no promise;
- logits outside the band around the caller's constant in which exp neither overflows nor loses every weight.

flywheel-tpu's decode kernels divide by an approximate reciprocal, which the interpreter rounds to BF16: their fence
allows for it.

The fence is no contract: it says where the campaign looks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from verify.attention.problem import widen
from verify.devices import BF16_UNIT_ROUNDOFF
from verify.subjects import jax_pallas
from verify.subjects.arithmetic import Arithmetic
from verify.subjects.peers import decode, flywheel_tpu, tokamax
from verify.subjects.subject import Domain, Subject

if TYPE_CHECKING:
    from verify.attention.problem import AttentionProblem
    from verify.devices import DeviceModel

LARGEST_SUM = 2.0**127
FLYWHEEL_VALUES = 2.0**12
OVERFLOW, UNDERFLOW = math.log(2.0**127), math.log(2.0**126)


def _values(problem: AttentionProblem, largest: float) -> bool:
    v = widen(problem.v)
    return float(np.abs(v[np.isfinite(v)]).max(initial=0.0)) <= largest


def _seeing(problem: AttentionProblem) -> np.ndarray:
    rows = np.stack([problem.mask(b).any(axis=1) for b in range(problem.batch)])
    return np.broadcast_to(rows[:, None], problem.q.shape[:3])


def ordinary(problem: AttentionProblem) -> np.ndarray:
    """Rows that see a key, if no sum of p v can overflow."""
    return _seeing(problem) & _values(problem, LARGEST_SUM / problem.kv_len)


def small_values(problem: AttentionProblem) -> np.ndarray:
    """Rows that see a key, if |v| <= 2^12."""
    return _seeing(problem) & _values(problem, FLYWHEEL_VALUES)


def decoded_small_values(problem: AttentionProblem) -> np.ndarray:
    """The same of rows that are decoded."""
    return small_values(problem) & decode.DECODED.contains(problem)


def near_the_constant(problem: AttentionProblem) -> np.ndarray:
    """Rows whose largest logit lies so near the constant that neither l nor the sum of p v leaves FP32's range."""
    largest = max(float(np.abs(widen(problem.v)).max(initial=0.0)), 1.0)
    room = OVERFLOW - math.log(problem.kv_len * largest) if math.isfinite(largest) else -math.inf
    found = np.zeros(problem.q.shape[:3], dtype=bool)
    for b, h in np.ndindex(problem.batch, problem.heads):
        with np.errstate(all="ignore"):
            logits = widen(problem.q[b, h]) @ widen(problem.k[b, problem.kv_head(h)]).T * problem.scale
            if problem.softcap is not None:
                logits = problem.softcap * np.tanh(logits / problem.softcap)
            highest = np.where(problem.mask(b), logits, -np.inf).max(axis=1)
        above = highest - tokamax.LARGEST_CONSTANT
        found[b, h] = (above <= room) & (above >= -UNDERFLOW / 2)
    return found & ordinary(problem)


RECIPROCAL = (1.0 + BF16_UNIT_ROUNDOFF) / (1.0 - BF16_UNIT_ROUNDOFF) - 1.0
"""Of the reciprocal, in BF16, of a number rounded to BF16."""


@dataclasses.dataclass(frozen=True)
class _ApproximateReciprocal(Arithmetic):
    def effective(self, device: DeviceModel, kv_len: int) -> DeviceModel:
        """Every weight may err as much again: the derivation has no place for an error of the division alone."""
        found = super().effective(device, kv_len)
        return dataclasses.replace(found, exp2_relative=found.exp2_relative * (1.0 + RECIPROCAL) + RECIPROCAL)


def _fenced(subject: Subject, name: str, domain: Domain, largest: float | None = None) -> Subject:
    """The subject with a domain; relations build problems of their own from a case: what they pass is refused here."""

    @functools.wraps(subject.call)
    def call(q: Any, k: Any, v: Any, **options: Any) -> Any:  # noqa: ANN401  as the subject's own
        words = np.asarray(v, np.float32)
        size = float(np.abs(words[np.isfinite(words)]).max(initial=0.0))
        if size > (LARGEST_SUM / k.shape[-2] if largest is None else largest):
            message = f"|v| up to {size:g} lies behind the fence"
            raise NotImplementedError(message)
        return subject.call(q, k, v, **options)

    return dataclasses.replace(subject, name=f"verify.subjects.peers.fenced:{name}", call=call, domain=domain)


_ORDINARY = Domain("rows that see a key, and values whose sums do not overflow", ordinary)
_SMALL = Domain("rows that see a key, and |v| <= 2^12", small_values)

JAX_SPLASH = _fenced(jax_pallas.SPLASH, "JAX_SPLASH", _ORDINARY)
JAX_FLASH = _fenced(jax_pallas.FLASH, "JAX_FLASH", _ORDINARY)
TOKAMAX_SPLASH_EXP = _fenced(tokamax.SPLASH_EXP, "TOKAMAX_SPLASH_EXP", _ORDINARY)
TOKAMAX_SPLASH_CONSTANT = _fenced(
    tokamax.SPLASH_CONSTANT,
    "TOKAMAX_SPLASH_CONSTANT",
    Domain("rows that see a key, whose largest logit lies near the constant", near_the_constant),
)
FLYWHEEL_TPU_DENSE = _fenced(flywheel_tpu.DENSE, "FLYWHEEL_TPU_DENSE", _SMALL, FLYWHEEL_VALUES)
FLYWHEEL_TPU_VARLEN = _fenced(flywheel_tpu.VARLEN, "FLYWHEEL_TPU_VARLEN", _SMALL, FLYWHEEL_VALUES)
_DECODED = Domain("decoded rows that see a key, and |v| <= 2^12", decoded_small_values)
_APPROXIMATE = _ApproximateReciprocal(weights="bf16", exponential="exp2", block_kv=jax_pallas.BLOCK)
FLYWHEEL_TPU_DECODE, FLYWHEEL_TPU_PAGED = (
    dataclasses.replace(_fenced(subject, name, _DECODED, FLYWHEEL_VALUES), arithmetic=_APPROXIMATE)
    for subject, name in (
        (decode.FLYWHEEL_TPU, "FLYWHEEL_TPU_DECODE"),
        (decode.FLYWHEEL_TPU_PAGED, "FLYWHEEL_TPU_PAGED"),
    )
)

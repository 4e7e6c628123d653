"""The rotary oracles pass their own checks, and a wrong oracle does not."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest

from verify.attention.reference import OracleUnsound
from verify.rotary import health, oracle_arb, oracle_float64, oracle_mpmath

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.rotary.problem import RotaryProblem, Rotated

    Oracle = Callable[[RotaryProblem], Rotated]

compute = oracle_float64.rotate


@pytest.mark.smoke
def test_the_oracles_are_sound() -> None:
    """Every tier gives every known answer, with a small bound, and all tiers agree."""
    health.check_oracles()


def other_layout(problem: RotaryProblem) -> Rotated:
    """Half-split for interleaved and the other way round."""
    return compute(dataclasses.replace(problem, layout="half" if problem.layout == "interleaved" else "interleaved"))


def other_base(problem: RotaryProblem) -> Rotated:
    """Base 1e4 whatever is asked."""
    return compute(dataclasses.replace(problem, base=10_000.0))


def other_sign(problem: RotaryProblem) -> Rotated:
    """The sine with the other sign."""
    return compute(dataclasses.replace(problem, inverse=not problem.inverse))


def one_position_late(problem: RotaryProblem) -> Rotated:
    """Positions counted from one."""
    return compute(dataclasses.replace(problem, positions=np.maximum(problem.positions - 1, 0)))


def whole_head(problem: RotaryProblem) -> Rotated:
    """All lanes rotated although only some should be."""
    return compute(dataclasses.replace(problem, rotary_dim=None))


def by_formula(problem: RotaryProblem, frequencies: np.ndarray, dtype: type[np.floating]) -> Rotated:
    """The textbook formula with given frequencies and a phase of the given precision, claiming the float64 bound."""
    right = compute(problem)
    out = right.out.copy()
    first, second = problem.lanes()
    x = problem.numbers()
    for batch in range(problem.batch):
        phase = (problem.position(batch)[:, None].astype(dtype) * frequencies.astype(dtype)).astype(np.float64)
        cos, sin = np.cos(phase), np.sin(phase) * (-1 if problem.inverse else 1)
        a, b = x[batch][..., first], x[batch][..., second]
        out[batch][..., first], out[batch][..., second] = a * cos - b * sin, b * cos + a * sin
    return dataclasses.replace(right, out=out)


def exact_frequencies(problem: RotaryProblem) -> np.ndarray:
    """Inverse frequencies in float64."""
    return problem.base ** (-2.0 * np.arange(problem.pairs) / max(problem.width, 1))


def fp32_frequencies(problem: RotaryProblem) -> Rotated:
    """Frequencies rounded to FP32, everything else in float64."""
    return by_formula(problem, exact_frequencies(problem).astype(np.float32), np.float64)


def fp32_phase(problem: RotaryProblem) -> Rotated:
    """Frequencies and phase in FP32."""
    return by_formula(problem, exact_frequencies(problem), np.float32)


def float64_phase(problem: RotaryProblem) -> Rotated:
    """Everything in float64, not reduced exactly: off by position * 2^-53, which the claimed bound does not allow."""
    return by_formula(problem, exact_frequencies(problem), np.float64)


def half_exponent(problem: RotaryProblem) -> Rotated:
    """base**(-i / width) instead of base**(-2 i / width)."""
    return by_formula(problem, np.sqrt(exact_frequencies(problem)), np.float64)


def few_digits(problem: RotaryProblem) -> Rotated:
    """The definition with twelve digits."""
    return oracle_mpmath.rotate(problem, dps=12)


def few_bits(problem: RotaryProblem) -> Rotated:
    """Balls of 64 bits, which do not determine a phase at 2^20."""
    return oracle_arb.rotate(problem, precision=64)


WRONG: dict[str, Oracle] = {
    oracle.__name__: oracle
    for oracle in (
        other_layout,
        other_base,
        other_sign,
        one_position_late,
        whole_head,
        fp32_frequencies,
        fp32_phase,
        float64_phase,
        half_exponent,
        few_digits,
        few_bits,
    )
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_oracle_is_caught(name: str) -> None:
    """A wrong layout, base, sign, position or exponent, and reduced precision, do not pass the known answers."""
    with pytest.raises(OracleUnsound):
        health.check_oracle(name, WRONG[name])

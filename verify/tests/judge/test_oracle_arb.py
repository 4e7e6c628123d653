"""Ball arithmetic reaches the precision asked for, or says so."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import flint
import numpy as np
import pytest
from flint import arb

from verify.attention import oracle_arb, oracle_mpmath
from verify.attention.reference import OracleUnsound
from verify.tests.judge.problems import adversarial_problem, normal_problem, problem

if TYPE_CHECKING:
    import mpmath

pytestmark = pytest.mark.cover


def to_arb(x: mpmath.mpf) -> arb:
    """An mpf as an exact ball."""
    sign, mantissa, exponent, _ = x._mpf_
    return arb(int(-mantissa if sign else mantissa)) * arb(2) ** int(exponent)


@pytest.mark.parametrize("seed", range(40))
def test_balls_hold_the_definition(seed: int) -> None:
    """Every ball contains what the readable definition gives, to its own error."""
    case = adversarial_problem(seed)
    batch, head, row = 0, case.heads - 1, case.q_len - 1
    balls, ball = oracle_arb.attention_row(case, batch, head, row)
    values, value = oracle_mpmath.attention_row(case, batch, head, row, dps=80)
    if case.visible(row) == 0:
        pytest.skip("an empty row has no numbers to compare")
    with flint.ctx.workprec(400):
        largest = max(1.0, *np.abs(case.v.astype(np.float64)).ravel().tolist())
        assert (ball + arb(0, 1e-60) * (1 + abs(ball))).contains(to_arb(value))
        for wide, exact in zip(balls, values, strict=True):
            assert (wide + arb(0, 1e-60) * arb(largest)).contains(to_arb(exact))


def test_precision_rises_until_radii_are_small() -> None:
    """Logits near 2^100 that nearly tie: far too few bits at the start still end in the radius asked for."""
    case = problem(
        [[[[2.0**60, 1.0]]]], [[[[2.0**40, 0.0], [2.0**40, 1.0]]]], [[[[1.0, 2.0], [3.0, 5.0]]]], causal=False
    )
    out, lse = oracle_arb.attention_row(case, 0, 0, 0, precision=16, relative=2.0**-70)
    assert all(ball.rad() <= 5 * 2.0**-70 for ball in out)
    assert lse.rad() <= lse.mid() * 2.0**-70
    assert float(out[0]) == pytest.approx(1 + 2 / (1 + np.exp(-1.0)))


def test_exhausted_precision_is_loud() -> None:
    """When the bits allowed do not suffice, the error names the radius, the limit and the rows."""
    case = normal_problem(0, q_len=3, kv_len=5)
    with pytest.raises(OracleUnsound, match=r"30 bits does not reach a relative radius of 8\.67e-19 .*batch 0, head 1"):
        oracle_arb.attention_row(case, 0, 1, 2, precision=30, max_precision=30)


def test_cancelling_values() -> None:
    """Weights that cancel exactly give a ball around 0 that is small against sum P |v|."""
    case = problem([[[[1.0]]]], [[[[3.0], [3.0]]]], [[[[2.0**100], [-(2.0**100)]]]], causal=False)
    [out], _ = oracle_arb.attention_row(case, 0, 0, 0)
    assert out.contains(0)
    assert out.rad() <= 2.0**100 * 2.0**-60


def test_the_caller_keeps_its_precision() -> None:
    """The global working precision is as it was."""
    before = flint.ctx.prec
    oracle_arb.attention(normal_problem(0, q_len=2, kv_len=3))
    assert flint.ctx.prec == before


def test_float64_of_a_ball() -> None:
    """Rounding a ball to float64 covers its radius and the rounding; exact numbers get error 0."""
    assert oracle_arb.to_float64(arb(0.75)) == (0.75, 0.0)
    assert oracle_arb.to_float64(arb.neg_inf()) == (-np.inf, 0.0)
    with flint.ctx.workprec(200):
        third = arb(1) / 3
        value, error = oracle_arb.to_float64(third)
        assert abs(arb(value) - third) <= arb(error)
        assert error <= 2.0**-54
        value, error = oracle_arb.to_float64(arb(2) ** 2000)
        assert error == np.inf


def test_rows_match_single_rows() -> None:
    """Several rows at a time give overlapping balls with one at a time."""
    case = normal_problem(1, q_len=4, kv_len=6)
    together = oracle_arb.attention_rows(case, 0, 1, [0, 3, 2])
    for row, (out, lse) in zip([0, 3, 2], together, strict=True):
        alone, alone_lse = oracle_arb.attention_row(case, 0, 1, row)
        assert lse.overlaps(alone_lse)
        assert all(a.overlaps(b) for a, b in zip(out, alone, strict=True))


def test_extreme_scales() -> None:
    """Scales near the ends of binary64 need no special case."""
    case = problem([[[[1.5]]]], [[[[1.0], [2.0]]]], [[[[3.0], [5.0]]]], causal=False)
    steep = oracle_arb.attention(dataclasses.replace(case, scale=1e300))
    assert steep.out.item() == 5.0
    flat = oracle_arb.attention(dataclasses.replace(case, scale=5e-324))
    assert flat.out.item() == 4.0

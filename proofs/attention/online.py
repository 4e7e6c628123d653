"""The rescaling softmax that a caller asks for: the bias is added to the running maximum at once."""

from __future__ import annotations

from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import z3

from flywheel.attention import budget, tile
from proofs.attention.floor import anchor_shifts
from proofs.attention.overflow import any_order_bound
from proofs.constants import envelope
from proofs.exact import BF16, FP32, power_of_two
from proofs.lemma import Assumption, Method, lemma, require
from proofs.smt import FP32 as FP32_SORT
from proofs.smt import NEAREST, require_always

_TESTS = "verify/tests/proofs/test_proofs_assumptions.py"
_EXACT_INTEGERS = 2**24


@lemma(
    statement="a running maximum with BIAS added at once is an integer, never below the maximum, exact up to 2**24 - "
    "BIAS; beyond, a lost bias leaves l finite, and the checks see an o that overflows or a sum below the floor",
    rests_on=(
        "budget.BIAS",
        "budget.LANES",
        "budget.LANE_LIMIT",
        "budget.MAX_KEYS",
        "budget.SUM_FLOOR",
        "devices.exp2_relative",
    ),
    methods=(Method.SMT, Method.EXACT, Method.INSTANCES),
    assumptions=(
        Assumption("the running maximum is the ceiling of a score", f"{_TESTS}::test_running_maximum_is_an_integer"),
        Assumption("rows below the floor are replayed", f"{_TESTS}::test_rows_below_the_floor_are_unsound"),
        Assumption("an o that is not finite is refused", f"{_TESTS}::test_results_that_are_not_finite_are_unsound"),
        Assumption("the early shift is an integer", f"{_TESTS}::test_early_shifts_are_integers"),
    ),
)
def early_bias() -> str:
    """Why `softmax="online"` may save the operation per score that a replay spends on the bias.

    Let m be the ceiling of a score, a = fl(m + BIAS).

    - Right on the domain: a is an integer (from 2**23 on every FP32 number is one), a >= m, and a grows with m.  So
      factors are powers of two, as in a replay (`integer_maximum_rescales_exactly`, `recovery_is_exact`), every
      exponent s - a is at most 0, and the row is the one of `attention_theorem` against the final a, whatever a is.
    - While |m| + BIAS <= 2**24 nothing is rounded: a = m + BIAS, the exponent of the maximum lies in
      [-(BIAS + 1), -BIAS], weights and sums are those of a replay and need no check.
    - Beyond, a lies between m and m + 2 BIAS (checked at every exponent).  Weights are at most 1, so that
      l <= 2 MAX_KEYS, below the check's limit.  Two things can be lost with the bias: room for values (o may overflow:
      with weights of 1 two keys with the largest BF16 suffice), and half of the floor's (a weight of 2**-(2 BIAS + 1)
      may be all there is).  The first is looked at in o, the second in l, and the block is replayed with the late bias.

    An SMT solver confirms the statements about a for every finite FP32 score; Coq has them for every integer of the
    format, with the factors (early_bias.v).
    """
    shifts = {shift for exponent in range(24, 128) for shift in anchor_shifts(exponent)}
    require(min(shifts) >= 0 and max(shifts) <= 2 * budget.BIAS, "an early shift lies outside of [m, m + 2 BIAS]")
    lost = power_of_two(100)
    require(FP32.nearest(lost + budget.BIAS) == lost, "the bias is no longer lost at 2**100")
    exp2 = 1 + envelope("exp2_relative")
    denominator = any_order_bound(budget.MAX_KEYS, FP32.precision) * exp2
    limit = budget.LANES * Fraction(budget.LANE_LIMIT)
    require(denominator <= limit, f"l may reach {float(denominator):.6g} with a bias that was lost")
    require(2 * BF16.largest > FP32.largest, "two largest BF16 values no longer overflow without the bias")
    weight = power_of_two(-(2 * budget.BIAS + 1)) * (1 - envelope("exp2_relative"))
    require(weight < Fraction(budget.SUM_FLOOR), "a shift that was rounded upwards no longer passes the floor")
    _code_agrees()
    _shifts_of_every_score()
    return f"every FP32 score; l <= {float(denominator):.3g}; shifts off by up to {max(shifts)}"


def _shifts_of_every_score() -> None:
    s, bias = z3.FP("s", FP32_SORT), z3.FPVal(float(budget.BIAS), FP32_SORT)
    maximum = z3.fpRoundToIntegral(z3.RTP(), s)
    shift = z3.fpAdd(NEAREST, maximum, bias)
    finite = z3.Not(z3.Or(z3.fpIsNaN(s), z3.fpIsInf(s)))
    require_always(z3.fpGEQ(shift, maximum), "an early shift is below its maximum", given=finite)
    require_always(z3.fpEQ(z3.fpRoundToIntegral(z3.RTP(), shift), shift), "an early shift is no integer", given=finite)
    exact = z3.FPVal(float(_EXACT_INTEGERS - budget.BIAS), FP32_SORT)
    require_always(
        z3.fpEQ(z3.fpSub(NEAREST, shift, bias), maximum),
        "an early shift is rounded below 2**24",
        given=z3.And(finite, z3.fpLEQ(z3.fpAbs(maximum), exact)),
    )


def _code_agrees() -> None:
    """The kernel's step, early and late, on scores of every size."""
    for exponent in (0, 10, 23):
        _same_weights(2.0**exponent)
    s = jnp.full((tile.SUBLANES, 128), np.float32(2.0**100))
    unset = jnp.full((1, 128), tile.UNSET, jnp.float32)
    early, shift, _ = tile.online_weights(s, unset, None, late_bias=False)
    late, _, _ = tile.online_weights(s, unset, None, late_bias=True)
    require(float(early[0, 0]) == 1.0, "at 2**100 an early bias is not lost")
    require(bool((shift == s[:1]).all()), "at 2**100 an early shift is not the maximum")
    room = 1 + float(envelope("exp2_relative"))
    require(float(late[0, 0]) <= 2.0**-budget.BIAS * room, "at 2**100 a late bias is lost")


def _same_weights(size: float) -> None:
    """Integer scores, so that no exponent is rounded: both ways subtract the same numbers and give the same weights."""
    rng = np.random.default_rng(7)
    s = jnp.asarray(np.round(rng.uniform(-size, size, (tile.SUBLANES, 128))), jnp.float32)
    unset = jnp.full((1, 128), tile.UNSET, jnp.float32)
    early, shift, _ = tile.online_weights(s, unset, None, late_bias=False)
    late, maximum, _ = tile.online_weights(s, unset, None, late_bias=True)
    require(bool((early == late).all()), f"early and late bias give different weights for scores up to {size:g}")
    require(bool((shift == maximum + budget.BIAS).all()), f"an early shift is rounded for scores up to {size:g}")

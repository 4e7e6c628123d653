"""The parts joined: one theorem from BF16 inputs to the BF16 output, and the contract's charges against it."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from flywheel.attention import budget, tile
from proofs.constants import envelope
from proofs.exact import FP32, ball, ball_precision, log2_ball, power_of_two
from proofs.lemma import Assumption, Method, lemma, require
from verify import devices
from verify.attention import contract

if TYPE_CHECKING:
    from flint import arb

_TESTS = "verify/tests/proofs/test_proofs_assumptions.py"
_BETA_ROOM = power_of_two(-18)
"""attention_theorem.v asks for a mean beta of at most 1 - 2**-18 ..."""
_FLUSHED_ROOM = power_of_two(-20)
"""... and for no more than a 2**-20th of the floor flushed from l."""
_LARGEST_LSE = (0, 1, power_of_two(20), power_of_two(126))


@lemma(
    statement="from BF16 inputs to the BF16 output and the LSE in one theorem, for the static anchor, the rescaling "
    "softmax and a replay, any order of summation; wherever the contract's bound is finite, it charges what the "
    "theorem does",
    rests_on=(
        "budget.BIAS",
        "budget.LANES",
        "budget.LANE_LIMIT",
        "budget.MAX_KEYS",
        "budget.SUM_FLOOR",
        "contract.BIAS",
        "contract.EVALUATION_SLACK",
        "contract.LARGEST_EXPONENT",
        "devices.BF16_UNIT_ROUNDOFF",
        "devices.exp2_relative",
        "devices.log_absolute",
        "devices.log_relative",
        "devices.reciprocal_relative",
        "devices.smallest_normal",
        "devices.unit_roundoff",
        "devices.dot_unit_roundoff",
        "tile.LN2",
    ),
    methods=(Method.BALLS, Method.EXACT),
    assumptions=(
        Assumption("additions round to nearest or towards zero", f"{_TESTS}::test_weights_and_sums"),
        Assumption("the device rounds to BF16 to nearest, ties to even", f"{_TESTS}::test_xla_rounds_to_bf16_as_numpy"),
        Assumption("denominators beyond the limits are refused", f"{_TESTS}::test_rows_below_the_floor_are_unsound"),
        Assumption("o is finite when it is divided", f"{_TESTS}::test_results_that_are_not_finite_are_unsound"),
        Assumption("a row has at most MAX_KEYS keys", f"{_TESTS}::test_more_than_max_keys_are_refused"),
    ),
)
def attention_theorem() -> str:
    """What Coq proves (attention_theorem.v), and how the contract follows from it.

    Given for each key BF16 numbers q_d, k_d and a BF16 value; FP32 products, sums in any order, the scale, the
    subtraction of any shift A, exp2 within its envelope or flushed, the rounding of the weight to BF16, the product;
    l and o summed in any order; l within the checks' limits; the last steps.  Then |out - exact| <= `out_bound`
    (contract, section 6.3) with inner the smaller of the first-order and the convex bound, all in terms of the
    inputs: exact shares P, sigma of each key, the number of keys.  Nothing is assumed of the anchor.  A weight that
    is flushed is either as small exactly, or its rho is at least 1.  The same for a softmax that rescales by powers
    of two, with early or late bias, each key first in the frame of its own fragment; and for the LSE.

    Here the contract's charges are compared with the theorem's, for every number of keys up to MAX_KEYS:

    - rho: e**x (1 + exp2) - 1 + exp2, compared by `contract_constants`;
    - Gamma: (1 + u)**(n - 1) - 1, with 131 u to spare; so that where the contract's denominator is positive, the mean
      beta is at most 1 - 2**-18, as the theorem asks;
    - flushing: per key 4 omega (1 + Gamma) from l, the excess over flushed_weight below what Gamma spares; from o
      2 omega |v| and 3 omega, over SUM_FLOOR / 2;
    - the LSE: shift, constant, product and addition against 5 u (|lse| + 128 ln 2), where l is within its limits.
    """
    with ball_precision():
        lengths = _lengths()
        for model, n in itertools.product(devices.MODELS.values(), lengths):
            _first_order_is_covered(model, n)
        for model, size in itertools.product(devices.MODELS.values(), _LARGEST_LSE):
            _lse_is_covered(model, Fraction(size))
    limit = budget.LANES * Fraction(budget.LANE_LIMIT)
    require(limit < power_of_two(126), f"a weight of {float(limit):.4g} has an exponent beyond exp2's envelope")
    return f"{len(lengths)} numbers of keys, {len(devices.MODELS)} device models"


def _lengths() -> list[int]:
    """Powers of two and their neighbours, up to the longest row."""
    powers = [2**k for k in range(budget.MAX_KEYS.bit_length())]
    return sorted({n + d for n in powers for d in (-1, 0, 1) if 1 <= n + d <= budget.MAX_KEYS})


def _growth(n: int, u: Fraction) -> arb:
    return (n * ball(1 + u).log()).exp() - 1


def _first_order_is_covered(model: devices.DeviceModel, n: int) -> None:
    rows = contract._Charges(np.array([n]), model)  # noqa: SLF001  its own charges
    charged = ball(float(rows.summing[0]))
    if charged >= 1:
        return  # the contract's denominator is not positive: it does not use this bound
    omega, floor = ball(model.smallest_normal), ball(budget.SUM_FLOOR)
    weight, products = ball(rows.flushed_weight), ball(float(rows.flushed_products[0]))
    room = ball(Fraction(contract.EVALUATION_SLACK) - 1)
    for u_l, u_o in itertools.product((model.unit_roundoff, model.dot_unit_roundoff), repeat=2):
        of_l, of_o = (_growth(n - 1, Fraction(u)) for u in (u_l, u_o))
        spare = charged - of_l
        where = f"{n} keys on {model.name}"
        require(spare - room >= ball(_BETA_ROOM), f"a finite bound of {where} may have a mean beta of nearly 1")
        lost = 4 * n * omega * (1 + of_l)
        require(lost <= floor * ball(_FLUSHED_ROOM), f"what {where} lose of l is not small against the floor")
        require(lost * 2 / floor <= n * weight + spare / 2, f"what {where} lose of l is not charged")
        require(2 * omega * (1 + of_o) * 2 / floor <= weight, f"a weight of {where} lost from o is not charged")
        require(3 * n * omega * (1 + of_o) * 2 / floor <= products, f"products of {where} lost from o are not charged")


def _lse_is_covered(model: devices.DeviceModel, size: Fraction) -> None:
    """`lse_bound` of attention_theorem.v for an LSE of this size, at a few errors of the sum."""
    ln2 = ball(2).log()
    for end in (Fraction(budget.SUM_FLOOR), budget.LANES * Fraction(budget.LANE_LIMIT)):
        require(
            abs(log2_ball(end)) <= ball(contract.LARGEST_EXPONENT), f"ln l passes its range at l = {float(end):.4g}"
        )
    u, omega, most = ball(model.unit_roundoff), ball(model.smallest_normal), ln2 * ball(contract.LARGEST_EXPONENT)
    held = abs(ball(FP32.nearest(Fraction(tile.LN2))) / ln2 - 1)
    logarithm = ball(model.log_relative) * most + ball(model.log_absolute)
    for apart in (Fraction(0), power_of_two(-20), Fraction(1, 2), Fraction(20)):
        parts = ball(apart) + logarithm + omega
        parts += ((1 + u) * (1 + held) * (1 + u) - 1) * (ball(size) + most + ball(apart))
        needed = parts + u * (ball(size) + parts) + omega
        rounding = logarithm + 5 * u * (ball(size) + most)
        charged = (ball(apart) + rounding) * (1 + 4 * u) * ball(contract.EVALUATION_SLACK)
        require(
            charged >= needed, f"the LSE's roundings are not covered at an LSE of {float(size):.3g} on {model.name}"
        )
    require(envelope("log_relative") < 1, "a logarithm that errs by its own size is none")

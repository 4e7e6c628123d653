"""The constants of the contract that rest on what the kernel does: operation counts, ranges, units."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from flywheel.attention import budget, checks, tile
from proofs.constants import envelope
from proofs.exact import FP32, ball, ball_precision, log2_ball, power_of_two
from proofs.lemma import Assumption, Method, lemma, require
from verify import devices
from verify.attention import contract

if TYPE_CHECKING:
    from flint import arb

_TESTS = "verify/tests/proofs/test_proofs_assumptions.py"


@lemma(
    statement="the contract's gamma, operation counts, shift error, domain, logarithm's range and evaluation slack "
    "cover what the kernel computes",
    rests_on=(
        "budget.BIAS",
        "budget.LANES",
        "budget.LANE_LIMIT",
        "budget.SUM_FLOOR",
        "budget.MAX_KEYS",
        "budget.FP32_MAX",
        "contract.BIAS",
        "contract.LARGEST_EXPONENT",
        "contract.DOMAIN_LIMIT",
        "contract.EVALUATION_SLACK",
        "contract.NEGLIGIBLE",
        "devices.unit_roundoff",
        "devices.dot_unit_roundoff",
        "devices.exp2_relative",
        "tile.LOG2_E",
    ),
    methods=(Method.BALLS, Method.EXACT),
    assumptions=(
        Assumption("head_dim is one of HEAD_DIMS", "flywheel.attention.checks:check_operands"),
        Assumption("a row has at most MAX_KEYS keys", f"{_TESTS}::test_more_than_max_keys_are_refused"),
    ),
)
def contract_constants() -> str:
    """Each constant against the count or range it stands for.

    gamma: e**(n u) - 1 as float64 evaluates it is at least (1 + u)**n - 1 and 1 - (1 - u)**n, for every n.
    Sums: a term passes through at most n - 1 additions that round (adding an exact zero does not), over keys and lanes
    together and in any order; one multiplication each for 0.5 / l and for P are apart.  `summing` allows n + 130, which
    also covers the lanes counted separately.
    Shift: the fast path rounds s - a once, a replay s - m and then the bias; where the weight counts these are at most
    126 or log2(LANE_LIMIT) in size, and 126 - BIAS and 126.
    Score: head_dim - 1 additions, the rounding of the scale (to binary64 twice, to FP32 once) and of the product.
    Domain: sums and scores of at most 2**127 stay finite through these roundings.
    Logarithm: ln l lies within LN2 * LARGEST_EXPONENT.
    Slack: float64 sums of up to MAX_KEYS non-negative terms, in a numerator and a denominator; where every score's
    doubt e is below NEGLIGIBLE, 3 e stands for e - ln(1 - e - e**2).
    """
    with ball_precision():
        _gamma_dominates()
        _sums_are_covered()
        _shift_is_covered()
        _scores_are_covered()
        _weights_are_covered()
        _ranges_are_covered()
        _slack_is_covered()
    return f"{len(_lengths())} lengths, {len(checks.HEAD_DIMS)} head sizes, {len(devices.MODELS)} device models"


def _lengths() -> list[int]:
    powers = [2**k for k in range(budget.MAX_KEYS.bit_length())]
    return sorted({n + d for n in powers for d in (-1, 0, 1) if 1 <= n + d <= budget.MAX_KEYS})


def _growth(n: int, u: Fraction) -> arb:
    """(1 + u)**n - 1."""
    return (n * ball(1 + u).log()).exp() - 1


def _units() -> set[Fraction]:
    return {Fraction(u) for model in devices.MODELS.values() for u in (model.unit_roundoff, model.dot_unit_roundoff)}


def _gamma_dominates() -> None:
    for u in _units():
        for n in [*_lengths(), budget.MAX_KEYS + 130]:
            value = ball(float(contract.gamma(float(n), float(u))))
            require(value >= _growth(n, u), f"gamma({n}, {float(u)}) is below (1 + u)**n - 1")
            require(value >= 1 - (n * ball(1 - u).log()).exp(), f"gamma({n}, {float(u)}) is below 1 - (1 - u)**n")


def _sums_are_covered() -> None:
    for model in devices.MODELS.values():
        u = Fraction(max(model.unit_roundoff, model.dot_unit_roundoff))
        for n in _lengths():
            rows = contract._Charges(np.array([n]), model)  # noqa: SLF001  not a copy of it
            allowed = ball(float(rows.summing[0]))
            roundings = (n - 1) + (budget.LANES - 1) + 2
            require(allowed >= _growth(roundings, u), f"`summing` of {n} keys allows fewer than {roundings} roundings")
            # The convex bound divides by a sum: (1 - u)**-(n - 1) - 1 has to be covered too.
            inverse = (-(n - 1) * ball(1 - u).log()).exp() - 1
            require(allowed >= inverse, f"`summing` of {n} keys does not cover the inverse of a sum's error")


def _shift_is_covered() -> None:
    bias = budget.BIAS
    with_room = log2_ball(budget.LANE_LIMIT) + 1
    for model in devices.MODELS.values():
        u = ball(model.unit_roundoff)
        charged = ball(contract._shift_error(model))  # noqa: SLF001  the contract's own charge
        largest = with_room if with_room > 126 else ball(127)
        fast, replayed = u * largest, u * ((127 - bias) + 127)
        require(charged >= fast, f"the shift error of the fast path is not covered on {model.name}")
        require(charged >= replayed, f"the shift error of a replay is not covered on {model.name}")


def _scores_are_covered() -> None:
    off = abs(ball(tile.LOG2_E) * ball(2).log() - 1)
    require(off <= ball(power_of_two(-52)), f"LOG2_E = {tile.LOG2_E} is not log2(e) to binary64")
    for model in devices.MODELS.values():
        dot, u = Fraction(model.dot_unit_roundoff), Fraction(model.unit_roundoff)
        for head_dim in checks.HEAD_DIMS:
            # scale = ln 2 makes the factor of the logits 1 in log2 units; the contract evaluates itself in float64,
            # whose few roundings EVALUATION_SLACK covers and are granted here.
            unit_pair = np.ones((1, 1))
            charged = ball(float(contract._score_error(unit_pair, contract.LN2, head_dim, model)[0, 0]))  # noqa: SLF001
            flushed = (2 * head_dim + 1) * Fraction(model.smallest_normal)
            constant = (1 + power_of_two(-51)) * (1 + u)
            needed = (1 + _growth(head_dim - 1, dot)) * ball(constant * (1 + u)) - 1 + ball(flushed)
            require(
                charged * ball(1 + power_of_two(-48)) >= needed,
                f"the error of a score at head_dim {head_dim} is not covered on {model.name}",
            )


def _weights_are_covered() -> None:
    """x + x**2 + e exp2 >= e**x (1 + exp2) - 1 + exp2 for x <= 1, where rho takes the small form (`_grown`).

    The second exp2 is what a flushed weight needs (key_conforms.v).  For larger x the contract charges e**x (1 + exp2).
    """
    exp2 = ball(envelope("exp2_relative"))
    for x in (Fraction(n, 64) for n in range(65)):
        grown = ball(x).exp()
        charged = ball(x + x**2) + exp2 * ball(math.e) * ball(1 + power_of_two(-50))
        require(charged >= grown * (1 + exp2) - 1 + exp2, f"rho at an exponent of {x} does not cover exp2's error")


def _ranges_are_covered() -> None:
    dot, u = envelope("dot_unit_roundoff"), envelope("unit_roundoff")
    grown = ball(contract.DOMAIN_LIMIT) * (1 + _growth(max(checks.HEAD_DIMS), dot)) * ball((1 + u) ** 3)
    require(
        grown + budget.BIAS <= ball(FP32.largest), f"a score at DOMAIN_LIMIT = {contract.DOMAIN_LIMIT:.6g} may overflow"
    )
    for name, end in (("LANES * LANE_LIMIT", budget.LANES * budget.LANE_LIMIT), ("SUM_FLOOR", budget.SUM_FLOOR)):
        size = abs(log2_ball(end))
        require(size <= ball(contract.LARGEST_EXPONENT), f"|log2 l| passes LARGEST_EXPONENT at l = {name}")
    require(
        ball(contract.LARGEST_EXPONENT) >= 126,
        f"weights down to 2**-126 count, LARGEST_EXPONENT is {contract.LARGEST_EXPONENT}",
    )


def _slack_is_covered() -> None:
    one_sum = ball(1 + (budget.MAX_KEYS + 100) * power_of_two(-52))
    require(
        ball(contract.EVALUATION_SLACK) >= one_sum * one_sum / (2 - one_sum),
        f"EVALUATION_SLACK = {contract.EVALUATION_SLACK} does not cover float64 sums of MAX_KEYS terms",
    )
    e = ball(contract.NEGLIGIBLE)
    require(3 * e >= e - (1 - e - e * e).log(), f"a doubt of NEGLIGIBLE = {contract.NEGLIGIBLE} nats is not negligible")

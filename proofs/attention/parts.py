"""The parts of the theorem: scores, weights, the logarithm of the denominator, and the replay as a sum."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from proofs.attention.rows import OMEGA, flush
from proofs.constants import envelope
from proofs.exact import BF16, FP32, ball, ball_precision, floor_log2, power_of_two
from proofs.lemma import Assumption, Method, lemma, require
from verify.attention import contract

if TYPE_CHECKING:
    from collections.abc import Sequence

_TESTS = "verify/tests/proofs/test_proofs_assumptions.py"


def _truncated(x: Fraction) -> Fraction:
    """x rounded to FP32 towards zero."""
    if x == 0:
        return x
    quantum = power_of_two(floor_log2(abs(x)) - FP32.precision + 1)
    return int(x / quantum) * quantum


@lemma(
    statement="a score errs by at most |scale| log2(e) ((1 + u_dot)^(d-1) (1 + held)(1 + u) - 1) sum|q k|, plus "
    "what is "
    "flushed, in any order of summation",
    rests_on=("devices.unit_roundoff", "devices.dot_unit_roundoff"),
    methods=(Method.EXACT, Method.INSTANCES),
    assumptions=(Assumption("additions round to nearest or towards zero", f"{_TESTS}::test_weights_and_sums"),),
)
def score_error() -> str:
    """The contract's section 3.

    Products of BF16 numbers are exact or flushed; their sum errs term by term (summation_error.v); the scale in log2
    units is held with a relative error and the product with it rounds once.  Coq has the inequality (score_error.v);
    `contract_constants` compares the contract's charge with it.  Here it is tried on dot products of 16 terms whose
    additions round towards zero, the worst a matrix unit may do.
    """
    numbers = random.Random(3)  # noqa: S311  not for secrets
    dot_unit, unit = envelope("dot_unit_roundoff"), envelope("unit_roundoff")
    worst = Fraction(0)
    for _ in range(60):
        q, k = (
            [BF16.nearest(Fraction(numbers.uniform(1, 2)) * power_of_two(numbers.randrange(8))) for _ in range(16)]
            for _ in range(2)
        )
        products = [a * b for a, b in zip(q, k, strict=True)]
        scale = Fraction(numbers.uniform(0.05, 2))
        held = FP32.nearest(scale)
        dot = products[0]
        for product in products[1:]:
            dot = _truncated(dot + product)
        score = FP32.nearest(dot * held)
        growth = (1 + dot_unit) ** (len(products) - 1) * (1 + unit) * (1 + unit) - 1
        allowed = scale * growth * sum((abs(x) for x in products), Fraction(0))
        error = abs(score - scale * sum(products, Fraction(0)))
        require(error <= allowed, f"a score errs by {float(error):.3g}, more than {float(allowed):.3g}")
        worst = max(worst, error / allowed)
    return f"60 dot products, truncated; the worst error is {float(worst):.3f} of the bound"


@lemma(
    statement="an exponent off by tau and an exp2 off by its envelope move a weight by at most e^(tau ln 2)(1 + "
    "exp2) - 1, "
    "relatively",
    rests_on=("devices.exp2_relative",),
    methods=(Method.BALLS,),
    assumptions=(Assumption("weights are never negative", f"{_TESTS}::test_weights_and_sums"),),
)
def weight_error() -> str:
    """rho, the contract's section 4.

    Upwards it is the product of both errors; downwards, e**-x (1 - e) is no further off:
    2 - e**x (1 + e) <= e**-x (1 - e), as (e**x - 1)**2 + e (e**2x - 1) >= 0.  Coq has it for every exponent
    (weight_error.v); here both ends are compared in balls.
    """
    with ball_precision():
        e = ball(envelope("exp2_relative"))
        for power in range(-30, 3):
            x = ball(power_of_two(power))
            rho = x.exp() * (1 + e) - 1
            require(rho >= 1 - (-x).exp() * (1 - e), f"downwards rho is not enough at x = 2**{power}")
        return f"exp2 alone: {float(e.mid()):.3g}, worst device"


@lemma(
    statement="|ln l - ln W| <= -ln(1 - beta') for a denominator off by a relative beta' < 1; the contract's logarithm "
    "charges as much",
    rests_on=("devices.unit_roundoff",),
    methods=(Method.BALLS,),
)
def log_sum_exp_error() -> str:
    """The contract's section 7: ln(1 + x) is steepest below, so that -ln(1 - beta') covers both directions.

    Coq has it together with the bound of l (log_sum_exp_error.v).  The contract evaluates -ln(1 - beta') in float64;
    EVALUATION_SLACK covers its rounding.
    """
    relative = [2.0**-k for k in range(1, 40)] + [0.75, 0.99, 1 - 2.0**-20]
    charged = contract._log_of_relative(np.array(relative))  # noqa: SLF001  the contract's own charge
    with ball_precision():
        for value, charge in zip(relative, charged.tolist(), strict=True):
            b = ball(value)
            lost, gained = -(1 - b).log(), (1 + b).log()
            require(lost >= gained, f"ln(1 + x) gains more than it loses at {value}")
            allowed = ball(charge) * ball(Fraction(contract.EVALUATION_SLACK))
            require(allowed >= lost, f"the contract's logarithm does not cover a relative error of {value}")
    require(bool(np.isinf(contract._log_of_relative(np.array([1.0]))[0])), "a relative error of 1 is given a logarithm")  # noqa: SLF001
    return f"{len(relative)} relative errors"


@lemma(
    statement="a replay, from a saved state or for the whole row, is a sum of its terms in some order: each term in "
    "the last "
    "frame, 2**(own maximum - last maximum) times itself, exactly",
    rests_on=("budget.BIAS", "devices.smallest_normal"),
    methods=(Method.EXACT, Method.INSTANCES),
    assumptions=(
        Assumption("the running maximum is the ceiling of a score", f"{_TESTS}::test_running_maximum_is_an_integer"),
        Assumption("rescaling factors are powers of two", f"{_TESTS}::test_weights_and_sums"),
    ),
)
def recovery_is_exact() -> str:
    """Why a recovered row obeys the same bound as any other.

    Going on from a sum against an older maximum multiplies it by a power of two and adds the next fragment's sum: in
    the frame of the last maximum that is one more tree of additions, whose leaves have been multiplied by powers of
    two.  A factor of 0 removes terms that are below 2**-BIAS 2**-126 there, which the theorem treats as flushed
    weights. So `attention_bound` and `convex_bound`, which hold for every such tree, hold for the replay of a whole
    row, and would for one from a saved state.  Coq has the induction over fragments (recovery_is_exact.v); here
    fragments with random maxima are summed in exact arithmetic and compared with their terms in the last frame.
    """
    numbers = random.Random(5)  # noqa: S311
    dropped = 0
    for _ in range(60):
        fragments = [
            [
                FP32.nearest(Fraction(numbers.uniform(0.5, 1)) * power_of_two(-32 - numbers.randrange(6)))
                for _ in range(4)
            ]
            for _ in range(6)
        ]
        steps = [numbers.choice((0, 0, 1, 3, 20, 90, 140)) for _ in fragments]
        maxima = [sum(steps[: n + 1]) for n in range(len(steps))]
        computed = _replayed(fragments, maxima)
        dropped += any(step > -FP32.min_exponent for step in steps[1:])
        terms = [x * power_of_two(m - maxima[-1]) for own, m in zip(fragments, maxima, strict=True) for x in own]
        exact, count = sum(terms, Fraction(0)), len(terms)
        growth = (1 + FP32.unit_roundoff) ** (count - 1) - 1
        # A rescaling and an addition per fragment and the additions in it, each may flush; so may every dropped term.
        allowed = growth * exact + 3 * count * OMEGA * (1 + growth)
        require(
            abs(computed - exact) <= allowed, f"a replay is off by {float(computed - exact):.3g} of {float(exact):.3g}"
        )
    require(dropped > 0, "no replay dropped what was summed before")
    return f"60 replays of 6 fragments, {dropped} of which drop earlier sums"


def _replayed(fragments: Sequence[Sequence[Fraction]], maxima: Sequence[int]) -> Fraction:
    """The rescaling sum in FP32, flushing."""
    total, previous = Fraction(0), maxima[0]
    for terms, maximum in zip(fragments, maxima, strict=True):
        difference = previous - maximum
        factor = power_of_two(difference) if difference >= FP32.min_exponent else Fraction(0)
        own = Fraction(0)
        for x in terms:
            own = flush(FP32.nearest(own + x))
        total = flush(FP32.nearest(flush(total * factor) + own))
        previous = maximum
    return total

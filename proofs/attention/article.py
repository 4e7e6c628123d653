"""The article's budget tau, against ours; and inputs on which its claims do not hold."""

from __future__ import annotations

from fractions import Fraction

from flint import arb

from flywheel.attention import budget
from proofs.attention.overflow import any_order_bound
from proofs.constants import envelope
from proofs.exact import BF16, FP32, ball, ball_precision, log2_ball, power_of_two
from proofs.lemma import Assumption, Method, lemma, require

_TESTS = "verify/tests/proofs/test_proofs_assumptions.py"
_LARGEST_VALUE = 2**12
_SMALLEST_TAU = 20
_LONG_CONTEXT = 2**19


def tau(keys: int) -> arb:
    """The article's budget in nats: 88.7 - ln N - ln 2**12 - 2."""
    return ball(Fraction(867, 10)) - arb(keys).log() - arb(_LARGEST_VALUE).log()


def guaranteed_jump(keys: int) -> arb:
    """Nats above the first fragment's maximum that all keys may reach, at |v| <= 2**12, without a replay.

    The smaller of two limits, in log2 units before the conversion: each lane's sum stays within LANE_LIMIT, and o stays
    finite.  A weight is at most 2**(jump - BIAS), since the anchor lies at or above the maximum plus BIAS.
    """
    exp2 = 1 + envelope("exp2_relative")
    per_lane = any_order_bound(-(-keys // budget.LANES), FP32.precision) * exp2
    whole = any_order_bound(keys, FP32.precision) * exp2 * (1 + BF16.unit_roundoff) * _LARGEST_VALUE
    of_lanes = log2_ball(Fraction(budget.LANE_LIMIT) / per_lane)
    of_o = log2_ball(FP32.largest / whole)
    smaller = min(of_lanes, of_o)
    return (smaller + budget.BIAS) * arb(2).log()


@lemma(
    statement="for every length from 128 on that the article supports (tau >= 20 nats), this kernel replays only "
    "beyond the article's tau; the article's claims themselves fail without its unchecked assumptions",
    rests_on=(
        "budget.BIAS",
        "budget.LANES",
        "budget.LANE_LIMIT",
        "budget.MAX_KEYS",
        "budget.FP32_MAX",
        "devices.BF16_UNIT_ROUNDOFF",
        "devices.exp2_relative",
    ),
    methods=(Method.BALLS, Method.EXACT),
    assumptions=(
        Assumption(
            "the anchor is the ceiling of a visible score, plus BIAS", f"{_TESTS}::test_anchor_is_ceiling_plus_bias"
        ),
    ),
)
def article_tau() -> str:
    """Our budget holds the article's, and more.

    The article's check l <= e**tau implies s_j - a <= tau for every j (its Claim 2).  If all keys jump that far and
    |v| <= 2**12, our weights are at most 2**(tau / ln 2 - BIAS), and neither a lane's sum passes LANE_LIMIT nor does o
    overflow, in any order of summation (bound of `replay_never_overflows`).  Huge anchors (beyond 2**24), whose bias is
    rounded away, are outside this comparison.

    Where the article's argument as stated does not hold, in exact arithmetic:

    1. |v| > 2**12: a jump of 60 nats with v = 2**60 passes its check at 512K keys, o overflows, the exact result is
       2**60.
    2. Scores [0, 65], V = [1, 2**35]: l passes e**tau, o overflows.  Here both stay finite thanks to the bias.
    3. An anchor that is no score of the row, 200 nats above all of them: every FP32 weight is 0 and l vanishes.
    """
    with ball_precision():
        margins: list[arb] = []
        keys = 128
        while keys <= budget.MAX_KEYS:
            limit = tau(keys)
            if not limit < _SMALLEST_TAU:
                # Both fall with the length: twice as many keys against the tau of these stand for all between.
                jump = guaranteed_jump(min(2 * keys, budget.MAX_KEYS))
                require(
                    jump > limit,
                    f"{keys} keys: jumps of {float(jump.mid()):.2f} nats may replay, tau is {float(limit.mid()):.2f}",
                )
                margins.append(jump - limit)
            keys *= 2
        require(bool(margins), "the article supports none of these lengths")
        _overflowing_values()
        _vanishing_denominator()
        least = min(float(margin.mid()) for margin in margins)
        return f"{len(margins)} ranges of lengths; ours passes tau by {least:.1f} nats; 3 counterexamples confirmed"


def _overflowing_values() -> None:
    """Counterexamples 1 and 2: the article's check passes and its o overflows; ours stays finite on both."""
    limit = tau(_LONG_CONTEXT).exp()
    largest = ball(FP32.largest)
    for jump, first, value in ((60, 0, power_of_two(60)), (65, 1, power_of_two(35))):
        weight = arb(jump).exp()
        require(1 + weight <= limit, f"a jump of {jump} nats no longer passes the article's check")
        o = first + weight * ball(value)
        require(o > largest, f"o = e**{jump} * {value} no longer overflows")
        require(o / (1 + weight) <= ball(value), "the exact result is not finite")
        require(o * ball(power_of_two(-budget.BIAS)) * ball(1 + power_of_two(-7)) < largest, "our o overflows as well")


def _vanishing_denominator() -> None:
    """Counterexample 3: exp(-200) is below half the smallest FP32 subnormal, so that it is 0 however it is rounded."""
    weight = arb(-200).exp()
    require(weight < ball(power_of_two(-150)), "exp(-200) no longer vanishes in FP32")
    require(weight < ball(budget.SUM_FLOOR), "such a row would pass the floor")

"""The floor of the denominator, and what is flushed below it."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import z3

from flywheel.attention import budget
from proofs.constants import envelope
from proofs.exact import FP32, power_of_two
from proofs.lemma import Assumption, Method, lemma, require
from proofs.smt import FP32 as FP32_SORT
from proofs.smt import NEAREST, require_always
from verify import devices
from verify.attention import contract

_TESTS = "verify/tests/proofs/test_proofs_assumptions.py"


def weight_of_maximum() -> Fraction:
    """A lower bound of the weight of the score that the anchor, or the running maximum, was taken from."""
    return power_of_two(-(budget.BIAS + 1)) * (1 - envelope("exp2_relative"))


@lemma(
    statement="an anchor taken from a score of the row leaves l >= SUM_FLOOR, and so does every replay; "
    "a row below the floor had an anchor that was no score of its own and is replayed",
    rests_on=("budget.BIAS", "budget.SUM_FLOOR", "devices.exp2_relative"),
    methods=(Method.EXACT, Method.SMT),
    assumptions=(
        Assumption(
            "the anchor is the ceiling of a visible score, plus BIAS", f"{_TESTS}::test_anchor_is_ceiling_plus_bias"
        ),
        Assumption("rows below the floor are replayed", f"{_TESTS}::test_rows_below_the_floor_are_unsound"),
    ),
)
def floor_is_reached() -> str:
    """The floor tells a row with a proper anchor from one without.

    Let m = ceil(s), s the score that the anchor was taken from; ceil is exact in FP32.  For |m| + BIAS <= 2**24 the
    anchor a = m + BIAS is exact, s - a lies in (-(BIAS + 1), -BIAS], and fl(s - a) >= -(BIAS + 1) as that is an FP32
    number.  Its weight is at least 2**-(BIAS + 1) (1 - exp2_relative), and l is at least its weight
    (`check_never_misses`).  In a replay both subtractions, s - m and then BIAS, stay within [-1, 0] and
    [-(BIAS + 1), -BIAS] by the same argument, for every m; the fragment that brings the final running maximum adds such
    a weight, and later factors are 1.  An SMT solver confirms the range of a replay's exponent for every finite FP32
    score, subnormal ones included.

    Nothing is assumed of scores that are evaluated twice with different roundings, nor of anchors beyond 2**24, where
    m + BIAS is rounded: between 0 and 2 BIAS above m (checked at every exponent), so that the row's own score has a
    weight between 2**(-2 BIAS - 1) and 1.  Whenever l ends below the floor the row is replayed.
    """
    floor, least = Fraction(budget.SUM_FLOOR), weight_of_maximum()
    require(
        least >= floor,
        f"the weight of the anchor's own score may be {float(least):.6g}, below SUM_FLOOR = {float(floor):.6g}: "
        f"rows with a proper anchor would be replayed, and replays would divide by less than the floor",
    )
    _exponents_of_every_score()
    shifts = {shift for exponent in range(24, 128) for shift in anchor_shifts(exponent)}
    require(
        min(shifts) >= 0 and max(shifts) <= 2 * budget.BIAS,
        f"a rounded anchor may lie {[str(s) for s in sorted(shifts)]} above its score",
    )
    return f"l >= {float(least):.6g} >= SUM_FLOOR = {float(floor):.6g}; huge anchors are off by 0 to {max(shifts)}"


def _exponents_of_every_score() -> None:
    """(s - ceil(s)) - BIAS in FP32, for every finite word s."""
    s, bias = z3.FP("s", FP32_SORT), z3.FPVal(float(budget.BIAS), FP32_SORT)
    maximum = z3.fpRoundToIntegral(z3.RTP(), s)
    exponent = z3.fpSub(NEAREST, z3.fpSub(NEAREST, s, maximum), bias)
    low = z3.FPVal(-float(budget.BIAS + 1), FP32_SORT)
    require_always(
        z3.And(z3.fpGEQ(exponent, low), z3.fpLEQ(exponent, z3.fpNeg(bias))),
        "the exponent of a replay's own maximum leaves [-(BIAS + 1), -BIAS]",
        given=z3.Not(z3.Or(z3.fpIsNaN(s), z3.fpIsInf(s))),
    )


def anchor_shifts(exponent: int) -> list[Fraction]:
    """fl(m + BIAS) - m for significands of each kind: at the ends of the binade, even and odd, of both signs."""
    quantum = power_of_two(exponent - 23)
    low, high = 2**23, 2**24
    integers = [sign * n * quantum for n in (low, low + 1, low + 2, high - 2, high - 1) for sign in (1, -1)]
    return [FP32.nearest(m + budget.BIAS) - m for m in integers]


@lemma(
    statement="what is flushed to zero in a row of n keys, over its denominator, is at most half of what the contract "
    "charges: flushed_weight and flushed_products per key",
    rests_on=(
        "budget.BIAS",
        "budget.SUM_FLOOR",
        "budget.MAX_KEYS",
        "budget.LANES",
        "contract.BIAS",
        "devices.exp2_relative",
        "devices.smallest_normal",
    ),
    methods=(Method.EXACT,),
    assumptions=(
        Assumption("a fragment holds at least LANES keys", "flywheel.attention.tiling:resolve"),
        Assumption("a row has at most MAX_KEYS keys", f"{_TESTS}::test_more_than_max_keys_are_refused"),
    ),
)
def flushed_weights_are_negligible() -> str:
    """Every flush loses less than w = smallest_normal; the lemma counts them.

    Weights: where 2**t is below w / (1 - exp2_relative) the computed weight may be 0, w, or anything between, rounded
    to BF16 or not: off by at most w / (1 - exp2_relative) <= 2 w.  Sums of non-negative normal numbers flush nothing.

    Sums of o: at most one product, one addition and, in a replay, one rescaling per key: 3 w.  Fewer than n / F
    rescalings find a sum that is not zero (F keys in a fragment), so they are no more than the keys.
    Lane sums in a replay: each rescaling may flush LANES partial sums, LANES (ceil(n / F) - 1) < n as F >= LANES: one
    more w per key.  A factor that is 0 stands for 2**-127 or less; what it removes was at most 2**-BIAS per key, less
    than w in the final frame, and is removed once.

    The denominator: computed l >= SUM_FLOOR, so the exact sum of weights is at least SUM_FLOOR / 2 unless the row's
    beta reaches 1, where the contract does not use this bound; in a replay it is at least half the weight of the
    maximum.
    """
    require(contract.BIAS == budget.BIAS, f"contract.BIAS = {contract.BIAS} promises another bias than {budget.BIAS}")
    w, e = envelope("smallest_normal"), envelope("exp2_relative")
    one_weight = w / (1 - e)
    require(one_weight <= 2 * w, f"exp2_relative = {float(e)} lets a flushed weight be off by more than 2 w")
    worst = Fraction(0)
    for model in devices.MODELS.values():
        for n in (1, budget.LANES, budget.MAX_KEYS):
            charged_weight, charged_products = _charges(model, n)
            fast, replayed = Fraction(budget.SUM_FLOOR) / 2, weight_of_maximum() / 2
            _covers("flushed_weight", charged_weight, 2 * w / fast)
            _covers("flushed_weight (replay)", charged_weight, (one_weight + w) / replayed)
            _covers("flushed_products", charged_products / n, 3 * w / min(fast, replayed))
            worst = max(worst, n * charged_weight)
    require(power_of_two(-(budget.BIAS + 127)) * (1 + e) <= w, "a factor of 0 may remove more than w per key")
    for keys in (1, 127, 128, 129, 257, budget.MAX_KEYS):
        for fragment in (budget.LANES, 2 * budget.LANES, 3 * budget.LANES):
            require(
                budget.LANES * (-(-keys // fragment) - 1) < keys,
                f"rescaling flushes more than one lane sum per key: {keys} keys, fragments of {fragment}",
            )
    require(worst < power_of_two(-8), f"MAX_KEYS flushed weights may be {float(worst):.3g} of a row")
    return f"charged for MAX_KEYS keys: {float(worst):.3g} of the row"


def _charges(model: devices.DeviceModel, n: int) -> tuple[Fraction, Fraction]:
    """What the contract itself charges for a row of n keys: per weight, and for all products."""
    rows = contract._Charges(np.array([n]), model)  # noqa: SLF001  its charges, not a copy
    return Fraction(float(rows.flushed_weight)), Fraction(float(rows.flushed_products[0]))


def _covers(name: str, charged: Fraction, needed: Fraction) -> None:
    # Twice: later roundings magnify what was flushed (`attention_bound`).
    require(
        charged >= 2 * needed,
        f"the contract's {name} is {float(charged):.6g} per key, twice {float(needed):.6g} may be flushed",
    )

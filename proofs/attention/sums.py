"""The check of the partial sums: what it sees, and what passing it guarantees."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import z3

from flywheel.attention import budget
from proofs.constants import envelope
from proofs.exact import BF16, FP32, ball, ball_precision, log2_ball, power_of_two
from proofs.lemma import Assumption, Method, lemma, require
from proofs.smt import FP32 as FP32_SORT
from proofs.smt import NEAREST, require_always
from verify.attention import contract

_TESTS = "verify/tests/proofs/test_proofs_assumptions.py"


@lemma(
    statement="fl(a + b) >= max(a, b) for a, b >= 0; so a lane sum <= LANE_LIMIT means that every weight in it is; "
    "NaN and +inf fail; an o that overflowed on the way is not finite at the end",
    rests_on=("budget.LANE_LIMIT", "devices.exp2_relative", "contract.LARGEST_EXPONENT"),
    methods=(Method.EXHAUSTIVE, Method.EXACT, Method.BALLS, Method.SMT),
    assumptions=(
        Assumption("weights are never negative and additions round monotonically", f"{_TESTS}::test_weights_and_sums"),
        Assumption("the check is `not (l <= limit)`, lane by lane", f"{_TESTS}::test_the_check_fails_nan_and_infinity"),
        Assumption("an o that is not finite is refused", f"{_TESTS}::test_results_that_are_not_finite_are_unsound"),
    ),
)
def check_never_misses() -> str:
    """No weight hides in a sum.

    max(a, b) is itself a number of the format and a + b >= max(a, b); rounding is monotone and leaves numbers of the
    format alone, hence fl(a + b) >= max(a, b).  By induction over any tree of additions, a computed sum of
    non-negative terms is at least each of them, and a sum that later terms are added to only grows, so that the last
    check of a row sees every weight of the row.  The statement about one addition is confirmed for *all* pairs of
    BF16 significands (up to a common scale there are no others), to nearest and towards zero, and for FP32 at the
    edges of its significand range and, by an SMT solver, for all pairs of words, infinity included. Flushing weights
    below 2**-126 changes them before they are added, and monotonically.

    The terms of o have either sign, and there the same trick fails; but infinity or NaN plus anything is infinity or
    NaN, so that an overflow is still there at the end, when o is looked at.
    """
    pairs = _all_bf16_sums() + _edge_fp32_sums()
    _all_fp32_sums()
    require(FP32.holds(Fraction(budget.LANE_LIMIT)), f"LANE_LIMIT is no finite FP32 number: {budget.LANE_LIMIT}")
    limit = np.float32(budget.LANE_LIMIT)
    for bad in (np.float32(np.nan), np.float32(np.inf)):
        require(not bad <= limit, f"a lane sum of {bad} passes the check l <= {limit}")
    with ball_precision():
        # p = 2**t (1 + e), |e| <= exp2_relative: p <= LANE_LIMIT bounds t.
        t = log2_ball(budget.LANE_LIMIT) - (1 - ball(envelope("exp2_relative"))).log() / ball(2).log()
        require(
            t <= ball(contract.LARGEST_EXPONENT),
            f"a weight that passes the check may have an exponent of {float(t.mid()):.6f}, "
            f"beyond contract.LARGEST_EXPONENT = {contract.LARGEST_EXPONENT}, where the envelope of exp2 ends",
        )
        widest = float(t.mid())
        return f"{pairs} sums, and all 2**64 pairs of words by SMT; a weight that passes has s - anchor <= {widest:.6f}"


def _all_bf16_sums() -> int:
    """All sums a + b of positive BF16 numbers, up to a common power of two; below a quarter ulp every b acts alike."""
    p = BF16.precision
    significands = np.arange(2 ** (p - 1), 2**p, dtype=np.int64)
    count = 0
    for gap in range(p + 3):
        total = (significands[:, None] << gap) + significands[None, :]
        largest = np.maximum(significands[:, None] << gap, significands[None, :])
        for rounded in (_nearest(total, p), _towards_zero(total, p)):
            require(
                bool((rounded >= largest).all()), f"a BF16 sum falls below its larger term at a gap of {gap} binades"
            )
            count += rounded.size
    return count


def _all_fp32_sums() -> None:
    """Every pair of FP32 words without a sign, infinity included; a NaN is not at most anything."""
    a, b = z3.FPs("a b", FP32_SORT)
    total = z3.fpAdd(NEAREST, a, b)
    lost = [z3.Or(z3.fpIsNaN(x), z3.fpIsInf(x)) for x in (a, b, total)]
    require_always(z3.Implies(z3.Or(lost[0], lost[1]), lost[2]), "a sum with an infinity or NaN becomes finite")
    given = z3.And(*(z3.And(z3.Not(z3.fpIsNaN(x)), z3.Not(z3.fpIsNegative(x))) for x in (a, b)))
    require_always(
        z3.And(z3.fpLEQ(a, total), z3.fpLEQ(b, total)), "an FP32 sum falls below one of its terms", given=given
    )


def _quantum(n: np.ndarray, precision: int) -> np.ndarray:
    """The spacing of numbers with `precision` bits at the integers n > 0 (1 where n fits whole)."""
    bits = np.frexp(n.astype(np.float64))[1].astype(np.int64)
    return np.int64(1) << np.maximum(bits - precision, 0)


def _towards_zero(n: np.ndarray, precision: int) -> np.ndarray:
    quantum = _quantum(n, precision)
    return n // quantum * quantum


def _nearest(n: np.ndarray, precision: int) -> np.ndarray:
    quantum = _quantum(n, precision)
    quotient, rest = n // quantum, n % quantum
    up = (2 * rest > quantum) | ((2 * rest == quantum) & (quotient % 2 == 1))
    return (quotient + up) * quantum


def _edge_fp32_sums() -> int:
    """FP32 sums at the edges of the significand's range, over every gap that matters, exactly and by the processor."""
    low, high = 2**23, 2**24
    edges = [low, low + 1, low + 2, low + 3, 3 * 2**22, high - 3, high - 2, high - 1]
    count = 0
    for gap in range(28):
        for a in edges:
            for b in edges:
                x, y = Fraction(a), Fraction(b) * power_of_two(-gap)
                exact = FP32.nearest(x + y)
                machine = Fraction(float(np.float32(float(x)) + np.float32(float(y))))
                require(machine == exact, f"numpy rounds {float(x)} + {float(y)} to {float(machine)}")
                require(exact >= max(x, y), f"FP32 {float(x)} + {float(y)} rounds below its larger term")
                count += 1
    return count


@lemma(
    statement="lanes that pass the check and the floor give SUM_FLOOR <= l <= LANES * LANE_LIMIT, finite, "
    "with 0.5 / l a normal FP32 number, whatever a device's reciprocal may err",
    rests_on=(
        "budget.LANES",
        "budget.LANE_LIMIT",
        "budget.SUM_FLOOR",
        "budget.FP32_MAX",
        "devices.reciprocal_relative",
        "devices.smallest_normal",
    ),
    methods=(Method.EXACT,),
    assumptions=(
        Assumption(
            "a quotient 0.5 / l whose exact value is normal is not flushed", f"{_TESTS}::test_quotients_at_the_limits"
        ),
        Assumption("rows below the floor are replayed", f"{_TESTS}::test_rows_below_the_floor_are_unsound"),
    ),
)
def checked_sum_has_normal_reciprocal() -> str:
    """The division by l is an ordinary one.

    Every m * LANE_LIMIT with m <= LANES is an FP32 number (checked one by one).  By induction over any tree, the
    computed sum of m lanes, each at most LANE_LIMIT, is at most m * LANE_LIMIT: the exact sum of two subtrees is, and
    monotone rounding cannot carry it past a number of the format.  So adding up the lanes costs no margin, in any
    order.
    """
    limit, floor, lanes = Fraction(budget.LANE_LIMIT), Fraction(budget.SUM_FLOOR), budget.LANES
    for m in range(1, lanes + 1):
        require(
            FP32.holds(m * limit), f"{m} * LANE_LIMIT is no finite FP32 number: a sum of {m} lanes may round past it"
        )
    require(floor > 0, f"SUM_FLOOR = {float(floor)} is no floor")
    largest = lanes * limit
    least_quotient, largest_quotient = 1 / (2 * largest), 1 / floor
    # Strictly above: a reciprocal that errs downwards must not fall into the range that is flushed.
    low = 1 - envelope("reciprocal_relative")
    require(
        least_quotient * low > FP32.smallest_normal,
        f"0.5 / l falls to {float(least_quotient):.6g} at l = LANES * LANE_LIMIT, "
        "so near the smallest normal, 2**-126, that a reciprocal's error reaches below it",
    )
    require(
        FP32.smallest_normal <= floor <= largest, f"SUM_FLOOR = {float(floor)} leaves no range of normal denominators"
    )
    require(largest_quotient <= FP32.largest, f"1 / l overflows at SUM_FLOOR = {float(floor)}")
    room = least_quotient / FP32.smallest_normal - 1
    return (
        f"l <= {float(largest):.6g}; 0.5 / l >= 2**-126 (1 + {float(room):g}) and <= {float(largest_quotient / 2):.6g}"
    )

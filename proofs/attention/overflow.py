"""What keeps o finite in a replay, and what keeps the division from spoiling it."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import z3

from flywheel.attention import budget
from proofs.constants import envelope
from proofs.exact import BF16, FP32, Format, floor_log2, next_power_of_two, power_of_two
from proofs.lemma import Assumption, Method, lemma, require
from proofs.smt import BF16 as BF16_SORT
from proofs.smt import FP32 as FP32_SORT
from proofs.smt import NEAREST, require_always

_TESTS = "verify/tests/proofs/test_proofs_assumptions.py"


@lemma(
    statement="in a replay, every partial sum of o over at most MAX_KEYS keys is finite for any finite values, "
    "in any order of summation",
    rests_on=(
        "budget.BIAS",
        "budget.MAX_KEYS",
        "budget.LANES",
        "budget.LANE_LIMIT",
        "budget.HALF_BF16_MAX",
        "budget.FP32_MAX",
        "devices.exp2_relative",
    ),
    methods=(Method.EXACT, Method.EXHAUSTIVE),
    assumptions=(
        Assumption("a row has at most MAX_KEYS keys", f"{_TESTS}::test_more_than_max_keys_are_refused"),
        Assumption("a replay's exponents are at most -BIAS", f"{_TESTS}::test_replay_weights_stay_below_the_bias"),
        Assumption("a replay reads finite values only", f"{_TESTS}::test_replay_values_are_finite"),
        Assumption(
            "additions round to nearest or towards zero, rescaling factors are at most 1",
            f"{_TESTS}::test_weights_and_sums",
        ),
    ),
)
def replay_never_overflows() -> str:
    """The bias leaves room for MAX_KEYS keys at the running maximum and the largest BF16.

    An exponent is at most -BIAS, so a weight is at most 2**-BIAS (1 + exp2_relative); rounded to BF16 (monotonically)
    it is at most P.  Each product is exact and at most P * BF16_MAX <= M, M a power of two; call M the unit.

    Let T(n) be the largest sum that any tree of FP32 additions can compute from n terms of at most one unit.
    Rounding is monotone and symmetric, so terms of either sign, smaller terms, flushed sums and factors <= 1 on the
    way compute no more than all terms equal to one unit, added.  The relative bound (1 + u)**n is useless at
    n = 2**30; instead:

    - n <= 2**24: T(n) = n.  Integers up to 2**24 are FP32 numbers, so no addition rounds.
    - 2**24 < n <= N: T(n) <= 2 n - c with c = 2 N u, by induction over the last addition A + B of a + b = n terms,
      A >= B.  Its error is at most min(B, u (A + B)), since A is itself an FP32 number.
      (1) a, b <= 2**24: A + B <= 2**25 has an error of at most 1; n + 1 <= 2 n - c as c <= 2**24.
      (2) a > 2**24 >= b: A + 2 B <= 2 a - c + 2 b.
      (3) b > 2**24 >= a: B <= A <= 2**24, error at most 1: a + (2 b - c) + 1 <= 2 n - c.
      (4) a, b > 2**24: (2 n - 2 c)(1 + u) <= 2 n - c as 2 n u <= c.

    So 2 * MAX_KEYS * M is never passed, and it is finite.  The induction is confirmed by computing T(n) exactly for
    significands of 4 to 6 bits, all n up to 2**(2 p - 1); the factor 2 is needed, T(n) comes close to it.  (The
    kernel's own order, fragment after fragment, keeps T(n) = n; the lemma does not lean on it.)
    """
    n, bias = budget.MAX_KEYS, budget.BIAS
    weight = BF16.nearest(power_of_two(-bias) * (1 + envelope("exp2_relative")))
    unit = next_power_of_two(weight * BF16.largest)
    bound = any_order_bound(n, FP32.precision) * unit
    require(
        bound <= FP32.largest,
        f"{n} weights of at most 2**-{bias} times the largest BF16 may sum to 2**{_log2_above(bound)} in some order, "
        f"more than the largest FP32",
    )
    # The denominator of a replay keeps to the limits of a checked one, so that its reciprocal is normal too.
    denominator = any_order_bound(n, FP32.precision) * next_power_of_two(
        power_of_two(-bias) * (1 + envelope("exp2_relative"))
    )
    require(
        denominator <= budget.LANES * Fraction(budget.LANE_LIMIT),
        f"the denominator of a replay may reach 2**{_log2_above(denominator)}, more than LANES * LANE_LIMIT",
    )
    reached = max(_confirm_bound(p) for p in (4, 5, 6))
    return f"|o| <= 2**{_log2_above(bound)} < FP32_MAX; toy formats reach {reached:.3f} n of the 2 n allowed"


def any_order_bound(n: int, precision: int) -> Fraction:
    """T(n) in units of the largest term; see `replay_never_overflows`.

    Raises:
        LemmaRefuted: n is so large that the induction does not close.
    """
    exact, u = 2**precision, power_of_two(-precision)
    if n <= exact:
        return Fraction(n)
    c = 2 * n * u
    require(c <= exact, f"the induction needs 2 n u <= 2**{precision}, n = {n}")
    require((2 * n - 2 * c) * (1 + u) <= 2 * n - c, f"the induction step fails at n = {n}")
    return 2 * n - c


def largest_sums(count: int, toy: Format) -> np.ndarray:
    """T(1) .. T(count) of a format: the best last addition, over all splits, exactly."""
    best = np.zeros(count + 1, dtype=np.int64)
    best[1] = 1
    for n in range(2, count + 1):
        sums = best[1 : n // 2 + 1] + best[n - 1 : n - n // 2 - 1 : -1]
        best[n] = max(int(toy.nearest(Fraction(int(total)))) for total in np.unique(sums))
    return best[1:]


def _confirm_bound(precision: int) -> float:
    """The induction's bound on every T(n) of a toy format; returns the largest T(n) / n."""
    count = 2 ** (2 * precision - 1)
    sums = largest_sums(count, Format(precision, FP32.min_exponent, FP32.max_exponent))
    for n, total in enumerate(sums.tolist(), 1):
        allowed = n if n <= 2**precision else any_order_bound(count, precision) - 2 * (count - n)
        require(total <= allowed, f"with {precision} bits, {n} terms of 1 can sum to {total}, more than {allowed}")
    return float(np.max(sums / np.arange(1, count + 1)))


def _log2_above(x: Fraction) -> int:
    """The exponent of the smallest power of two that is at least x."""
    return floor_log2(next_power_of_two(x))


@lemma(
    statement="o / l may pass the largest |v| by 2**-8 and round to infinity; limiting it at half scale never "
    "overflows and never moves it away from the exact result",
    rests_on=("budget.HALF_BF16_MAX", "budget.SUM_FLOOR", "budget.FP32_MAX"),
    methods=(Method.EXACT, Method.EXHAUSTIVE, Method.SMT),
    assumptions=(
        Assumption("o is finite when it is divided", f"{_TESTS}::test_results_that_are_not_finite_are_unsound"),
        Assumption("an overflow gives an infinity of the right sign", f"{_TESTS}::test_normalise_limits_and_keeps_nan"),
    ),
)
def clamp_keeps_the_bound() -> str:
    """The limit costs nothing and saves the largest values.

    Needed: one key whose weight 1 + 2**-8 + 2**-23 rounds up to 1 + 2**-7 in P but not in l gives o / l = 1.00389 v,
    which for v = BF16_MAX rounds to infinity, although the exact result is v.

    Harmless: the exact result is a mean of values, so it lies in [-m, m], m = BF16_MAX.  Moving x to the nearest
    point of an interval never increases its distance to a point y of the interval: for x > m >= y, |m - y| = m - y <
    x - y; the other side is the same; inside nothing moves.  (Confirmed on every triple of a small grid.)

    Never NaN, and no overflow that matters: h = o * (0.5 / l) is the product of a finite o and a finite, non-zero
    factor (`checked_sum_has_normal_reciprocal`).  If it overflows, its exact value passes FP32_MAX > HALF_BF16_MAX
    and the limit makes of the infinity what it would make of the exact value.  After the limit h + h is exact and at
    most BF16_MAX, a BF16 number, so that rounding to BF16, being monotone, stays finite: an SMT solver confirms it for
    every FP32 word, with NaN for NaN and nothing else.
    """
    half, largest = Fraction(budget.HALF_BF16_MAX), BF16.largest
    require(2 * half == largest, f"2 * HALF_BF16_MAX is {float(2 * half)}, not the largest BF16 {float(largest)}")
    require(FP32.holds(half) and FP32.holds(2 * half), "HALF_BF16_MAX or its double is no FP32 number")
    require(Fraction(budget.FP32_MAX) == FP32.largest, f"FP32_MAX is {budget.FP32_MAX}, not the largest FP32")
    require(FP32.largest > half, "an overflowing product would not pass HALF_BF16_MAX")
    require(1 / (2 * Fraction(budget.SUM_FLOOR)) <= FP32.largest, "0.5 / l overflows at SUM_FLOOR")
    _every_word_stays_finite()
    ratio = _excess_example(largest)
    grid = range(-6, 7)
    for m in range(1, 6):
        for x in grid:
            limited = max(-m, min(m, x))
            worse = [y for y in range(-m, m + 1) if abs(limited - y) > abs(x - y)]
            require(not worse, f"limiting {x} to [-{m}, {m}] moves it away from {worse}")
    return f"example: o / l = {float(ratio):.6f} v, to infinity without the limit, to v with it"


def _every_word_stays_finite() -> None:
    """`tile.normalise` from h on, then the rounding to BF16: all FP32 words, infinities and NaN included."""
    h = z3.FP("h", FP32_SORT)
    limit = z3.FPVal(float(budget.HALF_BF16_MAX), FP32_SORT)
    limited = z3.If(z3.fpGT(h, limit), limit, h)
    limited = z3.If(z3.fpLT(limited, z3.fpNeg(limit)), z3.fpNeg(limit), limited)
    out = z3.fpToFP(NEAREST, z3.fpAdd(NEAREST, limited, limited), BF16_SORT)
    kept = z3.fpIsNaN(out) == z3.fpIsNaN(h)
    require_always(z3.And(kept, z3.Not(z3.fpIsInf(out))), "a limited result is not finite, or a NaN is lost or made")


def _excess_example(value: Fraction) -> Fraction:
    """One key whose P rounds up: the ratio (o / l) / v in FP32 arithmetic, checked to round to infinity unlimited."""
    # At weight scale 2**-8, so that o itself is finite; powers of two change no rounding.
    scale = power_of_two(-8)
    weight = (1 + power_of_two(-8) + power_of_two(-23)) * scale
    require(FP32.holds(weight), "the example's weight is no FP32 number")
    o = FP32.nearest(BF16.nearest(weight) * value)
    half = FP32.nearest(o * FP32.nearest(Fraction(1, 2) / weight))
    unlimited = BF16.nearest(2 * half)
    require(unlimited > BF16.largest, f"the example no longer rounds past the largest BF16: {float(unlimited)}")
    limited = min(half, Fraction(budget.HALF_BF16_MAX))
    require(BF16.nearest(2 * limited) == value, "the limited example does not round to its value")
    return 2 * half / value

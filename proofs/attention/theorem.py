"""The final theorem: the bound of the output from the errors of its parts."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from flywheel.attention import budget
from proofs.attention.rows import OMEGA, Row, draw
from proofs.constants import envelope
from proofs.exact import BF16, FP32, ball, ball_precision, power_of_two
from proofs.lemma import Assumption, Method, lemma, require
from verify import devices
from verify.attention import contract

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flint import arb

_TESTS = "verify/tests/proofs/test_proofs_assumptions.py"
_UNIT = BF16.unit_roundoff


def growth(roundings: int, u: Fraction) -> Fraction:
    """(1 + u)**roundings - 1."""
    return (1 + u) ** roundings - 1


def _rows() -> Iterator[Row]:
    """Rows of a few shapes; the same ones every time."""
    numbers = random.Random(20260929)  # noqa: S311  not for secrets
    for count, spread, skewed in (
        (1, 0, True),
        (2, 1, False),
        (5, 3, True),
        (24, 12, False),
        (24, 2, True),
        (24, 110, True),
    ):
        for _ in range(40):
            yield draw(numbers, count=count, spread=spread, skewed=skewed)


@lemma(
    statement="|o / l - exact| <= (sum w alpha |v| + |exact| sum w beta + flushed) / (W (1 - beta) - flushed), in any "
    "order of summation, rescaled on the way or not; the contract's first-order bound charges as much",
    rests_on=(
        "budget.SUM_FLOOR",
        "contract.BIAS",
        "devices.BF16_UNIT_ROUNDOFF",
        "devices.smallest_normal",
        "devices.unit_roundoff",
        "devices.dot_unit_roundoff",
    ),
    methods=(Method.EXACT, Method.INSTANCES),
    assumptions=(
        Assumption("additions round to nearest or towards zero", f"{_TESTS}::test_weights_and_sums"),
        Assumption("the device rounds to BF16 to nearest, ties to even", f"{_TESTS}::test_xla_rounds_to_bf16_as_numpy"),
    ),
)
def attention_bound() -> str:
    """First order.

    For a key with the exact weight w and the value v let p be the computed weight, |p - w| <= rho w unless it is
    flushed (then w, p <= 2 omega), b its rounding to BF16 and x the product b v (exact, or off by omega).  In any tree
    of additions a term passes through at most n - 1 that round, so that with Gamma = (1 + u)**(n - 1) - 1

        |l - W|         <= sum w beta + F_l,           beta  = (1 + rho)(1 + Gamma_l) - 1
        |o - sum w v|   <= sum w alpha |v| + F_o,      alpha = (1 + rho)(1 + 2**-8)(1 + Gamma_o) - 1

    where F collects what is flushed, magnified by later roundings.  Since sum w v = exact W,
    o - exact l = (o - sum w v) - exact (l - W); divide by l >= W - sum w beta - F_l.

    Coq has the theorem (attention_bound.v, on sums in any order from summation_error.v).  Here the inequality is tried
    on rows in exact arithmetic with errors as large as they may be, and the contract's charges are compared with the
    theorem's: its Gamma counts more roundings (`contract_constants`), and its charge for a flushed weight covers
    2 omega (1 + Gamma) / W while beta <= 1, W being at least SUM_FLOOR / (1 + beta); beyond that the bound is infinite.
    `attention_theorem` compares all charges.
    """
    closest = Fraction(0)
    for row in _rows():
        error, allowed = first_order_of(row)
        require(
            error <= allowed,
            f"a row of {len(row.keys)} keys errs by {float(error):.6g}, more than {float(allowed):.6g}",
        )
        closest = max(closest, error / allowed) if allowed else closest
    beta = Fraction(1)
    for model in devices.MODELS.values():
        charged = _flushed_weight(model)
        least = Fraction(budget.SUM_FLOOR) / (1 + beta)
        needed = 2 * Fraction(model.smallest_normal) * (1 + beta) / least
        require(
            charged >= needed,
            f"flushing a weight may move a row by {float(needed):.6g} on {model.name}, {float(charged):.6g} is charged",
        )
    return f"{sum(1 for _ in _rows())} rows; the worst error is {float(closest):.3f} of the bound"


def _flushed_weight(model: devices.DeviceModel) -> Fraction:
    rows = contract._Charges(np.array([1]), model)  # noqa: SLF001  its own charge
    return Fraction(float(rows.flushed_weight))


def first_order_of(row: Row) -> tuple[Fraction, Fraction]:
    """The error of o / l and what the theorem allows."""
    n, u = len(row.keys), FP32.unit_roundoff
    gamma = growth(n - 1, u)
    exact, weights = row.exact, row.weights
    beta = sum((key.w * ((1 + key.rho) * (1 + 4 * u) * (1 + gamma) - 1) for key in row.keys), Fraction(0))
    alpha = sum(
        (key.w * abs(key.v) * ((1 + key.rho) * (1 + 4 * u) * (1 + _UNIT) * (1 + gamma) - 1) for key in row.keys),
        Fraction(0),
    )
    of_l = (2 * OMEGA * n + row.flushes * OMEGA) * (1 + gamma)
    of_o = sum((2 * OMEGA * abs(key.v) + OMEGA for key in row.keys), Fraction(0)) * (1 + gamma)
    of_o += row.flushes * OMEGA * (1 + gamma)
    allowed = (alpha + abs(exact) * beta + of_o + abs(exact) * of_l) / (weights - beta - of_l)
    return abs(row.o / row.l - exact), allowed


@lemma(
    statement="however wrong the weights are, o / l lies within the visible values' spread of the exact result, up "
    "to the "
    "roundings that o and l do not share; the contract's convex bound charges as much",
    rests_on=(
        "budget.SUM_FLOOR",
        "budget.MAX_KEYS",
        "contract.BIAS",
        "contract.CONVEX_KEYS",
        "devices.BF16_UNIT_ROUNDOFF",
        "devices.smallest_normal",
        "devices.unit_roundoff",
        "devices.dot_unit_roundoff",
    ),
    methods=(Method.BALLS, Method.EXACT, Method.INSTANCES),
    assumptions=(
        Assumption("weights are never negative", f"{_TESTS}::test_weights_and_sums"),
        Assumption("rows below the floor are replayed", f"{_TESTS}::test_rows_below_the_floor_are_unsound"),
    ),
)
def convex_bound() -> str:
    """The convex bound.

    Write l = sum p f and o = sum p g v with factors f, g of at most n - 1 roundings each, g with the rounding to BF16
    besides.  The p f are non-negative: sum p f v / sum p f is a mean of the visible values, as the exact result is, and
    two points of an interval are no further apart than the farther end.  What remains is
    sum p f v (g / f - 1), at most skew max|v| of l, and flushing.

    The contract's skew, (1 + 2**-8)(1 + Gamma)**2 - 1, covers g / f - 1 in both directions for every length up to
    MAX_KEYS.  What is flushed, two operations per key and two omega per weight at most, is multiplied by later
    roundings, up to (1 + u)**(n - 1): what does not grow with the values is charged as flushed_products, the rest is
    paid by the 262 roundings that the skew counts beyond those of the sums, as long as n <= CONVEX_KEYS.  For longer
    rows, whose first-order bound is infinite too, the contract promises nothing.  Coq has the theorem
    (convex_bound.v, attention_theorem.v).
    """
    for row in _rows():
        error, allowed = convex_of(row)
        require(
            error <= allowed,
            f"a row of {len(row.keys)} keys errs by {float(error):.6g}, more than {float(allowed):.6g}",
        )
    with ball_precision():
        lengths = [2**k for k in range(budget.MAX_KEYS.bit_length())]
        for model in devices.MODELS.values():
            for n in lengths:
                _skew_is_covered(model, n)
            _flushes_are_covered(model)
    return f"{len(lengths)} lengths, {len(devices.MODELS)} device models; flushing up to {contract.CONVEX_KEYS} keys"


def _roundings(n: int, u: Fraction) -> tuple[arb, arb]:
    """(1 - u)**(n - 1) and (1 + u)**(n - 1)."""
    return ((n - 1) * ball(1 - u).log()).exp(), ((n - 1) * ball(1 + u).log()).exp()


def _skew_is_covered(model: devices.DeviceModel, n: int) -> None:
    rows = contract._Charges(np.array([n]), model)  # noqa: SLF001  its own charge
    charged = ball(float(contract._skew(rows.summing, devices.BF16_UNIT_ROUNDOFF)[0]))  # noqa: SLF001
    low_l, high_l = _roundings(n, Fraction(model.unit_roundoff))
    low_o, high_o = _roundings(n, Fraction(model.dot_unit_roundoff))
    unit = ball(devices.BF16_UNIT_ROUNDOFF)
    above, below = (1 + unit) * high_o / low_l - 1, 1 - (1 - unit) * low_o / high_l
    slack = ball(1 + power_of_two(-45))
    require(
        charged * slack >= above,
        f"the contract's skew of {n} keys on {model.name} does not cover {float(above.mid()):.6g}",
    )
    require(
        charged * slack >= below,
        f"the contract's skew of {n} keys on {model.name} does not cover {float(below.mid()):.6g}",
    )


def _flushes_are_covered(model: devices.DeviceModel) -> None:
    """`convex` of attention_theorem.v against the contract's, for every number of keys up to CONVEX_KEYS.

    With M and m for (1 + u)**(n - 1) and (1 - u)**(n - 1) of either sum, s the skew and |v| <= 1, the theorem charges
    n omega / SUM_FLOOR times 3 M_o + 2 (M_l + M_o) + 2 M_l + 2 (2 + s) M_l, the first term apart from the values.
    s + 1 is at most B = (1 + 2**-8) M_o / m_l, and neither M_l nor M_o exceeds B: the rest is at most
    B n omega / SUM_FLOOR (8 + 2 M_l), where the bracket is largest for the longest row.  The contract's skew has
    B ((1 + Gamma)**2 m_l / M_o - 1) to spare, an exponential of something linear in n, so that it is least for the
    shortest row or the longest.
    """
    longest = contract.CONVEX_KEYS
    omega, floor = ball(model.smallest_normal), ball(budget.SUM_FLOOR)
    for u_l, u_o in itertools.product((model.unit_roundoff, model.dot_unit_roundoff), repeat=2):
        spare: list[arb] = []
        for n in (1, longest):
            rows = contract._Charges(np.array([n]), model)  # noqa: SLF001  its own charges
            low_l, _ = _roundings(n, Fraction(u_l))
            _, high_o = _roundings(n, Fraction(u_o))
            charged = ball(float(rows.flushed_products[0]))
            require(charged >= 3 * n * omega * high_o / floor, f"products flushed from {n} keys are not covered")
            spare.append((1 + ball(float(rows.summing[0]))) ** 2 * low_l / high_o - 1)
        _, high_l = _roundings(longest, Fraction(u_l))
        needed = longest * omega / floor * (8 + 2 * high_l)
        least = min(spare[1], spare[0])
        require(
            least >= needed,
            f"weights flushed from {longest} keys, {float(needed.mid()):.3g} of the row on {model.name}, are not "
            f"covered",
        )


def convex_of(row: Row) -> tuple[Fraction, Fraction]:
    """The error of o / l and what the convex bound allows."""
    n, u = len(row.keys), FP32.unit_roundoff
    least, most = (1 - u) ** (n - 1), (1 + u) ** (n - 1)
    values = [key.v for key in row.keys]
    exact, largest = row.exact, max(abs(v) for v in values)
    skew = max((1 + _UNIT) * most / least - 1, 1 - (1 - _UNIT) * least / most)
    farthest = max(max(values) - exact, exact - min(values))
    in_l, in_o = row.flushes * OMEGA * most, row.flushes * OMEGA * most
    per_key = 2 * OMEGA * largest * 2 * most + OMEGA * most
    floor = Fraction(budget.SUM_FLOOR) * power_of_two(-20)
    require(row.l >= floor, "a row of the test has too small a denominator")
    rest = (n * per_key + in_o + largest * in_l) / floor
    return abs(row.o / row.l - exact), (farthest + skew * largest) * (1 + in_l / floor) + rest


@lemma(
    statement="from o / l within inner of the exact result to the BF16 output: reciprocal, product, limit, doubling "
    "and "
    "rounding add (2 reciprocal + 3 u)(|exact| + inner), 2**-8 of the result, and 2 omega",
    rests_on=(
        "budget.HALF_BF16_MAX",
        "devices.BF16_UNIT_ROUNDOFF",
        "devices.reciprocal_relative",
        "devices.smallest_normal",
        "devices.unit_roundoff",
    ),
    methods=(Method.EXACT,),
    assumptions=(
        Assumption("o is finite when it is divided", f"{_TESTS}::test_results_that_are_not_finite_are_unsound"),
        Assumption("0.5 / l errs by its envelope", f"{_TESTS}::test_quotients_at_the_limits"),
    ),
)
def final_division() -> str:
    """The last steps, in the order of `tile.normalise`.

    h = fl(o q), q = (0.5 / l)(1 + e): two relative errors, (1 + reciprocal)(1 + u) - 1 <= 2 reciprocal + 3 u.  Either h
    is flushed: then the output is 0, and o q was below omega.  Or it is rounded, with at most 2**-150 of underflow, and
    rounding 2 h to BF16 adds 2**-8 relatively or 2**-134 absolutely, together less than 2 omega.  The limit in between
    moves nothing away from the exact result (`clamp_keeps_the_bound`).  Coq has the theorem (final_division.v), Gappa
    the relative error of the product (final_division.g).
    """
    for model in devices.MODELS.values():
        r, u = Fraction(model.reciprocal_relative), Fraction(model.unit_roundoff)
        require(
            (1 + r) * (1 + u) - 1 <= 2 * r + 3 * u,
            f"reciprocal and product err by more than is charged on {model.name}",
        )
        require(r < Fraction(1, 2), f"a reciprocal that errs by {float(r)} is none")
    unit, omega = Fraction(devices.BF16_UNIT_ROUNDOFF), envelope("smallest_normal")
    underflow = power_of_two(-134) + 2 * power_of_two(-150) * (1 + unit)
    require(underflow <= 2 * omega, f"underflow may move the output by {float(underflow):.3g}, more than 2 omega")
    return f"{len(devices.MODELS)} device models; underflow adds {float(underflow / omega):.4f} omega at most"


@lemma(
    statement="the final theorem: the BF16 output of a row lies within the contract's out bound of the exact "
    "result, for any "
    "order of summation, in the fast path and in a replay",
    rests_on=(
        "budget.HALF_BF16_MAX",
        "budget.SUM_FLOOR",
        "devices.BF16_UNIT_ROUNDOFF",
        "devices.reciprocal_relative",
        "devices.smallest_normal",
        "devices.unit_roundoff",
    ),
    methods=(Method.EXACT, Method.INSTANCES),
    assumptions=(
        Assumption("rows below the floor are replayed", f"{_TESTS}::test_rows_below_the_floor_are_unsound"),
        Assumption("o is finite when it is divided", f"{_TESTS}::test_results_that_are_not_finite_are_unsound"),
        Assumption("the device rounds to BF16 to nearest, ties to even", f"{_TESTS}::test_xla_rounds_to_bf16_as_numpy"),
    ),
)
def output_bound() -> str:
    """All parts together, on the domain.

    Scores within `score_error`, weights within `weight_error` or flushed, sums as a fast path or a replay forms them
    (`recovery_is_exact`), a denominator above the floor (`floor_is_reached`), sums that did not overflow
    (`check_never_misses`, `replay_never_overflows`), the smaller of `attention_bound` and `convex_bound`, and
    `final_division`.  Coq has the composition (output_bound.v).  Here rows are taken through to their BF16 output.
    """
    worst = Fraction(0)
    r, u, unit = (Fraction(x) for x in (2.0**-24, 2.0**-24, devices.BF16_UNIT_ROUNDOFF))
    omega, half_limit = envelope("smallest_normal"), Fraction(budget.HALF_BF16_MAX)
    for row in _rows():
        inner = min(first_order_of(row)[1], convex_of(row)[1])
        half = FP32.nearest(row.o * FP32.nearest(1 / (2 * row.l)))
        out = BF16.nearest(2 * max(-half_limit, min(half_limit, half)))
        size = abs(row.exact)
        divided = inner + (2 * r + 3 * u) * (size + inner)
        allowed = divided + unit * (size + divided) + 2 * omega
        error = abs(out - row.exact)
        require(error <= allowed, f"an output errs by {float(error):.6g}, more than {float(allowed):.6g}")
        worst = max(worst, error / allowed)
    return f"{sum(1 for _ in _rows())} rows; the worst error is {float(worst):.3f} of the bound"

"""Why a replay may rescale as often as it likes: its factors are powers of two."""

from __future__ import annotations

import math
from fractions import Fraction

import jax.numpy as jnp
import numpy as np

from flywheel.attention import budget, tile
from proofs.exact import FP32, power_of_two
from proofs.lemma import Assumption, Method, lemma, require

_TESTS = "verify/tests/proofs/test_proofs_assumptions.py"
_EXACT_INTEGERS = 2**24
_LOWEST_FACTOR = -126


@lemma(
    statement="a replay's factor is exactly 2**(old maximum - new maximum), or 0 where that is below 2**-126; "
    "multiplying by it is exact unless the product is flushed",
    rests_on=("budget.BIAS", "budget.FP32_MAX", "tile._FP32_EXPONENT_BIAS", "tile._FP32_MANTISSA_BITS"),
    methods=(Method.EXACT, Method.EXHAUSTIVE),
    assumptions=(
        Assumption("the running maximum is the ceiling of a score", f"{_TESTS}::test_running_maximum_is_an_integer"),
    ),
)
def integer_maximum_rescales_exactly() -> str:
    """Rescaling adds no rounding to the bound.

    ceil of an FP32 number is an FP32 number (from 2**23 on every one is an integer), so the running maximum is an
    integer, as is its first value -FP32_MAX.  The difference of two integers is an integer d <= 0: an FP32 number if
    |d| <= 2**24, and otherwise rounded, monotonically, to -2**24 or less (or to -inf), where the factor is 0 either
    way.  `power_of_two` is run on every integer from 0 down to -2**16 and on each power of two below; it caps its
    argument at -127, so that nothing else can occur.  x * 2**n has the significand of x: exact if it is normal.

    BIAS is subtracted last, from s - maximum, which is at most 0 and within [-1, 0] for the maximum itself.  Added to a
    maximum of 2**100 it would be rounded away and the weights there would be 1, not 2**-BIAS.
    """
    require(Fraction(budget.FP32_MAX) == FP32.largest, f"FP32_MAX is {budget.FP32_MAX}, not the largest FP32")
    require(FP32.largest.denominator == 1, "the first running maximum is no integer")
    tried = _factors_are_exact() + _differences_are_exact() + _products_are_exact() + _ceilings_are_exact()
    huge = power_of_two(100)
    require(FP32.nearest(huge + budget.BIAS) == huge, "the example of a bias that is rounded away no longer is one")
    return f"{tried} factors, differences, products and ceilings compared exactly"


def _factors_are_exact() -> int:
    exponents = [float(-n) for n in range(2**16 + 1)]
    exponents += [-(2.0**n) for n in range(17, 128)] + [-budget.FP32_MAX, -math.inf]
    factors = np.asarray(tile.power_of_two(jnp.asarray(exponents, jnp.float32).reshape(1, -1)))[0]
    for n, factor in zip(exponents, factors.tolist(), strict=True):
        expected = power_of_two(int(n)) if n >= _LOWEST_FACTOR else Fraction(0)
        require(Fraction(factor) == expected, f"power_of_two({n}) is {factor}")
    return len(exponents)


def _integers() -> np.ndarray:
    """FP32 integers at the edges of every binade and at small distances from them, of both signs."""
    found = {0}
    for exponent in range(128):
        quantum = 2 ** max(exponent - 23, 0)
        for steps in (0, 1, 2, 3, 127, 128):
            for n in (2**exponent + steps * quantum, 2 ** (exponent + 1) - (steps + 1) * quantum):
                if FP32.holds(Fraction(n)):
                    found |= {n, -n}
    return np.array(sorted(found), dtype=np.float64)


def _differences_are_exact() -> int:
    """All pairs old <= new.  float64 holds a difference of two FP32 numbers exactly where it is at most 2**24."""
    integers = _integers()
    old, new = integers[:, None], integers[None, :]
    exact = old - new
    with np.errstate(over="ignore"):
        rounded = (old.astype(np.float32) - new.astype(np.float32)).astype(np.float64)
    near, far = (exact <= 0) & (exact >= -_EXACT_INTEGERS), exact < -_EXACT_INTEGERS
    require(bool((rounded[near] == exact[near]).all()), "the difference of two near maxima is rounded")
    require(bool((rounded[far] <= -_EXACT_INTEGERS).all()), "the difference of two far maxima rounds to above -2**24")
    return int(near.sum() + far.sum())


def _products_are_exact() -> int:
    count = 0
    for significand in (2**23, 2**23 + 1, 3 * 2**22 + 1, 2**24 - 1):
        for exponent in range(-126, 128):
            x = significand * power_of_two(exponent - 23)
            for n in (0, -1, -2, -23, -24, -125, -126):
                product = x * power_of_two(n)
                require(product < FP32.smallest_normal or FP32.holds(product), f"{float(x)} * 2**{n} is not exact")
                count += 1
    return count


def _ceilings_are_exact() -> int:
    """Over the upper halves of all FP32 words, each with its lower half all zeros and all ones."""
    upper = np.arange(2**16, dtype=np.uint32) << np.uint32(16)
    words = np.concatenate([upper, upper | np.uint32(0xFFFF)]).view(np.float32)
    finite = words[np.isfinite(words)]
    ceilings = np.ceil(finite)
    exact = np.ceil(finite.astype(np.float64))
    require(bool((ceilings == exact).all()), "the ceiling of some FP32 number is no FP32 number")
    return finite.size

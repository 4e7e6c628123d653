"""The short convolution as a product with a selector matrix."""

from __future__ import annotations

from fractions import Fraction

import z3

from proofs.exact import BF16, FP32, power_of_two
from proofs.lemma import Method, lemma, require
from proofs.smt import BF16 as BF16_SORT
from proofs.smt import FP32 as FP32_SORT
from proofs.smt import NEAREST, require_always

_EXACT_FROM = power_of_two(-111)


@lemma(
    statement="a product of two BF16 numbers is the sum of two BF16 numbers, hi + lo, exactly, from 2**-111 in size "
    "on; "
    "splitting the taps instead does nothing",
    rests_on=(),
    methods=(Method.EXHAUSTIVE, Method.SMT),
)
def convolution_products() -> str:
    """What makes the selector product as good as an FP32 convolution.

    tap_t x has at most 16 significant bits, exact in FP32.  hi is it rounded to BF16; the rest has at most 8 bits and a
    sign, so that lo = rest exactly, unless its last bit lies below the normal numbers.  Then hi + lo times the 0/1
    selector adds up exact products in FP32: seven additions for four taps, gamma(7, u) sum|tap x|, instead of four
    roundings to BF16.  A tap is a BF16 number already: its own lo is 0.

    Tried on all pairs of significands (up to a scale there are no others); an SMT solver confirms it for all pairs of
    words with their exponents.
    """
    split = 0
    for a in range(128, 256):
        for b in range(128, 256):
            product = Fraction(a * b)
            hi = BF16.nearest(product)
            lo = BF16.nearest(product - hi)
            require(hi + lo == product, f"{a} * {b} is not the sum of its parts")
            split += lo != 0
    require(split > 0, "no product needs its second part")
    require(all(BF16.nearest(Fraction(a)) == a for a in range(128, 256)), "a tap has a second part after all")
    # The last of 16 bits is a 2**-15th of the leading one, and must be normal.
    require(_EXACT_FROM * power_of_two(-15) >= FP32.smallest_normal, "2**-111 is too small for an exact split")
    _all_words()
    return f"{256**2 // 4} pairs of significands, {split} of which need both parts; all 2**32 pairs of words"


def _all_words() -> None:
    x, y = z3.FPs("x y", BF16_SORT)
    product = z3.fpMul(NEAREST, z3.fpToFP(NEAREST, x, FP32_SORT), z3.fpToFP(NEAREST, y, FP32_SORT))
    hi = z3.fpToFP(NEAREST, product, BF16_SORT)
    rest = z3.fpSub(NEAREST, product, z3.fpToFP(NEAREST, hi, FP32_SORT))
    lo = z3.fpToFP(NEAREST, rest, BF16_SORT)
    finite = z3.And(*(z3.Not(z3.Or(z3.fpIsNaN(f), z3.fpIsInf(f))) for f in (product, hi)))
    large = z3.fpGEQ(z3.fpAbs(product), z3.FPVal(float(_EXACT_FROM), FP32_SORT))
    require_always(
        z3.fpEQ(z3.fpToFP(NEAREST, lo, FP32_SORT), rest),
        "the rest of a product is no BF16 number",
        given=z3.And(finite, large),
    )

"""The constants that lemmas rest on, by the names used in `rests_on`, read when a lemma is checked."""

from __future__ import annotations

import math
from fractions import Fraction

from flywheel.attention import budget
from verify import devices
from verify.attention import contract
from verify.rotary import contract as rotary

_MODULES = {"budget": budget, "contract": contract, "devices": devices, "rotary": rotary}


def envelope(field: str) -> Fraction:
    """The largest value of a field over all device models: what every supported machine may do."""
    return max(Fraction(getattr(model, field)) for model in devices.MODELS.values())


def value_of(name: str) -> Fraction:
    """The value of `module.NAME`, or of `devices.field` over all device models."""
    module, attribute = name.split(".")
    if module == "devices" and not attribute.isupper():
        return envelope(attribute)
    return Fraction(getattr(_MODULES[module], attribute))


def describe(name: str) -> str:
    """`NAME = value`, powers of two written as such."""
    return f"{name} = {written(value_of(name))}"


def written(value: Fraction) -> str:
    """A value as people write it: an integer, 2**k, or k * 2**e with an integer k."""
    numerator, denominator = value.numerator, value.denominator
    if denominator == 1 and abs(numerator) < 2**20:
        return str(numerator)
    if numerator <= 0 or denominator & (denominator - 1):
        return f"{float(value):.6g}"
    trailing = (numerator & -numerator).bit_length() - 1
    exponent = trailing - int(math.log2(denominator))
    odd = numerator >> trailing
    if odd == 1:
        return f"2**{exponent}"
    return f"{odd} * 2**{exponent}" if odd < 2**24 else f"{float(value):.9g}"

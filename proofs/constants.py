"""The constants that lemmas rest on, by the names used in `rests_on`, read when a lemma is checked."""

from __future__ import annotations

import math
from fractions import Fraction

from flywheel.attention import budget, checks, tile
from flywheel.attention import rotary as rotary_kernel
from flywheel.gdn import inverse as gdn_inverse
from flywheel.gdn import schedule as gdn_schedule
from flywheel.gdn import spec as gdn_spec
from flywheel.gdn import tile as gdn_tile
from verify import devices
from verify.attention import contract
from verify.gdn import inverse_levels, steps
from verify.rotary import contract as rotary

_MODULES = {
    "budget": budget,
    "checks": checks,
    "contract": contract,
    "devices": devices,
    "gdn_inverse": gdn_inverse,
    "gdn_schedule": gdn_schedule,
    "gdn_spec": gdn_spec,
    "gdn_tile": gdn_tile,
    "inverse_levels": inverse_levels,
    "rotary": rotary,
    "rotary_kernel": rotary_kernel,
    "steps": steps,
    "tile": tile,
}


def envelope(field: str) -> Fraction:
    """The largest value of a field over all device models: what every supported machine may do."""
    return max(Fraction(getattr(model, field)) for model in devices.MODELS.values())


def value_of(name: str) -> Fraction:
    """The value of `module.NAME`, or of `devices.field` over all device models."""
    module, attribute = name.split(".")
    if is_of_device(name):
        return envelope(attribute)
    return Fraction(float(getattr(_MODULES[module], attribute)))


def is_of_device(name: str) -> bool:
    """Whether a name is a field of the device models: what a machine may do, and no choice of the code's."""
    module, attribute = name.split(".")
    return module == "devices" and not attribute.isupper()


def name_of(module: object, attribute: str) -> str:
    """The name under which lemmas list an attribute of a module."""
    return next(f"{name}.{attribute}" for name, each in _MODULES.items() if each is module)


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

"""The phase of a rotary embedding in FP32."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from proofs.exact import FP32, power_of_two
from proofs.lemma import Method, lemma, require
from verify.rotary import contract as rotary

_LONG_CONTEXT = 2**19


@lemma(
    statement="a phase computed as fl(position * frequency) errs by at most (eta + u) of itself: radians, not ulp, at "
    "long context",
    rests_on=("rotary.RECIPROCAL_OF_POWER", "rotary.FP32_UNIT"),
    methods=(Method.EXACT, Method.INSTANCES),
)
def rotary_phase() -> str:
    """Error by position.

    The frequency f is held with a relative error eta, the product with an integer position p (exact in FP32 up to
    2**24) rounds once: |phase - p f| <= p f ((1 + eta)(1 + u) - 1).  At frequency 1 and position 2**19 - 1 that is a
    sixteenth of a radian and more, which no accuracy of cosine and sine can mend: the bound has to grow with the
    position.  The bound is nearly reached: a search among positions below 2**19 finds a rounding error of nearly u p f.
    """
    eta, u = Fraction(rotary.RECIPROCAL_OF_POWER), Fraction(rotary.FP32_UNIT)
    require(eta >= 2 * u, "an inverse frequency taken as a reciprocal of a power rounds twice")
    require(u >= FP32.unit_roundoff, f"FP32 rounds by up to 2**-24, FP32_UNIT is {float(u):.3g}")
    relative = (1 + eta) * (1 + u) - 1
    require(relative <= eta + u + 2 * eta * u, "the second order is larger than charged")
    worst = _worst_rounding()
    require(worst <= float(u), f"a product rounds by {worst:.6g}, more than FP32_UNIT = {float(u):.6g}")
    require(worst >= float(u) / 2, f"no product rounds by half of FP32_UNIT: found {worst:.6g}")
    radians = relative * (_LONG_CONTEXT - 1)
    require(radians > power_of_two(-4), "the phase at position 2**19 is accurate after all")
    return f"at position {_LONG_CONTEXT - 1}: up to {float(radians):.3f} rad; rounding reaches {worst / float(u):.3f} u"


def _worst_rounding() -> float:
    """The largest relative rounding error of p f over all positions below 2**19 for a few frequencies."""
    positions = np.arange(1, _LONG_CONTEXT, dtype=np.float64)
    worst = 0.0
    for pair in (1, 3, 7, 20, 31):
        held = np.float64(np.float32(10000.0 ** (-2 * pair / 128)))
        exact = positions * held  # 19 + 24 bits: exact in float64
        rounded = exact.astype(np.float32).astype(np.float64)
        worst = max(worst, float(np.max(np.abs(rounded - exact) / exact)))
    return worst

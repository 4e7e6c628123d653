"""The phase of a rotary embedding in FP32."""

from __future__ import annotations

import itertools
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
from flint import arb

from flywheel.attention import rotary as kernel
from proofs.exact import FP32, ball, ball_precision, power_of_two
from proofs.lemma import Assumption, Method, lemma, require
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


_PHASE_ERROR = power_of_two(-30)
"""Turns: what the docstring of `flywheel.rotary_tables` says."""


@lemma(
    statement="phases formed in turns from 64-bit frequencies err by less than 2**-30 turns at every INT32 position "
    "from 0 on, MAX_POSITION and beyond; FP32 phases are off by a sixteenth of a radian at 2**20",
    rests_on=("rotary_kernel.MAX_POSITION", "rotary_kernel._WORD", "rotary_kernel._HALF_WORD", "rotary_kernel._DIGITS"),
    methods=(Method.EXACT, Method.BALLS, Method.INSTANCES),
    assumptions=(
        Assumption(
            "cosines and sines are right at long context",
            "verify/tests/kernels/attention/test_rotary.py::test_tables_do_not_decay_with_position",
        ),
    ),
)
def rotary_turns() -> str:
    """The kernel's own tables.

    A frequency in turns per token is held as a fraction of 2**64, rounded: off by 2**-65, and by what 50 digits of 2 pi
    and of a power leave.  A position times it is formed modulo one turn: the product with the high word exactly modulo
    2**32, of the product with the low word the upper 32 bits.  `_high_product` drops the fractions of two middle
    products and the product of the lower halves, each less than one unit of 2**-32: it is at most 3 too small, and
    none of its sums passes 32 bits.  It is run on words at the edges and compared.  Together 3 units of 2**-32 and a
    position's 2**-65.
    """
    word, half = kernel._WORD, kernel._HALF_WORD  # noqa: SLF001  the kernel's own constants
    require(2 * half == word == 32, f"words of {word} bits, halves of {half}, are not those of 32-bit integers")
    with ball_precision():
        digits = abs(ball(Fraction(kernel._TWO_PI)) - 2 * arb.pi())  # noqa: SLF001
        require(digits < ball(power_of_two(-150)), "2 pi has fewer digits than it says")
    of_digits = Fraction(10) ** (2 - kernel._DIGITS)  # noqa: SLF001  a power, a quotient, 2 pi: relatively
    frequency = power_of_two(-2 * word - 1) + of_digits
    farthest = max(kernel.MAX_POSITION, 2**31 - 1)
    phase = farthest * frequency + 3 * power_of_two(-word)
    require(phase < _PHASE_ERROR, f"a phase at position {farthest} errs by {float(phase):.3g} turns")
    low = 2**half - 1
    edges = (0, 1, low, low + 1, low + 2, 2**31 - 1, 2**31, 2**word - low - 1, 2**word - 2, 2**word - 1)
    most = 0
    for a, b in itertools.product(edges, repeat=2):
        found = int(kernel._high_product(*jnp.asarray([a, b], jnp.uint32)))  # noqa: SLF001
        missing = (a * b >> word) - found
        require(0 <= missing <= 3, f"the upper half of {a} * {b} is off by {missing}")
        most = max(most, missing)
    return f"at most {float(phase / _PHASE_ERROR):.3f} of 2**-30 turns; upper halves up to {most} too small"

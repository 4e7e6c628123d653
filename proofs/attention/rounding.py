"""The unit of the two roundings to BF16: of P and of the result."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np

from proofs.exact import BF16
from proofs.lemma import Assumption, Method, lemma, require
from verify import devices

_TESTS = "verify/tests/proofs/test_proofs_assumptions.py"


@lemma(
    statement="|bf16(x) - x| <= 2**-8 |x| for every normal x up to the largest BF16, and nearly attained",
    rests_on=("devices.BF16_UNIT_ROUNDOFF",),
    methods=(Method.EXHAUSTIVE, Method.EXACT),
    assumptions=(
        Assumption("the device rounds to BF16 to nearest, ties to even", f"{_TESTS}::test_xla_rounds_to_bf16_as_numpy"),
    ),
)
def bf16_rounding_unit() -> str:
    """Eight significant bits.

    Between two neighbouring BF16 numbers the error grows linearly towards the midpoint, so the worst points are the
    midpoints: they and their FP32 neighbours are tried for every positive finite BF16 word.  One binade is tried whole,
    all 2**23 FP32 numbers in [1, 2); the others are scaled copies.  The worst is 1 + 2**-8, which rounds to 1.
    """
    unit = Fraction(devices.BF16_UNIT_ROUNDOFF)
    whole = (np.arange(2**23, dtype=np.uint32) | np.uint32(0x3F800000)).view(np.float32)
    edges = _midpoints()
    worst = max(_worst_error(whole, unit), _worst_error(edges, unit))
    attained = error_of_worst()
    require(
        worst == float(attained), f"the largest relative error is {worst}, not that of 1 + 2**-8, {float(attained)}"
    )
    require(unit <= attained * (1 + 2 * BF16.unit_roundoff), f"BF16_UNIT_ROUNDOFF = {float(unit)} is needlessly large")
    return f"{whole.size + edges.size} numbers; worst {float(attained):.8f} of at most {float(unit):.8f}"


def error_of_worst() -> Fraction:
    """The relative error at 1 + 2**-8, exactly."""
    x = 1 + BF16.unit_roundoff
    return abs(BF16.nearest(x) - x) / x


def _midpoints() -> np.ndarray:
    """For every positive normal BF16 word: itself, the midpoint above it, and their FP32 neighbours."""
    words = np.arange(0x0080, 0x7F80, dtype=np.uint32) << np.uint32(16)
    offsets = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    x = (words[:, None] | offsets[None, :]).reshape(-1).view(np.float32)
    return x[x <= np.float32(float(BF16.largest))]


def _worst_error(x: np.ndarray, unit: Fraction) -> float:
    """The largest |bf16(x) - x| / |x|; the inequality itself is decided without a division, in exact float64."""
    exact = x.astype(np.float64)
    rounded = x.astype(ml_dtypes.bfloat16).astype(np.float64)
    error = np.abs(rounded - exact)
    require(
        bool((error <= float(unit) * exact).all()), f"some FP32 number errs by more than {float(unit)} when rounded"
    )
    return float(np.max(error / exact))

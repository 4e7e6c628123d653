"""Numbers to BF16 words, each rounded at most once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from verify.attention.problem import BF16

if TYPE_CHECKING:
    from jaxtyping import Float64, UInt16

SIGNIFICAND = 8
"""Significant bits of BF16, the hidden one included."""
SMALLEST_EXPONENT = -125
"""`frexp` exponent of the smallest normal number, 2^-126 = 0.5 * 2^-125; below it the spacing no longer shrinks."""


def round_to_bf16(x: Float64[np.ndarray, "*shape"]) -> np.ndarray:
    """The BF16 numbers nearest to x, ties to even; magnitudes that round past the largest BF16 become infinite.

    A cast by ml_dtypes goes through FP32 and so rounds twice: 1 + 2^-8 + 2^-40 would fall to 1.
    """
    _, exponent = np.frexp(x)
    digits = np.maximum(exponent, SMALLEST_EXPONENT) - SIGNIFICAND
    # Scaling by a power of two and rint are exact but for the one rounding meant; the cast then has nothing to round.
    return np.ldexp(np.rint(np.ldexp(x, -digits)), digits).astype(BF16)


def from_bits(words: UInt16[np.ndarray, "*shape"]) -> np.ndarray:
    """The BF16 numbers whose 16-bit words these are."""
    return np.ascontiguousarray(words).view(BF16)


def to_bits(x: np.ndarray) -> UInt16[np.ndarray, "*shape"]:
    """The 16-bit words of BF16 numbers."""
    return np.ascontiguousarray(x).view(np.uint16)

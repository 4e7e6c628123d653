"""The kernel's inverse in eight matrix products, emulated in numpy, with its roundings in named places.

I + L for a 64 x 64 chunk, bottom-up: 4 x 4 diagonal blocks by two products, then 4 -> 16 -> 64 by three each,

    level 4:   P = L4 L4                    X4 = (I - L4) (I + P)
    merge:     N = E D^-1                   [Y; Q] = [D^-1; N] N            X = (D^-1 - Y) (I + Q)

where L4 is L within the 4 x 4 diagonal blocks, D^-1 the level below and E the part of L that the level adds.
Operands are BF16 ("bf16"), or each a sum of two BF16 numbers ("bf16x3"), of which the product of the low halves is left
out where the kernel multiplies few rows.  Sums are FP32.  The last factor is either multiplied as it stands, or as
A + A Q with A kept in FP32.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float32

CHUNK = 64
LEVELS = (4, 16, 64)
PRECISIONS = ("bf16", "bf16x3")
FINISHES = ("add", "multiply")


@dataclasses.dataclass(frozen=True)
class InverseSteps:
    """Which roundings the inverse makes.

    Attributes:
        precision: "bf16" or "bf16x3".
        finish: "add": the last product of a level is A + A Q; "multiply": A (I + Q).
    """

    precision: str = "bf16"
    finish: str = "add"

    def __post_init__(self) -> None:
        for name, value, allowed in (("precision", self.precision, PRECISIONS), ("finish", self.finish, FINISHES)):
            if value not in allowed:
                message = f"{name} must be one of {', '.join(allowed)}, got {value!r}"
                raise ValueError(message)


def to_bf16(x: np.ndarray) -> Float32[np.ndarray, "*shape"]:
    """Round to BF16, nearest even, and back to FP32."""
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def product(precision: str, *, few: bool = False) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """The matrix product of FP32 arrays in a precision; with `few` rows, pairs lack the product of their low halves."""
    return _bf16_product if precision == "bf16" else functools.partial(_split_product, few=few)


def _bf16_product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return to_bf16(left) @ to_bf16(right)


def _split_product(left: np.ndarray, right: np.ndarray, *, few: bool = False) -> np.ndarray:
    left_high, right_high = to_bf16(left), to_bf16(right)
    left_low, right_low = to_bf16(left - left_high), to_bf16(right - right_high)
    if few:
        return left_high @ right_high + (left_low @ right_high + left_high @ right_low)
    # As the kernel does it: what the right high and low halves give in one contraction each, then their sum.
    both = np.concatenate([left_high, left_low], axis=-1)
    halves = (np.concatenate([half, half], axis=-2) for half in (right_high, right_low))
    of_high, of_low = (both @ half for half in halves)
    return of_high + of_low


def part(lower: np.ndarray, level: int) -> np.ndarray:
    """What a level adds: entries within its diagonal blocks and in none of the level below."""
    i, j = np.indices(lower.shape[-2:])
    here = (i > j) & (i // level == j // level)
    below = here & (i // (level // 4) == j // (level // 4)) if level > LEVELS[0] else np.zeros_like(here)
    return np.where(here & ~below, lower, 0.0)


def invert(lower: Float32[np.ndarray, "*batch n n"], steps: InverseSteps) -> Float32[np.ndarray, "*batch n n"]:
    """(I + L)^-1 as the kernel computes it, for n = 4, 16 or 64.

    Raises:
        ValueError: another size.
    """
    n = lower.shape[-1]
    if n not in LEVELS:
        message = f"the chunk must have {', '.join(map(str, LEVELS))} tokens, got {n}"
        raise ValueError(message)
    dot, of_few = (product(steps.precision, few=few) for few in (False, True))
    lower = lower.astype(np.float32)
    identity = np.eye(n, dtype=np.float32)
    base = part(lower, LEVELS[0])
    x = _finish(identity - base, dot(base, base), identity, steps, dot)
    for level in LEVELS[1:]:
        if level <= n:
            # N of 64 rows has none in the first 16, the last products in half of all; N at 16 has some in each tile.
            nilpotent = (of_few if level == CHUNK else dot)(part(lower, level), x)
            stacked = dot(np.concatenate([x, nilpotent], axis=-2), nilpotent)
            x = _finish(x - stacked[..., :n, :], stacked[..., n:, :], identity, steps, of_few)
    return x


def _finish(
    left: np.ndarray,
    power: np.ndarray,
    identity: np.ndarray,
    steps: InverseSteps,
    dot: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> np.ndarray:
    if steps.finish == "add":
        return left + dot(left, power)
    return dot(left, identity + power)

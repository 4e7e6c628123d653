"""One rotary problem: exact inputs and the function that a kernel has to compute.

For pair i = 0 .. rotary_dim / 2 - 1 of a token at position p (Su et al., *RoFormer*, 2021),

    phase = p * base**(-2 i / rotary_dim)
    first' = first cos(phase) - second sin(phase)      second' = second cos(phase) + first sin(phase)

where (first, second) are lanes (i, i + rotary_dim / 2) in layout "half" (GPT-NeoX, Llama) and (2 i, 2 i + 1) in layout
"interleaved" (GPT-J, RoFormer).  Lanes from rotary_dim on pass unchanged.  `inverse` rotates back: the gradient.

Inputs are read as rational numbers, subnormals as zero, `base` as the binary64 number that it is.  A pair with an entry
that is not finite is undefined: oracles give NaN with an infinite error for both lanes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from verify.attention.problem import BF16, SMALLEST_NORMAL, widen

if TYPE_CHECKING:
    from jaxtyping import Float64, Int

Layout = Literal["half", "interleaved"]

LARGEST_POSITION = 1 << 20
DTYPES = (BF16, np.dtype(np.float32))


@dataclasses.dataclass(frozen=True, eq=False)
class RotaryProblem:
    """Inputs of one rotation.

    Attributes:
        x: BF16 or FP32 `[batch, heads, tokens, head_dim]`.
        positions: integers in 0 .. 2**20, `[tokens]` or `[batch, tokens]`.
        base: of the inverse frequencies, at least 1 ("theta" in model configurations).
        layout: which lanes make a pair: "half" or "interleaved".
        rotary_dim: how many leading lanes are rotated, even; None for all.
        inverse: rotate by the negative phase.
    """

    x: np.ndarray
    positions: np.ndarray
    base: float = 1e4
    layout: Layout = "half"
    rotary_dim: int | None = None
    inverse: bool = False

    def __post_init__(self) -> None:
        if self.x.dtype not in DTYPES or self.x.ndim != 4:
            message = (
                f"x must be bfloat16 or float32 [batch, heads, tokens, head_dim], got {self.x.dtype} "
                f"of rank {self.x.ndim}"
            )
            raise ValueError(message)
        if not np.issubdtype(self.positions.dtype, np.integer):
            message = f"positions must be integers, got {self.positions.dtype}"
            raise ValueError(message)
        if self.positions.shape not in {(self.tokens,), (self.batch, self.tokens)}:
            message = (
                f"positions must have shape {(self.tokens,)} or {(self.batch, self.tokens)}, got {self.positions.shape}"
            )
            raise ValueError(message)
        if np.any((self.positions < 0) | (self.positions > LARGEST_POSITION)):
            message = (
                f"positions must lie in 0 .. {LARGEST_POSITION}, got {self.positions.min()} .. {self.positions.max()}"
            )
            raise ValueError(message)
        if not 1.0 <= self.base < math.inf:
            message = f"base must be finite and at least 1, got {self.base}"
            raise ValueError(message)
        if self.layout not in get_args(Layout):
            message = f"layout must be one of {get_args(Layout)}, got {self.layout!r}"
            raise ValueError(message)
        if self.width % 2 or not 0 <= self.width <= self.head_dim:
            message = f"rotary_dim must be even and at most head_dim = {self.head_dim}, got {self.width}"
            raise ValueError(message)

    @property
    def batch(self) -> int:
        """Batch entries."""
        return self.x.shape[0]

    @property
    def tokens(self) -> int:
        """Tokens per batch entry."""
        return self.x.shape[2]

    @property
    def head_dim(self) -> int:
        """Lanes of a head."""
        return self.x.shape[3]

    @property
    def width(self) -> int:
        """Lanes that are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def pairs(self) -> int:
        """Pairs of lanes."""
        return self.width // 2

    def lanes(self) -> tuple[slice, slice]:
        """The first and the second lane of every pair."""
        if self.layout == "half":
            return slice(0, self.pairs), slice(self.pairs, self.width)
        return slice(0, self.width, 2), slice(1, self.width, 2)

    def position(self, batch: int) -> Int[np.ndarray, " tokens"]:
        """Positions of one batch entry."""
        return (self.positions if self.positions.ndim == 1 else self.positions[batch]).astype(np.int64)

    def numbers(self) -> Float64[np.ndarray, "batch heads tokens head_dim"]:
        """The input as exact float64 numbers, subnormals read as zero."""
        if self.x.dtype == BF16:
            return widen(np.ascontiguousarray(self.x))
        wide = self.x.astype(np.float64)
        return np.where(np.abs(wide) < SMALLEST_NORMAL, 0.0, wide)


@dataclasses.dataclass(frozen=True, eq=False)
class Rotated:
    """The exact result up to a proved elementwise error; NaN with an infinite error is undefined.

    Attributes:
        out: `[batch, heads, tokens, head_dim]`.
        error: |out - exact| <= error.
        tier: "float64", "arb" or "mpmath".
    """

    out: Float64[np.ndarray, "batch heads tokens head_dim"]
    error: Float64[np.ndarray, "batch heads tokens head_dim"]
    tier: str

    @classmethod
    def start(cls, problem: RotaryProblem, tier: str) -> Rotated:
        """The input itself with error 0: right for the lanes that are not rotated."""
        return cls(problem.numbers(), np.zeros(problem.x.shape), tier)

    def mark_undefined(self, problem: RotaryProblem) -> Rotated:
        """NaN with an infinite error for pairs that hold something that is not finite; returns itself."""
        x = problem.numbers()
        first, second = problem.lanes()
        odd = ~(np.isfinite(x[..., first]) & np.isfinite(x[..., second]))
        for lanes in (first, second):
            self.out[..., lanes][odd] = np.nan
            self.error[..., lanes][odd] = np.inf
        return self

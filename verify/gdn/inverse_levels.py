"""Rounding sites of the eight-product inverse, each with the exact factors that carry it to the result.

docs/gdn-inverse-contract.md derives what stands here; names are its names.  At each level T = D + E, D the part of T
within the diagonal blocks of the level below.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from verify.devices import BF16_UNIT_ROUNDOFF
from verify.gdn.float64_stages import gamma
from verify.gdn.inverse import float64
from verify.gdn.inverse_steps import LEVELS, to_bf16

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float64

    from verify.devices import DeviceModel
    from verify.gdn.inverse_steps import InverseSteps

LOW_UNIT = 2.0**-9
"""What rounding the low part of a split number costs, in units of what rounding to the high part alone costs: the low
part is at most half a spacing, 2**(e - 8), and where it is less, half its own spacing is at most 2**(e - 17)."""
PASS = 128
"""Terms that the smallest matrix unit sums in one pass; hi x hi, lo x hi and hi x lo take passes of their own."""
SPLIT_UNIT = BF16_UNIT_ROUNDOFF * LOW_UNIT
"""A number minus its two BF16 parts, relatively."""


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """One matrix product of FP32 numbers: what rounding its operands and its sum may cost."""

    precision: str
    device: DeviceModel

    def rounded(self, x: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
        """How far an operand of size at most x is from what enters the product."""
        smallest = np.where(x > 0.0, self.device.smallest_normal, 0.0)  # a part below it may become zero
        return half_spacing(x) * (1.0 if self.precision == "bf16" else LOW_UNIT) + smallest

    def known(self, x: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
        """The same for an operand that is known: its own rounding."""
        high = to_bf16(x).astype(np.float64)
        rest = np.abs(x - high)
        if self.precision == "bf16x3":
            rest = np.abs(x - high - to_bf16(x - high))
        return np.where(rest > 0.0, rest + self.device.smallest_normal, 0.0)

    def accumulated(
        self, left: Float64[np.ndarray, "m n"], right: Float64[np.ndarray, "n p"], *, partial: int = 3
    ) -> Float64[np.ndarray, "m p"]:
        """What summing in FP32 costs, for operands (as they enter the product) of at most these sizes.

        With split operands, the product of the low halves is left out: each is at most half a spacing of its operand.
        `partial` partial products are one sum; with 4 the low halves' is among them, and charged all the same.
        """
        size = left @ right
        split = self.precision == "bf16x3"
        terms = left.shape[1] * (partial if split else 1)
        summing = np.expm1(terms * self.device.dot_unit_roundoff) * (1.0 + (2.0**-6 if split else 0.0))
        error = summing * size + np.where(size > 0.0, 2.0 * terms * self.device.smallest_normal, 0.0)
        return error + half_spacing(left) @ half_spacing(right) if split else error

    def joined(
        self,
        addend: Float64[np.ndarray, "m p"],
        left: Float64[np.ndarray, "m n"],
        right: Float64[np.ndarray, "n p"],
    ) -> Float64[np.ndarray, "m p"]:
        """What adding an FP32 matrix to a product costs beside `accumulated`; all of at most these sizes.

        The compiler may make it the accumulator of the product: it goes through an addition of every pass.  One FP32
        rounding more, which the addend may have behind it, is included.
        """
        passes = -(-left.shape[1] // PASS) * (3 if self.precision == "bf16x3" else 1)
        growth = np.expm1(passes * self.device.dot_unit_roundoff + self.device.unit_roundoff)
        return growth * (addend + left @ right)


def half_spacing(x: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """At least |bf16(y) - y| for every |y| <= x: half the distance of BF16 numbers at the size of x."""
    _, exponent = np.frexp(x)
    return np.where(x > 0.0, np.ldexp(BF16_UNIT_ROUNDOFF, exponent - 1), 0.0)


@dataclasses.dataclass(frozen=True, eq=False)
class Factor:
    """An exact matrix as float64 knows it: a value, and a bound of what its computation has cost."""

    value: np.ndarray
    error: np.ndarray

    @classmethod
    def of(cls, value: np.ndarray) -> Factor:
        """A matrix that is what it is."""
        return cls(value, np.zeros_like(value))

    def __matmul__(self, other: Factor) -> Factor:
        """The product."""
        left, right = np.abs(self.value), np.abs(other.value)
        error = self.error @ (right + other.error) + left @ other.error + gamma(len(left) + 2) * (left @ right)
        return Factor(self.value @ other.value, error)

    def __add__(self, other: Factor) -> Factor:
        """The sum."""
        value = self.value + other.value
        return Factor(value, self.error + other.error + gamma(1) * np.abs(value))

    def __neg__(self) -> Factor:
        """The negative."""
        return Factor(-self.value, self.error)

    @property
    def size(self) -> np.ndarray:
        """At least its absolute values."""
        return np.abs(self.value) + self.error


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """One rounding site: |what it does to the level's result| <= |left| error |right|, to first order.

    `left` and `right` give the factors for the level that the site is carried to, from that level.
    """

    error: np.ndarray
    left: Callable[[Level], Factor]
    right: Callable[[Level], Factor]

    def carried(self, level: Level) -> np.ndarray:
        """Its part of the bound of a level's result."""
        return self.left(level).size @ self.error @ self.right(level).size


@dataclasses.dataclass(frozen=True, eq=False)
class Level:
    """The blocks of one size, inverted: T_m, its inverse, and how far the computed inverse may be from it.

    Attributes:
        matrix: T_m.
        inverse: T_m^-1.
        sites: by name, those of this level and of the levels below.
        remainder: bound of all that is of higher order.
        block: size of its blocks.
        error: bound of |computed - T_m^-1|; 0 on the diagonal and above.
    """

    matrix: Factor
    inverse: Factor
    sites: dict[str, Site]
    remainder: np.ndarray
    block: int
    error: np.ndarray = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        total = self.remainder + sum(site.carried(self) for site in self.sites.values())
        object.__setattr__(self, "error", np.tril(total, -1))


def _through(block: Factor, inner: Factor | None = None) -> Callable[[Level], Factor]:
    """T^-1 D (times what stands inside): how an error of D^-1 reaches the result from the left."""
    return lambda level: level.inverse @ block if inner is None else level.inverse @ block @ inner


def _back(block: Factor, inner: Factor | None = None) -> Callable[[Level], Factor]:
    """(What stands inside times) D T^-1, from the right."""
    return lambda level: block @ level.inverse if inner is None else inner @ (block @ level.inverse)


def _operand(x: np.ndarray, given: np.ndarray, arithmetic: Arithmetic) -> np.ndarray:
    """How far L as it enters a product is from L: what it was given with, and its rounding."""
    if not given.any():
        return arithmetic.known(x)
    return given + arithmetic.rounded(np.abs(x) + given)


def base_level(lower: np.ndarray, given: np.ndarray, steps: InverseSteps, arithmetic: Arithmetic) -> Level:
    """Level 4: P = L L, X = (I - L)(I + P)."""
    n = len(lower)
    identity = np.eye(n)
    multiply = identity if steps.finish == "multiply" else np.zeros((n, n))
    size, operand = np.abs(lower), _operand(lower, given, arithmetic)
    exact = float64(lower)
    matrix, inverse = Factor.of(identity + lower), Factor(exact.value, exact.error)
    square, left = Factor.of(lower) @ Factor.of(lower), Factor.of(identity - lower)
    # P as it enters: the operands of L L, its sum, its own rounding.
    power = size @ operand + operand @ size + operand @ operand
    power = power + arithmetic.accumulated(size + operand, size + operand)
    power = power + arithmetic.rounded(square.size + power)
    most = identity + size + operand
    summed = arithmetic.accumulated(most, multiply + square.size + power)
    summed = summed + arithmetic.joined(most, most, multiply + square.size + power)
    sites = {
        "level 4, operand I - L": Site(operand, _through(matrix), _back(matrix, Factor.of(multiply) + square)),
        "level 4, L^2": Site(power, _through(matrix, left), _back(matrix)),
        "level 4, last sum": Site(np.tril(summed, -1), _through(matrix), _back(matrix)),
    }
    if steps.finish == "add":
        sites["level 4, given L"] = Site(given, _through(matrix), _back(matrix))
    return Level(matrix, inverse, sites, operand @ power, LEVELS[0])


def merge(below: Level, lower: np.ndarray, given: np.ndarray, steps: InverseSteps, arithmetic: Arithmetic) -> Level:
    """One level up: T = D + E, N = E D^-1, [Y; Q] = [D^-1; N] N, X = (D^-1 - Y)(I + Q)."""
    n = len(lower)
    identity = np.eye(n)
    multiply = identity if steps.finish == "multiply" else np.zeros((n, n))
    block, diagonal = below.matrix, below.inverse
    matrix = Factor.of(block.value + lower)
    exact = float64(lower + block.value - identity)
    inverse = Factor(exact.value, exact.error)
    nilpotent = Factor.of(lower) @ diagonal
    square = nilpotent @ nilpotent
    to_left, to_right = (inverse @ block).size, (block @ inverse).size  # |T^-1 D| and |D T^-1| = |(I + N)^-1|
    size_e, operand_e = np.abs(lower), _operand(lower, given, arithmetic)

    # What enters: D^, and M, which stands for N in both of its products.
    most_d = diagonal.size + below.error
    round_d = arithmetic.rounded(np.tril(most_d, -1))  # ones are exact
    nu = operand_e @ (most_d + round_d) + size_e @ round_d
    nu = nu + arithmetic.accumulated(size_e + operand_e, most_d + round_d)
    round_n = arithmetic.rounded(nilpotent.size + size_e @ below.error + nu)
    mu = nu + round_n
    spread = size_e @ below.error + mu  # |M - N|
    most_n = nilpotent.size + spread

    # Y, A = D^ - Y, Q = M M and what it enters as, A as it enters.
    alpha = round_d @ most_n + arithmetic.accumulated(most_d + round_d, most_n)
    alpha = alpha + np.tril(arithmetic.joined(most_d, most_d + round_d, most_n), -1)
    exact_a = diagonal @ (Factor.of(identity) + (-nilpotent))
    doubt_a = below.error @ (identity + nilpotent.size) + most_d @ spread
    most_a = exact_a.size + doubt_a + alpha
    doubt_square = nilpotent.size @ spread + spread @ most_n
    q = arithmetic.accumulated(most_n, most_n)
    q = q + arithmetic.rounded(square.size + doubt_square + q)
    most_q = square.size + doubt_square + q
    round_a = arithmetic.rounded(np.tril(most_a, -1))
    summed = arithmetic.accumulated(most_a + round_a, multiply + most_q)
    summed = summed + arithmetic.joined(most_a, most_a + round_a, most_q)
    summed = np.tril(summed, -1)

    # Of higher order: Neumann series of (I + E D^)^-1 and (I + M)^-1, whose fourth powers vanish.
    by_left, step, first = _below(below, inverse @ block, block @ inverse, lower)
    tail_d = _neumann_tail(step, first)
    tail_m = _neumann_tail(step + to_right @ mu, first + to_right @ mu @ to_right)
    moved = by_left @ (to_right + tail_d)
    remainder = to_left @ below.remainder @ to_right + by_left @ tail_d
    remainder = remainder + inverse.size @ mu @ tail_m + moved @ mu @ (to_right + tail_m)
    remainder = remainder + alpha @ doubt_square + (doubt_a + alpha) @ q + round_a @ (doubt_square + q)
    level = f"level {below.block * 4}"
    sites = below.sites | {
        f"{level}, E D^-1": Site(nu, _plain, _back(block)),
        f"{level}, rounding of N": Site(round_n, _plain, _back(block)),
        f"{level}, D^-1 N": Site(alpha, _through(matrix), _back(matrix, Factor.of(identity) + square)),
        f"{level}, N^2": Site(q, _through(matrix, exact_a), _back(matrix)),
        f"{level}, operand A": Site(round_a, _through(matrix), _back(matrix, Factor.of(multiply) + square)),
        f"{level}, last sum": Site(summed, _through(matrix), _back(matrix)),
    }
    return Level(matrix, inverse, sites, np.tril(remainder, -1), below.block * 4)


def _plain(level: Level) -> Factor:
    return level.inverse


def _below(below: Level, left: Factor, right: Factor, lower: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bounds of |G d|, |H E d| and |H E d H| for the error d of the level below, G = T^-1 D, H = D T^-1.

    Each site is multiplied by G, or by H E, before absolute values are taken.
    """
    between = right @ Factor.of(lower)
    by_left = left.size @ below.remainder
    step = between.size @ below.remainder
    first = step @ right.size
    for site in below.sites.values():
        outer, inner = site.left(below), site.right(below)
        scaled = (between @ outer).size @ site.error
        by_left = by_left + (left @ outer).size @ site.error @ inner.size
        step = step + scaled @ inner.size
        first = first + scaled @ (inner @ right).size
    return by_left, step, first


def _neumann_tail(step: np.ndarray, first: np.ndarray) -> np.ndarray:
    """(I - S)^-1 |H| - |H| from S and S |H|, for the block strictly lower triangular S >= 0 of a level: S^4 = 0."""
    total = term = first
    for _ in range(2):
        term = step @ term
        total = total + term
    return total

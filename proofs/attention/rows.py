"""Rows on which the theorem's inequalities are tried: exact rationals, roundings as bad as a machine may make them."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import TYPE_CHECKING

from proofs.exact import BF16, FP32, floor_log2, power_of_two

if TYPE_CHECKING:
    import random

OMEGA = FP32.smallest_normal


@dataclasses.dataclass(frozen=True)
class Key:
    """A visible key as in attention_bound.v: w exact weight, v value, rho, p computed weight, b its BF16, x = b v."""

    w: Fraction
    v: Fraction
    rho: Fraction
    p: Fraction
    b: Fraction
    x: Fraction


@dataclasses.dataclass(frozen=True)
class Row:
    """Keys with the computed sums and how often one of them may have been flushed."""

    keys: tuple[Key, ...]
    l: Fraction  # noqa: E741  the field's name of the denominator
    o: Fraction
    flushes: int

    @property
    def weights(self) -> Fraction:
        """The exact denominator."""
        return sum((key.w for key in self.keys), Fraction(0))

    @property
    def exact(self) -> Fraction:
        """The exact result."""
        return sum((key.w * key.v for key in self.keys), Fraction(0)) / self.weights


def flush(x: Fraction) -> Fraction:
    """What a flushing machine makes of a result."""
    return Fraction(0) if abs(x) < OMEGA else x


def draw(random_numbers: random.Random, *, count: int, spread: int, skewed: bool) -> Row:
    """A row of `count` keys whose weights span `spread` binades.

    `skewed` makes every error of a weight, and every rounding to BF16, go the way of the value's sign, which is the
    worst for o and leaves l where it is.
    """
    keys = tuple(_draw_key(random_numbers, spread=spread, skewed=skewed) for _ in range(count))
    order = random_numbers.sample(range(count), count)
    return Row(
        keys,
        _summed([keys[n].p for n in order], random_numbers),
        _summed([keys[n].x for n in order], random_numbers),
        flushes=count - 1,
    )


def _draw_key(random_numbers: random.Random, *, spread: int, skewed: bool) -> Key:
    v = BF16.nearest(Fraction(random_numbers.uniform(-4, 4)))
    exponent = -32 - random_numbers.randrange(spread + 1)
    w = Fraction(random_numbers.uniform(0.5, 1)) * power_of_two(exponent)
    rho = Fraction(random_numbers.choice((0, 2**-18, 2**-12, 2**-6)))
    sign = (1 if v >= 0 else -1) if skewed else random_numbers.choice((-1, 1))
    p = _towards(w * (1 + sign * rho), FP32.precision, -sign)
    b = flush(BF16.nearest(p))
    return Key(w, v, rho, p, b, flush(b * v))


def _towards(x: Fraction, precision: int, sign: int) -> Fraction:
    """The neighbour of x in the direction of the sign."""
    quantum = power_of_two(floor_log2(abs(x)) - precision + 1)
    steps = x / quantum
    return (-(-steps.numerator // steps.denominator) if sign > 0 else steps.numerator // steps.denominator) * quantum


def _summed(terms: list[Fraction], random_numbers: random.Random) -> Fraction:
    """FP32 additions along a random tree, results below the smallest normal flushed."""
    while len(terms) > 1:
        at = random_numbers.randrange(len(terms) - 1)
        terms[at : at + 2] = [flush(FP32.nearest(terms[at] + terms[at + 1]))]
    return terms[0]

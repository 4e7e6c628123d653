"""Arithmetics that an interpreter may put in place of the machine's.

- `Exact`: float64, no conversion rounds: the function that the program means.
- `Nearest`: every result rounded to the nearest number of its format, sums one addition at a time.
- `Adversarial`: every result moved within a device's envelope (`verify.devices`), in a chosen direction or at random.
- `Stochastic`: results rounded up or down at random, as Verrou's `random` and `average` modes do, or with uniform noise
  of half an ulp before rounding, as Verificarlo's Monte Carlo arithmetic (`rr`, then nearest) does.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

import numpy as np

from verify.rounding import BF16, FORMATS, FP32, Format, down, nearest, spacing, stochastic, up

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.devices import DeviceModel
    from verify.emulate.primitives import Terms
    from verify.emulate.sites import Site

DIRECTIONS = ("up", "down", "away", "toward", "random")
MODES = ("average", "random", "mca")


class EmulationError(ValueError):
    """An equation that cannot be emulated; the message names it and its source line."""


class Arithmetic(Protocol):
    """What becomes of an equation's exact result."""

    def rounded(
        self, site: Site, exact: np.ndarray, operands: tuple[np.ndarray, ...], terms: Terms | None
    ) -> np.ndarray:
        """The result, given what float64 makes of the operands; `terms` for sums and matrix products."""
        ...


class Exact:
    """No rounding but float64's."""

    def rounded(
        self, site: Site, exact: np.ndarray, operands: tuple[np.ndarray, ...], terms: Terms | None
    ) -> np.ndarray:
        """The exact result."""
        del site, operands, terms
        return exact


def _format(site: Site) -> Format:
    if site.dtype not in FORMATS:
        message = f"{site.source}: {site.primitive} gives {site.dtype}, whose roundings are not known here"
        raise EmulationError(message)
    return FORMATS[site.dtype]


def _flushed(x: np.ndarray, to: Format) -> np.ndarray:
    """Subnormal results become zero, as on every device here."""
    return np.where(np.abs(x) < to.smallest_normal, np.copysign(0.0, x), x)


def _one_by_one(site: Site, terms: Terms, rounded: Callable[[np.ndarray, Format], np.ndarray]) -> np.ndarray:
    """A sum in the order in which it is written; products of FP32 operands are rounded, those of BF16 are exact."""
    wide = FP32 if site.dtype != FP32.name else _format(site)
    total: np.ndarray | None = None
    for term in terms.each():
        one = rounded(term, wide) if terms.products else term
        total = one if total is None else rounded(total + one, wide)
    if total is None:
        return np.zeros(site.shape)
    return total if site.dtype == FP32.name else rounded(total, _format(site))


class Nearest:
    """Correctly rounded operations, subnormals flushed; sums in FP32, one after another."""

    def rounded(
        self, site: Site, exact: np.ndarray, operands: tuple[np.ndarray, ...], terms: Terms | None
    ) -> np.ndarray:
        """The nearest number of the result's format."""
        del operands
        if terms is not None:
            return _one_by_one(site, terms, lambda x, to: _flushed(nearest(x, to), to))
        to = _format(site)
        return _flushed(nearest(exact, to), to)


@dataclasses.dataclass
class Stochastic:
    """Random rounding.

    Attributes:
        mode: "average": either neighbour, the nearer one more often, so that the mean is right (stochastic rounding);
            "random": either neighbour equally often; "mca": uniform noise of half an ulp, then nearest.
        seed: of all draws.
    """

    mode: str = "average"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            message = f"mode must be one of {', '.join(MODES)}, got {self.mode!r}"
            raise ValueError(message)
        self._rng = np.random.default_rng(self.seed)

    def rounded(
        self, site: Site, exact: np.ndarray, operands: tuple[np.ndarray, ...], terms: Terms | None
    ) -> np.ndarray:
        """One of the neighbours of the exact result, addition by addition for a sum."""
        del operands
        return self._draw(exact, _format(site)) if terms is None else _one_by_one(site, terms, self._draw)

    def _draw(self, x: np.ndarray, to: Format) -> np.ndarray:
        if self.mode != "mca":
            return _flushed(stochastic(x, to, self._rng, fair=self.mode == "random"), to)
        # Numbers of the format are left alone, as in random rounding (Verificarlo's RR).
        noise = np.where(nearest(x, to) == x, 0.0, spacing(x, to) * self._rng.uniform(-0.5, 0.5, np.shape(x)))
        return _flushed(nearest(x + noise, to), to)


@dataclasses.dataclass
class Adversarial:
    """A device that uses all of its model's freedom.

    Attributes:
        device: whose envelopes.
        direction: "up", "down"; "away" from zero, "toward" it; "random": each result to either end.
        seed: of the random directions.
    """

    device: DeviceModel
    direction: str = "random"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.direction not in DIRECTIONS:
            message = f"direction must be one of {', '.join(DIRECTIONS)}, got {self.direction!r}"
            raise ValueError(message)
        self._rng = np.random.default_rng(self.seed)

    def rounded(
        self, site: Site, exact: np.ndarray, operands: tuple[np.ndarray, ...], terms: Terms | None
    ) -> np.ndarray:
        """The number of the format farthest from the exact result in the direction, within the envelope."""
        to = _format(site)
        if site.primitive in ("convert_element_type", "reduce_precision"):
            return _flushed(nearest(exact, to), to)  # no freedom: to nearest on every device
        room = self._room(site, exact, operands, terms, to)
        signs = self._signs(exact)
        with np.errstate(invalid="ignore"):
            least, most = exact - room, exact + room
            moved = np.where(signs > 0, down(most, to), up(least, to))
            # Where the envelope holds no number of the format, the nearest one.
            inside = (moved >= least) & (moved <= most)
        return _flushed(np.where(inside, moved, nearest(exact, to)), to)

    def _signs(self, exact: np.ndarray) -> np.ndarray:
        if self.direction == "random":
            return self._rng.choice([-1.0, 1.0], size=np.shape(exact))
        if self.direction in ("up", "down"):
            return np.full(np.shape(exact), 1.0 if self.direction == "up" else -1.0)
        return np.where(exact >= 0, 1.0, -1.0) * (1.0 if self.direction == "away" else -1.0)

    def _room(
        self, site: Site, exact: np.ndarray, operands: tuple[np.ndarray, ...], terms: Terms | None, to: Format
    ) -> np.ndarray:
        """How far the result may be from exact."""
        if terms is not None:
            products = self.device.unit_roundoff if terms.products else 0.0
            unit = self.device.dot_unit_roundoff if terms.products else self.device.unit_roundoff
            summing = np.expm1(max(terms.count - 1, 0) * unit + products) * terms.size()
            return summing + (0.0 if to == FP32 else spacing(exact, to) / 2)
        if to == BF16:
            name = _BF16_NAMES.get(site.primitive)
            return spacing(exact, to) * (0.5 if name is None else self.device.bf16_ulp[name])
        return envelope(site, exact, operands, self.device)


_BF16_NAMES = {
    "exp2": "exp2",
    "exp": "exp",
    "log": "log",
    "tanh": "tanh",
    "rsqrt": "rsqrt",
    "div": "reciprocal",
    "logistic": "sigmoid",
}


def envelope(site: Site, exact: np.ndarray, operands: tuple[np.ndarray, ...], device: DeviceModel) -> np.ndarray:
    """|device's FP32 result - exact| at most, for one elementwise equation.

    Raises:
        EmulationError: the device model says nothing about the function.
    """
    u, size = device.unit_roundoff, np.where(np.isfinite(exact), np.abs(exact), 0.0)
    relative: dict[str, float] = {
        "add": u,
        "add_any": u,
        "sub": u,
        "mul": u,
        "square": u,
        "integer_pow": 3 * u,
        "rem": 0.0,
        "reduce_prod": u,
        "cumprod": u,
        "div": device.reciprocal_relative + u,
        "sqrt": device.rsqrt_relative + u,  # x rsqrt(x)
        "rsqrt": device.rsqrt_relative,
        "exp2": device.exp2_relative,
        "exp": device.exp_relative,
        "log": device.log_relative,
        "log1p": device.log_relative,
        "tanh": device.tanh_relative,
        "logistic": device.sigmoid_relative,
    }
    absolute = {
        "log": device.log_absolute,
        "log1p": device.log_absolute,
        "tanh": device.tanh_absolute,
        "sin": device.sin_absolute,
        "cos": device.cos_absolute,
    }
    name = site.primitive
    if name == "one_minus_square":  # x^2 is rounded, and the difference
        return u * (np.square(operands[0]) + size)
    if name not in relative and name not in absolute:
        message = f"{site.source}: the device model {device.name} says nothing about {name}"
        raise EmulationError(message)
    return relative.get(name, 0.0) * size + absolute.get(name, 0.0)


@dataclasses.dataclass(frozen=True)
class At:
    """One arithmetic at some equations, another at all others.

    Attributes:
        inner: there.
        paths: of the equations.
        outer: elsewhere.
    """

    inner: Arithmetic
    paths: frozenset[str]
    outer: Arithmetic = dataclasses.field(default_factory=Exact)

    def rounded(
        self, site: Site, exact: np.ndarray, operands: tuple[np.ndarray, ...], terms: Terms | None
    ) -> np.ndarray:
        """By path."""
        return (self.inner if site.path in self.paths else self.outer).rounded(site, exact, operands, terms)

"""Which operation loses the digits: one equation at a time computed as a device would, all others exactly."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from verify.emulate.arithmetic import Adversarial, Arithmetic, At, Exact, Nearest, Stochastic
from verify.emulate.primitives import ROUNDED, SUMS
from verify.records import encode_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from verify.devices import DeviceModel
    from verify.emulate.interpreter import Program
    from verify.emulate.sites import Site

FORMAT = "flywheel-emulation/1"
RELATIVE, LARGEST = "relative", "largest"
KINDS = ("adversarial", "nearest", "stochastic")
SEEDS = 3
"""Draws per equation, of which the worst counts."""


@dataclasses.dataclass(frozen=True)
class Effect:
    """What an arithmetic does to the result.

    Attributes:
        error: the worst |found - exact|, by the ranking's measure; infinite if a finite result is not finite any more.
        output: which of the results.
        index: of its element.
        found, exact: there.
    """

    error: float
    output: int = 0
    index: tuple[int, ...] = ()
    found: float = 0.0
    exact: float = 0.0


@dataclasses.dataclass(frozen=True)
class Ranked:
    """One equation.

    Attributes:
        site: which.
        alone: the effect of computing this one as the device does, and everything else exactly.
        without: the effect of computing everything as the device does but this one.
    """

    site: Site
    alone: Effect
    without: Effect


@dataclasses.dataclass(frozen=True)
class Ranking:
    """All equations of a function that round, worst first.

    Attributes:
        function: its name.
        words: what it is and at which inputs.
        arithmetic: how the equations are computed, in words.
        device: name of the device model; empty where none counts.
        measure: "relative" or "largest" (of the results' own largest size).
        together: every equation as the device computes it.
        equations: by the effect of each alone.
    """

    function: str
    words: str
    arithmetic: str
    device: str
    measure: str
    together: Effect
    equations: tuple[Ranked, ...]

    def as_json(self) -> dict[str, Any]:
        """What docs/emulation.md describes; strict JSON, infinities as strings."""
        return {
            "format": FORMAT,
            "function": self.function,
            "words": self.words,
            "arithmetic": self.arithmetic,
            "device": self.device,
            "measure": self.measure,
            "together": _effect_json(self.together),
            "equations": [
                {
                    "rank": number + 1,
                    "path": ranked.site.path,
                    "primitive": ranked.site.primitive,
                    "dtype": ranked.site.dtype,
                    "shape": list(ranked.site.shape),
                    "file": ranked.site.file,
                    "line": ranked.site.line,
                    "function": ranked.site.function,
                    "text": ranked.site.text,
                    "callers": list(ranked.site.callers),
                    "alone": _effect_json(ranked.alone),
                    "without": _effect_json(ranked.without),
                }
                for number, ranked in enumerate(self.equations)
            ],
        }


def _effect_json(effect: Effect) -> dict[str, Any]:
    return {
        "error": encode_number(effect.error),
        "output": effect.output,
        "index": list(effect.index),
        "found": encode_number(effect.found),
        "exact": encode_number(effect.exact),
    }


def rounding_sites(program: Program) -> list[Site]:
    """The equations that an arithmetic may round: floating-point results of operations and sums."""
    names = {*ROUNDED, *SUMS}
    return [site for site in program.sites if site.primitive in names and "float" in site.dtype]


def arithmetics(kind: str, device: DeviceModel) -> list[Callable[[], Arithmetic]]:
    """The arithmetics of a kind, of which the worst counts.

    Raises:
        ValueError: an unknown kind.
    """
    if kind == "nearest":
        return [Nearest]
    if kind == "stochastic":
        return [lambda s=s: Stochastic(seed=s) for s in range(SEEDS)]
    if kind == "adversarial":
        drawn: list[Callable[[], Arithmetic]] = [lambda s=s: Adversarial(device, "random", s) for s in range(SEEDS)]
        return [*drawn, *(lambda d=d: Adversarial(device, d) for d in ("up", "down"))]
    message = f"arithmetic must be one of {', '.join(KINDS)}, got {kind!r}"
    raise ValueError(message)


def rank(
    program: Program,
    arguments: Sequence[Any],
    device: DeviceModel,
    *,
    kind: str = "adversarial",
    measure: str = RELATIVE,
    words: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> Ranking:
    """Compute the ranking.

    Args:
        program: the traced function.
        arguments: flattened.
        device: whose envelopes the adversarial arithmetic uses.
        kind: "adversarial", "nearest" or "stochastic".
        measure: "relative" or "largest".
        words: stand in the ranking as they are.
        progress: called with (done, of) after each equation.

    Raises:
        ValueError: an unknown kind or measure.
        EmulationError: an equation cannot be emulated.
    """
    if measure not in (RELATIVE, LARGEST):
        message = f"measure must be {RELATIVE} or {LARGEST}, got {measure!r}"
        raise ValueError(message)
    choices = arithmetics(kind, device)
    exact = program.run(arguments, Exact())
    sites = rounding_sites(program)
    paths = frozenset(site.path for site in sites)

    def worst(chosen: frozenset[str]) -> Effect:
        found = (program.run(arguments, At(choice(), chosen)) for choice in choices)
        return max((effect(results, exact, measure) for results in found), key=lambda each: each.error)

    ranked: list[Ranked] = []
    for number, site in enumerate(sites):
        only = frozenset({site.path})
        ranked.append(Ranked(site, worst(only), worst(paths - only)))
        if progress is not None:
            progress(number + 1, len(sites))
    ranked.sort(key=lambda each: -each.alone.error)
    uses_device = kind == "adversarial"
    return Ranking(
        program.name,
        words,
        kind,
        device.name if uses_device else "",
        measure,
        worst(paths) if sites else Effect(0.0),
        tuple(ranked),
    )


def effect(found: Sequence[np.ndarray], exact: Sequence[np.ndarray], measure: str) -> Effect:
    """The worst element of all floating-point results."""
    return max(_effects(found, exact, measure), key=lambda each: each.error, default=Effect(0.0))


def _effects(found: Sequence[np.ndarray], exact: Sequence[np.ndarray], measure: str) -> Iterator[Effect]:
    for number, (got, want) in enumerate(zip(found, exact, strict=True)):
        if want.dtype != np.float64 or want.size == 0:
            continue
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            error = np.where(same, 0.0, np.abs(got - want))
            finite = np.abs(want[np.isfinite(want)])
            size = np.abs(want) if measure == RELATIVE else np.full(want.shape, finite.max(initial=0.0))
            # A result that should be 0 has no relative error but 0 or infinite.
            scaled = np.where(error == 0.0, 0.0, np.where(size > 0.0, error / size, np.inf))
        scaled = np.where(np.isnan(scaled), np.inf, scaled)
        index = tuple(int(i) for i in np.unravel_index(int(scaled.argmax()), scaled.shape))
        yield Effect(float(scaled[index]), number, index, float(got[index]), float(want[index]))


def save(ranking: Ranking, path: Path) -> None:
    """Write it as JSON; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(ranking.as_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)

"""How far modelled times are from measured ones: `python -m verify.compiled calibrate`.

The model is compared with published timings of real TPUs (see `verify.compiled.published`).  Each published call is
compiled with the same configuration, its program's time is modelled, kernel and the operations around it, and a line is
fitted: measured = slope x modelled + overhead.
"""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verify.compiled.compile import CompileError, Job, compile_many
from verify.compiled.report import analyse_artifact
from verify.compiled.target import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from verify.compiled.compile import Artifact
    from verify.compiled.published import Timing

PEERS = Path(__file__).with_name("peers.py")


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """One published call beside its model.

    Attributes:
        timing: the published call.
        seconds: modelled time of the program; None if it has none.
        kernel_seconds: of its kernel alone.
        versions: of the compiler that the model read.
        reason: why there is no modelled time.
    """

    timing: Timing
    seconds: float | None
    kernel_seconds: float | None
    versions: dict[str, str | None] | None
    reason: str | None

    @property
    def ratio(self) -> float | None:
        """Measured over modelled: above 1 the model is optimistic."""
        return self.timing.seconds / self.seconds if self.seconds else None


@dataclasses.dataclass(frozen=True)
class Fit:
    """What the calibrated calls say together.

    Attributes:
        count: calls with a modelled time.
        lowest: smallest measured / modelled.
        median: median of it.
        highest: largest.
        slope: of measured against modelled time.
        overhead_seconds: measured time of a call that does nothing.
        residual: largest relative distance of a measured time from the line.
    """

    count: int
    lowest: float
    median: float
    highest: float
    slope: float
    overhead_seconds: float
    residual: float


def choose(timings: Sequence[Timing], limit: int | None) -> list[Timing]:
    """A spread of calls: without residuals first, short and long, causal and full, each head_dim."""
    ranked = sorted(timings, key=lambda each: (each.residuals, each.query[1], each.query[3], not each.causal))
    if limit is None or limit >= len(ranked):
        return ranked
    plain = [each for each in ranked if not each.residuals] or ranked
    positions = np.unique(np.linspace(0, len(plain) - 1, limit).round().astype(int))
    return [plain[position] for position in positions]


def calibrate(
    timings: Sequence[Timing],
    python: str | None,
    *,
    workers: int | None = None,
    started: Callable[[Job], None] | None = None,
) -> Iterator[Calibrated]:
    """Model each published call; yields as they finish."""
    jobs = {
        Job(
            Target(f"{PEERS}:tokamax_flash", options=timing.options(), factory=True), timing.generation, python=python
        ): timing
        for timing in timings
    }
    for job, result in compile_many(list(jobs), workers=workers, started=started):
        yield calibrated(jobs[job], result)


def calibrated(timing: Timing, result: Artifact | CompileError) -> Calibrated:
    """One call's model from its compilation, or the reason why there is none."""
    if isinstance(result, CompileError):
        return Calibrated(timing, None, None, None, str(result))
    report = analyse_artifact(result)
    kernel = sum(each.seconds or 0.0 for each in report.kernels)
    return Calibrated(timing, report.seconds, kernel, dict(report.versions), report.reasons.get("seconds"))


def fit(found: Sequence[Calibrated]) -> Fit | None:
    """The line through the calls; None with fewer than two."""
    pairs = [(each.seconds, each.timing.seconds) for each in found if each.seconds]
    if len(pairs) < 2:
        return None
    modelled, measured = np.array(pairs).T
    # Relative residuals: a long call must not outvote the short ones.
    matrix = np.stack([modelled, np.ones_like(modelled)], axis=1) / measured[:, None]
    (slope, overhead), *_ = np.linalg.lstsq(matrix, np.ones_like(measured), rcond=None)
    ratios = measured / modelled
    return Fit(
        count=len(pairs),
        lowest=float(ratios.min()),
        median=float(statistics.median(ratios.tolist())),
        highest=float(ratios.max()),
        slope=float(slope),
        overhead_seconds=float(overhead),
        residual=float(np.abs(matrix @ np.array([slope, overhead]) - 1).max()),
    )


def document(found: Sequence[Calibrated], line: Fit | None) -> dict[str, Any]:
    """The calibration as plain data."""
    ordered = sorted(found, key=lambda each: (each.timing.generation, each.timing.query[1], each.timing.name))
    return {
        "source": "published Tokamax autotuning timings of dense attention on the splash kernel",
        "versions": next((each.versions for each in ordered if each.versions), None),
        "fit": dataclasses.asdict(line) if line else None,
        "calls": [
            {
                "generation": each.timing.generation,
                "name": each.timing.name,
                "measured_seconds": each.timing.seconds,
                "modelled_seconds": each.seconds,
                "modelled_kernel_seconds": each.kernel_seconds,
                "ratio": each.ratio,
                "reason": each.reason,
            }
            for each in ordered
        ],
    }

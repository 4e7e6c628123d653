"""The verdict on an inverse: structure exactly, entries by the a-priori bound, and whether trivial answers would pass.

Ill-conditioned matrices are judged by the bound like all others.  Where the bound exceeds the largest entry of the
inverse, or a trivial answer lies within it too, the verdict is NO_POWER and says `ill-conditioned`: such a matrix can
convict a kernel, not acquit it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from verify.gdn.inverse import certificate, exact
from verify.gdn.inverse_contract import inverse_bound
from verify.measures import ComparisonError, errors, measure, widen
from verify.verdict import Judgement, Verdict, decide, describe, within_bound

if TYPE_CHECKING:
    from jaxtyping import Float32

    from verify.devices import DeviceModel
    from verify.gdn.inverse_contract import InverseBound
    from verify.gdn.inverse_steps import InverseSteps

NAME = "inverse"


@dataclasses.dataclass(frozen=True, eq=False)
class JudgedInverse:
    """A verdict with what was measured.

    Attributes:
        judgement: the verdict, by the a-priori bound alone.
        bound: the contract on this matrix.
        certified: largest entry of the a-posteriori certificate, a rigorously measured error; NaN if X has no
            certificate (not unit lower triangular, or not finite).  Never the criterion.
    """

    judgement: Judgement
    bound: InverseBound
    certified: float


def trivial_answers(lower: np.ndarray, found: np.ndarray) -> dict[str, np.ndarray]:
    """What a kernel that does nothing, or one thing wrong, would return for I + L, whose inverse is `found`."""
    identity = np.eye(len(lower))
    random = np.random.default_rng(len(lower)).standard_normal(lower.shape)
    return {
        "X = I": identity,
        "X = T": identity + lower,
        "the sign-flipped inverse": 2.0 * identity - found,
        "random entries": identity + np.tril(random, -1) * max(float(np.abs(found - identity).max(initial=0.0)), 1.0),
    }


def judge_inverse(
    lower: Float32[np.ndarray, "n n"],
    got: Float32[np.ndarray, "n n"],
    steps: InverseSteps,
    device: DeviceModel,
    *,
    power: bool = True,
) -> JudgedInverse:
    """Judge a computed inverse of I + L.

    Raises:
        ValueError: L is not an FP32 matrix, strictly lower triangular and finite, of 4, 16 or 64 rows.
    """
    bound = inverse_bound(lower, steps, device)
    limit, want = bound.bound, bound.exact
    try:
        found = errors(np.asarray(got), want)
    except ComparisonError as error:
        return JudgedInverse(Judgement(Verdict.FAIL, f"{NAME}: {error}"), bound, float("nan"))
    certified = _certified(lower, got)
    decision = decide(found, limit, bound.exact_error)
    if decision.open.any():
        better = exact(np.asarray(lower, np.float64))
        found = errors(np.asarray(got), better.value)
        decision = decide(found, limit, better.error)
    measures = {NAME: measure(found, limit)}
    notes = (f"a-posteriori certificate: within {certified:.3g} of the exact inverse (measured, not a criterion)",)
    # What the exact inverse's own rounding to float64 leaves open is far below any BF16 or FP32 spacing.
    wrong = dataclasses.replace(decision, wrong=decision.wrong | decision.open)
    if wrong.wrong.any():
        return JudgedInverse(Judgement(Verdict.FAIL, describe(NAME, found, wrong), measures, notes), bound, certified)
    weak = _weakness(lower, limit, want) if power else ""
    if weak:
        reason = f"ill-conditioned: the bound, up to {float(limit.max()):.3g}, {weak}"
        return JudgedInverse(Judgement(Verdict.NO_POWER, reason, measures, notes), bound, certified)
    return JudgedInverse(Judgement(Verdict.PASS, within_bound(NAME, measures[NAME]), measures, notes), bound, certified)


def _weakness(lower: np.ndarray, limit: np.ndarray, want: np.ndarray) -> str:
    """Why the bound cannot acquit; empty if it can.  A trivial answer that is the right one does not count."""
    accepted = [
        name
        for name, x in trivial_answers(np.asarray(lower, np.float64), want).items()
        if (np.abs(x - want) <= limit).all() and not np.array_equal(x.astype(np.float32), want.astype(np.float32))
    ]
    if accepted:
        return f"also accepts {', '.join(accepted)}"
    wide = int(np.count_nonzero(limit > np.abs(want).max()))
    return f"exceeds the inverse's largest entry at {wide} of {limit.size} entries" if wide else ""


def _certified(lower: np.ndarray, got: np.ndarray) -> float:
    try:
        return float(certificate(np.asarray(lower, np.float64), widen(np.asarray(got))).max(initial=0.0))
    except ValueError:
        return float("nan")

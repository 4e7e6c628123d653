"""The contract of the inverse: |X - (I + L)^-1| <= bound, elementwise, computed from L alone.

The derivation is docs/gdn-inverse-contract.md; site names are its names.  Each rounding site is carried to the result
through exact factors, and what is of second order is bounded by nilpotent Neumann series, not dropped.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from verify.gdn.float64_stages import gamma
from verify.gdn.inverse import float64
from verify.gdn.inverse_levels import Arithmetic, base_level, merge
from verify.gdn.inverse_steps import LEVELS, InverseSteps, part

if TYPE_CHECKING:
    from jaxtyping import Float64

    from verify.devices import DeviceModel
    from verify.gdn.inverse_levels import Level

EVALUATION = 1.0 + 2.0**-30
"""The bound is evaluated in float64: non-negative sums of at most 64 terms, nested some thirty deep."""


@dataclasses.dataclass(frozen=True, eq=False)
class InverseBound:
    """The contract on one matrix.

    Attributes:
        bound: of |X - (I + L)^-1|; 0 on and above the diagonal.
        exact: (I + L)^-1 in float64.
        exact_error: of `exact`.
        sites: for each rounding site its part of the bound's first order, carried to the result.
        remainder: what is of higher order.
        level: the last level, with the sites' factors.
    """

    bound: Float64[np.ndarray, "n n"]
    exact: Float64[np.ndarray, "n n"]
    exact_error: Float64[np.ndarray, "n n"]
    sites: dict[str, Float64[np.ndarray, "n n"]]
    remainder: Float64[np.ndarray, "n n"]
    level: Level

    def applied(self, right: Float64[np.ndarray, "n m"]) -> Float64[np.ndarray, "n m"]:
        """A bound of |(X - (I + L)^-1) right| for an exact matrix.

        Each site's right factor meets the matrix before absolute values are taken.
        """
        size = np.abs(right)
        total = (self.level.remainder + 4.0 * self.exact_error) @ size
        for site in self.level.sites.values():
            factor = site.right(self.level)
            met = np.abs(factor.value @ right) + (factor.error + gamma(len(right)) * np.abs(factor.value)) @ size
            total = total + site.left(self.level).size @ (site.error @ met)
        return np.minimum(np.where(np.isnan(total), np.inf, total) * EVALUATION, self.bound @ size)


def inverse_bound(
    lower: Float64[np.ndarray, "n n"],
    steps: InverseSteps,
    device: DeviceModel,
    *,
    lower_error: Float64[np.ndarray, "n n"] | None = None,
) -> InverseBound:
    """Evaluate the contract.

    Args:
        lower: L, strictly lower triangular, n = 4, 16 or 64.
        steps: the kernel's roundings.
        device: what its FP32 sums may cost.
        lower_error: how far the kernel's L may be from this one, elementwise; None: it is this one.

    Raises:
        ValueError: L is not square, strictly lower triangular and finite, of another size, or no FP32 matrix.
    """
    wide = np.asarray(lower, dtype=np.float64)
    if wide.ndim != 2 or wide.shape[0] not in LEVELS:
        message = f"lower must be [n, n] with n one of {', '.join(map(str, LEVELS))}, got {wide.shape}"
        raise ValueError(message)
    if lower_error is None and not np.array_equal(wide, wide.astype(np.float32)):
        message = "lower must hold FP32 numbers, which is what the kernel inverts; or give lower_error"
        raise ValueError(message)
    whole = float64(wide)
    given = np.zeros_like(wide) if lower_error is None else np.asarray(lower_error, dtype=np.float64)
    arithmetic = Arithmetic(steps.precision, device)
    with np.errstate(over="ignore", invalid="ignore"):
        level = base_level(part(wide, LEVELS[0]), part(given, LEVELS[0]), steps, arithmetic)
        for size in LEVELS[1:]:
            if size <= len(wide):
                level = merge(level, part(wide, size), part(given, size), steps, arithmetic)
        bound = np.tril(level.error * EVALUATION + 4.0 * whole.error, -1)
    carried = {name: np.tril(site.carried(level), -1) for name, site in level.sites.items()}
    return InverseBound(
        np.where(np.isnan(bound), np.inf, bound), whole.value, whole.error, carried, level.remainder, level
    )

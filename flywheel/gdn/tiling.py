"""How many heads a step takes, and the VMEM of a call."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flywheel.gdn.products import Precision

VMEM_LIMIT = 56 * 2**20
"""Bytes that a call may take: the smallest supported core (v7x) has 64 MiB, of which the compiler needs some itself."""

MOST_VALUES: dict[Precision, int] = {"bf16": 12, "bf16x3": 16}
"""Value heads of a step: chains enough to fill each other's waits, and few steps; more would spill more.  With pairs
they are taken in two halves."""


def group_of(n_kq: int, n_v: int, precision: Precision) -> int:
    """Query/key heads per step: a divisor of n_kq with at most MOST_VALUES value heads, if there is one."""
    per, most = n_v // n_kq, MOST_VALUES[precision]
    fitting = [g for g in range(1, n_kq + 1) if n_kq % g == 0 and g * per <= most]
    return max(fitting, default=1)

"""Copies between HBM and VMEM: windows of a traced number of whole groups of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flywheel.packing import GROUP

if TYPE_CHECKING:
    from collections.abc import Sequence

Action = Literal["start", "wait"]


class Window(NamedTuple):
    """Where rows come from and go to; rows are the axis before the last one.

    Attributes:
        source: a ref.
        source_group: its first group of rows.
        target: a ref.
        target_group: its first group of rows.
    """

    source: Any
    source_group: Any
    target: Any
    target_group: Any


class Transfer(NamedTuple):
    """Copies of the same number of groups for several windows.

    Attributes:
        windows: from where to where.
        groups: how many.
        semaphore: what the copies signal.
        needed: whether there is anything to do.
    """

    windows: Sequence[Window]
    groups: Any
    semaphore: Any
    needed: Any

    def run(self, action: Action, *, whole: bool) -> None:
        """Start the copies, or wait for them.  `whole`: each is one copy; else it is made group by group."""
        pl.when(self.needed & (self.groups > 0))(lambda: self._whole(action) if whole else self._by_groups(action))

    def _whole(self, action: Action) -> None:
        for window in self.windows:
            self._copy(action, window, 0, self.groups)

    def _by_groups(self, action: Action) -> None:
        def one(group: Any, carry: Any) -> Any:  # noqa: ANN401
            for window in self.windows:
                self._copy(action, window, group, 1)
            return carry

        lax.fori_loop(0, self.groups, one, 0)

    def _copy(self, action: Action, window: Window, first: Any, groups: Any) -> None:  # noqa: ANN401
        source = _rows(window.source, window.source_group + first, groups)
        target = _rows(window.target, window.target_group + first, groups)
        getattr(pltpu.make_async_copy(source, target, self.semaphore), action)()


def _rows(ref: Any, group: Any, groups: Any) -> Any:  # noqa: ANN401
    size = groups * GROUP
    rows = pl.ds(pl.multiple_of(group * GROUP, GROUP), size if isinstance(size, int) else pl.multiple_of(size, GROUP))
    return ref.at[(*[slice(None)] * (len(ref.shape) - 2), rows)]

"""Whether two results agree within their proved errors: what every health check of oracles asks."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from verify.attention.reference import OracleUnsound

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def agree(what: str, name: str, got: np.ndarray, want: np.ndarray, room: np.ndarray) -> None:
    """Two arrays have one shape, the same class everywhere, and lie within `room` of each other where finite.

    Raises:
        OracleUnsound: they do not; the message names the array and the element.
    """
    if got.shape != want.shape:
        message = f"{what}: {name} has shape {got.shape}, not {want.shape}"
        raise OracleUnsound(message)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(invalid="ignore"):
        same |= np.isfinite(got) & np.isfinite(want) & (np.abs(got - want) <= room)
    if not same.all():
        index = tuple(int(i) for i in np.unravel_index(int(same.argmin()), same.shape))
        message = f"{what}: {name}{list(index)} is {got[index]!r}, not {want[index]!r} +- {room[index]!r}"
        raise OracleUnsound(message)


def accurate(what: str, name: str, error: np.ndarray, size: np.ndarray | float, limit: float) -> None:
    """An oracle's own bound is small: at most `limit` of the size of what it bounds.

    Raises:
        OracleUnsound: it is not, so that nothing could be judged by it.
    """
    share = error / size
    if not np.all(share <= limit):
        message = f"{what}: its own bound of {name} is {share.max():.3g}, more than {limit:.3g}"
        raise OracleUnsound(message)


def cross_check[T](found: Mapping[str, T], compare: Callable[[str, T, T], None]) -> None:
    """Compare the results of several oracles, pair by pair.

    Raises:
        OracleUnsound: two of them differ by more than `compare` allows.
    """
    for first, second in itertools.combinations(found, 2):
        compare(f"{first} against {second}", found[first], found[second])

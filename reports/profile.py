"""What a record keeps of all elements of a result, beyond the worst: `profile`, a field of a record.

- `ulp`: how many elements err by how many ulp, [upper edge, count] per power of two; the last edges are "inf" and "nan"
  for elements of another class;
- `nth_row`: the RANK-th largest of the rows' largest shares, by which two runs are told apart (`reports.compare`);
- `heat`: the largest share over (row, column) of the head that holds the worst element, in at most CELLS cells a side.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from verify.bias import FALSE_ALARM_RATE
from verify.measures import ComparisonError, Errors, compared_bound, errors, shares, ulp_distances
from verify.records import encode_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from verify.attention.contract import ContractBound
    from verify.attention.reference import Reference

RANK = math.ceil(math.log2(1.0 / FALSE_ALARM_RATE))
"""Rows of two runs without a difference are in any order: the largest RANK of both lie in the second with a probability
of at most 2^-RANK, which is below the suite's false-alarm rate."""

CELLS = 24
LEAST_EDGE = 0.25
DIGITS = 3


@dataclasses.dataclass(frozen=True, eq=False)
class Compared:
    """An array of a result beside what is due.

    Attributes:
        name: in records.
        got: BF16 or FP32.
        want: the exact result, of the same shape.
        bound: what the error is held to.
        where: what is judged.
        lanes: whether the last axis is a row's lanes; a row is one element otherwise.
    """

    name: str
    got: np.ndarray
    want: np.ndarray
    bound: np.ndarray
    where: np.ndarray
    lanes: bool = True


def profile_of(
    out: np.ndarray, lse: np.ndarray | None, reference: Reference, bound: ContractBound, left_out: np.ndarray | None
) -> dict[str, Any]:
    """The profile of an attention result: of its output, and the rows of its LSE.

    Args:
        out: BF16 or FP32 `[batch, heads, q_len, v_dim]`.
        lse: FP32 `[batch, heads, q_len]`, nats; or None.
        reference: the exact result.
        bound: what it is held to.
        left_out: rows `[batch, heads, q_len]` that are not judged; None: none.
    """
    rows = bound.inside_domain if left_out is None else bound.inside_domain & ~left_out
    compared = [Compared("out", out, reference.out, bound.out, np.broadcast_to(rows[..., None], reference.out.shape))]
    if lse is not None:
        compared.append(Compared("lse", lse, reference.lse, bound.lse, rows, lanes=False))
    return profile(compared)


def profile(arrays: Iterable[Compared]) -> dict[str, Any]:
    """The profile of some arrays, with the heat map of the first."""
    found: dict[str, Any] = {}
    for array in arrays:
        if not array.where.any():
            continue
        try:
            compared = errors(array.got, array.want, nan_matches=True, where=array.where)
        except (ComparisonError, TypeError):
            continue
        share = shares(compared, compared_bound(compared, np.where(array.where, array.bound, 0.0)))
        found[array.name] = {"ulp": _histogram(compared), "nth_row": _nth_row(compared, share, lanes=array.lanes)}
        if "heat" not in found:
            found["heat"] = _heat(compared, share)
    return found


def _histogram(found: Errors) -> list[list[float | str]]:
    distances = ulp_distances(found)
    finite = distances[np.isfinite(distances)]
    counts: list[list[float | str]] = [[0.0, int(np.count_nonzero(finite == 0.0))]]
    with np.errstate(divide="ignore"):
        exponents = np.ceil(np.log2(np.maximum(finite[finite > 0.0], LEAST_EDGE))).astype(int)
    counts += [[2.0 ** int(e), int(n)] for e, n in zip(*np.unique(exponents, return_counts=True), strict=True)]
    beyond: list[list[float | str]] = [["inf", int(np.isinf(distances).sum())], ["nan", int(np.isnan(distances).sum())]]
    return [pair for pair in [*counts, *beyond] if pair[1]]


def _by_row(found: Errors, share: np.ndarray, *, lanes: bool) -> np.ndarray:
    """Largest share of each row, NaN above infinity above numbers."""
    where = np.arange(share.size) if found.where is None else found.where
    rows = where // found.shape[-1] if lanes else where
    starts = np.flatnonzero(np.diff(rows, prepend=rows[0] - 1))
    return np.maximum.reduceat(share, starts)


def _nth_row(found: Errors, share: np.ndarray, *, lanes: bool) -> dict[str, Any]:
    rows = np.sort(_by_row(found, share, lanes=lanes))  # NaN last
    value = float(rows[-RANK]) if rows.size >= RANK else None
    return {"rank": RANK, "rows": int(rows.size), "share": None if value is None else encode_number(value)}


def _heat(found: Errors, share: np.ndarray) -> dict[str, Any]:
    whole = np.full(math.prod(found.shape), -1.0)
    whole[slice(None) if found.where is None else found.where] = share
    index = np.unravel_index(int(share.argmax()) if found.where is None else found.where[share.argmax()], found.shape)
    head = whole.reshape(found.shape)[tuple(index[:-2])]
    row_edges, column_edges = (_edges(size) for size in head.shape)
    cells = np.maximum.reduceat(np.maximum.reduceat(head, row_edges[:-1], axis=0), column_edges[:-1], axis=1)
    outer = dict(zip(("head", "batch"), (int(i) for i in reversed(index[:-2])), strict=False))
    return {
        **outer,
        "rows": row_edges,
        "columns": column_edges,
        "cells": [[None if x == -1.0 else encode_number(_short(x)) for x in row] for row in cells.tolist()],
    }


def _edges(size: int) -> list[int]:
    count = min(size, CELLS)
    return [size * n // count for n in range(count + 1)]


def _short(x: float) -> float:
    return float(f"{x:.{DIGITS}g}") if math.isfinite(x) else x


def read_heat(body: Any) -> tuple[list[int], list[int], np.ndarray] | None:  # noqa: ANN401  from JSON
    """Row edges, column edges and cells of a record's `heat`; None if it is none.  Cells not judged are -1."""
    try:
        rows, columns = [int(x) for x in body["rows"]], [int(x) for x in body["columns"]]
        cells = np.array([[-1.0 if x is None else float(x) for x in row] for row in body["cells"]], dtype=np.float64)
    except (KeyError, TypeError, ValueError):
        return None
    fits = cells.shape == (len(rows) - 1, len(columns) - 1) and cells.size > 0
    return (rows, columns, cells) if fits and list(_steps(rows)) and list(_steps(columns)) else None


def _steps(edges: list[int]) -> Iterator[int]:
    return (b - a for a, b in itertools.pairwise(edges) if b > a)

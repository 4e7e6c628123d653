"""Packed sequences of any length: which keys a block of queries computes, and under which masks."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import jax
import numpy as np

from flywheel.packing import GROUP, Packing
from flywheel.ragged import body, geometry, spec, tiling
from flywheel.ragged.geometry import FIELDS, Geometry, Keys, Record, Step
from flywheel.ragged.tiling import WHOLE, Tiling
from proofs.lemma import Assumption, Method, lemma, require

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

# A fifth of the kernel's sizes, in the same proportions: fragments of 32 and 64 keys, blocks of 64, short ones of 32.
_SMALL = {"EDGE": 32, "LANES": 32, "LOOP_TILE": 32}
_FRAGMENTS = {"EDGE": 32, "FRAGMENT": 64}
_TILING = Tiling(block=64, short=32, unit=1, kv_unit=1, width=WHOLE)
_LENGTHS = ((1, 1), (5, 40), (33, 33), (64, 64), (70, 70), (90, 20), (3, 150), (120, 131), (0, 9))
_SIDES = (0, 9, 70)
_TOKENS = GROUP + max(lengths[0] for lengths in _LENGTHS)
_KEY_TOKENS = GROUP + max(lengths[1] for lengths in _LENGTHS)


@lemma(
    statement="in a packed batch every visible (query, key) pair is computed in exactly one window of keys, under a "
    "mask wherever some pair of its stretch is not visible, and no pair of another sequence is",
    rests_on=(),
    methods=(Method.EXHAUSTIVE,),
    assumptions=(
        Assumption(
            "a block takes the body that its record names",
            "verify/tests/kernels/ragged/test_ragged.py::test_blocks_of_several_classes",
        ),
    ),
)
def ragged_windows() -> str:
    """On the index maps that the ragged kernel runs: `Geometry.records` and `step`, and the masks of its bodies.

    For every offset of the sequence's queries in their group of 8 rows (and another of its keys), a grid of lengths
    around the edges of windows, every combination of left and right sides, and both ways of counting blocks, the
    bodies are gone through that a block's record chooses (short sequences, the diagonal, whole windows, any other),
    cell by cell; the masks are those of `flywheel.ragged.body` and `Site.visible`, run on numpy with smaller
    fragments.  Each pair of an own row and a key is counted over all visited windows: 1 where the definition sees it,
    0 elsewhere.
    """
    blocks = pairs = 0
    for own_origin, with_left, with_right in itertools.product((False, True), repeat=3):
        stride = _TILING.block - GROUP if own_origin else _TILING.block
        whole = Geometry(Packing(_TOKENS, 2, stride, own_origin=own_origin), None, None, _TILING)
        sides = itertools.product(_SIDES if with_left else (None,), _SIDES if with_right else (None,))
        found = list(_records(whole, list(sides)))
        with _on_numpy():
            for case, (left, right), records in found:
                bounded = dataclasses.replace(whole, left=left, right=right)
                pairs += sum(_counted(record, bounded, case) for record in records)
                blocks += len(records)
    return f"{blocks} blocks with {pairs} visible pairs; offsets 0 .. {GROUP - 1}, {len(_LENGTHS)} lengths"


_NUMPY = SimpleNamespace(**{**vars(np), "broadcast_to": lambda x, shape: np.broadcast_to(x, shape).copy()})
"""numpy with arrays of their own, as jnp has them."""


@contextlib.contextmanager
def _on_numpy() -> Generator[None]:
    """The kernel's own functions of indices, on numpy arrays and with smaller fragments."""
    patches = [(tiling, name, value) for name, value in _SMALL.items()]
    patches += [(body, name, value) for name, value in _FRAGMENTS.items()]
    numpy: list[tuple[Any, str, Any]] = [
        (body, "lax", _Indices),
        *((each, "jnp", _NUMPY) for each in (body, spec, geometry)),
    ]
    with contextlib.ExitStack() as stack:
        for module, name, value in [*patches, *numpy]:
            stack.enter_context(mock.patch.object(module, name, value))
        yield


class _Indices:
    """`lax.broadcasted_iota` in numpy."""

    @staticmethod
    def broadcasted_iota(dtype: Any, shape: tuple[int, int], axis: int) -> np.ndarray:  # noqa: ANN401
        return np.broadcast_to(np.arange(shape[axis], dtype=dtype).reshape(-1, *[1] * (1 - axis)), shape)


class _Case:
    """One sequence behind a first one that fills up its group: rows begin .. end, keys first .. last."""

    def __init__(self, begin: int, first: int, lengths: tuple[int, int]) -> None:
        self.begin, self.end = begin, begin + lengths[0]
        self.first, self.last = first, first + lengths[1]

    def sees(self, rows: np.ndarray, keys: np.ndarray, left: int | None, right: int | None) -> np.ndarray:
        """The definition: bottom-right aligned, within the sequence and the window."""
        aligned = rows[:, None] - self.end + self.last
        seen = (keys >= self.first) & (keys < self.last) & (rows >= self.begin)[:, None]
        if left is not None:
            seen = seen & (keys >= aligned - left)
        if right is not None:
            seen = seen & (keys <= aligned + right)
        return seen


def _records(
    cut: Geometry, sides: list[tuple[int | None, int | None]]
) -> Iterator[tuple[_Case, tuple[int | None, int | None], list[Record]]]:
    """Every case and sides with the records of the second sequence's blocks; sides are traced, all None or none."""
    cases = [
        _Case(begin, (3 * begin + 5) % GROUP, lengths) for begin, lengths in itertools.product(range(GROUP), _LENGTHS)
    ]
    bounds = np.array([[0, case.begin, case.end] for case in cases], np.int32)
    starts = np.array([[0, case.first] for case in cases], np.int32)
    stops = np.array([[case.first, case.last] for case in cases], np.int32)

    @jax.jit
    def run(left: Any, right: Any) -> Any:  # noqa: ANN401
        bounded = dataclasses.replace(cut, left=left, right=right)

        def one(q: Any, begin: Any, end: Any) -> Any:  # noqa: ANN401
            words, totals = bounded.records(q, Keys(begin, end))
            return words.reshape(-1, FIELDS), totals[1], bounded.queries.blocks(q).sequence

        return jax.vmap(one)(bounds, starts, stops)

    for pair in sides:
        words, totals, own = (np.asarray(x) for x in run(*(None if side is None else np.int32(side) for side in pair)))
        for n, case in enumerate(cases):
            yield case, pair, [Record(*words[n, b]) for b in range(totals[n]) if own[n, b] == 1]


def _counted(record: Record, cut: Geometry, case: _Case) -> int:
    rows = np.arange(record.carried, record.stop) + GROUP * record.group
    counts = np.zeros((len(rows), _KEY_TOKENS + 2 * cut.span), np.int64)
    if record.first_key < record.stop_key:
        for j in range(record.end, record.begin + 1):
            step = cut.step(record, j)
            for first, stop, key, mask in _cells(record, cut, step, j):
                own = slice(max(first, record.carried), min(stop, record.stop))
                if own.start >= own.stop:
                    continue
                at = step.start + key
                computed = np.broadcast_to(mask, (mask.shape[0], stop - first))[
                    :, own.start - first : own.stop - first
                ].T
                outside = computed[:, max(counts.shape[1] - at, 0) :]
                require(not outside.any(), f"{record}: a key beyond all keys is computed")
                width = min(mask.shape[0], counts.shape[1] - at)
                counts[own.start - record.carried : own.stop - record.carried, at : at + width] += computed[:, :width]
    seen = case.sees(rows, np.arange(counts.shape[1]), cut.left, cut.right)
    require(
        bool((counts == seen).all()),
        f"{record} with sides {cut.left}, {cut.right}: a pair is computed {counts[counts != seen][:1]} times",
    )
    return int(seen.sum())


def _cells(record: Record, cut: Geometry, step: Step, j: int) -> Iterator[tuple[int, int, int, np.ndarray]]:
    """First and last row, first key and mask `[keys, rows]` of everything that a step computes."""
    site: Any = SimpleNamespace(spec=SimpleNamespace(geometry=cut, tiling=_TILING, online=False))
    site.visible = lambda *given, **named: spec.Site.visible(site, *given, **named)
    if record.short:
        shape = "square" if cut.right is None else "diagonal"
        size = _class(_TILING.short_classes, max(record.stop, step.hi))
    elif record.diagonal and j == 0:
        shape, size = "diagonal", _class(_TILING.classes, record.stop)
    elif step.whole:
        shape, size = "whole", _class(_TILING.full_classes, record.stop)
    else:
        yield from _looped(record, site, step)
        return
    for fragment in body._fragments(site, shape, size):  # noqa: SLF001  the kernel's own cells
        for cell in fragment.cells:
            for keys, mask in body._visible(cell, step, shape):  # noqa: SLF001
                found = np.ones((keys.stop - keys.start, cell.width), bool) if mask is None else np.asarray(mask)
                yield cell.first, cell.first + cell.width, cell.start + keys.start, found


def _class(sizes: tuple[int, ...], rows: int) -> int:
    return next(size for size in sizes if rows <= size)


def _looped(record: Record, site: Any, step: Step) -> Iterator[tuple[int, int, int, np.ndarray]]:  # noqa: ANN401
    """`loops.edge`: tiles of keys from the one that holds `lo` on, against all rows."""
    size = _TILING.loop_tile
    rows = np.arange(-(-record.stop // size) * size)[None, :]
    for at in range(step.lo // size * size, step.hi, size):
        keys = np.arange(at, at + size)[:, None]
        yield 0, rows.shape[1], at, np.asarray(site.visible(step, keys, rows))

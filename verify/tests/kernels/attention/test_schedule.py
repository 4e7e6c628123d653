"""The geometry of the grid, exhaustively against the definition of visibility."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from flywheel.attention import kernel
from flywheel.attention.schedule import INDEX_BITS, LANE_GRID, ROW_GRID, Band, BlockKind, Schedule
from flywheel.attention.tiling import AttentionConfig, resolve

pytestmark = pytest.mark.smoke


def bands(q_len: int, kv_len: int) -> list[Band]:
    """Full, causal, and windows of several widths, bottom-right aligned."""
    offset = kv_len - q_len
    edges = [
        (None, None),
        (None, 0),
        (0, 0),
        (5, 0),
        (130, 0),
        (300, 40),
        (40, 300),
        (None, 130),
        (130, None),
    ]
    return [Band(None if a is None else offset - a, None if b is None else offset + b) for a, b in edges]


SMALL = [
    Schedule(q_len, kv_len, band, block_q, block_kv, fragment)
    for q_len, kv_len in itertools.product((1, 127, 300, 513), repeat=2)
    for band in bands(q_len, kv_len)
    for block_q, block_kv, fragment in ((128, 128, 128), (256, 256, 128), (256, 128, 128))
]


def overlapping(q_len: int, kv_len: int, block_q: int, left: int, right: int) -> Schedule:
    """A window (bottom-right aligned) over key blocks that overlap, of the sizes that the kernel chooses."""
    band = Band(kv_len - q_len - left, kv_len - q_len + right)
    tiling = resolve(AttentionConfig(block_q), q_len, kv_len, band=band)
    found = Schedule(q_len, kv_len, band, block_q, tiling.block_kv, tiling.fragment, tiling.overlap)
    assert found.by_queries, found
    return found


OVERLAPPING = [
    overlapping(*lengths, left, right)
    for lengths in ((1024, 2048, 512), (2048, 2048, 512), (384, 2048, 384), (3072, 2560, 1024))
    for left, right in ((0, 0), (127, 0), (255, 0), (511, 0), (300, 40), (40, 300), (700, 0))
]


def seen(schedule: Schedule) -> np.ndarray:
    """The definition, for every row of whole blocks (rows beyond q_len included) and every column of whole blocks."""
    row = np.arange(schedule.q_blocks * schedule.block_q)[:, None]
    column = np.arange((schedule.kv_blocks - 1) * schedule.stride + schedule.block_kv)[None, :]
    lower, upper = schedule.band
    visible = np.broadcast_to(column < schedule.kv_len, (row.size, column.size)).copy()
    if lower is not None:
        visible &= column >= row + lower
    if upper is not None:
        visible &= column <= row + upper
    return visible


def by_kind(schedule: Schedule, kind: BlockKind) -> np.ndarray:
    """What a kind says of each pair of its block."""
    row, column = np.arange(schedule.block_q)[:, None], np.arange(schedule.block_kv)[None, :]
    visible = np.broadcast_to(column < kind.keys, (row.size, column.size)).copy()
    if kind.band.lower is not None:
        visible &= column >= row + kind.band.lower
    if kind.band.upper is not None:
        visible &= column <= row + kind.band.upper
    return visible


def block_of(schedule: Schedule, visible: np.ndarray, i: int, j: int) -> np.ndarray:
    """One block of the definition."""
    row, column = i * schedule.block_q, j * schedule.stride
    return visible[row : row + schedule.block_q, column : column + schedule.block_kv]


def test_steps_cover_every_visible_pair_once() -> None:
    """The steps of a query block are its visited key blocks in order, each with a body that sees what it has to.

    Blocks without a step hold no visible pair, and every query block has a first and a last step.
    """
    for s in SMALL:
        visible = seen(s)
        by_query_block = {i: list(group) for i, group in itertools.groupby(s.steps, key=lambda step: step.i)}
        assert list(by_query_block) == list(range(s.q_blocks)), s
        for i, steps in by_query_block.items():
            blocks = [step.j for step in steps]
            assert blocks == list(range(blocks[0], blocks[-1] + 1)), (s, i)
            assert [step.first for step in steps] == [True] + [False] * (len(steps) - 1), (s, i)
            assert [step.last for step in steps] == [False] * (len(steps) - 1) + [True], (s, i)
            for j in range(s.kv_blocks):
                truth = block_of(s, visible, i, j)
                if j not in blocks:
                    assert not truth.any(), (s, i, j)
                    continue
                body = s.bodies[steps[blocks.index(j)].body]
                assert body.last == steps[blocks.index(j)].last, (s, i, j)
                assert (by_kind(s, body.kind) == truth).all(), (s, i, j)


def test_a_step_says_whether_its_keys_are_others() -> None:
    """A step is `moved` unless the step before, or before a head's first step its last, read the same key block."""
    for s in SMALL:
        blocks = [step.j for step in s.steps]
        assert [step.moved for step in s.steps] == [j != blocks[n - 1] for n, j in enumerate(blocks)], s


def test_fragments_cover_what_is_visible() -> None:
    """Keys and queries that a body leaves out see nothing of each other; pairs without a mask all see each other."""
    for s in SMALL:
        for body in s.bodies:
            visible = by_kind(s, body.kind)
            emitted = np.zeros_like(visible)
            for fragment in s.fragments(body.kind):
                keys = slice(fragment.start, fragment.start + fragment.size)
                for edge in (fragment.first, fragment.stop, fragment.clear_first, fragment.clear_stop):
                    assert edge % LANE_GRID == 0, (s, fragment)
                assert fragment.size % ROW_GRID == 0, (s, fragment)
                assert fragment.first <= fragment.clear_first <= fragment.clear_stop <= fragment.stop, (s, fragment)
                emitted[fragment.first : fragment.stop, keys] = True
                assert visible[fragment.clear_first : fragment.clear_stop, keys].all(), (s, fragment)
            assert not (visible & ~emitted).any(), (s, body)


def test_queries_seek_their_anchor_where_they_see_their_first_key() -> None:
    """A query's first visible key of all lies in a fragment that has it among the queries that adopt anchors."""
    for s in SMALL:
        visible = seen(s)
        first_key = np.where(visible.any(axis=1), visible.argmax(axis=1), -1)
        for step in s.steps:
            for fragment in s.fragments(s.bodies[step.body].kind):
                assert fragment.first <= fragment.adopting <= fragment.stop, (s, fragment)
                assert fragment.adopting % LANE_GRID == 0, (s, fragment)
                begin = step.j * s.block_kv + fragment.start
                others = first_key[step.i * s.block_q :][fragment.first : fragment.adopting]
                assert not ((others >= begin) & (others < begin + fragment.size)).any(), (s, fragment)


def test_queries_are_finished_once_and_after_their_last_key() -> None:
    """Every query of a block is finished exactly once, and nothing that comes later concerns it."""
    for s in SMALL:
        for _, steps in itertools.groupby(s.steps, key=lambda step: step.i):
            times = np.zeros(s.block_q, int)
            for body in (s.bodies[step.body] for step in steps):
                fragments = s.fragments(body.kind)
                done = s.finished(body)
                for n, fragment in enumerate(fragments):
                    assert not times[fragment.first : fragment.stop].any(), (s, body, n)
                    times[slice(*done[n])] += 1
                if not fragments:
                    times[slice(*done[0])] += 1
            assert (times == 1).all(), s


def test_rows_without_keys_are_announced() -> None:
    """`has_empty_rows` and `sees_key_0` say of the rows of the call what the definition says."""
    for s in SMALL:
        visible = seen(s)[: s.q_len]
        some = visible.any(axis=1)
        assert s.has_empty_rows == (not some.all()), s
        if s.sees_key_0:
            assert visible[some, 0].all(), s


def test_bodies_that_start_sums_reach_every_query_first() -> None:
    """If any body starts sums, every query block begins with such a one, whose first fragment has all queries."""
    some = 0
    for s in SMALL:
        for step in s.steps:
            body = s.bodies[step.body]
            assert (body in s.opening) == (step.first and bool(s.opening)), (s, step)
            if body in s.opening:
                assert (s.fragments(body.kind)[0].first, s.fragments(body.kind)[0].stop) == (0, s.block_q), (s, body)
                some += step.last is False
    assert some, "no schedule of several steps starts its sums"


def test_pieces_hide_what_is_invisible_and_nothing_else() -> None:
    """A fragment's pieces are its keys in order, and their masks say of each pair what the definition says."""
    for s in SMALL[::3]:
        for body in s.bodies:
            visible = by_kind(s, body.kind)
            for fragment in s.fragments(body.kind):
                for first in range(fragment.first, fragment.stop, LANE_GRID):
                    pieces = s.pieces(body.kind, fragment, first, LANE_GRID)
                    ends = [piece.start + piece.size for piece in pieces]
                    assert [0, *ends] == [*(piece.start for piece in pieces), fragment.size], (s, fragment)
                    for piece in pieces:
                        keys = slice(fragment.start + piece.start, fragment.start + piece.start + piece.size)
                        truth = visible[first : first + LANE_GRID, keys]
                        assert piece.hidden == (not truth.any()), (s, fragment, piece)
                        assert piece.clear == (truth.all() and truth.shape[1] == piece.size), (s, fragment, piece)
                        if piece.mask is not None:
                            rows, columns = np.ogrid[: truth.shape[0], : truth.shape[1]]
                            seen_here = columns < piece.mask.keys
                            if piece.mask.band.lower is not None:
                                seen_here = seen_here & (columns >= rows + piece.mask.band.lower)
                            if piece.mask.band.upper is not None:
                                seen_here = seen_here & (columns <= rows + piece.mask.band.upper)
                            assert (seen_here == truth).all(), (s, fragment, piece)


def test_packed_steps_are_what_the_kernel_reads() -> None:
    """Every field of every step survives packing into one word, the largest values included."""
    for s in [*SMALL[::17], Schedule(4095 * 128, 4095 * 128, Band(-128, 0), 128, 128, 128)]:
        words = kernel.pack(s.steps)
        for name in ("i", "j", "body", "moved", "first", "last"):
            got = np.asarray(kernel.unpack_field(words, name))
            assert (got == [getattr(step, name) for step in s.steps]).all(), name


def test_few_bodies() -> None:
    """However long the call, few kinds of blocks occur, so the kernel's code stays small."""
    rng = np.random.default_rng(0)
    for q_len, kv_len in rng.integers(1, 20_000, size=(100, 2)).tolist():
        for left, right in ((None, None), (None, 0), (1023, 0), (100, 100)):
            offset = kv_len - q_len
            band = Band(None if left is None else offset - left, None if right is None else offset + right)
            assert len(Schedule(q_len, kv_len, band, 512, 512, 256).bodies) <= 14


def test_one_of_overlapping_blocks_holds_all_that_a_query_block_sees() -> None:
    """Every query block has one step; its key block holds every visible key and lies within the keys, also for copies.

    It begins on the grid of replays' tiles, and its number fits into a packed step.
    """
    some = 0
    for s in OVERLAPPING:
        visible = seen(s)
        assert visible.shape[1] == s.kv_len, s
        assert [step.i for step in s.steps] == list(range(s.q_blocks)), s
        assert s.kv_blocks <= 2**INDEX_BITS, s
        some += s.overlap
        for step in s.steps:
            assert step.first, (s, step)
            assert step.last, (s, step)
            assert 0 <= step.j * s.stride <= s.kv_len - s.block_kv, (s, step)
            rows = visible[step.i * s.block_q : (step.i + 1) * s.block_q]
            assert rows.sum() == block_of(s, visible, step.i, step.j).sum(), (s, step)
            assert (by_kind(s, s.bodies[step.body].kind) == block_of(s, visible, step.i, step.j)).all(), (s, step)
        tiles = resolve(AttentionConfig(s.block_q), s.q_len, s.kv_len, band=s.band).replay_keys
        assert s.stride % tiles == s.block_kv % tiles == 0, s
    assert some, "no blocks overlap"


def test_cells_have_every_visible_pair_once() -> None:
    """Over the steps of a query block, a visible pair lies in one cell, and nothing of a query comes after its end.

    The first cell of a query is fresh, where any is; a query that no cell finishes sees nothing.
    """
    for s in [*SMALL[::5], *OVERLAPPING[::3]]:
        for _, steps in itertools.groupby(s.steps, key=lambda step: step.i):
            finished, begun = np.zeros(s.block_q, int), np.zeros(s.block_q, bool)
            for body in (s.bodies[step.body] for step in steps):
                visible, times = by_kind(s, body.kind), np.zeros((s.block_q, s.block_kv + ROW_GRID), int)
                for cell in s.cells(body, 256):
                    rows = slice(cell.first, cell.first + cell.width)
                    assert not finished[rows].any(), (s, cell)
                    assert cell.fresh == ((s.by_queries or bool(s.opening)) and not begun[rows].any()), (s, cell)
                    begun[rows] = True
                    times[rows, cell.start : cell.start + cell.size] += 1
                    finished[slice(*cell.done)] += 1
                times = times[:, : s.block_kv]
                assert (times[visible] == 1).all(), (s, body)
                assert (times <= 1).all(), (s, body)
                if body.last:
                    assert (finished <= 1).all(), (s, body)
                    assert not visible[finished == 0].any(), (s, body)


def test_anchors_are_taken_from_keys_that_every_query_sees_one_of() -> None:
    """Where bodies go by queries, a query's first cell has such keys, or all of its cells look for its first key."""
    shared = adopted = 0
    for s in [*SMALL[::5], *OVERLAPPING[::3]]:
        if not s.by_queries:
            continue
        for body in s.bodies:
            visible = by_kind(s, body.kind)
            for _, cells in itertools.groupby(s.cells(body, 256), key=lambda cell: cell.first):
                first, *others = cells
                stop = first.first + first.width
                assert not any(cell.shared is not None for cell in others), (s, body)
                if first.shared is None:
                    assert {cell.adopting for cell in (first, *others)} == {first.first}, (s, body)
                    adopted += 1
                    continue
                assert {cell.adopting for cell in (first, *others)} == {stop}, (s, body)
                assert first.shared % ROW_GRID == 0, (s, first)
                assert first.start <= first.shared <= first.start + first.size - ROW_GRID, (s, first)
                assert visible[first.first : stop, first.shared : first.shared + ROW_GRID].any(axis=1).all(), (s, first)
                shared += 1
    assert shared, "no cell has keys that all of its queries see"
    assert adopted, "no cell looks for its queries' first keys"

"""The geometry of the grid, exhaustively against the definition of visibility."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from flywheel.attention.kernel import last_block
from flywheel.attention.schedule import ROW_GRID, BlockKind, Schedule

SMALL = [
    Schedule(q_len, kv_len, causal, block_q, block_kv, fragment)
    for q_len, kv_len in itertools.product((1, 7, 32, 33, 63, 64, 100), repeat=2)
    for causal in (True, False)
    for block_q, block_kv, fragment in ((32, 32, 16), (32, 32, 32), (64, 64, 16))
]


def visible(schedule: Schedule, row: int, key: int) -> bool:
    """The definition: bottom-right aligned."""
    return key < schedule.kv_len and (not schedule.causal or key <= row + schedule.kv_len - schedule.q_len)


@pytest.mark.smoke
def test_kinds_agree_with_the_definition() -> None:
    """For every block pair, its kind says of each (row, key) pair exactly what the definition says."""
    for s in SMALL:
        for i, j in itertools.product(range(s.q_blocks), range(s.kv_blocks)):
            rows = range(i * s.block_q, min((i + 1) * s.block_q, s.q_len))
            kind = s.kind(i, j)
            for row in rows:
                for column in range(s.block_kv):
                    sees = kind is not None and kind.sees(row - i * s.block_q, column)
                    assert sees == visible(s, row, j * s.block_kv + column), (s, i, j, row, column)


@pytest.mark.smoke
def test_no_visible_block_is_skipped() -> None:
    """Key blocks after the last visited one hold no visible pair, and each visited one has a body or nothing to see."""
    for s in SMALL:
        full = BlockKind(None, s.block_kv)
        for i in range(s.q_blocks):
            last_row = min((i + 1) * s.block_q, s.q_len) - 1
            assert not any(visible(s, last_row, key) for key in range((s.last_block(i) + 1) * s.block_kv, s.kv_len))
            for j in range(s.last_block(i) + 1):
                kind = s.kind(i, j)
                assert kind is None or kind in s.edge_kinds or (kind == full and s.has_full_blocks), (s, i, j)


@pytest.mark.smoke
def test_fragments_cover_what_is_visible() -> None:
    """Rows and fragments that a body leaves out see nothing; rows that it leaves unmasked see everything."""
    for s in SMALL:
        for kind in (*s.edge_kinds, BlockKind(None, s.block_kv)):
            emitted = dict(s.fragments(kind))
            for n in range(s.block_kv // s.fragment):
                columns = range(n * s.fragment, (n + 1) * s.fragment)
                first = emitted[n].first if n in emitted else s.block_q
                assert not any(kind.sees(row, c) for row in range(first) for c in columns)
                if n in emitted:
                    rows = emitted[n]
                    assert rows.first % ROW_GRID == 0
                    assert rows.first <= rows.clear <= s.block_q
                    assert all(kind.sees(row, c) for row in range(rows.clear, s.block_q) for c in columns)


@pytest.mark.smoke
def test_traced_last_block_is_the_schedule_s() -> None:
    """The kernel's traced index arithmetic agrees with the plain integers for every query block."""
    for s in SMALL:
        traced = [int(jnp.asarray(last_block(s, jnp.int32(i)))) for i in range(s.q_blocks)] if s.causal else None
        if traced is not None:
            assert traced == [s.last_block(i) for i in range(s.q_blocks)]


@pytest.mark.smoke
def test_few_bodies() -> None:
    """However long the call, at most four kinds of edge blocks occur, so the kernel's code stays small."""
    rng = np.random.default_rng(0)
    for q_len, kv_len in rng.integers(1, 20_000, size=(200, 2)):
        for causal in (True, False):
            assert len(Schedule(int(q_len), int(kv_len), causal, 512, 512, 256).edge_kinds) <= 4

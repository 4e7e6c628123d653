"""The maps of packed sequences: simulated writes, row by row, against what each row must hold."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING

import jax
import numpy as np
import pytest

from flywheel.packing import GROUP, Blocks, Packing, clean, padded_tokens, pieces

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

pytestmark = pytest.mark.smoke

GARBAGE = -7
"""What a row of a window holds that is not the block's own."""

MODES = list(itertools.product((8, 16, 40), (False, True), (False, True)))
"""(block, own_origin, padding)."""


@functools.cache
def mapped(packing: Packing) -> object:
    """The maps of a batch of `cu_seqlens`, compiled once."""
    return jax.jit(jax.vmap(packing.blocks))


def blocks_of(packing: Packing, batch: np.ndarray) -> list[Blocks]:
    """The maps of every row of a batch, in numpy."""
    found = mapped(packing)(batch.astype(np.int32))  # type: ignore[operator]
    fields = [np.asarray(field) for field in found]
    return [Blocks(*(field[n] for field in fields)) for n in range(len(batch))]


def own_value(sequence: int, row: np.ndarray) -> np.ndarray:
    """What the block of a sequence writes to its rows."""
    return 1000 * (sequence + 1) + row


def written(packing: Packing, blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """The array after all writes (GARBAGE where none came), and how often each row was some block's own."""
    rows = padded_tokens(packing.tokens)
    array, owned = np.full(rows, GARBAGE), np.zeros(rows, int)
    tail = np.zeros(GROUP, int)
    for n in range(int(blocks.total)):
        start, size = GROUP * int(blocks.group[n]), GROUP * int(blocks.groups[n])
        carried, stop = int(blocks.carried[n]), int(blocks.stop[n])
        assert 0 <= carried < GROUP
        assert 0 <= carried < stop <= size <= packing.window
        assert size - stop < GROUP
        assert 0 <= start <= start + size <= rows, "a window reaches beyond the array"
        window = np.full(size, GARBAGE)
        mine = np.arange(start + carried, start + stop)
        window[carried:stop] = own_value(int(blocks.sequence[n]), mine)
        owned[mine] += 1
        window[:carried] = tail[:carried]
        array[start : start + size] = window
        tail = window[size - GROUP :]
    return array, owned


def due(packing: Packing, cu: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """What `written` must return, of rows that belong to a sequence or to padding."""
    rows = packing.tokens
    array, owned = np.full(rows, GARBAGE), np.zeros(rows, int)
    if packing.padding:
        array = own_value(packing.sequences, np.arange(rows))
        owned[:] = 1
    for sequence, (begin, end) in enumerate(itertools.pairwise(cu)):
        array[begin:end] = own_value(sequence, np.arange(begin, end))
        owned[begin:end] = 1
    return array, owned


def check(packing: Packing, batch: Iterable[Sequence[int]]) -> int:
    """Every row is owned by the blocks it should be and finally has the right value; returns the number of cases."""
    cases = np.asarray(list(batch))
    for cu, blocks in zip(cases.tolist(), blocks_of(packing, cases), strict=True):
        array, owned = written(packing, blocks)
        expected, owners = due(packing, cu)
        belonging = owners > 0
        assert (owned[: packing.tokens] == owners).all(), cu
        assert not owned[packing.tokens :].any()
        assert (array[: packing.tokens][belonging] == expected[belonging]).all(), cu
        # A group is written whole: up to 7 rows outside of all sequences are touched with it, with zeros or garbage.
        groups = np.pad(belonging, (0, len(array) - len(belonging))).reshape(-1, GROUP).any(axis=1)
        assert (array[~np.repeat(groups, GROUP)] == GARBAGE).all(), cu
        check_order(packing, blocks, cu)
    return len(cases)


def check_order(packing: Packing, blocks: Blocks, cu: Sequence[int]) -> None:
    """Blocks ascend, are numbered within their sequences, name first and last, and leave the unused entries zero."""
    count = int(blocks.total)
    assert count <= packing.max_blocks == len(blocks.group)
    assert all(not field[count:].any() for field in blocks[1:])
    for sequence, (begin, end) in enumerate(itertools.pairwise(cu)):
        mine = np.flatnonzero(blocks.sequence[:count] == sequence)
        origin = begin if packing.own_origin else begin // GROUP * GROUP
        assert len(mine) == (-(-(end - origin) // packing.block) if end > begin else 0)
        assert blocks.number[mine].tolist() == list(range(len(mine)))
        assert blocks.is_first[mine].tolist() == [n == 0 for n in range(len(mine))]
        assert blocks.is_last[mine].tolist() == [n == len(mine) - 1 for n in range(len(mine))]
        first = GROUP * blocks.group[mine] + blocks.carried[mine]
        starts = [max(begin, origin + n * packing.block) for n in range(len(mine))]
        assert first.tolist() == starts, "a block does not begin where it counts from"


@pytest.mark.deep
@pytest.mark.parametrize(("block", "own_origin", "padding"), MODES)
def test_every_start_offset_and_length(block: int, own_origin: bool, padding: bool) -> None:
    """A sequence of 0 to 40 tokens at every offset from the grid, between two others, leaves every row right."""
    tokens = 8 + 7 + 40 + 8
    packing = Packing(tokens, 3, block, own_origin, padding)
    cases = [(0, 8 + offset, 8 + offset + length, tokens) for offset in range(8) for length in range(41)]
    assert check(packing, cases) == 8 * 41


@pytest.mark.deep
@pytest.mark.parametrize(("block", "own_origin", "padding"), MODES)
def test_all_lengths_of_four_short_sequences(block: int, own_origin: bool, padding: bool) -> None:
    """Several sequences in one group, empty ones among them: all lengths 0 to 4 of four, with padding after them."""
    packing = Packing(17, 4, block, own_origin, padding)
    lengths = np.asarray(list(itertools.product(range(5), repeat=4)))
    assert check(packing, np.cumsum(np.pad(lengths, ((0, 0), (1, 0))), axis=1)) == 5**4


@pytest.mark.deep
@pytest.mark.parametrize(("block", "own_origin"), [(8, False), (8, True), (16, False), (16, True)])
def test_all_cuts_of_a_short_axis(block: int, own_origin: bool) -> None:
    """All ways to place three bounds on up to 21 tokens, the first one not at 0 included."""
    for tokens in (1, 9, 21):
        packing = Packing(tokens, 2, block, own_origin, padding=True)
        check(packing, itertools.combinations_with_replacement(range(tokens + 1), 3))


@pytest.mark.parametrize("own_origin", [False, True])
def test_bound_on_blocks_is_attained(own_origin: bool) -> None:
    """The static number of blocks is no larger than some lengths need: memory and steps are not reserved in vain."""
    for block, sequences, padding in ((8, 2, False), (8, 2, True), (16, 1, False)):
        packing = Packing(3 * block, sequences, block, own_origin, padding)
        cuts = itertools.combinations_with_replacement(range(3 * block + 1), sequences + 1)
        cases = np.asarray([cut for cut in cuts if padding or cut[0] == 0])
        most = max(int(blocks.total) for blocks in blocks_of(packing, cases))
        assert most == packing.max_blocks


def test_arbitrary_bounds_are_inert() -> None:
    """Falling, negative and huge bounds describe the blocks of what `clean` makes of them, inside the array."""
    values = (-(2**31), -5, 0, 3, 8, 13, 29, 30, 31, 2**31 - 1)
    cases = np.asarray(list(itertools.product(values, repeat=3)), np.int64)
    cleaned = np.asarray(jax.vmap(functools.partial(clean, tokens=30))(cases.astype(np.int32)))
    assert (np.diff(cleaned, axis=1) >= 0).all()
    assert cleaned.min() == 0
    assert cleaned.max() == 30
    for own_origin in (False, True):
        packing = Packing(30, 2, 16, own_origin, padding=True)
        check(packing, cleaned)
        for raw, tidy in zip(blocks_of(packing, cases), blocks_of(packing, cleaned), strict=True):
            for a, b in zip(raw, tidy, strict=True):
                assert np.array_equal(a, b)


def test_clean_keeps_valid_bounds() -> None:
    """Bounds that describe sequences come back as they are."""
    for cut in itertools.combinations_with_replacement(range(6), 4):
        np.testing.assert_array_equal(clean(np.asarray(cut, np.int32), 5), cut)


def test_own_origin_does_not_depend_on_the_place() -> None:
    """Blocks that count from a sequence's own first token hold the same tokens of it at every offset."""
    packing = Packing(200, 2, 16, own_origin=True)
    batch = np.asarray([(0, start, start + 50) for start in range(150)])
    for cu, blocks in zip(batch, blocks_of(packing, batch), strict=True):
        mine = blocks.sequence[: int(blocks.total)] == 1
        first = (GROUP * blocks.group + blocks.carried)[: int(blocks.total)][mine] - cu[1]
        stop = (GROUP * blocks.group + blocks.stop)[: int(blocks.total)][mine] - cu[1]
        assert first.tolist() == [0, 16, 32, 48]
        assert stop.tolist() == [16, 32, 48, 50]


@pytest.mark.parametrize("most", [1, 2, 5, 16, 17])
def test_pieces_cover_a_window_once(most: int) -> None:
    """The copies that are present move each group of a window once and no other, at most one of each size."""
    for groups in range(most + 1):
        moved = [
            group
            for piece in pieces(groups, most)
            if piece.present
            for group in range(piece.start, piece.start + piece.groups)
        ]
        assert moved == list(range(groups))


def test_no_tokens_and_no_sequences() -> None:
    """Nothing to do is no block, not an error."""
    assert int(Packing(0, 3, 8).blocks(np.zeros(4, np.int32)).total) == 0
    assert int(Packing(24, 0, 8).blocks(np.zeros(1, np.int32)).total) == 0
    assert int(Packing(24, 0, 8, padding=True).blocks(np.zeros(1, np.int32)).total) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 1, 8), r"tokens must be within 0 .. 2\*\*30, got -1"),
        ((2**30 + 1, 1, 8), r"tokens must be within 0 .. 2\*\*30, got 1073741825"),
        ((8, -1, 8), "sequences must not be negative, got -1"),
        ((8, 1, 12), "block must be a positive multiple of 8, got 12"),
        ((8, 1, 0), "block must be a positive multiple of 8, got 0"),
    ],
)
def test_refusals(arguments: tuple[int, int, int], message: str) -> None:
    """A packing off the grid is refused with the argument, its value and the rule."""
    with pytest.raises(ValueError, match=message):
        Packing(*arguments)

"""Batch invariance: the same bits wherever a sequence lies and whatever its neighbours are."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from batches import FEATURES, arranged, assert_within_contract, batch, run, sequence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verify.attention.ragged import RaggedProblem
    from verify.attention.subjects import SubjectResult

LENGTHS = [13, 0, 17, 150, 1, 3, 0, 2, 131, 40, 300]


def assert_same_bits_elsewhere(
    problem: RaggedProblem, together: SubjectResult, places: Sequence[tuple[int, int]], **how: Any
) -> list[SubjectResult]:
    """Each sequence alone, after so many tokens of other values, has the bits that it has among its neighbours."""
    assert together.lse is not None
    found = []
    for n, before in places:
        rows, _ = sequence(problem, n)
        alone = run(arranged(problem, [n], before=before), batch_invariant=True, **how)
        assert alone.lse is not None
        mine = slice(before, before + rows.stop - rows.start)
        assert np.array_equal(alone.out[:, :, mine], together.out[:, :, rows], equal_nan=True), (n, before)
        assert np.array_equal(alone.lse[:, :, mine], together.lse[:, :, rows], equal_nan=True), (n, before)
        found.append(alone)
    return found


def test_batch_invariance_is_bitwise() -> None:
    """With `batch_invariant` a sequence's results are the same bits alone, elsewhere, and among other neighbours."""
    problem = batch(LENGTHS)
    together = run(problem, batch_invariant=True)
    assert_within_contract(problem, together)
    assert_same_bits_elsewhere(problem, together, ((2, 5), (3, 0), (8, 3), (10, 6), (10, 101)))


@pytest.mark.deep
@pytest.mark.parametrize("name", FEATURES)
def test_batch_invariance_of_every_feature(name: str) -> None:
    """The same with each feature, and with more or fewer keys than queries, in several blocks of both."""
    options = dict(FEATURES[name])
    how = {"softmax": options.pop("softmax")} if "softmax" in options else {}
    for q_lengths, k_lengths in (([300, 40, 200, 9], [450, 7, 150, 0]), ([5, 130, 64, 1], [13, 700, 65, 260])):
        problem = batch(q_lengths, k_lengths, tokens=(660, 1040), sequences=5, **options)
        together = run(problem, batch_invariant=True, **how)
        assert_within_contract(problem, together)
        assert_same_bits_elsewhere(problem, together, ((0, 3), (1, 6), (2, 101), (3, 5)), **how)


@pytest.mark.deep
@pytest.mark.parametrize(("softmax", "value"), [("static", 3e38), ("online", np.inf)])
def test_batch_invariance_of_replays(softmax: str, value: float) -> None:
    """Blocks that are replayed, short and long, keep their bits elsewhere too.

    A jump of scores and of values replays a static anchor; the rescaling softmax replays for infinite values alone.
    """
    problem = batch([150, 40, 300, 11], seed=3)
    q, k, v = (np.array(x) for x in (problem.q, problem.k, problem.v))
    for n, row in ((0, 120), (1, 30), (2, 290)):
        first = sequence(problem, n)[0].start
        q[:, first + row] = 64.0
        k[:, first + row - 9] = 64.0
        v[:, first + row - 20] = value
    jumping = dataclasses.replace(problem, q=q, k=k, v=v)
    together = run(jumping, batch_invariant=True, softmax=softmax)
    assert_within_contract(jumping, together)
    found = assert_same_bits_elsewhere(jumping, together, ((0, 3), (1, 7), (2, 5), (2, 131), (3, 2)), softmax=softmax)
    replayed = [bool(each.replays is not None and each.replays.any()) for each in found]
    assert replayed == [True, True, True, True, False]

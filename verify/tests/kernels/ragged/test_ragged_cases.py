"""Packed attention on the known ways in which such kernels have gone wrong."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest
from batches import assert_within_contract, batch, run

from verify.attention.open_cases import BLOCKS, OPEN_CASES, OpenCase
from verify.subjects.judging import judge_open_case
from verify.subjects.ours import RAGGED, RAGGED_INVARIANT
from verify.verdict import Verdict

if TYPE_CHECKING:
    from verify.subjects.subject import Subject

pytestmark = pytest.mark.deep

FAMILIES = ("e1-", "e2-", "e5-", "e7-", "e8-")
CASES = [case for name, case in OPEN_CASES.items() if name.startswith(FAMILIES)]


@pytest.mark.parametrize("subject", [RAGGED, RAGGED_INVARIANT], ids=lambda subject: subject.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_open_cases(case: OpenCase, subject: Subject) -> None:
    """Positions beyond 16 bits, empty sequences, odd lengths, neighbours and guard rows, in blocks of 128."""
    blocks = dataclasses.replace(case, config=BLOCKS)
    judgement = judge_open_case(subject, blocks).judgement
    if judgement.verdict is Verdict.SKIPPED:
        pytest.skip(f"{subject.name}: {judgement.reason}")
    assert judgement.verdict is Verdict.PASS, judgement.reason


@pytest.mark.parametrize("invariant", [False, True])
def test_nan_in_the_padding(*, invariant: bool) -> None:
    """Lengths [0, 13, 30, 70] of 96 rows with NaN in V from row 70 on: rows 0..69 are what they are without it."""
    problem = batch([13, 17, 40], tokens=(96, 96), sequences=3)
    v = np.array(problem.v)
    v[:, 70:] = np.nan
    poisoned = run(dataclasses.replace(problem, v=v), batch_invariant=invariant)
    plain = run(problem, batch_invariant=invariant)
    assert_within_contract(problem, poisoned)
    assert np.array_equal(plain.out, poisoned.out)

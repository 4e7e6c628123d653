"""The float64 gradient oracle stays within its own bound, and the bound is worth something."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest
from flint import arb, arb_mat

from verify.attention.gradients import oracle_arb, oracle_float64
from verify.attention.gradients.problem import GradientProblem, causal_rows, dense_rows, full_rows
from verify.tests.gradients.gradient_problems import (
    TRAITS,
    adversarial_problem,
    bf16,
    fp32,
    normal_problem,
    rich_problem,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from verify.attention.gradients.reference import Bounded, Gradients

COVER_BATCHES, DEEP_BATCHES, BATCH = 8, 80, 50


def balls_of(case: GradientProblem) -> Iterator[tuple[str, tuple[int, ...], arb]]:
    """Every derivative of a problem as a certified ball: name, index, ball."""
    sinks = [arb(0)] * case.heads
    for batch, kv_head in np.ndindex(case.batch, case.kv_heads):
        balls = oracle_arb.kv_head_balls(case, batch, kv_head, relative=2.0**-80)
        matrices: list[tuple[str, tuple[int, int], arb_mat]] = [
            ("dk", (batch, kv_head), balls.dk),
            ("dv", (batch, kv_head), balls.dv),
        ]
        matrices += [("dq", (batch, head), matrix) for head, matrix in balls.dq.items()]
        for name, at, matrix in matrices:
            for row in range(matrix.nrows()):
                for lane in range(matrix.ncols()):
                    yield name, (*at, row, lane), matrix[row, lane]
        for head, ball in balls.dsink.items():
            sinks[head] += ball
    if case.sinks is not None:
        for head, ball in enumerate(sinks):
            yield "dsinks", (head,), ball


def certified(part: Bounded, index: tuple[int, ...], ball: arb) -> bool:
    """Whether every point of the ball is within the error of the value."""
    value, error = float(part.value[index]), float(part.error[index])
    return error == np.inf or bool(abs(ball - arb(value)) <= arb(error))


def violations(case: GradientProblem, found: Gradients) -> list[str]:
    """Derivatives that ball arithmetic does not certify to be within the float64 oracle's bound."""
    parts = dict(found.parts())
    return [f"{name}{index}" for name, index, ball in balls_of(case) if not certified(parts[name], index, ball)]


@pytest.mark.cover
@pytest.mark.parametrize("batch", range(COVER_BATCHES))
def test_bound_holds_on_adversarial_problems(batch: int) -> None:
    """Hundreds of adversarial problems, with and without escalation: not one derivative leaves its bound."""
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        case = adversarial_problem(seed)
        weak = None if seed % 2 else oracle_float64.WEAK
        assert violations(case, oracle_float64.gradients(case, weak=weak)) == [], f"seed {seed}"


@pytest.mark.deep
@pytest.mark.parametrize("batch", range(COVER_BATCHES, COVER_BATCHES + DEEP_BATCHES))
def test_bound_holds_on_thousands_of_problems(batch: int) -> None:
    """Thousands more, each with and without escalation, in blocks of every size."""
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        case = adversarial_problem(seed)
        for weak in (None, oracle_float64.WEAK):
            found = oracle_float64.gradients(case, weak=weak, rows_per_block=1 + seed % 5)
            assert violations(case, found) == [], f"seed {seed}, weak {weak}"


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(3))
def test_bound_holds_at_length(seed: int) -> None:
    """Rows of 512 keys, ordinary and with logits that need ball arithmetic."""
    case = normal_problem(seed, heads=2, kv_heads=1, q_len=6, kv_len=512, head_dim=32, v_dim=16, causal=bool(seed))
    assert violations(case, oracle_float64.gradients(case)) == []
    large = dataclasses.replace(case, scale=2.0**22)
    assert violations(large, oracle_float64.gradients(large, weak=None)) == []


def test_the_draw_is_adversarial() -> None:
    """Each trait changes what it is given; the default run draws every option, mask kind and length."""
    cases = [adversarial_problem(seed) for seed in range(COVER_BATCHES * BATCH)]
    assert {case.kv_len for case in cases} == {1, 2, 3, 9, 17}
    for option in ("d_lse", "sinks", "softcap"):
        assert {getattr(case, option) is None for case in cases} == {True, False}, option
    assert any(not case.mask(0, slice(0, 1)).any() for case in cases)
    for name, trait in TRAITS.items():
        rng = np.random.default_rng(0)
        shapes = {"q": (1, 2, 4, 4), "k": (1, 2, 6, 4), "v": (1, 2, 6, 3), "d_out": (1, 2, 4, 3), "d_lse": (1, 2, 4)}
        arrays = {key: rng.standard_normal(shape) for key, shape in shapes.items()} | {"sinks": np.ones(2)}
        before = {key: x.copy() for key, x in arrays.items()}
        trait(rng, arrays)
        assert any(not np.array_equal(before[key], arrays[key]) for key in arrays), name


def test_weak_rows_escalate() -> None:
    """Rows that float64 cannot tell apart go to ball arithmetic, are counted, and come back sharp; others do not."""
    case = normal_problem(1)
    q = case.q.copy()
    q[0, 2, 3:5] = bf16(q[0, 2, 3:5].astype(np.float64) * 2.0**40)
    k = np.repeat(case.k[:, :, :1], case.kv_len, axis=2)
    k[:, :, ::2, 0] = bf16(k[:, :, ::2, 0].astype(np.float64) * (1.0 + 2.0**-7))
    case = dataclasses.replace(case, q=q, k=k)
    loose, sharp = oracle_float64.gradients(case, weak=None), oracle_float64.gradients(case)
    assert (loose.escalated, loose.tier) == (0, "float64")
    assert (sharp.escalated, sharp.tier) == (2, "float64+arb")
    assert loose.dq.error[0, 2, 3:5].max() > 1e6 * sharp.dq.error[0, 2, 3:5].max()
    assert violations(case, sharp) == []


def test_bound_is_small_on_ordinary_data() -> None:
    """Normal data, 256 keys, 64 lanes: errors below 1e-12 of the largest derivative, far finer than FP32."""
    case = normal_problem(1, heads=2, kv_heads=1, q_len=256, kv_len=256, head_dim=64, v_dim=32)
    found = oracle_float64.gradients(case)
    assert found.escalated == 0
    for name, part in found.parts():
        assert part.error.max() < 1e-11 * np.abs(part.value).max(), name


def test_bound_is_per_element() -> None:
    """A key lane of tiny numbers gives dq a tiny bound in that lane although another lane is huge."""
    case = normal_problem(2, head_dim=2)
    k = bf16(case.k.astype(np.float64) * np.array([1.0, 2.0**-60]))
    found = oracle_float64.gradients(dataclasses.replace(case, k=k))
    assert found.dq.error[..., 1].max() < 2.0**-50 * found.dq.error[..., 0].max()


@pytest.mark.parametrize("missing", ["gamma", "FUNCTION_ERROR", "ROUNDING"])
def test_the_cases_would_show_a_bound_that_forgets_a_term(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """With a lemma's term left out (and the evaluation's own slack kept), some adversarial problem leaves its bound."""
    monkeypatch.setattr(oracle_float64, "UNIT", 0.0)
    for name in {"gamma": ("gamma",), "FUNCTION_ERROR": ("FUNCTION_ERROR", "gamma"), "ROUNDING": ("ROUNDING", "gamma")}[
        missing
    ]:
        monkeypatch.setattr(oracle_float64, name, (lambda _terms: 0.0) if name == "gamma" else 0.0)
    cases = (adversarial_problem(seed) for seed in range(400))
    assert any(violations(case, oracle_float64.gradients(case, weak=None)) for case in cases)


@pytest.mark.parametrize("rows_per_block", [1, 3, 64])
def test_blocks_agree(rows_per_block: int) -> None:
    """Row blocks of any size give the same derivatives within the bounds."""
    case = rich_problem(4, q_len=11, kv_len=13)
    whole, blocked = oracle_float64.gradients(case), oracle_float64.gradients(case, rows_per_block=rows_per_block)
    for (name, a), (_, b) in zip(whole.parts(), blocked.parts(), strict=True):
        assert np.all(np.abs(a.value - b.value) <= a.error + b.error), name


def test_what_overflows_is_not_claimed() -> None:
    """Derivatives beyond float64 come back as 0 with an infinite error, not as a number with a bound."""
    case = GradientProblem(
        q=bf16(np.full((1, 1, 2, 1), 2.0**-100)),
        k=bf16(np.reshape([2.0**120, -(2.0**120)], (1, 1, 2, 1))),
        v=bf16(np.reshape([2.0**120, -(2.0**120)], (1, 1, 2, 1))),
        d_out=fp32(np.full((1, 1, 2, 1), 2.0**120)),
        mask=full_rows(2, 2),
        scale=2.0**1000,
    )
    found = oracle_float64.gradients(case)
    overflowed = np.isinf(found.dk.error)
    assert np.all(found.dk.value[overflowed] == 0.0)
    assert np.all(np.isfinite(found.dk.value))
    assert np.all(np.isfinite(found.dv.error))


def test_rows_per_block_must_be_positive() -> None:
    """A block of no rows is refused."""
    with pytest.raises(ValueError, match="rows_per_block must be at least 1, got 0"):
        oracle_float64.gradients(normal_problem(5), rows_per_block=0)


def test_masks_as_blocks_and_as_arrays_agree() -> None:
    """A causal mask by rows and the same mask held as a whole (with or without batch) give the same numbers."""
    case = rich_problem(6)
    rows = causal_rows(case.q_len, case.kv_len)(0, slice(0, case.q_len))
    wanted = oracle_float64.gradients(case)
    for mask in (dense_rows(rows), dense_rows(np.stack([rows, rows]))):
        found = oracle_float64.gradients(dataclasses.replace(case, mask=mask))
        for (name, a), (_, b) in zip(wanted.parts(), found.parts(), strict=True):
            assert np.array_equal(a.value, b.value), name

"""The float64 oracle stays within its own bound, and the bound is worth something."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from flint import arb

from verify.attention import oracle_arb, oracle_float64
from verify.attention.float64_rows import FLUSHED_LOG, FLUSHED_WEIGHT, flushed_exp
from verify.tests.judge.problems import TRAITS, adversarial_problem, normal_problem, problem

if TYPE_CHECKING:
    from verify.attention.problem import AttentionProblem

COVER_BATCHES, DEEP_BATCHES, BATCH = 12, 100, 50


def certified(value: float, error: float, ball: arb) -> bool:
    """Whether every point of the ball is within the error of the value (error 0: the ball is narrow and holds it)."""
    if error == 0.0:
        return bool(ball.contains(arb(value))) and bool(ball.rad() <= arb(2.0**-40) * abs(arb(value)))
    return error == np.inf or bool(abs(ball - arb(value)) <= arb(error))


def violations(case: AttentionProblem) -> list[str]:
    """Elements that ball arithmetic does not certify to be within the float64 oracle's bound."""
    found = oracle_float64.attention(case)
    bad = []
    for batch, head in np.ndindex(case.batch, case.heads):
        rows = [row for row in range(case.q_len) if case.visible(row)]
        answers = oracle_arb.attention_rows(case, batch, head, rows, relative=2.0**-80) if rows else []
        for row, (out, lse) in zip(rows, answers, strict=True):
            at = (batch, head, row)
            if not certified(float(found.lse[at]), float(found.lse_error[at]), lse):
                bad.append(f"lse{at}")
            bad += [
                f"out{(*at, lane)}"
                for lane, ball in enumerate(out)
                if not certified(float(found.out[(*at, lane)]), float(found.out_error[(*at, lane)]), ball)
            ]
    return bad


@pytest.mark.cover
@pytest.mark.parametrize("batch", range(COVER_BATCHES))
def test_bound_holds_on_adversarial_problems(batch: int) -> None:
    """Hundreds of adversarial problems: not one element leaves its bound."""
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        assert violations(adversarial_problem(seed)) == [], f"seed {seed}"


@pytest.mark.deep
@pytest.mark.parametrize("batch", range(COVER_BATCHES, COVER_BATCHES + DEEP_BATCHES))
def test_bound_holds_on_thousands_of_problems(batch: int) -> None:
    """Thousands more."""
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        assert violations(adversarial_problem(seed)) == [], f"seed {seed}"


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(4))
def test_bound_holds_at_length(seed: int) -> None:
    """Rows of 2048 keys, as whole rows and key by key."""
    case = normal_problem(seed, heads=1, kv_heads=1, q_len=4, kv_len=2048, head_dim=64, causal=False)
    assert violations(case) == []
    assert violations(dataclasses.replace(case, scale=2.0**30)) == []


def test_the_draw_is_adversarial() -> None:
    """Each trait changes what it is given, and the default run draws every length and finite inputs only."""
    cases = [adversarial_problem(seed) for seed in range(COVER_BATCHES * BATCH)]
    assert {case.kv_len for case in cases} == {1, 2, 3, 9, 17, 40}
    assert all(np.isfinite(x.astype(np.float64)).all() for case in cases for x in (case.q, case.k, case.v))
    for name, trait in TRAITS.items():
        case = normal_problem(0, q_len=4, kv_len=6, head_dim=4)
        arrays = [x.astype(np.float64) for x in (case.q, case.k, case.v)]
        changed = trait(np.random.default_rng(0), *arrays)
        assert any(not np.array_equal(a, b) for a, b in zip(arrays, changed, strict=True)), name


def test_bound_is_small_on_ordinary_data() -> None:
    """Normal data, 256 keys, 128 lanes: the bound is below 1e-11, far finer than an FP32 LSE or a BF16 output."""
    found = oracle_float64.attention(normal_problem(1, q_len=256, kv_len=256, head_dim=128))
    assert found.out_error.max() < 1e-11
    assert found.lse_error.max() < 1e-11


def test_bound_is_per_element() -> None:
    """A lane of tiny values gets a tiny bound although another lane is huge."""
    rng = np.random.default_rng(2)
    values = rng.standard_normal((1, 1, 50, 2)) * np.array([2.0**100, 2.0**-100])
    found = oracle_float64.attention(
        problem(rng.standard_normal((1, 1, 3, 2)), rng.standard_normal((1, 1, 50, 2)), values, causal=False)
    )
    assert found.out_error[..., 1].max() < 1e-13 * 2.0**-100 * 10


def test_one_huge_logit_keeps_a_small_output_bound() -> None:
    """A key that wins by 2^100 decides the output: the bound stays small although its logit is known to 2^50 only."""
    keys = [[[[2.0**100]], [[1.0]], [[-1.0]]]]
    case = problem([[[[1.0]]]], np.reshape(keys, (1, 1, 3, 1)), [[[[3.0], [5.0], [7.0]]]], causal=False)
    found = oracle_float64.attention(case)
    assert found.out.item() == 3.0
    assert found.out_error.item() < 1e-12
    assert found.lse_error.item() <= 2.0**100 * 1e-14


def test_what_the_anchor_has_lost_counts_for_every_key() -> None:
    """The winning logit loses 0.37 beside 2^50, whatever the order of lanes: errors are real and within the bound."""
    lost = []
    for lanes in itertools.permutations(range(3)):
        q = np.array([2.0**50, 1.0, -(2.0**50)])[list(lanes)]
        key = np.array([1.0, 0.37, 1.0])[list(lanes)]
        case = problem([[[q]]], [[[key, np.zeros(3)]]], [[[[2.0] * 3, [1.0] * 3]]], causal=False)
        assert violations(case) == []
        exact = oracle_arb.attention(case)
        lost.append(np.abs(oracle_float64.attention(case).out - exact.out).max())
    assert max(lost) > 1e-3


def test_weights_are_flushed_within_their_charge() -> None:
    """Below FLUSHED_LOG a weight counts as 0, which is at most FLUSHED_WEIGHT off; above it is exp's; NaN stays NaN."""
    x = np.array([0.0, -1.0, FLUSHED_LOG, np.nextafter(FLUSHED_LOG, -np.inf), -np.inf, np.nan])
    found = flushed_exp(x.copy())
    assert found[:3].tolist() == np.exp(x[:3]).tolist()
    assert found[3:5].tolist() == [0.0, 0.0]
    assert np.isnan(found[5])
    # Lemma 3: times e^h with h <= LOOSE, and room for what underflows.
    assert arb(FLUSHED_LOG).exp() * arb(oracle_float64.LOOSE).exp() + 4 * oracle_float64.TINY < FLUSHED_WEIGHT


def test_equal_values_are_exact() -> None:
    """Equal values give that value with error 0, whatever the weights."""
    rng = np.random.default_rng(3)
    case = problem(
        rng.standard_normal((1, 1, 6, 8)), rng.standard_normal((1, 1, 40, 8)), np.full((1, 1, 40, 8), 0.3), causal=False
    )
    found = oracle_float64.attention(case)
    assert np.all(found.out == case.v.astype(np.float64)[0, 0, 0, 0])
    assert np.all(found.out_error == 0.0)


def test_logits_beyond_float64_are_left_to_ball_arithmetic() -> None:
    """Where float64 cannot hold the logits, the bound is the spread of the values (LSE: infinite); arb resolves it."""
    case = problem([[[[2.0**100]]]], [[[[1.0], [2.0]]]], [[[[3.0], [5.0]]]], causal=False, scale=2.0**1000)
    found = oracle_float64.attention(case)
    assert abs(found.out.item() - 5.0) <= found.out_error.item()
    assert found.lse_error.item() == np.inf
    better = oracle_float64.refine(found, case, np.full((1, 1, 1, 1), 1e-6))
    assert better.out.item() == 5.0
    assert better.out_error.item() < 1e-15


def test_logits_near_the_end_of_float64_are_left_to_ball_arithmetic() -> None:
    """Logits that float64 holds, but whose difference it does not, are given up in the same way."""
    case = problem([[[[2.0**100]]]], [[[[1.0], [-1.0]]]], [[[[3.0], [5.0]]]], causal=False, scale=2.0**923)
    found = oracle_float64.attention(case)
    assert found.lse_error.item() == np.inf
    assert found.out_error.item() == pytest.approx(2.0)
    assert oracle_float64.refine(found, case, np.full((1, 1, 1, 1), 1e-6)).lse.item() == 2.0**1023


def test_classes_are_kept_beyond_float64() -> None:
    """Where float64 cannot hold the logits, NaN and infinities that the inputs force still come out exactly."""
    inf, nan = np.inf, np.nan
    keys = [[[[1.0], [nan]]], [[[1.0], [-inf]]], [[[1.0], [inf]]]]
    for key, out in zip(keys, (nan, 3.0, nan), strict=True):
        found = oracle_float64.attention(
            problem([[[[2.0**100]]]], [key], [[[[3.0], [5.0]]]], causal=False, scale=2.0**1000)
        )
        room = found.out_error.item()
        assert np.isnan(found.out.item()) if np.isnan(out) else abs(found.out.item() - out) <= room
        assert np.isnan(out) == (room == 0.0)


@pytest.mark.parametrize("rows_per_block", [1, 3, 7, 64])
def test_blocks_agree(rows_per_block: int) -> None:
    """Row blocks of any size give the same values within the bounds, though not bit for bit."""
    case = normal_problem(4, heads=4, kv_heads=2, q_len=33, kv_len=47)
    whole, blocked = oracle_float64.attention(case), oracle_float64.attention(case, rows_per_block=rows_per_block)
    assert np.all(np.abs(whole.out - blocked.out) <= whole.out_error + blocked.out_error)
    assert np.all(np.abs(whole.lse - blocked.lse) <= whole.lse_error + blocked.lse_error)


def test_visible_overrides_the_mask() -> None:
    """Counts handed in replace the problem's mask."""
    case = normal_problem(5, heads=1, kv_heads=1, q_len=3, kv_len=5)
    found = oracle_float64.attention(case, visible=np.array([0, 1, 5]))
    assert np.all(found.out[0, 0, 0] == 0.0)
    assert found.lse[0, 0, 0] == -np.inf
    assert np.all(found.out[0, 0, 1] == case.v.astype(np.float64)[0, 0, 0])


@pytest.mark.parametrize("visible", [[1, 2], [0, 1, 6], [-1, 0, 0]])
def test_bad_counts_are_refused(visible: list[int]) -> None:
    """Counts of another length or out of range are named in the error."""
    with pytest.raises(ValueError, match=r"visible must give a count in 0\.\.5 for each of 3 rows"):
        oracle_float64.attention(normal_problem(5, q_len=3, kv_len=5), visible=np.array(visible))


def test_rows_per_block_must_be_positive() -> None:
    """A block of no rows is refused."""
    with pytest.raises(ValueError, match="rows_per_block must be at least 1, got 0"):
        oracle_float64.attention(normal_problem(5), rows_per_block=0)


def test_refine_escalates_the_rows_that_need_it() -> None:
    """Only rows whose error exceeds a hundredth of the tolerance are recomputed, and the others stay as they are."""
    case = normal_problem(6, heads=2, kv_heads=1, q_len=5, kv_len=7)
    found = oracle_float64.attention(case)
    tolerance = np.full(found.out.shape, 1e-3)
    assert oracle_float64.refine(found, case, tolerance, np.full(found.lse.shape, 1e-3)) is found
    tolerance[0, 1, 2, 3] = found.out_error[0, 1, 2, 3]
    lse_tolerance = np.full(found.lse.shape, np.nan)
    lse_tolerance[0, 0, 4] = found.lse_error[0, 0, 4]
    better = oracle_float64.refine(found, case, tolerance, lse_tolerance)
    assert better.escalated == 2
    assert better.tier == "float64+arb"
    changed = (better.out_error != found.out_error).any(axis=-1)
    assert np.argwhere(changed).tolist() == [[0, 0, 4], [0, 1, 2]]
    assert np.all(better.out_error[changed] < found.out_error[changed])
    assert np.all(np.abs(better.out - found.out) <= better.out_error + found.out_error)


def test_refine_refuses_other_shapes() -> None:
    """A tolerance of another shape is named with both shapes."""
    case = normal_problem(6, q_len=5, kv_len=7)
    found = oracle_float64.attention(case)
    with pytest.raises(ValueError, match=r"tolerance_out must have shape \(1, 2, 5, 16\), got \(1, 2, 5\)"):
        oracle_float64.refine(found, case, found.lse)

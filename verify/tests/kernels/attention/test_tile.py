"""The maths of one tile, alone."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from flywheel.attention import tile
from flywheel.attention.budget import BIAS, FP32_MAX, LANE_LIMIT, LANES, SUM_FLOOR
from verify.backend import device_model

pytestmark = pytest.mark.smoke


def test_scores_scale_in_fp32() -> None:
    """The scale multiplies the FP32 sum: 257/256 * 1.4427 keeps 24 bits, which no BF16 word could hold."""
    q = jnp.full((8, 64), 1.0, jnp.bfloat16)
    k = jnp.zeros((8, 64), jnp.bfloat16).at[:, :2].set(jnp.array([1.0, 2.0**-8], jnp.bfloat16))
    got = tile.scores(q, k, 1.44269502)
    want = np.float32(1.0 + 2.0**-8) * np.float32(1.44269502)
    assert (np.asarray(got) == want).all()


def test_anchor_ignores_masked_scores() -> None:
    """A masked score is never an anchor, not even NaN or infinity; the anchor is an integer above the largest."""
    s = jnp.asarray([[1.5, 99.0, jnp.nan, -3.0], [jnp.inf, -7.25, -8.0, 0.0]], jnp.float32)
    seen = jnp.asarray([[True, False, False, True], [False, True, True, False]])
    assert np.asarray(tile.choose_anchor(s, seen)).ravel().tolist() == [2.0 + BIAS, -7.0 + BIAS]


def test_fast_step_masks_after_exp2() -> None:
    """A masked score may be NaN or infinite: its weight is 0 and the lane sums are those of the visible keys."""
    s = jnp.zeros((16, 2 * LANES), jnp.float32).at[:, 200:].set(jnp.nan).at[:, 150:200].set(jnp.inf)
    seen = jnp.broadcast_to(jnp.arange(2 * LANES) < 150, (16, 2 * LANES))
    p, sums = tile.fast_step(s, jnp.zeros((16, LANES), jnp.float32), seen)
    assert (np.asarray(p, np.float32) == np.asarray(seen, np.float32)).all()
    assert np.asarray(sums).sum(axis=1).tolist() == [150.0] * 16


def test_mask_concerns_its_rows_only() -> None:
    """With a mask for the first rows, the others see every key."""
    s = jnp.zeros((32, LANES), jnp.float32)
    p, _ = tile.fast_step(s, jnp.zeros((32, LANES), jnp.float32), jnp.zeros((16, LANES), bool))
    assert np.asarray(p, np.float32).sum(axis=1).tolist() == [0.0] * 16 + [float(LANES)] * 16


@pytest.mark.parametrize("value", [np.nan, np.inf, np.nextafter(np.float32(LANE_LIMIT), np.float32(np.inf))])
def test_check_fails_above_the_limit_and_for_nan(value: float) -> None:
    """One partial sum that is NaN, infinite or one ulp above the limit fails the check."""
    sums = jnp.ones((16, LANES), jnp.float32).at[3, 77].set(value)
    assert bool(tile.sums_exceed(sums, None))


def test_check_passes_at_the_limit_and_ignores_uncounted_rows() -> None:
    """The limit itself passes, and rows beyond the last query may hold anything."""
    sums = jnp.full((16, LANES), LANE_LIMIT, jnp.float32)
    assert not bool(tile.sums_exceed(sums, None))
    counted = jnp.broadcast_to(jnp.arange(16)[:, None] < 8, (16, LANES))
    assert not bool(tile.sums_exceed(sums.at[8:].set(jnp.nan), counted))
    assert bool(tile.sums_exceed(sums.at[7].set(jnp.nan), counted))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_final_check_sees_one_bad_element_of_o(value: float) -> None:
    """One element of o that is not finite makes the block unsound, however good l is."""
    total, o = jnp.ones((16, 1), jnp.float32), jnp.zeros((16, 64), jnp.float32)
    assert not bool(tile.result_unsound(total, o, None))
    assert bool(tile.result_unsound(total, o.at[5, 63].set(value), None))
    assert not bool(tile.result_unsound(total, o.at[5, 63].set(value), jnp.arange(16)[:, None] != 5))


@pytest.mark.parametrize("value", [0.0, np.nan, np.nextafter(np.float32(SUM_FLOOR), np.float32(0))])
def test_final_check_sees_a_sum_below_the_floor(value: float) -> None:
    """A denominator below the floor means that the anchor was no score of the row."""
    total, o = jnp.full((16, 1), SUM_FLOOR, jnp.float32), jnp.zeros((16, 64), jnp.float32)
    assert not bool(tile.result_unsound(total, o, None))
    assert bool(tile.result_unsound(total.at[2].set(value), o, None))


def test_normalise_limits_finite_results() -> None:
    """A quotient just above the largest BF16 stays finite; NaN stays NaN; ordinary values are exact."""
    largest = float(jnp.finfo(jnp.bfloat16).max)
    o = jnp.asarray([[FP32_MAX, -FP32_MAX, 3.0, jnp.nan]], jnp.float32)
    got = np.asarray(tile.normalise(o, jnp.ones((1, 1), jnp.float32)))[0]
    assert got[:3].tolist() == [largest, -largest, 3.0]
    assert np.isnan(got[3])


def test_power_of_two_is_exact() -> None:
    """2**n for every integer n of the normal range, and 0 for what would be subnormal, -inf included."""
    n = np.arange(-140, 1, dtype=np.float32)
    got = np.asarray(tile.power_of_two(jnp.asarray(np.append(n, -np.inf))[:, None]))[:, 0]
    want = np.append(np.where(n >= -126, np.exp2(n.astype(np.float64)), 0.0), 0.0)
    assert (got == want).all()


def test_log_sum_exp_of_nothing_is_nan() -> None:
    """A row whose weights are all 0 has seen only -inf scores: its LSE is NaN, not -inf."""
    got = np.asarray(tile.log_sum_exp(jnp.zeros((2, 1)), jnp.asarray([[0.0], [1.0]], jnp.float32)))
    assert np.isnan(got[0, 0])
    assert got[1, 0] == 0.0


def test_replay_of_fragments_equals_one_pass() -> None:
    """Splitting a row into fragments changes its weights by powers of two only: the sums agree but for FP32 adding."""
    s = jnp.asarray(np.random.default_rng(0).integers(-60, 60, (8, 4 * LANES)).astype(np.float32))
    seen = jnp.ones((8, LANES), bool)
    running = jnp.full((8, 1), -FP32_MAX, jnp.float32)
    total = jnp.zeros((8, 1), jnp.float32)
    for start in range(0, 4 * LANES, LANES):
        p, running, factor = tile.replay_weights(s[:, start : start + LANES], seen, running)
        total = total * factor + p.sum(axis=1, keepdims=True)
    whole, top, _ = tile.replay_weights(s, jnp.ones(s.shape, bool), jnp.full((8, 1), -FP32_MAX, jnp.float32))
    assert (running == top).all()
    np.testing.assert_allclose(total, whole.sum(axis=1, keepdims=True), rtol=4 * LANES * 2.0**-24)


def test_replay_keeps_the_bias_at_huge_scores() -> None:
    """At scores of 2**100 the bias is still subtracted: weights are 2**-BIAS, with room for any finite value."""
    s = jnp.full((8, LANES), 2.0**100, jnp.float32)
    p, _, _ = tile.replay_weights(s, jnp.ones(s.shape, bool), jnp.full((8, 1), -FP32_MAX, jnp.float32))
    np.testing.assert_allclose(p, 2.0**-BIAS, rtol=device_model().exp2_relative)


def test_nonfinite_values_reach_only_rows_that_see_them() -> None:
    """+inf, -inf, both and NaN in V: each marks the rows that see the key with a score above -inf, in its lane only."""
    s = jnp.zeros((8, LANES), jnp.float32).at[7].set(-jnp.inf)
    seen = jnp.arange(LANES)[None, :] <= jnp.arange(8)[:, None]
    v = jnp.zeros((LANES, 64), jnp.bfloat16).at[2, 0].set(jnp.inf).at[3, 1].set(-jnp.inf).at[4, 2].set(jnp.nan)
    v = v.at[2, 3].set(jnp.inf).at[5, 3].set(-jnp.inf)
    is_key = jnp.ones(v.shape, bool)
    marks = np.asarray(tile.nonfinite_marks(s, seen, v, is_key))
    assert marks[:, 0].tolist() == [0, 0, 1, 1, 1, 1, 1, 0]
    assert marks[:, 1].tolist() == [0, 0, 0, 2, 2, 2, 2, 0]
    assert marks[:, 2].tolist() == [0, 0, 0, 0, 3, 3, 3, 0]
    assert marks[:, 3].tolist() == [0, 0, 1, 1, 1, 3, 3, 0]
    assert (np.asarray(tile.finite_values(v, is_key), np.float32) == 0.0).all()
    out = np.asarray(tile.restore_nonfinite(jnp.zeros((8, 64), jnp.float32), jnp.asarray(marks)))
    assert out[3, 0] == np.inf
    assert out[3, 1] == -np.inf
    assert np.isnan(out[4, 2])
    assert np.isnan(out[5, 3])
    assert (out[:, 4:] == 0.0).all()

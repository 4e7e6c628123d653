"""The maths of one tile, alone."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from flywheel.attention import tile
from flywheel.attention.budget import BIAS, FP32_MAX, LANE_LIMIT, LANES, SUM_FLOOR
from verify.backend import device_model

pytestmark = pytest.mark.smoke


def test_products_are_those_of_keys_and_queries() -> None:
    """Keys lie on sublanes and queries on lanes, in both products; all dimensions differ."""
    rng = np.random.default_rng(0)
    k, q, v = (jnp.asarray(rng.integers(-3, 4, shape), jnp.bfloat16) for shape in ((32, 64), (24, 64), (32, 16)))
    s = np.asarray(tile.dot_products(k, q))
    assert (s == np.asarray(k, np.float64) @ np.asarray(q, np.float64).T).all()
    p = jnp.asarray(rng.integers(0, 3, (32, 24)), jnp.bfloat16)
    o = np.asarray(tile.weighted_values(v, p))
    assert (o == np.asarray(v, np.float64).T @ np.asarray(p, np.float64)).all()
    assert (np.asarray(tile.turned_values(v.T, p)) == o).all()


def test_scores_scale_in_fp32() -> None:
    """The scale multiplies the FP32 sum: 257/256 * 1.4427 keeps 24 bits, which no BF16 word could hold."""
    dot = jnp.full((8, 128), 1.0 + 2.0**-8, jnp.float32)
    got = tile.ScoreRule(0.7)(dot)
    want = np.float32(1.0 + 2.0**-8) * np.float32(0.7 * math.log2(math.e))
    assert (np.asarray(got) == want).all()


def test_soft_cap_bounds_the_logits() -> None:
    """Capped scores are softcap tanh(s / softcap) in log2 units: infinite dots give exactly the cap, small ones s."""
    dot = jnp.asarray([[np.inf, -np.inf, 2.0**-10, 0.0]], jnp.float32)
    got = np.asarray(tile.ScoreRule(2.0, 30.0)(dot))[0]
    cap = np.float32(30.0 * math.log2(math.e))
    assert got[:2].tolist() == [cap, -cap]
    assert got[2] == pytest.approx(2.0**-9 * math.log2(math.e), rel=8 * device_model().tanh_relative)
    assert got[3] == 0.0


@pytest.mark.parametrize("softcap", [2.0**-10, 1.0, 22.5, 23.0, 30.0, 50.0, 51.9])
def test_a_low_cap_shares_one_anchor(softcap: float) -> None:
    """The lowest score has a weight above the floor, the highest one within the limit; weights are exp2(s - A)."""
    rule = tile.ScoreRule(1.0, softcap)
    anchor = rule.anchor
    assert anchor is not None and anchor == round(anchor) <= 0.0  # noqa: PT018
    s = rule(jnp.asarray([[-np.inf, np.inf, 0.0, softcap / 2]] * tile.SUBLANES, jnp.float32))
    p = np.asarray(tile.weights(s, anchor, None), np.float64)[0]
    assert p[0] >= SUM_FLOOR
    assert p[1] <= LANE_LIMIT
    assert (p == np.asarray(jnp.exp2(s - jnp.float32(anchor)))[0]).all()


@pytest.mark.parametrize("softcap", [None, 52.0, 2.0**60])
def test_without_a_low_cap_rows_have_their_own_anchors(softcap: float | None) -> None:
    """One anchor could not hold both ends of the range of scores."""
    assert tile.ScoreRule(1.0, softcap).anchor is None


def test_anchor_ignores_masked_scores() -> None:
    """A masked score is never an anchor, not even NaN or infinity; the anchor is an integer above the largest."""
    s = jnp.asarray([[1.5, 99.0, jnp.nan, -3.0], [jnp.inf, -7.25, -8.0, 0.0]], jnp.float32).T
    visible = jnp.asarray([[True, False, False, True], [False, True, True, False]]).T
    assert np.asarray(tile.choose_anchor(s, visible)).ravel().tolist() == [2.0 + BIAS, -7.0 + BIAS]


def test_anchors_are_adopted_once_from_a_visible_key() -> None:
    """A query without an anchor takes one from the first keys it sees; one that has an anchor keeps it; a NaN shows."""
    anchor = jnp.broadcast_to(jnp.asarray([[tile.UNSET, tile.UNSET, 5.0, tile.UNSET]], jnp.float32), (8, 4))
    s = jnp.broadcast_to(jnp.asarray([[1.5, 1.5, 99.0, jnp.nan]], jnp.float32), (16, 4))
    visible = jnp.broadcast_to(jnp.asarray([[True, False, True, True]]), (16, 4))
    got = np.asarray(tile.adopt_anchor(anchor, s, visible))
    assert (got == got[:1])[:, :3].all()
    assert got[0, :3].tolist() == [2.0 + BIAS, float(np.float32(tile.UNSET)), 5.0]
    assert np.isnan(got[0, 3])


def test_weights_are_masked_after_exp2() -> None:
    """A masked score may be NaN or infinite: its weight is 0 and the partial sums are those of the visible keys."""
    s = jnp.zeros((256, 16), jnp.float32).at[200:].set(jnp.nan).at[150:200].set(jnp.inf)
    visible = jnp.broadcast_to(jnp.arange(256)[:, None] < 150, s.shape)
    p = tile.weights(s, jnp.zeros((8, 16), jnp.float32), visible)
    assert (np.asarray(p) == np.asarray(visible, np.float32)).all()
    assert np.asarray(tile.partial_sums(p)).sum(axis=0).tolist() == [150.0] * 16


@pytest.mark.parametrize("value", [np.nan, np.inf, np.nextafter(np.float32(LANE_LIMIT), np.float32(np.inf))])
def test_check_fails_above_the_limit_and_for_nan(value: float) -> None:
    """A partial sum that is NaN, infinite or one ulp above the limit is marked, and no other; the limit passes."""
    sums = jnp.full((8, 256), LANE_LIMIT, jnp.float32)
    assert not np.asarray(tile.exceeds_limit(sums)).any()
    marks = np.asarray(tile.exceeds_limit(sums.at[3, 77].set(value)))
    assert np.argwhere(marks).tolist() == [[3, 77]]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_final_check_sees_one_bad_element_of_o(value: float) -> None:
    """One element of o that is not finite marks its query, however good l is; the largest finite o does not."""
    o = jnp.full((64, 16), FP32_MAX, jnp.float32)
    assert not np.asarray(tile.overflow_marks(o)).any()
    marks = np.asarray(tile.overflow_marks(o.at[63, 5].set(value)))
    assert np.argwhere(marks).tolist() == [[0, 5]]


@pytest.mark.parametrize(
    "value",
    [
        0.0,
        np.nan,
        np.inf,
        np.nextafter(np.float32(SUM_FLOOR), np.float32(0)),
        np.nextafter(np.float32(LANES * LANE_LIMIT), np.float32(np.inf)),
    ],
)
def test_final_check_sees_a_denominator_out_of_range(value: float) -> None:
    """Below the floor the anchor was no score of the row; above the limit a last block or a sink overflowed."""
    for good in (SUM_FLOOR, 1.0, LANES * LANE_LIMIT):
        assert not np.asarray(tile.denominator_unsound(jnp.full((1, 16), good, jnp.float32))).any()
    marks = np.asarray(tile.denominator_unsound(jnp.ones((1, 16), jnp.float32).at[0, 2].set(value)))
    assert np.argwhere(marks).tolist() == [[0, 2]]


def test_normalise_limits_finite_results() -> None:
    """A quotient just above the largest BF16 stays finite; ordinary values are exact; a NaN is put back."""
    largest = float(jnp.finfo(jnp.bfloat16).max)
    o = jnp.asarray([[FP32_MAX, -FP32_MAX, 3.0, jnp.nan]], jnp.float32)
    out = tile.normalise(o, jnp.ones((1, 4), jnp.float32))
    assert np.asarray(out)[0, :3].tolist() == [largest, -largest, 3.0]
    assert np.isnan(np.asarray(tile.keep_nan(out, o))).tolist() == [[False, False, False, True]]


def test_power_of_two_is_exact() -> None:
    """2**n for every integer n of the normal range, and 0 for what would be subnormal, -inf included."""
    n = np.arange(-140, 1, dtype=np.float32)
    got = np.asarray(tile.power_of_two(jnp.asarray(np.append(n, -np.inf))[None]))[0]
    want = np.append(np.where(n >= -126, np.exp2(n.astype(np.float64)), 0.0), 0.0)
    assert (got == want).all()


def test_log_sum_exp_of_nothing_is_nan() -> None:
    """A row whose weights are all 0 has seen only -inf scores: its LSE is NaN, not -inf."""
    got = np.asarray(tile.log_sum_exp(jnp.zeros((1, 2)), jnp.asarray([[0.0, 1.0]], jnp.float32)))[0]
    assert np.isnan(got[0])
    assert got[1] == 0.0


def test_sink_weight_is_measured_like_a_score() -> None:
    """A sink of s nats weighs what a key of score s log2 e would; -inf weighs nothing, +inf shows."""
    shift = jnp.full((1, 4), 40.0, jnp.float32)
    for late in (False, True):
        base = 40.0 + (BIAS if late else 0)
        sink = jnp.float32(base * math.log(2.0))
        weight = np.asarray(tile.sink_weight(sink, shift, late_bias=late))
        error = device_model().exp2_relative + 2 * base * 2.0**-23
        np.testing.assert_allclose(weight, 1.0, rtol=error)
        assert not np.asarray(tile.sink_weight(jnp.float32(-np.inf), shift, late_bias=late)).any()
        assert np.isinf(np.asarray(tile.sink_weight(jnp.float32(np.inf), shift, late_bias=late))).all()


@pytest.mark.parametrize("late_bias", [False, True])
def test_fragments_equal_one_pass(*, late_bias: bool) -> None:
    """Splitting a row into fragments changes its weights by powers of two only: the sums agree but for FP32 adding."""
    s = jnp.asarray(np.random.default_rng(0).integers(-60, 60, (512, 8)).astype(np.float32))
    unset = jnp.full((1, 8), tile.UNSET, jnp.float32)
    shift, total = unset, jnp.zeros((1, 8), jnp.float32)
    for start in range(0, 512, 128):
        p, shift, factor = tile.online_weights(s[start : start + 128], shift, None, late_bias=late_bias)
        total = total * factor + p.sum(axis=0, keepdims=True)
    whole, top, _ = tile.online_weights(s, unset, None, late_bias=late_bias)
    assert (shift == top).all()
    # Each side adds as many non-negative terms as there are keys, in an order of its own.
    difference = 2 * s.shape[0] * device_model().unit_roundoff
    np.testing.assert_allclose(total, whole.sum(axis=0, keepdims=True), rtol=difference)


def test_late_bias_survives_huge_scores() -> None:
    """At scores of 2**100 the bias is still subtracted: weights are 2**-BIAS, with room for any finite value."""
    s = jnp.full((128, 8), 2.0**100, jnp.float32)
    p, _, _ = tile.online_weights(s, jnp.full((1, 8), tile.UNSET, jnp.float32), None, late_bias=True)
    np.testing.assert_allclose(p, 2.0**-BIAS, rtol=device_model().exp2_relative)


def test_nonfinite_values_reach_only_rows_that_see_them() -> None:
    """+inf, -inf, both and NaN in V: each marks the rows that see the key with a score above -inf, in its lane only."""
    s = jnp.zeros((128, 8), jnp.float32).at[:, 7].set(-jnp.inf)
    visible = jnp.arange(128)[:, None] <= jnp.arange(8)[None, :]
    v = jnp.zeros((128, 64), jnp.bfloat16).at[2, 0].set(jnp.inf).at[3, 1].set(-jnp.inf).at[4, 2].set(jnp.nan)
    v = v.at[2, 3].set(jnp.inf).at[5, 3].set(-jnp.inf)
    is_key = jnp.ones(v.shape, bool)
    marks = np.asarray(tile.nonfinite_marks(s, visible, v, is_key))
    assert marks[0].tolist() == [0, 0, 1, 1, 1, 1, 1, 0]
    assert marks[1].tolist() == [0, 0, 0, 2, 2, 2, 2, 0]
    assert marks[2].tolist() == [0, 0, 0, 0, 3, 3, 3, 0]
    assert marks[3].tolist() == [0, 0, 1, 1, 1, 3, 3, 0]
    assert (np.asarray(tile.finite_values(v, is_key), np.float32) == 0.0).all()
    out = np.asarray(tile.restore_nonfinite(jnp.zeros((64, 8), jnp.float32), jnp.asarray(marks)))
    assert out[0, 3] == np.inf
    assert out[1, 3] == -np.inf
    assert np.isnan(out[2, 4])
    assert np.isnan(out[3, 5])
    assert (out[4:] == 0.0).all()

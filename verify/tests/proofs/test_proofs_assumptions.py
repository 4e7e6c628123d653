"""What the lemmas take for granted of the kernel's steps and of the machine that runs these tests."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from proofs.exact import BF16, FP32

import jax  # isort: skip  after proofs, which configures JAX
import jax.numpy as jnp  # isort: skip

from flywheel.attention import AttentionConfig, api, budget, checks, tile, tiling
from verify import devices
from verify.attention import contract

pytestmark = pytest.mark.smoke

INF, NAN = math.inf, math.nan
BF16_MAX = float(BF16.largest)


def row(*values: float) -> jax.Array:
    """An FP32 row vector, one query per value."""
    return jnp.asarray(values, jnp.float32).reshape(1, -1)


def above(x: float) -> np.float32:
    """The next FP32 number."""
    return np.nextafter(np.float32(x), np.float32(INF))


def below(x: float) -> np.float32:
    """The previous FP32 number."""
    return np.nextafter(np.float32(x), np.float32(-INF))


def test_weights_and_sums() -> None:
    """exp2 is never negative, FP32 additions round to nearest, and rescaling factors are within [0, 1]."""
    t = jnp.concatenate([jnp.linspace(-400.0, 128.0, 200_001), jnp.asarray([-INF, -3e38, INF])])
    assert bool(jnp.all(jnp.exp2(t) >= 0.0))
    edges = np.array([2.0**23, 2.0**23 + 1, 3 * 2.0**22, 2.0**24 - 2, 2.0**24 - 1], np.float32)
    small = (edges[:, None] * 2.0 ** -np.arange(28)).reshape(-1).astype(np.float32)
    sums = np.asarray(jnp.asarray(edges)[:, None] + jnp.asarray(small)[None, :])
    for i, a in enumerate(edges.tolist()):
        for j, b in enumerate(small.tolist()):
            assert Fraction(float(sums[i, j])) == FP32.nearest(Fraction(a) + Fraction(b))
    factors = tile.power_of_two(row(0.0, -1.0, -126.0, -127.0, -1e30, -INF))
    np.testing.assert_array_equal(factors[0], [1.0, 0.5, 2.0**-126, 0.0, 0.0, 0.0])


def test_the_check_fails_nan_and_infinity() -> None:
    """A partial sum at the limit passes; above it, infinite or NaN, it fails, wherever it stands."""
    clean = jnp.full((tile.SUBLANES, 256), budget.LANE_LIMIT, jnp.float32)
    assert not bool(jnp.any(tile.exceeds_limit(clean) > 0.0))
    for value in (above(budget.LANE_LIMIT), INF, NAN):
        for place in ((0, 0), (3, 100), (tile.SUBLANES - 1, 255)):
            marks = np.asarray(tile.exceeds_limit(clean.at[place].set(value)))
            assert marks[place] == 1.0
            assert marks.sum() == 1.0


def test_partial_sums_are_no_more_than_lanes() -> None:
    """A query's denominator is kept as at most LANES partial sums, each with a limit of its own."""
    assert tile.SUBLANES <= budget.LANES
    ones = jnp.ones((512, 128), jnp.float32)
    assert tile.partial_sums(ones).shape[0] == tile.SUBLANES
    np.testing.assert_array_equal(tile.denominator(tile.partial_sums(ones)), jnp.full((1, 128), 512.0))


def test_quotients_at_the_limits() -> None:
    """0.5 / l is normal and within its unit at both ends of the range of checked denominators."""
    top = budget.LANES * budget.LANE_LIMIT
    denominators = np.array([top, below(top), budget.SUM_FLOOR, above(budget.SUM_FLOOR), 1.0, 3.0], np.float32)
    quotients = np.asarray(0.5 / jnp.asarray(denominators))
    for l, quotient in zip(denominators.tolist(), quotients.tolist(), strict=True):  # noqa: E741  the denominator
        exact = 1 / (2 * Fraction(l))
        assert FP32.holds(Fraction(quotient))
        assert abs(Fraction(quotient) - exact) <= Fraction(devices.CPU_INTERPRET.reciprocal_relative) * exact
    sums = jnp.full((tile.SUBLANES, 1), budget.LANE_LIMIT, jnp.float32)
    assert float(tile.denominator(sums)[0, 0]) <= top


def test_rows_below_the_floor_are_unsound() -> None:
    """A denominator at the floor or at the top passes; below, above, zero, infinite or NaN it fails."""
    top = budget.LANES * budget.LANE_LIMIT
    np.testing.assert_array_equal(tile.denominator_unsound(row(budget.SUM_FLOOR, 1.0, top)), jnp.zeros((1, 3)))
    bad = row(float(below(budget.SUM_FLOOR)), 0.0, NAN, INF, float(above(top)))
    np.testing.assert_array_equal(tile.denominator_unsound(bad), jnp.ones((1, 5)))


def test_results_that_are_not_finite_are_unsound() -> None:
    """The largest FP32 passes; one infinite or NaN entry of o fails its query and no other."""
    o = jnp.full((64, 128), budget.FP32_MAX, jnp.float32)
    np.testing.assert_array_equal(tile.overflow_marks(o), jnp.zeros((1, 128)))
    for value in (INF, -INF, NAN):
        marks = np.asarray(tile.overflow_marks(o.at[63, 5].set(value)))
        assert marks[0, 5] == 1.0
        assert marks.sum() == 1.0


def test_anchor_is_ceiling_plus_bias() -> None:
    """The anchor is the ceiling of the largest visible score, plus BIAS; invisible scores, NaN too, do not count."""
    scores = [[0.25, -3.0, 9.5, NAN], [-7.75, -8.0, INF, NAN], [2.0**30, 1.0, 2.0**31, NAN]]
    s = jnp.asarray(scores, jnp.float32).T
    visible = jnp.asarray([[True, True, False, False]] * 3).T
    anchors = np.asarray(tile.choose_anchor(s, visible))[0]
    np.testing.assert_array_equal(anchors, [1.0 + budget.BIAS, -7.0 + budget.BIAS, 2.0**30])


@pytest.mark.parametrize("size", [1.0, 1e3, 1e6, 2.0**23, 2.0**40, 2.0**126])
def test_replay_weights_stay_below_the_bias(size: float) -> None:
    """However large the scores, weights are at most 2**-BIAS and the maximum's at least 2**-(BIAS + 1), exp2 apart."""
    rng = np.random.default_rng(3)
    s = jnp.asarray(rng.uniform(-size, size, (256, 64)), jnp.float32)
    first = jnp.full((1, 64), tile.UNSET, jnp.float32)
    p, new_max, factor = tile.online_weights(s, first, jnp.ones(s.shape, bool), late_bias=True)
    room = devices.CPU_INTERPRET.exp2_relative
    assert float(jnp.max(p)) <= 2.0**-budget.BIAS * (1 + room)
    assert bool(jnp.all(jnp.max(p, axis=0) >= 2.0 ** -(budget.BIAS + 1) * (1 - room)))
    assert bool(jnp.all(new_max >= jnp.max(s, axis=0, keepdims=True)))
    assert bool(jnp.all(factor == 0.0))


def test_running_maximum_is_an_integer() -> None:
    """The running maximum is integer-valued, never falls, and its first value stays while no key is visible."""
    assert tile.UNSET == -budget.FP32_MAX
    rng = np.random.default_rng(4)
    running = jnp.full((1, 32), tile.UNSET, jnp.float32)
    unseen = jnp.zeros((128, 32), bool)
    for size in (3.0, 3e3, 3e5, 3e9):
        s = jnp.asarray(rng.uniform(-size, size, (128, 32)), jnp.float32)
        _, kept, factor = tile.online_weights(s, running, unseen, late_bias=True)
        np.testing.assert_array_equal(kept, running)
        np.testing.assert_array_equal(factor, jnp.ones((1, 32)))
        _, new, _ = tile.online_weights(s, running, ~unseen, late_bias=True)
        assert bool(jnp.all((new == jnp.floor(new)) & (new >= running)))
        running = new


def test_replay_values_are_finite() -> None:
    """A replay reads zeros for values that are not finite and for rows that are no key, and the others as they are."""
    v = jnp.asarray([[BF16_MAX, -BF16_MAX, INF, -INF, NAN, 0.5]] * 2, jnp.bfloat16)
    is_key = jnp.asarray([[True] * 6, [False] * 6])
    clean = np.asarray(tile.finite_values(v, is_key)).astype(np.float64)
    np.testing.assert_array_equal(clean, [[BF16_MAX, -BF16_MAX, 0.0, 0.0, 0.0, 0.5], [0.0] * 6])


def test_normalise_limits_and_keeps_nan() -> None:
    """Results beyond the largest BF16, an overflowing product included, become it with their sign; NaN stays NaN."""
    o = jnp.asarray([[budget.FP32_MAX, -budget.FP32_MAX, NAN, BF16_MAX * 1.003, 3.0]], jnp.float32)
    o = o.T
    out = np.asarray(tile.normalise(o, row(2.0**-34)))[:, 0]
    np.testing.assert_array_equal(out, [BF16_MAX, -BF16_MAX, NAN, BF16_MAX, 3.0 * 2.0**34])
    limited = np.asarray(tile.normalise(o, row(1.0)).astype(jnp.bfloat16)).astype(np.float64)[:, 0]
    np.testing.assert_array_equal(limited, [BF16_MAX, -BF16_MAX, NAN, BF16_MAX, 3.0])


def test_early_shifts_are_integers() -> None:
    """With the bias added at once the running shift is integer-valued, at or above every score, and never falls."""
    rng = np.random.default_rng(8)
    shift = jnp.full((1, 32), tile.UNSET, jnp.float32)
    for size in (3.0, 3e6, 2.0**24, 3e9, 2.0**100):
        s = jnp.asarray(rng.uniform(-size, size, (128, 32)), jnp.float32)
        p, new, _ = tile.online_weights(s, shift, None, late_bias=False)
        assert bool(jnp.all((new == jnp.floor(new)) & (new >= shift) & (new >= jnp.max(s, axis=0))))
        assert float(jnp.max(p)) <= 1.0
        shift = new


@pytest.mark.parametrize("cap", [2.0**-100, 1.0, 30.0, 2.0**120])
def test_capped_scores_keep_their_bound(cap: float) -> None:
    """No score passes the cap by more than tanh's envelope and three roundings, infinite dot products included."""
    rule = tile.ScoreRule(0.5, cap)
    dots = jnp.asarray([[0.0, 1.0, -1e30, 3e38, -INF, INF]], jnp.float32)
    found = np.abs(np.asarray(rule(dots)).astype(np.float64))
    model = devices.CPU_INTERPRET
    room = (1.0 + model.tanh_relative) * (1.0 + model.unit_roundoff) ** 3
    assert (found <= cap * math.log2(math.e) * room).all()
    assert found[0, -1] == found[0, -2] > 0.0


def test_sinks_are_seen_by_the_check() -> None:
    """A denominator with a sink far above the shift is refused, one with a sink near it passes."""
    sums = jnp.full((tile.SUBLANES, 1), budget.SUM_FLOOR, jnp.float32)
    for sink, unsound in ((-1e30, 0.0), (0.0, 0.0), (80.0, 0.0), (90.0, 1.0), (1e30, 1.0)):
        l = tile.denominator(sums) + tile.sink_weight(jnp.float32(sink), row(0.0), late_bias=False)  # noqa: E741
        assert float(tile.denominator_unsound(l)[0, 0]) == unsound


def test_maxima_keep_nan() -> None:
    """A NaN score makes its query's maximum NaN, wherever it stands, and no other."""
    s = jnp.asarray(np.random.default_rng(9).normal(size=(32, 4)), jnp.float32).at[17, 2].set(NAN)
    maxima = tile.maxima_with_nan(jnp.full((tile.SUBLANES, 4), tile.UNSET, jnp.float32), s)
    largest = np.asarray(tile.largest_or_nan(maxima, axis=0))[0]
    assert np.isnan(largest).tolist() == [False, False, True, False]


def test_xla_rounds_to_bf16_as_numpy() -> None:
    """XLA's conversion agrees with ml_dtypes on every BF16 word, the midpoint above it, and their FP32 neighbours."""
    words = np.arange(2**16, dtype=np.uint32) << np.uint32(16)
    x = (words[:, None] | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).reshape(-1).view(np.float32)
    x = x[np.isfinite(x) & (np.abs(x) >= 2.0**-126)]
    with np.errstate(over="ignore"):
        expected = x.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(jnp.asarray(x).astype(jnp.bfloat16)), expected)


def test_more_than_max_keys_are_refused() -> None:
    """MAX_KEYS keys are accepted, one more is refused by name and value before anything is launched."""
    q = jax.ShapeDtypeStruct((1, 1, 1, 64), jnp.bfloat16)
    longest = jax.ShapeDtypeStruct((1, 1, budget.MAX_KEYS, 64), jnp.bfloat16)
    longer = jax.ShapeDtypeStruct((1, 1, budget.MAX_KEYS + 1, 64), jnp.bfloat16)
    checks.check_operands(q, longest, longest)
    with pytest.raises(ValueError, match=f"k must have at most .* tokens, got {budget.MAX_KEYS + 1}"):
        api.attention(q, longer, longer, causal=False)


@pytest.mark.parametrize(("keys", "finite"), [(contract.CONVEX_KEYS, True), (contract.CONVEX_KEYS + 1, False)])
def test_rows_beyond_convex_keys_have_no_finite_bound(keys: int, *, finite: bool) -> None:
    """Up to CONVEX_KEYS keys the contract's bound is finite however long the row; beyond, nothing is promised."""
    one, none = np.ones((1, 1)), np.zeros(1)
    charges = contract._Charges(np.array([keys]), devices.V6E)
    rows = contract._Rows(charges, none, one, one, none, none, highest=one, lowest=one, total_v=keys * one)
    assert bool(np.isfinite(contract._out_bound(rows, (one, 0.0 * one))).all()) is finite


@pytest.mark.parametrize("fragment", [64, 127, 192])
def test_fragments_off_the_lanes_are_refused(fragment: int) -> None:
    """A fragment is a positive multiple of LANES."""
    with pytest.raises(ValueError, match=f"config.fragment must be a positive multiple of {budget.LANES}"):
        tiling.resolve(AttentionConfig(fragment=fragment), 1024, 1024, online=False)


def test_other_head_sizes_are_refused() -> None:
    """A head_dim outside HEAD_DIMS, the sizes that the error of a score was checked for, is refused."""
    x = jax.ShapeDtypeStruct((1, 1, 8, 512), jnp.bfloat16)
    with pytest.raises(ValueError, match="head_dim must be one of"):
        api.attention(x, x, x, causal=False)

"""Each oracle tier gives known answers, within its own bound."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import mpmath
import numpy as np
import pytest

from verify.attention import health, oracle_arb, oracle_mpmath
from verify.tests.judge.problems import problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.attention.problem import AttentionProblem
    from verify.attention.reference import Reference

    Oracle = Callable[[AttentionProblem], Reference]

pytestmark = pytest.mark.smoke

TIERS = health.tiers()
LOG2_GAPS = 7.9 * math.log(2.0)
TAU = 65.21
"""nats: the largest rise of a row's maximum that a static anchor in FP32 survives with 512K keys."""


@pytest.fixture(params=list(TIERS))
def oracle(request: pytest.FixtureRequest) -> Oracle:
    """Every tier in turn."""
    return TIERS[request.param]


def assert_certified(found: Reference, out: np.ndarray, lse: np.ndarray | None = None) -> None:
    """The bound covers the distance to the known answer (known to float64 rounding), and is small."""
    pairs = [(found.out, found.out_error, np.asarray(out))]
    if lse is not None:
        pairs.append((found.lse, found.lse_error, np.asarray(lse)))
    for got, error, want in pairs:
        assert got.shape == want.shape
        finite = np.isfinite(want)
        assert np.array_equal(got[~finite], want[~finite], equal_nan=True)
        room = error[finite] + 4.0 * np.spacing(np.abs(want[finite]))
        assert np.all(np.abs(got[finite] - want[finite]) <= room)
        assert np.all(error[finite] <= 1e-12 * (1.0 + np.abs(want[finite])))


def scores_problem(keys: list[float], values: list[float], scale: float = 1.0) -> AttentionProblem:
    """One query whose logits are scale * keys."""
    return problem([[[[1.0]]]], [[[[k] for k in keys]]], [[[[v] for v in values]]], causal=False, scale=scale)


def test_rows_that_see_no_key(oracle: Oracle) -> None:
    """A1: q_len 5, kv_len 2, causal: rows 0-2 are 0 with LSE -inf, row 3 is 1 with LSE 0, row 4 is 2 with LSE ln 2."""
    values = np.repeat([[1.0], [3.0]], 8, axis=1)[None, None]
    found = oracle(problem(np.ones((1, 1, 5, 8)), np.zeros((1, 1, 2, 8)), values, causal=True))
    out = np.repeat([[0.0], [0.0], [0.0], [1.0], [2.0]], 8, axis=1)[None, None]
    assert_certified(found, out, np.array([[[-math.inf] * 3 + [0.0, math.log(2.0)]]]))


def test_drifting_maximum(oracle: Oracle) -> None:
    """B2 (a): log2 scores 0, 7.9, 15.8 with values 1, 2, 4 give 3.9916094616081 and natural LSE 10.9559207829639."""
    found = oracle(scores_problem([0.0, 1.0, 2.0], [1.0, 2.0, 4.0], LOG2_GAPS))
    assert found.out.item() == pytest.approx(3.9916094616081, abs=1e-13)
    assert found.lse.item() == pytest.approx(10.9559207829639, abs=1e-13)
    assert found.out_error.item() < 1e-13


def test_steep_scores(oracle: Oracle) -> None:
    """B2 (b): natural scores 0, 60, 100 with values 1, 2, 4 give 4 - 2 exp(-40) and LSE 100 + exp(-40)."""
    found = oracle(scores_problem([0.0, 60.0, 100.0], [1.0, 2.0, 4.0]))
    assert_certified(found, np.full((1, 1, 1, 1), 4.0), np.full((1, 1, 1), 100.0))


def test_steep_scores_below_float64() -> None:
    """B2 (b): both exact tiers resolve 4 - out = 8.5e-18, which float64 cannot."""
    steep = scores_problem([0.0, 60.0, 100.0], [1.0, 2.0, 4.0])
    with mpmath.workdps(60):
        [precise], _ = oracle_mpmath.attention_row(steep, 0, 0, 0)
        assert abs((4 - precise) - 2 * mpmath.exp(-40)) < mpmath.mpf(10) ** -33
    [ball], _ = oracle_arb.attention_row(steep, 0, 0, 0, relative=2.0**-120)
    assert 8.4e-18 < float(4 - ball) < 8.6e-18


def test_underflowing_terms(oracle: Oracle) -> None:
    """B2 (c): scores 200, 0, 0 give the first value; the other weights (e^-200) do no harm."""
    found = oracle(scores_problem([200.0, 0.0, 0.0], [1.0, 2.0, 4.0]))
    assert_certified(found, np.full((1, 1, 1, 1), 1.0), np.full((1, 1, 1), 200.0))


def test_value_that_leaves_the_budget(oracle: Oracle) -> None:
    """B2 (d): scores 0, 65 with values 1, 2^35 give 2^35 to 29 digits."""
    found = oracle(scores_problem([0.0, 65.0], [1.0, 2.0**35]))
    assert_certified(found, np.full((1, 1, 1, 1), 2.0**35), np.full((1, 1, 1), 65.0))


@pytest.mark.parametrize("gap", [np.nextafter(TAU, 0.0), TAU, np.nextafter(TAU, 100.0)])
def test_continuous_at_the_replay_threshold(oracle: Oracle, gap: float) -> None:
    """B2 (e): a gap at tau, one ulp below and one above give the same result to float64."""
    found = oracle(scores_problem([0.0, 1.0], [1.0, 2.0], float(gap)))
    assert_certified(found, np.full((1, 1, 1, 1), 2.0 - math.exp(-TAU)), np.full((1, 1, 1), float(gap)))


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (24, 4), (28, 4), (6, 2), (8, 1), (4, 4)])
def test_query_heads_read_their_kv_head(oracle: Oracle, heads: int, kv_heads: int) -> None:
    """D1: with V of KV head h equal to h + 1 and random keys, query head i gives floor(i kv_heads / heads) + 1."""
    rng = np.random.default_rng(0)
    values = np.broadcast_to(np.arange(1.0, kv_heads + 1)[None, :, None, None], (1, kv_heads, 9, 2))
    keys = rng.standard_normal((1, kv_heads, 9, 2))
    found = oracle(problem(rng.standard_normal((1, heads, 9, 2)), keys, values, causal=True))
    want = np.array([i * kv_heads // heads + 1.0 for i in range(heads)])[None, :, None, None]
    assert_certified(found, np.broadcast_to(want, (1, heads, 9, 2)))


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 63, 64, 65, 127, 129, 192])
def test_lengths_off_the_block(oracle: Oracle, tokens: int) -> None:
    """E5: equal logits and V[j] = j mod 8, not causal: every row is the exact mean, whatever the length."""
    values = (np.arange(tokens) % 8)[None, None, :, None]
    found = oracle(problem(np.ones((1, 1, 2, 1)), np.zeros((1, 1, tokens, 1)), values, causal=False))
    mean = float(Fraction(sum(j % 8 for j in range(tokens)), tokens))
    assert_certified(found, np.full((1, 1, 2, 1), mean), np.full((1, 1, 2), math.log(tokens)))


def test_bottom_right_alignment(oracle: Oracle) -> None:
    """G3: 3 queries, 128 keys, causal, equal logits, V[j] = j give 62.5, 63, 63.5 (top-left would give 0, 0.5, 1)."""
    found = oracle(
        problem(np.ones((1, 1, 3, 1)), np.zeros((1, 1, 128, 1)), np.arange(128)[None, None, :, None], causal=True)
    )
    assert_certified(found, np.array([62.5, 63.0, 63.5])[None, None, :, None])


def test_signs_of_zero_and_subnormals(oracle: Oracle) -> None:
    """Subnormal queries, keys and values are read as zero, and zeros of either sign are the same."""
    tiny = 2.0**-127
    found = oracle(
        problem([[[[tiny, -0.0]]]], [[[[2.0**127, 1.0], [-0.0, 0.0]]]], [[[[tiny, 1.0], [-tiny, 3.0]]]], causal=False)
    )
    assert_certified(found, np.array([[[[0.0, 2.0]]]]), np.array([[[math.log(2.0)]]]))


@pytest.mark.parametrize("shape", [(0, 1, 2, 2), (1, 2, 0, 2), (1, 2, 3, 0)])
def test_empty_extents(oracle: Oracle, shape: tuple[int, ...]) -> None:
    """No batch entries, no queries or no lanes: shapes are kept, nothing fails."""
    found = oracle(problem(np.ones(shape), np.ones(shape), np.ones(shape), causal=True))
    assert found.out.shape == shape
    assert found.lse.shape == shape[:3]


def test_no_keys(oracle: Oracle) -> None:
    """Without keys every row is 0 with LSE -inf."""
    found = oracle(problem(np.ones((1, 1, 3, 2)), np.ones((1, 1, 0, 2)), np.ones((1, 1, 0, 2)), causal=False))
    assert_certified(found, np.zeros((1, 1, 3, 2)), np.full((1, 1, 3), -math.inf))

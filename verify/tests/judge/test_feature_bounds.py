"""The float64 oracle stays within its bound with every feature."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest

from verify.attention import oracle_arb, oracle_float64
from verify.attention.float64_rows import UNIT
from verify.attention.problem import SMALLEST_NORMAL
from verify.tests.judge.feature_problems import FEATURES, feature_problem
from verify.tests.judge.problems import normal_problem, problem
from verify.tests.judge.test_float64_bound import certified

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flint import arb

    from verify.attention.problem import AttentionProblem

COVER, DEEP = 200, 2400
SETS = [(name,) for name in FEATURES] + [tuple(FEATURES)]


def violations(case: AttentionProblem) -> Iterator[str]:
    """Elements that ball arithmetic does not certify to be within the float64 oracle's bound."""
    found = oracle_float64.attention(case)
    assert found.max_logit is not None
    assert found.max_logit_error is not None
    for batch, head in np.ndindex(case.batch, case.heads):
        rows = [row for row in range(case.q_len) if case.seen(batch, row).size or case.sink(head) is not None]
        answers = oracle_arb.attention_rows(case, batch, head, rows, relative=2.0**-80)
        maxima = oracle_arb.max_logits(case, batch, head, rows, relative=2.0**-80)
        for row, (out, lse), largest in zip(rows, answers, maxima, strict=True):
            at = (batch, head, row)
            pairs: list[tuple[str, float, float, arb]] = [("lse", found.lse[at], found.lse_error[at], lse)]
            if largest.is_finite():
                pairs.append(("max_logit", found.max_logit[at], found.max_logit_error[at], largest))
            pairs += [(f"out {lane}", found.out[at][lane], found.out_error[at][lane], x) for lane, x in enumerate(out)]
            yield from (f"{name} {at}" for name, x, error, ball in pairs if not certified(float(x), float(error), ball))


@pytest.mark.cover
@pytest.mark.parametrize("names", SETS, ids="+".join)
def test_bound_holds_with_features(names: tuple[str, ...]) -> None:
    """Adversarial problems with each feature, and with all: not one element leaves its bound."""
    for seed in range(COVER):
        assert list(violations(feature_problem(seed, *names))) == [], f"seed {seed}"


@pytest.mark.deep
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("names", SETS, ids="+".join)
def test_bound_holds_with_features_on_thousands(names: tuple[str, ...], part: int) -> None:
    """Thousands more of each."""
    for seed in range(COVER + part * DEEP // 8, COVER + (part + 1) * DEEP // 8):
        assert list(violations(feature_problem(seed, *names))) == [], f"seed {seed}"


def test_ranges_agree_with_the_mask() -> None:
    """`views`, which float64 and the contract ask, show each row the keys that `mask` shows, whatever the features."""
    for seed in range(300):
        case = feature_problem(seed, "window", "segments", "positions")
        if seed % 3 == 0:
            case = dataclasses.replace(case, q_positions=None)
        for batch in range(case.batch):
            seen = np.zeros((case.q_len, case.kv_len), dtype=bool)
            for view in case.views(batch):
                keys = np.arange(case.kv_len)[view.keys]
                for row, first, last in zip(np.arange(case.q_len)[view.rows], view.start, view.stop, strict=True):
                    seen[row, keys[first:last]] = True
            assert np.array_equal(seen, case.mask(batch)), seed


@pytest.mark.parametrize("rows_per_block", [1, 3, 64])
def test_blocks_agree_with_features(rows_per_block: int) -> None:
    """Row blocks of any size give the same values within the bounds."""
    case = dataclasses.replace(
        normal_problem(3, heads=2, kv_heads=1, q_len=40, kv_len=50),
        window=(7, 2),
        softcap=2.0,
        sinks=np.array([0.0, 2.0], dtype=np.float32),
        causal=False,
    )
    whole, parts = oracle_float64.attention(case), oracle_float64.attention(case, rows_per_block=rows_per_block)
    for name in ("out", "lse", "max_logit"):
        room = getattr(whole, f"{name}_error") + getattr(parts, f"{name}_error")
        assert np.all(np.abs(getattr(whole, name) - getattr(parts, name)) <= room)


def test_bounds_stay_small_with_features() -> None:
    """On ordinary data the bounds are as small as without features."""
    base = normal_problem(1, q_len=128, kv_len=256, head_dim=64)
    for changes in ({"window": (63, 0)}, {"softcap": 20.0}, {"sinks": np.ones(2, dtype=np.float32)}):
        found = oracle_float64.attention(dataclasses.replace(base, **changes))
        assert found.max_logit_error is not None
        assert max(x.max() for x in (found.out_error, found.lse_error, found.max_logit_error)) < 1e-11


def test_a_key_of_zeros_wins_exactly() -> None:
    """Beside a key of large size that cannot win, the largest logit 0 of a key of zeros is as good as exact."""
    case = problem([[[[3.0, 5.0]]]], [[[[0.0, 0.0], [-300.0, 7.0]]]], [[[[1.0, 2.0], [3.0, 4.0]]]], causal=False)
    found = oracle_float64.attention(case)
    assert found.max_logit is not None
    assert found.max_logit_error is not None
    assert found.max_logit[0, 0, 0] == 0.0
    assert 0.0 < found.max_logit_error[0, 0, 0] < SMALLEST_NORMAL


@pytest.mark.parametrize(("small", "exact"), [(2.0**-10, True), (2.0**-40, False)])
def test_scores_that_cancel_without_rounding_have_no_error(small: float, *, exact: bool) -> None:
    """Where float64 holds every partial sum the largest logit has the scale's rounding alone, and only there."""
    q, k = np.ones((1, 1, 1, 64)), np.full((1, 1, 2, 64), 2.0**20)
    k[..., ::2] = -(2.0**20)
    k[..., 0], k[..., 1] = small, 0.0
    case = problem(q, k, np.ones((1, 1, 2, 1)), causal=False, scale=0.125)
    found = oracle_float64.attention(case)
    assert found.max_logit_error is not None
    reach = 0.125 * np.sqrt(64) * np.linalg.norm(k[0, 0, 0])
    assert bool(found.max_logit_error[0, 0, 0] <= 2.01 * UNIT * reach) is exact
    (largest,) = oracle_arb.max_logits(case, 0, 0, [0], relative=2.0**-80)
    assert found.max_logit is not None
    assert certified(float(found.max_logit[0, 0, 0]), float(found.max_logit_error[0, 0, 0]), largest)


def test_saturated_logits_keep_a_small_bound() -> None:
    """Scores of 2^60, known to 2^10 only, are all the cap once capped: the tangent is flat there."""
    case = problem(
        [[[[2.0**30]]]],
        np.reshape([2.0**30, 2.0**29, -(2.0**30)], (1, 1, 3, 1)),
        np.reshape([1.0, 3.0, 900.0], (1, 1, 3, 1)),
        causal=False,
    )
    found = oracle_float64.attention(dataclasses.replace(case, softcap=50.0))
    assert abs(found.out.item() - 2.0) < 1e-12
    assert found.out_error.item() < 1e-11


def test_far_segments_do_not_loosen_the_bound() -> None:
    """Keys of another segment, however large, neither widen the range of the values nor the errors of the logits."""
    case = normal_problem(2, heads=1, kv_heads=1, q_len=4, kv_len=8, causal=False)
    ids = {"q_segments": np.zeros((1, 4), np.int64), "k_segments": np.arange(8)[None] % 2}
    k, v = case.k.copy(), case.v.copy()
    k[:, :, 1::2], v[:, :, 1::2] = 2.0**90, 2.0**120
    near, far = (
        oracle_float64.attention(dataclasses.replace(x, **ids)) for x in (case, dataclasses.replace(case, k=k, v=v))
    )
    assert np.array_equal(near.out, far.out)
    assert np.array_equal(near.out_error, far.out_error)

"""What f is where inputs are not finite, in every tier."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from verify.attention import health, oracle_float64
from verify.attention.problem import AttentionProblem
from verify.tests.judge.problems import BF16, normal_problem

pytestmark = pytest.mark.cover

KNOWN = {known.name: known for known in health.known_answers()}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("tier", health.tiers())
def test_known_answer(tier: str, name: str) -> None:
    """Each tier gives each known answer: NaN and infinite scores, non-finite values, masks, empty rows."""
    case = KNOWN[name]
    found = health.tiers()[tier](case.problem)
    for got, error, want, room in (
        (found.out, found.out_error, case.answer.out, case.answer.out_error),
        (found.lse, found.lse_error, case.answer.lse, case.answer.lse_error),
    ):
        odd = ~np.isfinite(want)
        assert np.array_equal(got[odd], want[odd], equal_nan=True)
        assert np.all(error[odd] == 0.0)
        assert np.all(np.abs(got[~odd] - want[~odd]) <= error[~odd] + room[~odd])


def poisoned(seed: int) -> AttentionProblem:
    """A small problem with non-finite and subnormal entries strewn about."""
    rng = np.random.default_rng(seed)
    case = normal_problem(seed, heads=2, kv_heads=1, q_len=4, kv_len=5, head_dim=3, causal=bool(rng.integers(2)))
    arrays = []
    for x in (case.q, case.k, case.v):
        wide = x.astype(np.float64)
        odd = rng.choice([np.nan, np.inf, -np.inf, 0.0, 2.0**-130], size=x.shape)
        arrays.append(np.where(rng.random(x.shape) < rng.choice([0.0, 0.02, 0.1]), odd, wide).astype(BF16))
    return AttentionProblem(*arrays, causal=case.causal, scale=float(rng.choice([0.5, -0.5, 0.0])))


@pytest.mark.parametrize("block", range(5))
def test_tiers_agree_on_poisoned_inputs(block: int) -> None:
    """Three independent treatments of NaN, infinities and subnormals agree in class and value."""
    for seed in range(block * 30, (block + 1) * 30):
        health.cross_check(poisoned(seed), health.tiers())


def test_poison_reaches_every_class() -> None:
    """The poisoned problems produce NaN rows, infinite and NaN lanes beside finite ones, and finite rows."""
    found = [oracle_float64.attention(poisoned(seed)) for seed in range(150)]
    out = np.concatenate([reference.out.reshape(-1, 3) for reference in found])
    assert np.isnan(out).all(axis=1).any()
    assert (np.isinf(out).any(axis=1) & np.isfinite(out).any(axis=1)).any()
    assert (np.isnan(out).any(axis=1) & np.isfinite(out).any(axis=1)).any()
    assert np.isfinite(out).all(axis=1).any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tier", health.tiers())
def test_hidden_keys_and_values_never_matter(tier: str, value: float) -> None:
    """Behind a causal mask anything may stand, and the rows that do not see it stay bit for bit as they are."""
    case = normal_problem(9, heads=2, kv_heads=1, q_len=4, kv_len=6, head_dim=3)
    k, v = case.k.copy(), case.v.copy()
    k[:, :, 4:], v[:, :, 4:] = value, value
    oracle = functools.partial(health.tiers()[tier])
    clean, dirty = oracle(case), oracle(AttentionProblem(case.q, k, v, causal=True, scale=case.scale))
    seen = [row for row in range(case.q_len) if case.visible(row) <= 4]
    assert seen == [0, 1]
    for name in ("out", "lse"):
        a, b = getattr(clean, name)[:, :, seen], getattr(dirty, name)[:, :, seen]
        room = getattr(clean, f"{name}_error")[:, :, seen] + getattr(dirty, f"{name}_error")[:, :, seen]
        assert np.all(np.abs(a - b) <= room)

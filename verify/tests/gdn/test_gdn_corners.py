"""Corners of the contracts: what a conforming device may do there, one rounding or flush at a time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from verify.devices import CPU_INTERPRET, V5E
from verify.gdn import oracle_float64
from verify.gdn.cases import GdnCase
from verify.gdn.contract import contract_bound
from verify.gdn.contract_front import front
from verify.gdn.contract_recurrent import recurrent_bound
from verify.gdn.problem import SMALLEST_NORMAL, DeltaRuleProblem, Sequences
from verify.gdn.steps import BF16_STEPS, SPLIT_STEPS, ChunkSteps, decays, run

EXACT_STEPS = dataclasses.replace(SPLIT_STEPS, out="fp32")


def rule(tokens: int, d_k: int = 4, **given: object) -> DeltaRuleProblem:
    """One head with an empty state and zeros for what is not given: arrays by name, `[tokens, ...]` without heads."""
    shapes = {"q": (tokens, d_k), "k": (tokens, d_k), "v": (tokens, 2), "beta": (tokens,), "g": (tokens,)}
    arrays = {
        name: np.broadcast_to(np.asarray(given.pop(name, 0.0), np.float32), shape)[:, None].copy()
        for name, shape in shapes.items()
        if not (name == "g" and np.ndim(given.get("g", 0.0)) == 2)
    }
    if "g" in given:
        arrays["g"] = np.asarray(given.pop("g"), np.float32)[:, None]
    state = np.broadcast_to(np.asarray(given.pop("state", 0.0), np.float32), (1, 1, d_k, 2)).copy()
    return DeltaRuleProblem(**arrays, state=state, sequences=Sequences.single(tokens), scale=1.0, **given)  # type: ignore[arg-type]


def test_exp_of_a_tiny_number_is_not_exact() -> None:
    """exp(-2^-60) is 1 in float64, and within the envelope of 1 on a device: the state may move by that."""
    problem = rule(1, g=-(2.0**-60), state=1.0)
    assert (contract_bound(problem, EXACT_STEPS, V5E).state >= V5E.exp_relative).all()
    never = contract_bound(rule(1, state=1.0), EXACT_STEPS, V5E)
    assert (never.state < V5E.exp_relative).all(), "exp(0) is 1 everywhere"


@pytest.mark.parametrize("a", [-16.0, 3.0, 1e30])
def test_the_logarithm_of_softplus_errs_relatively(a: float) -> None:
    """exp(a_log + ln softplus): the logarithm's envelope is an error of the exponent, in proportion to its size."""
    case = GdnCase("random", "up to 1", "mild", seed=1, lengths=(4,), heads=(1, 1, 4, 2))
    problem = case.layer()
    problem = dataclasses.replace(problem, a=np.full_like(problem.a, a), a_log=np.zeros(1, np.float32))
    for device in (CPU_INTERPRET, V5E):
        g = front(problem, 0, BF16_STEPS, device).g
        x = problem.a.astype(np.float64) + problem.dt_bias
        logarithm = np.log(np.logaddexp(0.0, x))
        worst = np.abs(np.expm1(device.log_relative * np.abs(logarithm)) * g.value)
        assert (g.error >= worst).all()


def test_a_scaled_query_may_be_flushed() -> None:
    """q scale below the normal range becomes zero, however large the state is that it reads."""
    problem = rule(1, q=4.0 * SMALLEST_NORMAL, state=2.0**120)
    problem = dataclasses.replace(problem, scale=2.0**-3)
    lost = np.abs(oracle_float64.gdn(problem).out)
    assert (lost > SMALLEST_NORMAL).all()
    for bound in (contract_bound(problem, EXACT_STEPS, CPU_INTERPRET), recurrent_bound(problem, EXACT_STEPS, V5E)):
        assert bound.inside_out.all()
        assert (bound.out >= lost).all()


def test_a_scaled_write_strength_may_be_flushed() -> None:
    """beta_scale sigmoid(b) below the normal range becomes zero."""
    problem = GdnCase("random", "up to 1", "mild", seed=1, lengths=(2,), heads=(1, 1, 4, 2)).layer()
    problem = dataclasses.replace(problem, b=np.full_like(problem.b, -87.0), beta_scale=0.125)
    beta = front(problem, 0, BF16_STEPS, CPU_INTERPRET).beta
    assert (beta.value < SMALLEST_NORMAL).all()
    assert (beta.error >= beta.value).all()


def test_a_decayed_key_may_be_flushed_before_it_meets_a_large_query() -> None:
    """A decay per channel: (k_j D) below the normal range becomes zero, and q_i is large."""
    k, q = np.zeros((2, 4), np.float32), np.zeros((2, 4), np.float32)
    k[0, 0], q[1, 0] = 2.0**-70, 2.0**60
    g = np.full((2, 4), -58 * np.log(2.0), np.float32)
    problem = rule(2, k=k, q=q, v=[[1.0, 1.0], [0.0, 0.0]], beta=[1.0, 0.0], g=g)
    reference = oracle_float64.gdn(problem)
    bound = contract_bound(problem, EXACT_STEPS, CPU_INTERPRET)
    assert bound.inside_out.all()
    assert (np.abs(reference.out[1]) > 0.0).all()
    assert (bound.out[1] >= np.abs(reference.out[1])).all(), "o_1 = q_1 (D k_0) v_0, of which D k_0 may be 0"


def test_a_state_beyond_fp32_is_outside() -> None:
    """k v^T overflows although nothing on the way to the output does: no state is promised, nor what follows."""
    k = np.zeros((66, 4), np.float32)
    k[0] = 2.0**60
    v = np.zeros((66, 2), np.float32)
    v[0] = 2.0**80
    problem = rule(66, k=k, v=v, beta=1.0)
    with np.errstate(over="ignore", invalid="ignore"):
        assert not np.isfinite(run(problem, EXACT_STEPS).state).all()
    bound = contract_bound(problem, EXACT_STEPS, CPU_INTERPRET)
    assert not bound.inside_state.any()
    assert not bound.inside_out[64:].any()


def test_an_overflow_takes_its_chunk_along() -> None:
    """An update beyond FP32 is infinite, and 0 times it is NaN in the rows of earlier tokens of the chunk."""
    v = np.zeros((70, 2), np.float32)
    v[:64], v[68] = 1.0, np.finfo(np.float32).max
    problem = rule(70, q=0.5, k=0.5, v=v, beta=2.0)
    with np.errstate(over="ignore", invalid="ignore"):
        found = run(problem, EXACT_STEPS)
    assert np.isfinite(found.out[:64]).all()
    assert not np.isfinite(found.out[64:68]).all()
    bound = contract_bound(problem, EXACT_STEPS, CPU_INTERPRET)
    assert bound.inside_out[:64].all()
    assert not bound.inside_out[64:].any()


def test_an_inverse_beyond_fp32_is_outside() -> None:
    """Keys so large that powers of L overflow, with nothing to write: 0 times infinity is promised nowhere."""
    problem = rule(8, k=2.0**50, beta=1.0)
    with np.errstate(over="ignore", invalid="ignore"):
        found = run(problem, EXACT_STEPS)
    assert not np.isfinite(found.out).all()
    assert not contract_bound(problem, EXACT_STEPS, CPU_INTERPRET).inside_out.any()


def test_pieces_of_the_largest_log_decay() -> None:
    """-3.4e38 rounds to -inf in BF16: the sums of pieces are still those of the segments."""
    g = np.array([-0.5, -np.finfo(np.float32).max, -0.25], np.float32)
    for found, want in zip(decays(g, "pieces"), decays(g, "segments"), strict=True):
        assert np.isfinite(found).all()
        assert (found == want).all()


def test_a_flushed_update_of_the_recurrence() -> None:
    """beta v below the normal range becomes zero, and the key that it meets is large."""
    problem = rule(1, k=2.0**10, v=2.0**-107, beta=2.0**-20)
    want = np.abs(oracle_float64.gdn(problem).state[0, 0])
    bound = recurrent_bound(problem, EXACT_STEPS, CPU_INTERPRET)
    assert bound.inside_state.all()
    assert (bound.state[0, 0] >= want).all(), "beta v may be 0"


PASSES = {"bf16": (ChunkSteps(out="fp32"), 1), "bf16x3": (EXACT_STEPS, 3)}
"""In how many passes a matrix unit sums a product of at most 128 terms, or of three times as many."""


@pytest.mark.parametrize("precision", PASSES)
def test_an_addend_may_join_the_sum_of_a_product(precision: str) -> None:
    """The decayed state as the accumulator of K^T V: it goes through an addition of every pass."""
    steps, passes = PASSES[precision]
    rng = np.random.default_rng(3)
    k = rng.standard_normal((64, 4)) * 2.0**-30
    problem = rule(64, k=k, v=1.0, beta=1.0, state=1.0)
    bound = contract_bound(problem, steps, V5E)
    assert (bound.state >= passes * V5E.dot_unit_roundoff).all()

"""Behaviour beyond single results: determinism, diagnostics, layout, transformations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flywheel
from flywheel.attention.budget import BIAS, SUM_FLOOR
from verify.attention import adversarial
from verify.attention.cases import AttentionCase
from verify.attention.contract import contract_bound
from verify.attention.judge import judge
from verify.attention.subjects import run_flywheel
from verify.backend import device_model

CASE = adversarial.by_name()["jump-2000-nats-middle"]


def bits(x: np.ndarray) -> np.ndarray:
    """Words, so that NaN equals NaN and -0 does not equal 0."""
    return x.view(np.uint16 if x.dtype.itemsize == 2 else np.uint32)


def test_deterministic() -> None:
    """Two runs of one problem agree bit for bit, replays included."""
    problem = CASE.build()
    first, second = (run_flywheel(problem, config=CASE.config) for _ in range(2))
    for a, b in ((first.out, second.out), (first.lse, second.lse), (first.anchor, second.anchor), (first.l, second.l)):
        assert (bits(a) == bits(b)).all()
    assert (first.replays == second.replays).all()


def test_options_do_not_change_the_result() -> None:
    """Asking for the LSE and diagnostics leaves the output as it is, bit for bit."""
    problem = CASE.build()
    config = flywheel.AttentionConfig(*CASE.config)
    alone = flywheel.attention(
        *map(jnp.asarray, (problem.q, problem.k, problem.v)),
        causal=True,
        scale=problem.scale,
        config=config,
        interpret=True,
    )
    assert (bits(np.asarray(alone)) == bits(run_flywheel(problem, config=CASE.config).out)).all()


def test_heads_and_batch_are_independent() -> None:
    """A head's result does not depend on which other heads or batch entries stand in the call, bit for bit."""
    case = AttentionCase("independent", (2, 4, 2, 130, 130, 64), seed=11)
    problem = case.build()
    whole = run_flywheel(problem)
    one = type(problem)(problem.q[1:, 2:3], problem.k[1:, 1:], problem.v[1:, 1:], problem.causal, problem.scale)
    alone = run_flywheel(one)
    assert (bits(whole.out[1:, 2:3]) == bits(alone.out)).all()
    assert (bits(whole.lse[1:, 2:3]) == bits(alone.lse)).all()


def test_diagnostics_say_what_happened() -> None:
    """The anchor is an integer, l lies within the checked range, and together they are the LSE."""
    problem = CASE.build()
    result = run_flywheel(problem, config=CASE.config)
    assert (result.anchor == np.round(result.anchor)).all()
    assert (result.l >= SUM_FLOOR).all()
    lse = np.log(2.0) * result.anchor.astype(np.float64) + np.log(result.l.astype(np.float64))
    assert (np.abs(lse - result.lse) <= contract_bound(problem, device_model()).lse).all()
    replayed_rows = np.repeat(result.replays > 0, CASE.config[0], axis=2)
    top = np.log2(np.e) * result.lse
    assert (np.abs(result.anchor - BIAS - top)[replayed_rows] < 16).all(), "a replayed row's anchor is its maximum"


def test_invisible_keys_do_not_matter() -> None:
    """What later keys and values hold, NaN included, does not change a row's bits."""
    case = AttentionCase("prefix", (1, 1, 1, 256, 256, 64), seed=3, config=(128, 128, 128))
    problem = case.build()
    poisoned_k, poisoned_v = problem.k.copy(), problem.v.copy()
    poisoned_k[:, :, 128:], poisoned_v[:, :, 128:] = np.nan, np.inf
    poisoned = type(problem)(problem.q, poisoned_k, poisoned_v, problem.causal, problem.scale)
    clean, dirty = (run_flywheel(p, config=case.config) for p in (problem, poisoned))
    assert (bits(clean.out[:, :, :128]) == bits(dirty.out[:, :, :128])).all()
    assert (bits(clean.lse[:, :, :128]) == bits(dirty.lse[:, :, :128])).all()


def test_default_scale() -> None:
    """Without a scale the logits are divided by sqrt(head_dim)."""
    problem = AttentionCase("scale", (1, 1, 1, 64, 64, 64), seed=4).build()
    operands = [jnp.asarray(x) for x in (problem.q, problem.k, problem.v)]
    default = flywheel.attention(*operands, causal=True, interpret=True)
    stated = flywheel.attention(*operands, causal=True, scale=0.125, interpret=True)
    assert (bits(np.asarray(default)) == bits(np.asarray(stated))).all()


def test_works_under_jit() -> None:
    """The function may stand inside a larger jitted computation."""
    problem = AttentionCase("jit", (1, 1, 1, 64, 64, 64), seed=5).build()
    operands = [jnp.asarray(x) for x in (problem.q, problem.k, problem.v)]
    inside = jax.jit(lambda q, k, v: flywheel.attention(q, k, v, causal=True, interpret=True) * 2)(*operands)
    outside = flywheel.attention(*operands, causal=True, interpret=True)
    assert (np.asarray(inside) == 2 * np.asarray(outside)).all()


@pytest.mark.tpu
def test_on_a_tpu() -> None:
    """On a TPU the compiled kernel obeys the contract of that device's model, replays included."""
    problem = CASE.build()
    bound = contract_bound(problem, device_model())
    result = run_flywheel(problem, config=CASE.config, interpret=False)
    judgement = judge(problem, result.out, result.lse, bound)
    assert judgement.passed, judgement.reason

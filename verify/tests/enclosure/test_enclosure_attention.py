"""Enclosures of attention: every execution, the exact answer and the real kernel lie inside."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest

from verify.attention import oracle_float64
from verify.attention.adversarial import families
from verify.attention.cases import AttentionCase
from verify.attention.subjects import run_flywheel
from verify.devices import CPU_INTERPRET, MODELS, V6E, DeviceModel
from verify.enclosure import executions
from verify.enclosure.attention import SOFTMAXES, AttentionEnclosure, attention

if TYPE_CHECKING:
    from verify.attention.problem import AttentionProblem

SHAPE = (1, 2, 1, 6, 20, 8)
CASES = {
    "ordinary": AttentionCase("ordinary", SHAPE, seed=1),
    "causal": AttentionCase("causal", SHAPE, seed=2, causal=True),
    "window": AttentionCase("window", SHAPE, seed=3, causal=True, window=(4, None)),
    "no key": AttentionCase("no key", (1, 1, 1, 8, 5, 8), seed=4, causal=True),
    "large scores": AttentionCase("large scores", SHAPE, seed=5, exponents=(4, 4, 0)),
    "huge values": AttentionCase("huge values", SHAPE, seed=6, exponents=(2, 2, 120)),
    "tiny values": AttentionCase("tiny values", SHAPE, seed=7, exponents=(0, 0, -120)),
    "small scores": AttentionCase("small scores", SHAPE, seed=8, exponents=(-20, -20, 0)),
}


def escaped(enclosure: AttentionEnclosure, out: np.ndarray, lse: np.ndarray) -> int:
    """Numbers outside."""
    of_lse = np.where(enclosure.empty, ~np.isneginf(lse), ~enclosure.lse.contains(lse))
    return int((~enclosure.out.contains(out)).sum() + of_lse.sum())


def check_executions(problem: AttentionProblem, device: DeviceModel, seeds: range) -> None:
    """Random executions of both softmaxes, against both kinds of enclosure."""
    for softmax in SOFTMAXES:
        wide, tight = (attention(problem, device, softmax=softmax, tight=tight) for tight in (False, True))
        for seed in seeds:
            out, lse = executions.attention(problem, executions.drawn(device, seed), softmax=softmax)
            for name, enclosure in (("wide", wide), ("tight", tight)):
                assert escaped(enclosure, out, lse) == 0, (softmax, name, seed)


@pytest.mark.parametrize("name", CASES)
def test_executions_lie_inside(name: str) -> None:
    """Random orders, fragments, anchors and roundings, on one case of each kind."""
    check_executions(CASES[name].build(), V6E if len(name) % 2 else CPU_INTERPRET, range(4))


@pytest.mark.deep
@pytest.mark.parametrize("device", sorted(MODELS))
@pytest.mark.parametrize("name", CASES)
def test_many_executions_lie_inside(name: str, device: str) -> None:
    """The same for every device and many more draws."""
    for seed in range(2):
        check_executions(dataclasses.replace(CASES[name], seed=10 + seed).build(), MODELS[device], range(12))


@pytest.mark.parametrize("name", CASES)
def test_the_exact_answer_lies_inside(name: str) -> None:
    """Where rounding widens; with known roundings it need not."""
    problem = CASES[name].build()
    reference, enclosure = oracle_float64.attention(problem), attention(problem, CPU_INTERPRET)
    assert (np.abs(reference.out - enclosure.out.mid) <= enclosure.out.rad + reference.out_error).all()
    error = np.abs(np.where(enclosure.empty, 0.0, reference.lse) - enclosure.lse.mid)
    assert (error <= enclosure.lse.rad + reference.lse_error)[~enclosure.empty].all()


def kernel_cases() -> list[AttentionCase]:
    """One of each kind in a shape that the kernel takes."""
    return [
        AttentionCase("kernel", (1, 2, 1, 24, 40, 64), seed=1, causal=True),
        AttentionCase("kernel", (1, 1, 1, 16, 48, 64), seed=2, exponents=(3, 3, 60)),
        AttentionCase("kernel", (1, 2, 2, 40, 8, 64), seed=3, causal=True),
    ]


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.deep) for n in (1, 2))])
def test_the_kernel_lies_inside(number: int) -> None:
    """`flywheel.attention`, within what is enclosed up to the noise of FP32."""
    problem = kernel_cases()[number].build()
    result = run_flywheel(problem)
    for tight in (False, True):
        enclosure = attention(problem, CPU_INTERPRET, tight=tight)
        assert enclosure.contains(np.asarray(result.out), np.asarray(result.lse))


@pytest.mark.deep
def test_the_kernel_lies_inside_on_every_adversarial_case() -> None:
    """Every named case, replays, soft caps and sinks included."""
    for family, cases in families().items():
        for case in cases:
            problem = case.build()
            result = run_flywheel(problem, config=case.config)
            assert result.lse is not None
            found = attention(problem, CPU_INTERPRET)
            assert escaped(found, np.asarray(result.out), np.asarray(result.lse)) == 0, (family, case.name)


def test_a_wrong_result_lies_outside() -> None:
    """The next head's output, the mean of V, one unit in the last place more than the kernel's: none is enclosed."""
    problem = CASES["causal"].build()
    out, lse = executions.attention(problem, executions.drawn(CPU_INTERPRET, 3))
    tight = attention(problem, CPU_INTERPRET, tight=True)
    assert tight.contains(out, lse)
    assert not tight.contains(np.roll(out, 1, axis=1), lse)
    assert not tight.contains(out * (1.0 + 2.0**-7), lse)
    assert not tight.contains(out, lse + 0.01)
    assert not attention(problem, CPU_INTERPRET).contains(
        np.broadcast_to(out.mean(axis=2, keepdims=True), out.shape), lse
    )


def test_rows_outside_the_domain_are_not_known() -> None:
    """A NaN or an infinity in q or k takes its rows out, one in v its lane."""
    problem = CASES["ordinary"].build()
    q, v = problem.q.copy(), problem.v.copy()
    q[0, 0, 2, 3], v[0, 0, 4, 5] = np.nan, np.inf
    found = attention(dataclasses.replace(problem, q=q, v=v), CPU_INTERPRET)
    assert np.isinf(found.out.rad[0, 0, 2]).all()
    assert np.isinf(found.out.rad[0, 0, :, 5]).all()
    assert np.isfinite(found.out.rad[0, 1, 2, :5]).all()


def test_another_softmax_is_refused() -> None:
    """By name, value and rule."""
    with pytest.raises(ValueError, match="softmax must be one of static, online, got 'flash'"):
        attention(CASES["ordinary"].build(), CPU_INTERPRET, softmax="flash")

"""Gradients of the delta rule: bounds against balls, independent tiers, wrong adjoints caught."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from verify.gdn.cases import GdnCase, every_family
from verify.gdn.gradients import health, oracle_arb, oracle_float64
from verify.gdn.gradients.problem import NAMES, GradientProblem, GradientReference
from verify.gdn.problem import Sequences
from verify.gdn.reference import OracleUnsound

SIZES = ((5,), (3, 0, 4), (9,))
HEADS = ((1, 1, 3, 2), (1, 2, 4, 2))


def check(stride: int, rounds: int = 1) -> int:
    """Compare the float64 tier with balls; returns how many cases there were."""
    count = 0
    for number in range(rounds):
        for i, family in enumerate(every_family(seed=500 * number)):
            if i % stride:
                continue
            case = dataclasses.replace(
                family, lengths=SIZES[i % 3], heads=HEADS[i % 2], per_channel=(i + number) % 4 == 0
            )
            problem = health.drawn(case)
            found, balls = oracle_float64.gradients(problem), oracle_arb.gradients(problem)
            for name in NAMES:
                room = found.error[name] + balls.error[name]
                assert (np.abs(found.value[name] - balls.value[name]) <= room).all(), (case.name, name)
            count += 1
    return count


def test_bounds_hold() -> None:
    """A thirteenth of all families: not one derivative beyond its bound."""
    assert check(13) == 26


@pytest.mark.deep
def test_bounds_hold_on_every_family() -> None:
    """All families, several times."""
    assert check(1, rounds=6) == 2016


def test_the_oracles_are_healthy() -> None:
    """Closed form, and three ways that agree."""
    health.check_oracles()


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_derivative_is_caught(name: str) -> None:
    """One derivative a little off, in one tier."""

    def wrong(problem: GradientProblem) -> GradientReference:
        found = oracle_float64.gradients(problem)
        return dataclasses.replace(found, value=found.value | {name: found.value[name] * (1.0 + 1e-6)})

    with pytest.raises(OracleUnsound, match=f"by {name}"):
        health.check_oracles(health.tiers() | {"wrong": wrong})


def test_checkpoints_change_nothing() -> None:
    """A sequence longer than a checkpoint: the derivative by the first token's value is what balls say."""
    problem = health.drawn(GdnCase("random", "up to 1", "mild", seed=2, lengths=(70,), heads=(1, 1, 3, 2)))
    found, balls = oracle_float64.gradients(problem), oracle_arb.gradients(problem)
    for name in NAMES:
        assert (np.abs(found.value[name] - balls.value[name]) <= found.error[name] + balls.error[name]).all(), name


def test_a_hard_reset_stops_the_gradient() -> None:
    """Nothing flows to tokens before g = -inf but from their own outputs; the derivative by that g is 0."""
    problem = health.drawn(GdnCase("random", "up to 1", "mild", seed=7, lengths=(6,), heads=(1, 1, 3, 2)))
    assert problem.rule.g is not None
    g, d_out = problem.rule.g.copy(), problem.d_out.copy()
    g[3], d_out[:3] = -np.inf, 0.0
    found = oracle_float64.gradients(
        dataclasses.replace(problem, rule=dataclasses.replace(problem.rule, g=g), d_out=d_out)
    )
    for name in ("q", "k", "v", "beta"):
        assert (np.abs(found.value[name][:3]) <= found.error[name][:3]).all(), name
    assert (found.value["g"][:4] == 0.0).all()
    assert (found.value["initial"] == 0.0).all()


def test_tokens_of_no_sequence_have_no_gradient() -> None:
    """Padding behind the last boundary."""
    problem = health.drawn(GdnCase("random", "up to 1", "mild", seed=7, lengths=(6,), heads=(1, 1, 3, 2)))
    short = dataclasses.replace(problem, rule=dataclasses.replace(problem.rule, sequences=Sequences.packed([4])))
    found = oracle_float64.gradients(short)
    assert not found.value["v"][4:].any()
    assert found.value["v"][:4].any()


@pytest.mark.parametrize(
    ("field", "message"),
    [("d_out", r"d_out must be BF16 or FP32 \[6, 1, 2\]"), ("d_state", r"d_state must be BF16 or FP32 \[1, 1, 3, 2\]")],
)
def test_shapes_are_checked(field: str, message: str) -> None:
    """By name."""
    problem = health.drawn(GdnCase("random", "up to 1", "mild", seed=7, lengths=(6,), heads=(1, 1, 3, 2)))
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(problem, **{field: np.zeros((2, 2), np.float32)})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["q", "beta"])
def test_non_finite_inputs_are_refused(name: str) -> None:
    """Derivatives are of finite inputs."""
    problem = health.drawn(GdnCase("random", "up to 1", "mild", seed=7, lengths=(6,), heads=(1, 1, 3, 2)))
    bad = getattr(problem.rule, name).copy()
    bad[0] = np.nan
    with pytest.raises(ValueError, match=f"{name} must be finite"):
        dataclasses.replace(problem, rule=dataclasses.replace(problem.rule, **{name: bad}))  # type: ignore[arg-type]

"""Enclosures of the Gated DeltaNet chunk: every execution, the exact answer and the emulated kernel lie inside."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest

from verify.devices import CPU_INTERPRET, MODELS, V6E, DeviceModel
from verify.enclosure import executions
from verify.enclosure.gdn import gdn
from verify.gdn import oracle_float64
from verify.gdn.cases import GdnCase, every_family
from verify.gdn.contract import contract_bound
from verify.gdn.inverse_steps import InverseSteps
from verify.gdn.judge import judge
from verify.gdn.steps import BF16_STEPS, KNOWN_STEPS, RESIDUAL_STEPS, SPLIT_STEPS, ChunkSteps, run
from verify.subjects import gdn_ours
from verify.subjects.gdn_ours import run_flywheel_gdn
from verify.verdict import Verdict

if TYPE_CHECKING:
    from verify.gdn.problem import Problem

HEADS = (1, 1, 8, 4)
STEPS = {
    "bf16": BF16_STEPS,
    "bf16x3": SPLIT_STEPS,
    "residual first": RESIDUAL_STEPS,
    "sigmoid, rounded copies, fp32 out": ChunkSteps(
        InverseSteps("bf16x3", "multiply"), "bf16x3", silu="sigmoid", convolution="bf16", out="fp32"
    ),
    "known operands, gates in pieces, fp32 out": dataclasses.replace(KNOWN_STEPS, decay="pieces", out="fp32"),
}


def case(keys: str, beta: str, decay: str, lengths: tuple[int, ...]) -> GdnCase:
    """Small."""
    return GdnCase(keys, beta, decay, seed=3, lengths=lengths, heads=HEADS)


CASES = {
    "random": case("random", "up to 1", "mild", (24,)),
    "identical": case("identical", "1", "0", (17,)),
    "periodic, resets": case("periodic", "1 to 2", "resets", (20, 3)),
    "zero, huge": case("zero", "up to 1", "huge", (12,)),
}


def check_executions(problem: Problem, steps: ChunkSteps, device: DeviceModel, seeds: range) -> None:
    """Random executions against both kinds of enclosure, and against the contract."""
    reference, bound = oracle_float64.gdn_chunked(problem), contract_bound(problem, steps, device)
    for seed in seeds:
        results = dict(
            zip(("out", "state"), executions.gdn(problem, steps, executions.drawn(device, seed)), strict=True)
        )
        for name, got in results.items():
            error = np.abs(got - getattr(reference, name))
            assert (error <= getattr(bound, name) + getattr(reference, f"{name}_error")).all(), (name, seed)
    for tight in (False, True):
        found = gdn(problem, steps, device, tight=tight)
        for seed in seeds:
            out, state = executions.gdn(problem, steps, executions.drawn(device, seed))
            outside = int((~found.out.contains(out)).sum()), int((~found.state.contains(state)).sum())
            assert outside == (0, 0), (tight, seed)


SLOW = ("periodic, resets", "zero, huge")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.deep) if n in SLOW else n for n in CASES])
def test_executions_lie_inside(name: str) -> None:
    """Random orders and roundings, as layer and as delta rule."""
    layer, rule = CASES[name].layer(negative=CASES[name].beta == "1 to 2"), CASES[name].rule()
    check_executions(layer, BF16_STEPS, V6E, range(2))
    check_executions(rule, SPLIT_STEPS, CPU_INTERPRET, range(2, 3))


@pytest.mark.deep
@pytest.mark.parametrize("device", sorted(MODELS))
@pytest.mark.parametrize("steps", STEPS)
def test_many_executions_lie_inside(steps: str, device: str) -> None:
    """Every family of keys, write strengths and decays, two chunks."""
    for number, family in enumerate(every_family(seed=5)):
        if number % 53:
            continue
        drawn = dataclasses.replace(family, lengths=(66, 3), heads=HEADS)
        problem: Problem = drawn.layer(negative=drawn.beta in ("2", "1 to 2")) if number % 2 else drawn.rule()
        check_executions(problem, STEPS[steps], MODELS[device], range(4))


def check_points(problem: Problem, steps: ChunkSteps) -> None:
    """The exact answer (wide), and the emulated kernel (both)."""
    reference, emulated = oracle_float64.gdn_chunked(problem), run(problem, steps)
    wide, tight = (gdn(problem, steps, CPU_INTERPRET, tight=tight) for tight in (False, True))
    for name in ("out", "state"):
        ball, want, error = getattr(wide, name), getattr(reference, name), getattr(reference, f"{name}_error")
        assert (np.abs(ball.mid - want) <= ball.rad + error).all(), name
    for found in (wide, tight):
        assert found.contains(emulated.out, emulated.state)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("steps", ["bf16", "bf16x3"])
def test_the_exact_answer_and_the_emulation_lie_inside(name: str, steps: str) -> None:
    """For both modes."""
    check_points(CASES[name].layer(negative=CASES[name].beta == "1 to 2"), STEPS[steps])


@pytest.mark.deep
@pytest.mark.parametrize("steps", STEPS)
def test_points_lie_inside_on_more(steps: str) -> None:
    """Many families, two chunks and a short sequence."""
    for number, family in enumerate(every_family(seed=11)):
        if number % 5 == 0:
            drawn = dataclasses.replace(family, lengths=(70, 3), heads=HEADS)
            check_points(drawn.layer(negative=drawn.beta in ("2", "1 to 2")), STEPS[steps])
            check_points(drawn.rule(), STEPS[steps])


def test_tighter_than_the_contract() -> None:
    """One chunk with known roundings: half the width of the contract's bound or less, at the worst element."""
    problem = dataclasses.replace(CASES["random"], lengths=(64,), heads=(1, 1, 32, 8)).layer()
    bound, found = (
        contract_bound(problem, BF16_STEPS, CPU_INTERPRET),
        gdn(problem, BF16_STEPS, CPU_INTERPRET, tight=True),
    )
    assert found.out.rad.max() < bound.out.max() / 2
    assert found.state.rad.max() < bound.state.max() / 2


def test_a_wrong_result_lies_outside() -> None:
    """The previous token's output, and a state that was not decayed."""
    problem = CASES["random"].layer()
    found, emulated = gdn(problem, SPLIT_STEPS, CPU_INTERPRET), run(problem, SPLIT_STEPS)
    assert found.contains(emulated.out, emulated.state)
    assert not found.contains(np.roll(emulated.out, 1, axis=0), emulated.state)
    assert not found.contains(emulated.out, emulated.state * np.float32(1.02))


def test_slots_that_nobody_writes_are_exact() -> None:
    """Copies have no radius."""
    problem = CASES["random"].rule()
    sequences = dataclasses.replace(problem.sequences, write_slots=np.array([-1]))
    found = gdn(dataclasses.replace(problem, sequences=sequences), SPLIT_STEPS, CPU_INTERPRET)
    assert (found.state.rad == 0.0).all()
    assert (found.state.mid == problem.state).all()


def test_gates_per_channel_are_refused() -> None:
    """By rule and value."""
    problem = dataclasses.replace(CASES["random"], per_channel=True).rule()
    with pytest.raises(ValueError, match="one decay per head, got one per channel"):
        gdn(problem, BF16_STEPS, CPU_INTERPRET)


@pytest.mark.deep
@pytest.mark.parametrize("precision", ["bf16", "bf16x3"])
def test_the_kernel_lies_inside(precision: str) -> None:
    """`flywheel.gdn`, two chunks, within both enclosures; and within the contract with known operands."""
    for keys in ("random", "near-duplicate"):
        problem = GdnCase(keys, "up to 1", "mild", seed=2, lengths=(100,), heads=(1, 1, 128, 128)).layer()
        result, steps = run_flywheel_gdn(problem, precision=precision), gdn_ours.steps(precision)
        assert result.out is not None
        for tight in (False, True):
            found = gdn(problem, steps, CPU_INTERPRET, tight=tight)
            assert found.contains(np.asarray(result.out, dtype=np.float64), result.state)
        bound = contract_bound(problem, dataclasses.replace(steps, operands="known"), CPU_INTERPRET)
        assert judge(problem, result, bound).verdict is Verdict.PASS

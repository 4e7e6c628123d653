"""Verdicts on outputs, final states and convolution states."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from verify.devices import CPU_INTERPRET
from verify.gdn import judge as judging
from verify.gdn import oracle_arb, oracle_float64
from verify.gdn.cases import GdnCase
from verify.gdn.contract import GdnBound, contract_bound
from verify.gdn.judge import GdnResult, judge
from verify.gdn.problem import BF16, DeltaRuleProblem, GdnProblem, Sequences, final_conv_state, value_lanes
from verify.gdn.steps import BF16_STEPS, SPLIT_STEPS, ChunkSteps, run
from verify.verdict import Verdict


def layer(seed: int = 1, **changes: object) -> GdnProblem:
    """A packed layer call with grouped heads whose slots outnumber its sequences."""
    case = GdnCase("random", "up to 1", "mild", seed=seed, lengths=(66, 9), heads=(1, 2, 16, 8))
    problem = case.layer()
    spare = dataclasses.replace(
        problem,
        state=np.concatenate([problem.state, problem.state[:1] * 3]),
        conv_state=np.concatenate([problem.conv_state, problem.conv_state[:1]]),
    )
    return dataclasses.replace(spare, **changes)  # type: ignore[arg-type]


def answer(problem: GdnProblem, steps: ChunkSteps = SPLIT_STEPS) -> GdnResult:
    """What the emulated kernel gives."""
    found = run(problem, steps)
    return GdnResult(found.out, found.state, final_conv_state(problem))


def bound(problem: GdnProblem, steps: ChunkSteps = SPLIT_STEPS) -> GdnBound:
    """The contract."""
    return contract_bound(problem, steps, CPU_INTERPRET)


@functools.cache
def plain() -> tuple[GdnProblem, GdnResult, GdnBound]:
    """The layer, its emulated answer and its bound, made once."""
    problem = layer()
    return problem, answer(problem), bound(problem)


def test_the_emulated_kernel_passes() -> None:
    """In both modes; with a check of power in the mode that has it."""
    problem = layer()
    verdict = judge(problem, answer(problem), bound(problem), power=True)
    assert verdict.verdict is Verdict.PASS, verdict.reason
    rough = judge(problem, answer(problem, BF16_STEPS), bound(problem, BF16_STEPS))
    assert rough.verdict is Verdict.PASS, rough.reason


def test_growth_over_tokens_is_reported() -> None:
    """The measures of the output say how errors depend on the token."""
    problem = layer()
    verdict = judge(problem, answer(problem), bound(problem))
    assert verdict.measures["out"].growth is not None


@pytest.mark.parametrize(
    "mistake",
    [
        "one element",
        "wrong head",
        "state transposed",
        "stale slot",
        "convolution state",
        "untouched slot",
        "NaN",
        "no decay",
    ],
)
def test_mistakes_fail(mistake: str) -> None:
    """Each of these is found, and the reason names the array."""
    problem, good, limit = plain()
    assert good.out is not None
    assert good.conv_state is not None
    out, state, conv = good.out.copy(), good.state.copy(), good.conv_state.copy()
    named = "out"
    if mistake == "one element":
        out[40, 1, 3] *= 1.1
    elif mistake == "wrong head":
        out = out[:, ::-1].copy()
    elif mistake == "state transposed":
        state, named = state[:, :, ::-1].copy(), "state"
    elif mistake == "stale slot":
        state[1], named = problem.state[1], "state"
    elif mistake == "convolution state":
        conv[0, 2, 5], named = conv[0, 1, 5], "conv_state"
    elif mistake == "untouched slot":
        state[2, 0, 0, 0], named = 0.5, "slots [2]"
    elif mistake == "NaN":
        out[3, 0, 0] = np.nan
    else:
        out = run(dataclasses.replace(problem, a=np.full_like(problem.a, -200)), SPLIT_STEPS).out
    verdict = judge(problem, GdnResult(out, state, conv), limit)
    assert verdict.verdict is Verdict.FAIL
    assert named in verdict.reason


def test_a_wide_bound_has_no_power() -> None:
    """A bound that also accepts zeros says so."""
    problem = layer()
    wide = dataclasses.replace(bound(problem), out=np.full((75, 2, 8), 100.0), state=np.full((3, 2, 16, 8), 100.0))
    verdict = judge(problem, answer(problem), wide, power=True)
    assert verdict.verdict is Verdict.NO_POWER
    assert "ill-conditioned" in verdict.reason
    assert "zeros, with the states as they were" in verdict.reason


def test_nan_in_one_sequence_stays_there() -> None:
    """A NaN in the second sequence's values is not judged there, and must not reach the first."""
    problem = layer()
    qkv = problem.qkv.copy()
    qkv[68, -1] = np.nan  # the last lane of the last value head
    poisoned = dataclasses.replace(problem, qkv=qkv)
    good = answer(problem)
    assert good.out is not None
    out, state = good.out.copy(), good.state.copy()
    out[68:, 1, -1], state[1, 1, :, -1] = np.nan, np.nan
    result = GdnResult(out, state, final_conv_state(poisoned))
    verdict = judge(poisoned, result, bound(poisoned))
    assert verdict.verdict is Verdict.PASS, verdict.reason
    out[0, 1, -1] = np.nan
    assert judge(poisoned, result, bound(poisoned)).verdict is Verdict.FAIL


def test_tokens_of_no_sequence_are_not_judged() -> None:
    """What stands behind the last boundary is the kernel's own."""
    problem = layer(sequences=Sequences.packed([66]))
    found = answer(problem)
    assert found.out is not None
    found.out[66:] = 777
    assert judge(problem, found, bound(problem)).verdict is Verdict.PASS


def test_speculative_tokens() -> None:
    """States after the accepted tokens; outputs of all."""
    sequences = dataclasses.replace(Sequences.packed([66, 9]), accepted=np.array([62, 0]))
    problem = layer(sequences=sequences)
    found = answer(problem)
    assert judge(problem, found, bound(problem)).verdict is Verdict.PASS
    whole = answer(layer())
    late = GdnResult(found.out, whole.state, found.conv_state)
    assert judge(problem, late, bound(problem)).verdict is Verdict.FAIL
    reference = oracle_float64.gdn(problem)
    assert (reference.state[1] == problem.state[1]).all()


def test_a_bound_of_another_shape_is_refused() -> None:
    """By name."""
    problem = layer()
    other = dataclasses.replace(bound(problem), out=np.zeros((1, 2, 8)))
    with pytest.raises(ValueError, match=r"bound.out must have shape \(75, 2, 8\)"):
        judge(problem, answer(problem), other)


def test_another_shape_fails() -> None:
    """A result of another shape is a failure, not an exception."""
    problem = layer()
    found = answer(problem)
    assert found.out is not None
    verdict = judge(problem, GdnResult(found.out[:-1], found.state, found.conv_state), bound(problem))
    assert verdict.verdict is Verdict.FAIL
    assert "shapes differ" in verdict.reason


UNWRITTEN = (0, 0, slice(0, 64), slice(0, 8))
"""Entries of the state below that are exactly 0: where these lanes of a key are not 0, those of its value are."""


def alternating() -> DeltaRuleProblem:
    """Sixteen tokens of huge values, keys by turns in one half of their lanes and in the other; too many for balls."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((16, 1, 128)) for _ in range(3))
    k[::2, :, 64:] = k[1::2, :, :64] = v[::2, :, :8] = 0.0
    k /= np.sqrt((k * k).sum(axis=-1, keepdims=True))
    return DeltaRuleProblem(
        *(x.astype(BF16) for x in (q, k, 2.0**40 * v)),
        beta=np.full((16, 1), 0.5, np.float32),
        g=np.full((16, 1), -0.01, np.float32),
        state=np.zeros((1, 1, 128, 128), np.float32),
        sequences=Sequences.single(16),
    )


def test_what_float64_cannot_tell_is_decided_in_its_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exact 0 passes where the reference's own error is beyond the bound; a small number there fails.

    Where balls would take too long, neither is called wrong: the verdict says that the case is ill-conditioned.
    """
    problem = alternating()
    limits, reference = bound(problem), oracle_float64.gdn_chunked(problem)
    assert (reference.state_error[UNWRITTEN] > limits.state[UNWRITTEN]).any(), "nothing is open, nothing is tested"
    out, right = reference.out.astype(np.float32), reference.state.astype(np.float32)
    right[UNWRITTEN] = 0.0
    off = right.copy()
    off[0, 0, 2, 3] = 2.0**-40
    found = [judge(problem, GdnResult(out, state), limits, reference=reference) for state in (right, off)]
    assert [each.verdict for each in found] == [Verdict.PASS, Verdict.FAIL], [each.reason for each in found]
    assert "1 of 16384 elements of state are wrong; worst state[0, 0, 2, 3]" in found[1].reason
    monkeypatch.setattr(judging, "MOST_BALLS", 16 * 128)  # one lane: the one that is off comes first
    assert judge(problem, GdnResult(out, off), limits, reference=reference).verdict is Verdict.FAIL
    monkeypatch.setattr(judging, "MOST_BALLS", 0)
    unsure = judge(problem, GdnResult(out, off), limits, reference=reference)
    assert unsure.verdict is Verdict.NO_POWER
    assert unsure.reason.startswith("ill-conditioned: ")
    assert "elements of state are as near to their bound as the exact result is known" in unsure.reason


def test_lanes_of_values_stand_alone() -> None:
    """Some value lanes of a layer, by themselves, have the same exact results as in the whole."""
    problem = layer()
    lanes = np.array([1, 6])
    whole, part = oracle_arb.gdn(problem), oracle_arb.gdn(value_lanes(problem, lanes))
    assert (np.abs(whole.out[..., lanes] - part.out) <= whole.out_error[..., lanes] + part.out_error).all()
    assert (np.abs(whole.state[..., lanes] - part.state) <= whole.state_error[..., lanes] + part.state_error).all()

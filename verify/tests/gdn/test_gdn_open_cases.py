"""Known ways in which such kernels have gone wrong elsewhere: the oracles give the closed forms.

The inputs stand in `verify.gdn.open_cases`; `test_gdn_subjects.py` runs those that are layers on other kernels.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from verify.devices import CPU_INTERPRET
from verify.gdn import inverse, oracle_arb, oracle_float64, oracle_mpmath
from verify.gdn.cases import GdnCase
from verify.gdn.contract import contract_bound
from verify.gdn.health import MOST_PRODUCTS
from verify.gdn.inverse_judge import judge_inverse
from verify.gdn.inverse_steps import InverseSteps, invert
from verify.gdn.judge import GdnResult, judge
from verify.gdn.open_cases import OPEN_CASES, convolving, equal_keys, normed, scalar
from verify.gdn.problem import DeltaRuleProblem, GdnProblem, Sequences, final_conv_state
from verify.gdn.steps import SPLIT_STEPS, run
from verify.verdict import Verdict

ORACLES = {
    "mpmath": oracle_mpmath.gdn,
    "arb": oracle_arb.gdn,
    "arb chunked": lambda problem: oracle_arb.gdn_chunked(problem, chunk=16),
    "float64": oracle_float64.gdn,
    "float64 chunked": oracle_float64.gdn_chunked,
}
WITH_CLOSED_FORM = {name: case for name, case in OPEN_CASES.items() if case.out is not None}


@pytest.mark.parametrize("name", WITH_CLOSED_FORM)
def test_oracles_give_the_closed_form(name: str) -> None:
    """Every oracle that is fast enough for the case gives its closed form within the oracle's proved error."""
    problem = WITH_CLOSED_FORM[name].build()
    want = WITH_CLOSED_FORM[name].answer_of(problem)
    size = problem.tokens * problem.state[0].size
    for oracle, run_oracle in ORACLES.items():
        if oracle == "mpmath" and size > MOST_PRODUCTS:
            continue
        found = run_oracle(problem)  # type: ignore[operator]
        assert (np.abs(found.out - want.out) <= found.out_error + want.out_error).all(), oracle
        assert (np.abs(found.state - want.state) <= found.state_error + want.state_error).all(), oracle


LAYERS = {name: case for name, case in OPEN_CASES.items() if case.build_layer() is not None and case.tier == "cover"}


QUICK = ("f8-permuted-slots", "f4-one-token-huge-long-memory", "f10-large", "e2-zero-length-sequences")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.deep) for name in LAYERS]
)
def test_the_emulated_kernel_passes(name: str) -> None:
    """The algorithm of the contract, in hi/lo products, is within its bound on every layer."""
    problem = LAYERS[name].build_layer()
    assert problem is not None
    found = run(problem, SPLIT_STEPS)
    result = GdnResult(found.out, found.state, final_conv_state(problem))
    judgement = judge(problem, result, contract_bound(problem, SPLIT_STEPS, CPU_INTERPRET))
    outside = name == "f10-large"  # the sum of squares overflows in FP32
    assert judgement.verdict is (Verdict.OUTSIDE_DOMAIN if outside else Verdict.PASS), judgement.reason


@pytest.mark.deep
def test_e7_every_pair_of_lengths() -> None:
    """(a, b) in 1..17 x 1..17: each sequence equals itself alone, and the other's state does not matter."""
    for first in range(1, 18):
        for second in range(1, 18):
            v = [1.0] * first + [2.0] * second
            together = oracle_float64.gdn(
                scalar(v, beta=0.75, g=-0.1, state=(7.0, 9.0), sequences=Sequences.packed([first, second]))
            )
            for number, (length, state) in enumerate(((first, 7.0), (second, 9.0))):
                rows = slice(0, first) if number == 0 else slice(first, first + second)
                alone = oracle_float64.gdn(scalar([number + 1.0] * length, beta=0.75, g=-0.1, state=(state,)))
                assert (together.out[rows] == alone.out).all()
                assert (together.state[number] == alone.state[0]).all()


@pytest.mark.parametrize("beta", [0.5, 0.58, 0.835, 1.0, 1.95, 2.0])
def test_f1_the_inverse_of_equal_keys(beta: float) -> None:
    """Equal keys are judged by the bound in both precisions: never wrong, ill-conditioned where it has no power."""
    i, j = np.indices((64, 64))
    for g in (0.0, -1e-2) if beta in (0.835, 2.0) else (-1e-3,):
        lower = np.where(i > j, beta * np.exp(g * (i - j)), 0.0).astype(np.float32)
        for precision in ("bf16", "bf16x3"):
            steps = InverseSteps(precision)
            verdict = judge_inverse(lower, invert(lower, steps), steps, CPU_INTERPRET).judgement
            assert verdict.verdict is not Verdict.FAIL, verdict.reason
            if precision == "bf16x3" and beta <= 1.0:
                assert verdict.verdict is Verdict.PASS, verdict.reason
            if verdict.verdict is Verdict.NO_POWER:
                assert "ill-conditioned" in verdict.reason


def test_f1_alternating_keys() -> None:
    """+k, -k, .. is the equal-key inverse with alternating signs."""
    i, j = np.indices((64, 64))
    sign = (-1.0) ** (i - j)
    lower = np.where(i > j, 0.835 * sign, 0.0)
    closed = equal_keys(0.835, 0.0) * sign
    found = inverse.exact(lower)
    assert (np.abs(found.value - closed) <= found.error + 2.0**-50).all()


def test_f1_the_full_power_series_is_no_reference() -> None:
    """(I - L)(I + L^2) .. (I + L^32) on the whole chunk errs by more than 1/4 in float64 for beta 0.835."""
    i, j = np.indices((64, 64))
    lower = np.where(i > j, 0.835, 0.0)
    x, power = np.eye(64) - lower, lower @ lower
    for _ in range(5):
        x, power = x @ (np.eye(64) + power), power @ power
    assert np.abs(x - equal_keys(0.835, 0.0)).max() > 0.25


@pytest.mark.parametrize("tokens", [1, 7, 64, 65])
def test_f3_no_decay_is_the_ungated_rule(tokens: int) -> None:
    """g = 0 and no g at all are one function."""
    problem = GdnCase("random", "up to 1", "0", seed=3, lengths=(tokens,), heads=(1, 1, 8, 4)).rule()
    ungated = dataclasses.replace(problem, g=None)
    for oracle in (oracle_float64.gdn, oracle_float64.gdn_chunked):
        assert (oracle(problem).out == oracle(ungated).out).all()


def test_f4_published_values() -> None:
    """g -5 per token: o_1 = 0.5, o_2 = 0.5016844867497714, limit 0.5016901809245154."""
    out = oracle_float64.gdn(OPEN_CASES["f4-strong-decay"].build()).out[:, 0, 0]
    assert abs(out[0] - 0.5) <= 1e-15
    assert abs(out[1] - 0.5016844867497714) <= 1e-15
    assert abs(out[-1] - 0.5016901809245154) <= 1e-15


def test_f6_published_value() -> None:
    """State 0.6516326649281583 with g in nats; 0.6767767 and 0.375 are the mistakes."""
    state = oracle_float64.gdn(OPEN_CASES["f6-natural-logarithm"].build()).state[0, 0, 0, 0]
    assert abs(state - 0.6516326649281583) <= 1e-15


@pytest.mark.parametrize("g", [0.5, math.inf])
def test_f6_positive_gates_are_refused(g: float) -> None:
    """A positive log-decay is outside the domain, by name and value."""
    with pytest.raises(ValueError, match=f"g is a natural-log decay and must not be positive, got {g}"):
        scalar([1.0], g=g)


@pytest.mark.parametrize("splits", [[48], [16, 16, 16], [1] * 48, [5, 40, 3]])
def test_f8_splits_agree(splits: list[int]) -> None:
    """48 tokens in one call, in three, or in 48: the same outputs and states, within the oracle's error."""
    case = GdnCase("near-duplicate", "up to 1", "mild", seed=2, lengths=(48,), heads=(1, 2, 8, 4))
    whole = case.layer()
    reference = oracle_float64.gdn(whole)
    state, conv = whole.state, whole.conv_state
    start, rows = 0, []
    for length in splits:
        part = slice(start, start + length)
        piece = dataclasses.replace(
            whole,
            qkv=whole.qkv[part],
            a=whole.a[part],
            b=whole.b[part],
            state=state,
            conv_state=conv,
            sequences=Sequences.single(length),
        )
        found = oracle_float64.gdn(piece)
        rows.append(found.out)
        # A state is handed on in FP32: half a spacing per call.
        state, conv = found.state.astype(np.float32), final_conv_state(piece)
        start += length
    handed_on = 2.0**-24 * len(splits) * (1.0 + np.abs(reference.state).max())
    assert np.abs(np.concatenate(rows) - reference.out).max() <= 2.0 * handed_on * 8.0**0.5
    assert np.abs(found.state - reference.state).max() <= 2.0 * handed_on * 8.0**0.5
    assert (conv == final_conv_state(whole)).all()


def test_f8_unreferenced_slots_are_unchanged() -> None:
    """A slot that no sequence writes keeps its words, in every tier."""
    problem = OPEN_CASES["f8-permuted-slots"].build()
    for oracle in (oracle_float64.gdn, oracle_arb.gdn, oracle_mpmath.gdn):
        assert (oracle(problem).state[3] == problem.state[3]).all()


@pytest.mark.parametrize("splits", [[6], [1, 5], [2, 4], [1, 2, 3], [1] * 6])
def test_f9_convolution_splits(splits: list[int]) -> None:
    """y = 1000, 2100, 3210, 4321, 5432, 6543 and states [0, 0, 1] .. [4, 5, 6], however the call is split."""
    whole = convolving([6])
    conv = whole.conv_state
    start, rows = 0, []
    for length in splits:
        part = slice(start, start + length)
        piece = dataclasses.replace(
            whole,
            qkv=whole.qkv[part],
            a=whole.a[part],
            b=whole.b[part],
            conv_state=conv,
            sequences=Sequences(
                np.array([0, length]), np.array([start % 2]), np.array([(start + length) % 2]), np.array([True])
            ),
        )
        rows.append(oracle_float64.gdn(piece).out[:, 0, 0])
        after = final_conv_state(piece)
        source = start % 2
        if (start + length) % 2 != source:
            assert (after[source] == conv[source]).all()
        conv = after
        start += length
        due = ([0.0, 0.0, 0.0] + [float(x) for x in range(1, start + 1)])[-3:]
        assert conv[start % 2, :, 2].tolist() == due
    assert np.abs(np.concatenate(rows) - [1000, 2100, 3210, 4321, 5432, 6543]).max() <= 1e-10


@pytest.mark.parametrize(
    ("eps", "value"), [(1e-6, 0.06622661785325), (0.0, 0.08838834764832)], ids=["inside on the sum", "none"]
)
def test_f10_published_values(eps: float, value: float) -> None:
    """All entries 1e-4, d = 128: to the digits given (1e-4 in FP32 is off by 2^-25)."""
    out = oracle_float64.gdn(normed(1e-4, eps)).out
    assert (np.abs(out - value) <= 2.0**-24 * value).all()


def test_p9_the_published_bound_of_the_inverse_is_not_the_worst() -> None:
    """Identical keys, beta 0.835, g -1e-3: errors above 9e-3 lie within the proved bound."""
    rng = np.random.default_rng(1)
    i, j = np.indices((64, 64))
    worst = 0.0
    for _ in range(8):
        k = rng.standard_normal(128)
        k = (k / np.linalg.norm(k)).astype(np.float32)
        lower = np.where(i > j, 0.835 * np.exp(-1e-3 * (i - j)) * float(k @ k), 0.0).astype(np.float32)
        judged = judge_inverse(lower, invert(lower, InverseSteps()), InverseSteps(), CPU_INTERPRET)
        assert judged.judgement.verdict is not Verdict.FAIL
        worst = max(worst, float(np.abs(invert(lower, InverseSteps()) - judged.bound.exact).max()))
    assert worst > 5e-3


@pytest.mark.parametrize("a_log", [80.0, 88.0, 90.0, 100.0, 1000.0])
@pytest.mark.parametrize(("a", "decays"), [(-2000.0, False), (5.0, True)])
def test_p10_large_rates(a_log: float, a: float, decays: bool) -> None:
    """exp(a_log) beyond FP32, and beyond float64: decay 1 far from a gate, a hard reset with one; never NaN."""
    problem = OPEN_CASES["p10-large-a_log-with-a-gate"].build()
    assert isinstance(problem, GdnProblem)
    changed = dataclasses.replace(
        problem,
        a=np.full_like(problem.a, a),
        a_log=np.full(1, a_log, np.float32),
        state=np.ones_like(problem.state),
    )
    found = oracle_float64.gdn(changed)
    assert np.isfinite(found.out).all()
    assert (found.out_error <= 1e-12).all()
    fresh = dataclasses.replace(changed, sequences=Sequences.single(problem.tokens, initial=False))
    same = np.abs(found.out - oracle_float64.gdn(fresh).out).max() <= 1e-12
    assert same == decays


def test_state_slots_of_the_delta_rule_alone() -> None:
    """The delta rule's problems have no convolution state, and say so by type."""
    assert isinstance(OPEN_CASES["f3-no-decay"].build(), DeltaRuleProblem)

"""The contract's bound: sound where float64 is lost, tight where it is not, and a function of the inputs alone."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from flywheel.attention import budget
from verify.attention import adversarial, contract, oracle_arb, oracle_float64
from verify.attention.cases import AttentionCase
from verify.attention.contract import contract_bound
from verify.attention.problem import AttentionProblem
from verify.devices import CPU_INTERPRET, V6E
from verify.tests.judge.feature_problems import feature_problem
from verify.tests.judge.problems import adversarial_problem


def test_bias_is_the_kernel_s() -> None:
    """What the contract promises about flushing is what the kernel does."""
    assert contract.BIAS == budget.BIAS


def test_limit_of_the_named_cases_is_the_kernel_s() -> None:
    """The jumps named after the kernel's limit stand at it."""
    assert 2.0 ** (adversarial.FLYWHEEL_LIMIT - budget.BIAS) == budget.LANE_LIMIT


def test_bound_is_around_f_where_float64_scores_cancel() -> None:
    """Scores that cancel by more than 53 bits: float64 thinks the other key wins, and the bound allows for that.

    f is -1; a kernel that sums in FP32 may return anything between the values, so the bound has to reach +1.
    """
    problem = adversarial.cancelling().build()
    exact = oracle_arb.attention(problem)
    assert np.abs(exact.out + 1.0).max() < 2.0**-40
    bound = contract_bound(problem, CPU_INTERPRET)
    assert bound.inside_domain.all()
    assert (bound.out >= 2.0).all()
    assert (bound.out < 2.04).all(), "no more than the spread of the values and the final roundings"


def huge_and_tiny(far: float) -> AttentionProblem:
    """Eight ordinary keys, and one that is hugely negative and weighs nothing."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, n, 64)).astype(np.float32) for n in (1, 9, 9))
    q[..., 0], k[..., 0] = 1.0, 0.0
    k[0, 0, 4, 0] = -far
    words = [x.astype(ml_dtypes.bfloat16) for x in (q, k, v)]
    return AttentionProblem(*words, causal=False, scale=1.0)


def test_a_key_without_weight_does_not_loosen_the_bound() -> None:
    """One hugely negative score, of which float64 knows nothing, leaves the bound of the others as it is."""
    near, far = (contract_bound(huge_and_tiny(x), CPU_INTERPRET).out for x in (2.0**6, 2.0**100))
    assert (far <= near * (1 + 2.0**-8)).all()


@pytest.mark.parametrize("names", [(), ("sinks",), ("window", "sinks")])
@pytest.mark.parametrize("seed", range(8))
def test_bound_in_few_passes_is_the_bound_pair_by_pair(seed: int, names: tuple[str, ...]) -> None:
    """Without a soft cap errors of scores are straight lines, and taken together; pair by pair they say the same.

    Queries that are known to be off by 0 are what takes the other way; each way is evaluated within EVALUATION_SLACK.
    """
    problem = feature_problem(seed, *names) if names else adversarial_problem(seed)
    few = contract_bound(problem, V6E)
    each = contract_bound(problem, V6E, query_error=np.zeros(problem.q.shape))
    np.testing.assert_array_equal(few.inside_domain, each.inside_domain)
    for name in ("out", "lse", "max_logit"):
        one, other = getattr(few, name), getattr(each, name)
        assert (one <= other * contract.EVALUATION_SLACK).all(), name
        assert (other <= one * contract.EVALUATION_SLACK).all(), name


@pytest.mark.parametrize("names", [(), ("softcap", "sinks"), ("window",)])
@pytest.mark.parametrize("seed", range(8))
def test_a_better_known_output_only_sharpens_the_bound(seed: int, names: tuple[str, ...]) -> None:
    """The better f is known the smaller is the bound: by the float64 oracle, by ball arithmetic.

    Where f is known to within a doubt, |o| + doubt and its distance from a value are at most two doubts above f's own.
    The bound takes one of the two, at most once where the sum of weights is known to a half, and a little besides.
    """
    problem = feature_problem(seed, *names) if names else adversarial_problem(seed)
    floats, balls = oracle_float64.attention(problem), oracle_arb.attention(problem)
    known, sharp = (contract_bound(problem, V6E, reference=x) for x in (floats, balls))
    judged = known.inside_domain[..., None] & np.isfinite(floats.out)
    assert (sharp.out <= known.out * contract.EVALUATION_SLACK + 4.0 * balls.out_error)[judged].all()


@pytest.mark.parametrize("names", [(), ("softcap", "sinks"), ("window", "segments"), ("sinks",), ("segments", "sinks")])
@pytest.mark.parametrize("seed", range(4))
def test_reference_and_bound_are_those_of_either_alone(seed: int, names: tuple[str, ...]) -> None:
    """From the same scores or each from its own: number for number the same."""
    problem = feature_problem(seed, *names) if names else adversarial_problem(seed)
    reference, bound = contract.reference_and_bound(problem, V6E)
    alone = oracle_float64.attention(problem)
    for name in ("out", "out_error", "lse", "lse_error", "max_logit", "max_logit_error"):
        np.testing.assert_array_equal(getattr(reference, name), getattr(alone, name), name)
    for other in (contract_bound(problem, V6E), contract_bound(problem, V6E, reference=alone)):
        for name in ("out", "lse", "inside_domain", "max_logit"):
            np.testing.assert_array_equal(getattr(bound, name), getattr(other, name), name)


@pytest.mark.parametrize("family", ["adversarial", "ordinary"])
def test_reference_error_is_far_below_the_bound(family: str) -> None:
    """The float64 oracle's own error is a small part of the bound, so that verdicts are decided."""
    for case in adversarial.families()[family][:40]:
        problem = case.build()
        bound = contract_bound(problem, CPU_INTERPRET)
        error = oracle_float64.attention(problem).out_error
        assert (error <= bound.out / 16).all(), case.name


def test_bound_depends_on_the_device_monotonically() -> None:
    """A device that rounds worse gets a larger bound, element by element."""
    problem = AttentionCase("monotone", (1, 1, 1, 40, 40, 64), seed=1).build()
    worse = dataclasses.replace(CPU_INTERPRET, exp2_relative=2.0**-10, dot_unit_roundoff=V6E.dot_unit_roundoff)
    assert (contract_bound(problem, worse).out > contract_bound(problem, CPU_INTERPRET).out).all()
    assert (contract_bound(problem, worse).lse > contract_bound(problem, CPU_INTERPRET).lse).all()


def test_blocks_of_rows_do_not_change_the_bound() -> None:
    """How many rows are evaluated at once bounds memory, nothing else."""
    problem = AttentionCase("blocks", (1, 2, 1, 70, 90, 64), seed=2).build()
    whole, parts = (contract_bound(problem, CPU_INTERPRET, rows_per_block=n) for n in (256, 16))
    # What float64 rounding may do to the evaluation is what the contract itself grants it.
    granted = contract.EVALUATION_SLACK - 1.0
    np.testing.assert_allclose(whole.out, parts.out, rtol=granted)
    np.testing.assert_allclose(whole.lse, parts.lse, rtol=granted)


def test_rows_outside_the_domain_are_named() -> None:
    """A pair whose terms overflow FP32 takes its row out of the domain, and no other row."""
    case = adversarial.jump("outside", 300, 0.0, quiet=True)
    problem = case.build()
    problem.k[0, 0, 300, 10] = 2.0**100
    problem.q[0, 0, 400, 10] = 2.0**100
    inside = contract_bound(problem, CPU_INTERPRET).inside_domain
    assert not inside[0, 0, 400]
    assert inside.sum() == inside.size - 1


def test_a_value_that_is_not_finite_takes_out_its_lane_only() -> None:
    """The other lanes of a row that sees an infinite value keep their bound."""
    problem = adversarial.by_name()["inf-in-v-middle"].build()
    bound = contract_bound(problem, CPU_INTERPRET)
    assert bound.inside_domain.all()
    others = np.delete(bound.out, 5, axis=3)
    assert np.isfinite(others).all()

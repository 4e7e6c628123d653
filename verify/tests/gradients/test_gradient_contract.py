"""The contract of backward kernels: honest ones keep it, in every order and with every feature; wrong ones do not."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from verify.__main__ import main
from verify.attention.cases import AttentionCase, Edit
from verify.attention.contract import contract_bound
from verify.attention.gradients import contract as gradient_contract
from verify.attention.gradients import oracle_float64
from verify.attention.gradients.contract import Roundings, gradient_bound
from verify.attention.gradients.judge import GradientResult, cotangent, judge_gradients
from verify.attention.gradients.problem import GradientProblem
from verify.attention.open_cases import OPEN_CASES
from verify.devices import CPU_INTERPRET, V5E
from verify.subjects import Arithmetic, Subject, load
from verify.subjects.judging import judge_subject
from verify.subjects.selftest import AdapterError, self_test
from verify.tests.gradients.backward_kernels import MISTAKES, RIGHT, backward, declared
from verify.verdict import Verdict

if TYPE_CHECKING:
    from verify.attention.gradients.contract import GradientBound
    from verify.attention.gradients.reference import Gradients
    from verify.attention.problem import AttentionProblem
    from verify.devices import DeviceModel
    from verify.verdict import Judgement

CASES = {
    case.name: case
    for case in (
        AttentionCase("plain", (2, 6, 2, 40, 56, 16), seed=1, exponents=(1, 1, 0)),
        AttentionCase("full", (1, 2, 2, 64, 64, 32), seed=2, causal=False),
        AttentionCase("capped", (1, 4, 2, 33, 33, 16), seed=3, exponents=(2, 2, 0), softcap="0x1p2"),
        AttentionCase("sinks", (1, 4, 2, 24, 40, 16), seed=4, sinks=("0x1p1", "-inf", "-0x1p2", "0x1p3")),
        AttentionCase("window", (1, 2, 1, 50, 50, 16), seed=5, window=(7, 0)),
        AttentionCase("wide values", (1, 4, 4, 24, 24, 16), seed=6, v_dim=48),
        AttentionCase("large logits", (1, 2, 1, 32, 32, 16), seed=7, exponents=(4, 4, 0)),
        AttentionCase("large values", (1, 2, 1, 32, 32, 16), seed=8, exponents=(0, 0, 60)),
        AttentionCase("ragged", (1, 2, 1, 30, 40, 16), seed=9, cu_seqlens_q=(0, 13, 30), cu_seqlens_k=(0, 17, 40)),
        AttentionCase("more queries than keys", (1, 2, 1, 40, 8, 16), seed=10),
    )
}

VARIANTS: tuple[tuple[dict[str, Any], dict[str, str]], ...] = (
    ({}, {}),
    ({"delta_from": "weights"}, {"delta": "weights"}),
    ({"narrow_dp": True, "delta_from": "weights"}, {"d_weights": "bf16", "delta": "weights"}),
    ({"keep_ds": True}, {"d_scores": "fp32"}),
)


def exact(problem: AttentionProblem) -> Gradients:
    """The derivatives, with the problem's own cotangent."""
    return oracle_float64.gradients(GradientProblem.of(problem, cotangent(problem)))


def bound_of(problem: AttentionProblem, device: DeviceModel = CPU_INTERPRET, **arithmetic: str) -> GradientBound:
    """The bound of an arithmetic."""
    return Arithmetic(block_kv=None, **arithmetic).gradient_bound(problem, cotangent(problem), device, exact(problem))


def judged(problem: AttentionProblem, got: GradientResult, **arithmetic: str) -> Judgement:
    """The verdict on derivatives, held to an arithmetic."""
    return judge_gradients(problem, cotangent(problem), got, bound_of(problem, **arithmetic), power=True)


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
@pytest.mark.parametrize("name", CASES)
def test_an_honest_kernel_keeps_its_bound(name: str, variant: int) -> None:
    """Every feature, every declared way of rounding: within the bound, and the bound rejects trivial answers."""
    options, arithmetic = VARIANTS[variant]
    problem = CASES[name].build()
    verdict = judged(problem, backward(problem, cotangent(problem), **options), **arithmetic)
    assert verdict.verdict is Verdict.PASS, verdict.reason
    assert set(verdict.measures) == {"dq", "dk", "dv"} | ({"dsinks"} if problem.sinks is not None else set())


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(60))
def test_an_honest_kernel_keeps_its_bound_everywhere(seed: int) -> None:
    """Random shapes, exponents and features."""
    rng = np.random.default_rng(seed)
    kv_heads = int(rng.integers(1, 3))
    q_len, kv_len = (int(x) for x in rng.integers(1, 200, 2))
    heads = kv_heads * int(rng.integers(1, 4))
    case = AttentionCase(
        f"random {seed}",
        (int(rng.integers(1, 3)), heads, kv_heads, q_len, kv_len, int(rng.choice([8, 64]))),
        causal=bool(rng.integers(2)),
        seed=seed,
        exponents=tuple(int(x) for x in rng.integers(-3, 5, 3)),
        v_dim=None if rng.integers(2) else 24,
        window=(int(rng.integers(0, 64)), None) if rng.integers(2) else None,
        softcap=None if rng.integers(2) else float(rng.choice([0.5, 8.0])).hex(),
        sinks=None if rng.integers(2) else tuple(float(x).hex() for x in rng.integers(-8, 8, heads)),
    )
    problem = case.build()
    for options, arithmetic in VARIANTS:
        verdict = judged(problem, backward(problem, cotangent(problem), **options), **arithmetic)
        assert verdict.verdict in (Verdict.PASS, Verdict.NO_POWER), (case, verdict.reason)


CAUGHT_BY = {"no slope of the soft cap": "capped", "tiled heads": "plain", "transposed weights": "full"}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_kernel_is_caught(mistake: str) -> None:
    """Each mistake, on the case that can show it."""
    problem = CASES[CAUGHT_BY.get(mistake, "plain")].build()
    verdict = judged(problem, backward(problem, cotangent(problem), mistake=mistake))
    assert verdict.verdict is Verdict.FAIL, verdict.reason


@pytest.mark.parametrize("declared_as", [{"d_weights": "fp32"}, {"d_scores": "fp32"}], ids=["dP", "dS"])
def test_a_rounding_that_was_not_declared_is_caught(declared_as: dict[str, str]) -> None:
    """A kernel that keeps dP, or dS, in BF16 and says FP32 breaks its bound: the bound is that tight."""
    problem = CASES["full"].build()
    narrow = "d_weights" in declared_as
    got = backward(problem, cotangent(problem), narrow_dp=narrow, keep_ds=narrow, delta_from="weights")
    honest = {"d_weights": "bf16", "d_scores": "fp32", "delta": "weights"} if narrow else {"delta": "weights"}
    assert judged(problem, got, **honest).verdict is Verdict.PASS
    assert judged(problem, got, **honest | {"d_scores": "fp32"} | declared_as).verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("kernel", "case", "cause"),
    [
        ("NO_SCALE", "g2-narrow-values", "dq agrees with: no factor scale"),
        ("NO_DELTA", "g2-narrow-values", "dq agrees with: delta left out"),
        ("FIRST_HEAD", "random-heads-6-2", "dk agrees with: the first query head of each group alone"),
        ("TILED_HEADS", "random-heads-6-2", "dq agrees with: heads tiled, not repeated"),
        ("OPPOSITE_SIGN", "g2-narrow-values", "dq agrees with: the opposite sign"),
    ],
)
def test_the_message_names_the_mistake(kernel: str, case: str, cause: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`judge --subject` exits with 1, and says what the author did wrong, where, with both values and their bits."""
    name = "verify.tests.gradients.backward_kernels"
    assert main(["judge", "--subject", f"{name}:{kernel}", case]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert cause in text, text
    assert re.search(r"got \S+ \(0x[0-9a-f]+\), want \S+", text)
    assert main(["judge", "--subject", f"{name}:RIGHT", case]) == 0


def test_the_self_test_and_the_open_cases_of_the_right_kernel() -> None:
    """All sizes different, every feature; gradients of rows without a key are 0, NaN next door never matters."""
    assert len(self_test(RIGHT)) == 8
    for name in (
        "a1-rows-without-a-key",
        "e2-zero-length-sequences",
        "b4-soft-cap-of-huge-logits",
        "b6-sink-of-the-head",
    ):
        found = judge_subject(RIGHT, OPEN_CASES[name].build())
        assert found.judgement.verdict is Verdict.PASS, found.judgement.reason
    assert isinstance(found.result, GradientResult)
    with pytest.raises(AdapterError, match="self-test 'plain'"):
        self_test(declared("tiled heads"))


def test_what_a_hidden_nan_must_not_reach() -> None:
    """V of another sequence is NaN: elements that it does not reach are judged, and 0 * NaN in them is a failure."""
    problem = OPEN_CASES["e8-nan-in-a-neighbour"].build()
    right = GradientResult(*(np.nan_to_num(part.value).astype(np.float32) for _, part in exact(problem).parts()))
    found = judged(problem, right)
    assert found.verdict is Verdict.PASS, found.reason
    assert found.notes[0].startswith("9984 of 16384 elements of dq: nothing promised")
    spoilt = dataclasses.replace(right, dv=np.full_like(right.dv, np.nan))
    wrong = judged(problem, spoilt)
    assert wrong.verdict is Verdict.FAIL
    assert "NaN where a finite number is due" in wrong.reason


def test_the_charge_for_delta_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the charge for delta the right kernel leaves the bound where dP - delta cancels: values an ulp apart."""
    near = (Edit("v", "set", "0x1.8p1"), Edit("v", "set", "0x1.82p1", step=2))
    problem = AttentionCase("near values", (1, 1, 1, 64, 64, 16), seed=11, causal=False, edits=near).build()
    got = backward(problem, cotangent(problem))
    assert judged(problem, got).verdict in (Verdict.PASS, Verdict.NO_POWER)
    monkeypatch.setattr(gradient_contract._Rule, "delta_error", lambda _, d_out, *__: np.zeros((len(d_out), 1)))
    assert judged(problem, got).verdict is Verdict.FAIL


def test_the_bound_grows_with_the_machine() -> None:
    """A machine with a coarser exponential gets a wider bound, in every array."""
    problem = CASES["plain"].build()
    narrow, wide = bound_of(problem), bound_of(problem, V5E)
    for (_, less), (_, more) in zip(narrow.parts(), wide.parts(), strict=True):
        assert (more >= less).all()
        assert (more > less).any()


def test_what_overflows_is_outside_the_domain() -> None:
    """Elements whose terms leave FP32's range have an infinite bound; the others are judged."""
    problem = AttentionCase("huge", (1, 1, 1, 8, 8, 16), seed=1, exponents=(0, 0, 126)).build()
    bound = bound_of(problem)
    assert np.isinf(bound.dq).any()
    assert np.isfinite(bound.dv).all()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Roundings(0.0, delta="rows"), "delta must be one of output, weights, got 'rows'"),
        (lambda: Arithmetic(d_scores="fp8"), "d_scores must be one of bf16, fp32, got 'fp8'"),
        (
            lambda: Subject("x", len, operation="backward"),
            "operation must be one of attention, attention_gradients, got 'backward'",
        ),
        (
            lambda: dataclasses.replace(load("jax.nn.dot_product_attention"), operation="attention_gradients"),
            "features.lse must be None for attention_gradients, got 'bf16'",
        ),
    ],
)
def test_wrong_declarations_are_refused(make: Any, text: str) -> None:
    """Each names the argument, the value and the rule."""
    with pytest.raises(ValueError, match=re.escape(text)):
        make()


def test_a_kernel_that_returns_something_else_is_told_so() -> None:
    """Two arrays instead of three, and another shape: a failure with the words, not an exception."""
    problem = OPEN_CASES["g3-bottom-right-alignment"].build()
    two = Subject("two", lambda *arrays, **_: arrays[:2], operation="attention_gradients")
    assert "two must return (dq, dk, dv), got 2" in judge_subject(two, problem).judgement.reason
    swapped = Subject(
        "swapped", lambda *arrays, **_: (arrays[1], arrays[0], arrays[2]), operation="attention_gradients"
    )
    assert "dq: shapes differ" in judge_subject(swapped, problem).judgement.reason


def test_the_forward_bound_is_read() -> None:
    """Delta from the forward output is charged the forward output's bound."""
    problem = CASES["plain"].build()
    d_out = cotangent(problem)
    forward = contract_bound(problem, CPU_INTERPRET)
    wider = dataclasses.replace(forward, out=forward.out * 2.0)
    tight, loose = (
        gradient_bound(problem, d_out, CPU_INTERPRET, bound, Roundings(2.0**-22), exact(problem))
        for bound in (forward, wider)
    )
    assert (loose.dq > tight.dq).any()
    assert np.array_equal(loose.dv, tight.dv)

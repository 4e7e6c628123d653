"""The built-in subjects: what they declare, their self-test, and every open case."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys

import numpy as np
import pytest

from verify.attention import oracle_float64
from verify.attention.cases import base_values
from verify.attention.judge import judge
from verify.attention.open_cases import OPEN_CASES, OpenCase, planted
from verify.attention.problem import AttentionProblem
from verify.devices import CPU_INTERPRET, V6E
from verify.subjects import EVERYWHERE, FINITE, Arithmetic, Domain, Features, Subject, findings, load, names
from verify.subjects.judging import judge_open_case, judge_subject, promised_rows
from verify.subjects.layouts import LAYOUTS, from_layout, to_layout
from verify.subjects.registry import BUILT_IN, PEERS, is_ours
from verify.subjects.selftest import nearest_layout, problems, self_test
from verify.verdict import Verdict

OTHERS = tuple(name for name in BUILT_IN if not is_ours(name))
OURS = tuple(name for name in BUILT_IN if is_ours(name))
COVER = tuple(case for case in OPEN_CASES.values() if case.tier == "cover")
DEEP = tuple(case for case in OPEN_CASES.values() if case.tier == "deep")


def check_against_findings(name: str, case: OpenCase) -> None:
    """A subject fails exactly where a finding is recorded for it, in the same way."""
    recorded = {record["case"]: record for record in findings.read() if record["subject"] == name}.get(case.name)
    judged = judge_open_case(load(name), case)
    verdict, reason = judged.judgement.verdict, judged.judgement.reason
    if recorded is None:
        expected = (Verdict.PASS, Verdict.SKIPPED, Verdict.OUTSIDE_DOMAIN)
        assert verdict in expected, f"a finding that is not recorded (python -m verify findings): {reason}"
    else:
        assert verdict is Verdict.FAIL, f"recorded as failing, now {verdict}: renew the findings"
        assert findings.kind(recorded) == findings.kind(findings.finding_of(case, judged))


@pytest.mark.parametrize("case", COVER, ids=[case.name for case in COVER])
@pytest.mark.parametrize("name", OTHERS)
def test_open_case(name: str, case: OpenCase) -> None:
    """What JAX's own kernels do with an open case: right, not supported, or a recorded finding; never hidden."""
    check_against_findings(name, case)


@pytest.mark.deep
@pytest.mark.parametrize("case", DEEP, ids=[case.name for case in DEEP])
@pytest.mark.parametrize("name", OTHERS)
def test_open_case_deep(name: str, case: OpenCase) -> None:
    """The rest of the open cases."""
    check_against_findings(name, case)


@pytest.mark.deep
@pytest.mark.parametrize("case", OPEN_CASES.values(), ids=list(OPEN_CASES))
@pytest.mark.parametrize("name", PEERS)
def test_open_case_of_a_peer(name: str, case: OpenCase) -> None:
    """The same for the kernels of the group `peers`, where they are installed."""
    reason = load(name).missing()
    if reason is not None:
        pytest.skip(reason)
    check_against_findings(name, case)


# Ours is run by hundreds of other tests; one blockwise kernel of JAX's stands for both; gradients have tests apart.
SELDOM = (*OURS, "jax.flash_attention", "jax.nn.dot_product_attention[gradients]")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.deep if name in SELDOM else ()) for name in (*OTHERS, *OURS)]
)
def test_self_test(name: str) -> None:
    """Every adapter does what it declares, with all sizes different."""
    assert self_test(load(name))


@pytest.mark.deep
@pytest.mark.parametrize("name", PEERS)
def test_self_test_of_a_peer(name: str) -> None:
    """A peer's adapter reads and writes the axes it declares, however inaccurate its kernel is (a finding says so)."""
    subject = load(name)
    if subject.missing() is not None:
        pytest.skip(str(subject.missing()))
    recorded = any(record["subject"] == name for record in findings.read())
    for problem in problems(subject).values():
        judged = judge_subject(subject, problem)
        verdict = judged.judgement.verdict
        assert verdict in (Verdict.PASS, Verdict.SKIPPED) or (verdict is Verdict.FAIL and recorded)
        assert nearest_layout(judged) in ("as declared", None)
        assert judged.result is not None or verdict is Verdict.SKIPPED


def test_ours_and_the_others_are_found_by_name() -> None:
    """Every name loads without importing a peer's package, and carries that name."""
    for name in names():
        assert load(name).name == name
    code = (
        "import sys, verify; from verify.subjects import load, names; [load(n) for n in names()];"
        "print([m for m in ('tokamax', 'flywheel_tpu') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_missing_package_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that is not installed is skipped, and the reason says how to install it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    judged = judge_subject(load("tokamax.splash_attention"), OPEN_CASES["g3-bottom-right-alignment"].build())
    assert judged.judgement.verdict is Verdict.SKIPPED
    assert judged.judgement.reason == "tokamax is not installed (uv sync --group peers)"


@pytest.mark.smoke
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_inverted(layout: str) -> None:
    """to_layout puts each axis where its letter stands, and from_layout takes it back."""
    sizes = {"b": 2, "h": 3, "t": 4, "d": 5}
    x = np.arange(120).reshape(2, 3, 4, 5)
    given = x if "b" in layout else x[1]
    moved = to_layout(given, layout)
    assert moved.shape == tuple(sizes[letter] for letter in layout)
    assert (from_layout(moved, layout) == given).all()


@pytest.mark.smoke
def test_features_say_what_is_lacking() -> None:
    """Each limit skips with its own words; what is declared is not skipped."""
    square = planted(4, [0.0] * 4, [1.0] * 4)
    long = planted(2, [0.0] * 4, [1.0] * 4)
    full = planted(4, [0.0] * 4, [1.0] * 4, causal=False)
    heads = dataclasses.replace(square, q=square.q.repeat(2, axis=1))
    wanted = {
        "no causal mask": (Features(causal="never"), square),
        "causal only for q_len = kv_len, got 2 and 4": (Features(causal="square"), long),
        "only with a causal mask": (Features(full=False), full),
        "no grouped heads, got 2 and 1": (Features(grouped_heads=False), heads),
        "head_dim must be one of 128, 256, got 64": (Features(head_dims=(128, 256)), square),
        "q_len must be a multiple of 8, got 4": (Features(multiple_of=(8, 1)), square),
        "no window": (Features(), dataclasses.replace(square, window=(1, None))),
        "no softcap": (Features(), dataclasses.replace(square, softcap=5.0)),
        "no sinks": (Features(), dataclasses.replace(square, sinks=np.zeros(1, np.float32))),
    }
    for words, (features, problem) in wanted.items():
        assert features.lacking(problem) == words
    assert Features().lacking(long) is None
    assert Features(window=True).lacking(dataclasses.replace(square, window=(1, None))) is None


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Features(causal="top"), "causal must be one of 'bottom-right', 'square', 'never', got 'top'"),
        (lambda: Features(lse="bf32"), "lse must be one of 'fp32', 'bf16', None, got 'bf32'"),
        (lambda: Arithmetic(weights="fp8"), "weights must be one of bf16, fp32, got 'fp8'"),
        (lambda: Arithmetic(block_kv=0), "block_kv must be positive, got 0"),
        (lambda: Subject("x", lambda: None, layout="dbth"), "layout must be one of bhtd"),
    ],
)
def test_a_declaration_that_means_nothing_is_refused(make: object, text: str) -> None:
    """A misspelt declaration names the argument, the value and the rule."""
    with pytest.raises(ValueError, match=text.replace("(", r"\(")):
        make()  # type: ignore[operator]


def test_rows_outside_a_promise_are_not_judged() -> None:
    """A domain leaves rows out of the comparison, all of them or some, and the verdict says so."""
    right = load("user_kernels:RIGHT")
    problem = planted(4, [0.0] * 4, [1.0, 2.0, 3.0, float("nan")])
    assert not promised_rows(dataclasses.replace(right, domain=FINITE), problem).any()
    judged = judge_subject(dataclasses.replace(right, domain=FINITE), problem)
    assert judged.judgement.verdict is Verdict.OUTSIDE_DOMAIN
    assert "finite inputs" in judged.judgement.reason
    # V = NaN in the last key reaches every row of a kernel that multiplies it by a zero weight.
    wrong = judge_subject(dataclasses.replace(right, domain=EVERYWHERE), problem)
    assert wrong.judgement.verdict is Verdict.FAIL
    last = Domain("the last row", lambda p: np.arange(p.q_len)[None, None] == p.q_len - 1)
    part = judge_subject(dataclasses.replace(right, domain=last), problem)
    assert part.judgement.verdict is Verdict.PASS
    assert "3 of 4 rows: nothing promised, not judged" in part.judgement.notes


@pytest.mark.smoke
def test_arithmetic_charges_what_an_algorithm_adds() -> None:
    """More rescalings and a coarser exponential never make a bound smaller; an exact anchor changes nothing else."""
    fixed = Arithmetic(exponential="exp2", block_kv=None).effective(CPU_INTERPRET, 4096)
    assert fixed == CPU_INTERPRET
    steps = [
        Arithmetic(exponential="exp2", block_kv=block).effective(CPU_INTERPRET, 4096) for block in (4096, 512, 128)
    ]
    weights = [model.exp2_relative for model in steps]
    assert CPU_INTERPRET.exp2_relative < weights[0] < weights[1] < weights[2]
    # 32 rescalings and the weight itself: 33 exponentials, and 32 times one reciprocal and four roundings.
    assert weights[2] > 33 * CPU_INTERPRET.exp2_relative + 32 * (CPU_INTERPRET.reciprocal_relative + 4 * 2.0**-24)
    assert (
        Arithmetic(exponential="exp", block_kv=None).effective(CPU_INTERPRET, 1).exp2_relative
        == CPU_INTERPRET.exp_relative
    )


@pytest.mark.smoke
def test_weights_kept_in_fp32_get_no_room_for_bf16() -> None:
    """Values that cancel show the rounding of P: FP32 weights keep their bound, BF16 ones break it and keep theirs."""
    q, k, v = (base_values((1, 1, 64, 64), stream, 0) for stream in range(3))
    problem = AttentionProblem(q, k, v, causal=False, scale=0.125)
    wide = [x.astype(np.float32)[0, 0] for x in (q, k, v)]
    scores = wide[0] @ wide[1].T * np.float32(0.125)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    out = {
        name: ((p.astype(np.float32) @ wide[2]) / weights.sum(axis=1, keepdims=True)).astype(q.dtype)[None, None]
        for name, p in (("fp32", weights), ("bf16", weights.astype(q.dtype)))
    }
    reference = oracle_float64.attention(problem)
    verdicts = {}
    for given, got in out.items():
        for declared in ("fp32", "bf16"):
            bound = Arithmetic(weights=declared).bound(problem, CPU_INTERPRET)
            verdicts[given, declared] = judge(problem, got, None, bound, reference=reference).verdict
    assert verdicts.pop(("bf16", "fp32")) is Verdict.FAIL
    assert set(verdicts.values()) == {Verdict.PASS}
    assert Arithmetic(weights="fp32").weight_unit(V6E) == Arithmetic(weights="bf16").weight_unit(CPU_INTERPRET) == 2**-8

"""The verdict on attention results: certified passes and failures, classes, domain, power, and telling reasons."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from fractions import Fraction

import numpy as np
import pytest

from verify.attention import oracle_arb, oracle_float64
from verify.attention.judge import judge
from verify.attention.problem import BF16, AttentionProblem
from verify.tests.judge.problems import PlainBound, normal_problem, plain_bound, problem, rounded
from verify.verdict import Verdict

pytestmark = pytest.mark.cover


def causal_case() -> AttentionProblem:
    """Four query heads on two KV heads, more keys than queries."""
    return normal_problem(0, heads=4, kv_heads=2, q_len=40, kv_len=300, head_dim=16)


def as_bf16(x: np.ndarray) -> np.ndarray:
    """Rounded to BF16."""
    return x.astype(np.float32).astype(BF16)


def test_a_rounded_result_passes() -> None:
    """The exact result, rounded, passes with power, for BF16 and FP32 outputs, and with or without LSE."""
    case = causal_case()
    out, lse = rounded(case)
    for got in (out, out.astype(np.float32)):
        for got_lse in (lse, None):
            judgement = judge(case, got, got_lse, plain_bound(case), power=True)
            assert judgement.verdict is Verdict.PASS, judgement.reason
            assert set(judgement.measures) == ({"out"} if got_lse is None else {"out", "lse"})
    assert judge(case, out, lse, plain_bound(case), reference=oracle_float64.attention(case)).passed


@pytest.mark.parametrize("at", [(0, 0, 0, 0), (0, 3, 39, 15), (0, 1, 17, 2)])
def test_one_wrong_element_fails(at: tuple[int, ...]) -> None:
    """A single element beyond its bound fails, and the reason gives its index."""
    case = causal_case()
    out, lse = rounded(case)
    out[at] = out[at].astype(np.float64) + 1.0
    judgement = judge(case, out, lse, plain_bound(case))
    assert judgement.verdict is Verdict.FAIL
    assert f"1 of 2560 elements of out are wrong; worst out{list(at)}: got" in judgement.reason


def test_a_wrong_lse_fails() -> None:
    """A base-2 log-sum-exp fails although the output is right."""
    case = causal_case()
    out, lse = rounded(case)
    judgement = judge(case, out, lse / np.float32(math.log(2.0)), plain_bound(case))
    assert judgement.verdict is Verdict.FAIL
    assert "160 of 160 elements of lse are wrong" in judgement.reason


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_unwarranted_class_fails(value: float) -> None:
    """NaN or an infinity in place of a number fails, is the worst element, and shows in the measures."""
    case = causal_case()
    out, lse = rounded(case)
    out[0, 2, 5, 7] = value
    out[0, 1, 1, 1] = 1e30
    judgement = judge(case, out, lse, plain_bound(case))
    assert judgement.verdict is Verdict.FAIL
    assert "worst out[0, 2, 5, 7]" in judgement.reason
    assert judgement.measures["out"].absolute.index == (0, 2, 5, 7)
    assert not math.isfinite(judgement.measures["out"].absolute.value)


@pytest.mark.parametrize(
    ("got_out", "got_lse", "what"),
    [
        (np.zeros((1, 4, 40, 8), BF16), None, "out: shapes differ: got (1, 4, 40, 8), want (1, 4, 40, 16)"),
        (None, np.zeros((1, 4, 40, 1), np.float32), "lse: shapes differ: got (1, 4, 40, 1), want (1, 4, 40)"),
    ],
)
def test_wrong_shapes_fail(got_out: np.ndarray | None, got_lse: np.ndarray | None, what: str) -> None:
    """An output or LSE of another shape fails with both shapes."""
    case = causal_case()
    judgement = judge(case, rounded(case)[0] if got_out is None else got_out, got_lse, plain_bound(case))
    assert judgement.verdict is Verdict.FAIL
    assert judgement.reason == what


def test_nothing_compared_fails() -> None:
    """A problem without queries is no pass."""
    case = normal_problem(0, q_len=0)
    judgement = judge(case, *rounded(case), plain_bound(case))
    assert judgement.verdict is Verdict.FAIL
    assert "nothing was compared" in judgement.reason


def test_other_formats_are_refused() -> None:
    """A float64 output is an error of the caller, not a verdict."""
    case = causal_case()
    with pytest.raises(TypeError, match="got must be BF16 or FP32, got float64"):
        judge(case, rounded(case)[0].astype(np.float64), None, plain_bound(case))


@pytest.mark.parametrize(
    ("name", "value", "shapes"),
    [
        ("inside_domain", np.ones((1, 4, 40, 16), bool), r"\(1, 4, 40\), got \(1, 4, 40, 16\)"),
        ("out", np.ones((1, 4, 40, 1)), r"\(1, 4, 40, 16\), got \(1, 4, 40, 1\)"),
        ("lse", np.float64(1.0), r"\(1, 4, 40\), got \(\)"),
    ],
)
def test_bounds_of_another_shape_are_refused(name: str, value: np.ndarray, shapes: str) -> None:
    """Bounds are given in full, never broadcast; another shape is an error of the caller, not a verdict."""
    case = causal_case()
    bound = dataclasses.replace(plain_bound(case), **{name: value})
    with pytest.raises(ValueError, match=rf"bound\.{name} must have shape {shapes}"):
        judge(case, *rounded(case), bound)


def near_tie() -> AttentionProblem:
    """Logits near 2^70 that differ by 1: float64 knows nothing about the weights, f is (3 + 5 e) / (1 + e)."""
    keys = [[[[2.0**35, 0.0], [2.0**35, 1.0]]]]
    return problem([[[[2.0**35, 1.0]]]], keys, [[[[3.0, -3.0], [5.0, -5.0]]]], causal=False)


def test_open_elements_are_decided_by_ball_arithmetic() -> None:
    """Where float64 cannot decide, the right answer passes and a wrong one within float64's error fails."""
    case = near_tie()
    found = oracle_float64.attention(case)
    assert found.out_error.min() > 0.5
    mean = (3 + 5 * math.e) / (1 + math.e)
    bound = plain_bound(case)
    right = judge(case, as_bf16(np.array([[[[mean, -mean]]]])), found.lse.astype(np.float32), bound)
    assert right.verdict is Verdict.PASS, right.reason
    assert right.notes == ("out: 1 of 1 rows (100.00%) computed by ball arithmetic",)
    assert right.escalation is not None
    assert (right.escalation.rows, right.escalation.of, right.escalation.share) == (1, 2, 0.5)
    wrong = judge(case, as_bf16(np.array([[[[mean, -4.0]]]])), None, bound)
    assert wrong.verdict is Verdict.FAIL
    assert "1 of 2 elements of out are wrong; worst out[0, 0, 0, 1]: got -4" in wrong.reason


def test_an_open_lse_is_decided_by_ball_arithmetic() -> None:
    """The same for a log-sum-exp whose bound is finer than float64's error."""
    case = near_tie()
    exact = float(oracle_arb.attention_row(case, 0, 0, 0)[1].mid())
    bound = dataclasses.replace(plain_bound(case), lse=np.full((1, 1, 1), 2.0**-30 * exact))
    loose = oracle_float64.attention(case)
    loose = dataclasses.replace(loose, lse_error=np.full((1, 1, 1), exact))
    out = as_bf16(oracle_arb.attention(case).out)
    assert judge(case, out, np.full((1, 1, 1), exact, np.float32), bound, reference=loose).passed
    high = np.full((1, 1, 1), exact * (1 + 2.0**-22), np.float32)
    assert judge(case, out, high, bound, reference=loose).verdict is Verdict.FAIL


def test_ball_arithmetic_decides_to_the_last_bit() -> None:
    """f is 1/3: an error of 1/3 is beyond a bound of the float64 just below 1/3 and within that just above."""
    case = problem([[[[1.0]]]], np.zeros((1, 1, 3, 1)), [[[[0.0], [0.0], [1.0]]]], causal=False)
    below = 1.0 / 3.0
    assert Fraction(below) < Fraction(1, 3) < Fraction(math.nextafter(below, 1.0))
    for limit, passes in ((below, False), (math.nextafter(below, 1.0), True)):
        bound = PlainBound(np.full((1, 1, 1, 1), limit), np.ones((1, 1, 1)), np.ones((1, 1, 1), bool))
        judgement = judge(case, np.zeros((1, 1, 1, 1), BF16), None, bound)
        assert judgement.passed == passes
        assert not any("equal their bound" in note for note in judgement.notes)


def test_a_tie_counts_as_within_and_is_noted() -> None:
    """f is 0 by symmetry, which no interval can show: an error equal to the bound is within, and a note says so."""
    keys = [[[[1.0], [1.0], [0.5], [0.5]]]]
    case = problem([[[[1.0]]]], keys, [[[[1.0], [-1.0], [2.0], [-2.0]]]], causal=False)
    bound = PlainBound(np.full((1, 1, 1, 1), 0.5), np.ones((1, 1, 1)), np.ones((1, 1, 1), bool))
    reference = oracle_float64.attention(case)
    reference = dataclasses.replace(reference, out_error=np.maximum(reference.out_error, 2.0**-50))
    judgement = judge(case, np.full((1, 1, 1, 1), 0.5, np.float32), None, bound, reference=reference)
    assert judgement.passed
    assert any("1 elements equal their bound" in note for note in judgement.notes)


def with_class(value: float) -> AttentionProblem:
    """One value of the last key is not finite."""
    case = normal_problem(1, heads=1, kv_heads=1, q_len=4, kv_len=4, head_dim=3)
    v = case.v.copy()
    v[0, 0, 3, 1] = value
    return dataclasses.replace(case, v=v)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_classes_are_judged_outside_the_domain(value: float) -> None:
    """In a row outside the domain, NaN and infinities of f are due, and its finite elements are not judged."""
    case = with_class(value)
    out, lse = rounded(case)
    bound = plain_bound(case)
    assert not bound.inside_domain[0, 0, 3]
    out[0, 0, 3, 0] = 7.0
    judgement = judge(case, out, lse, bound)
    assert judgement.verdict is Verdict.PASS, judgement.reason
    assert "1 of 4 rows lie outside the domain" in judgement.notes[-1]
    out[0, 0, 3, 1] = 7.0
    judgement = judge(case, out, lse, bound)
    assert judgement.verdict is Verdict.FAIL
    assert "worst out[0, 0, 3, 1]: got 7" in judgement.reason


def test_a_problem_outside_the_domain_is_said_to_be() -> None:
    """If every row lies outside the domain and f is finite, there is no verdict on the kernel, whatever it gave."""
    case = causal_case()
    out, lse = rounded(case)
    inside = np.zeros(lse.shape, bool)
    bound = PlainBound(np.full(out.shape, np.nan), np.full(lse.shape, np.inf), inside)
    judgement = judge(case, np.full_like(out, np.nan), lse, bound)
    assert judgement.verdict is Verdict.OUTSIDE_DOMAIN
    assert "all 160 rows lie outside the domain" in judgement.reason


def test_shapes_are_checked_outside_the_domain_too() -> None:
    """A wrong shape fails even if there is nothing to judge by value."""
    case = causal_case()
    bound = PlainBound(np.ones((1, 4, 40, 16)), np.ones((1, 4, 40)), np.zeros((1, 4, 40), bool))
    assert judge(case, np.zeros((1, 4, 40, 8), BF16), None, bound).verdict is Verdict.FAIL


def test_rows_without_keys_are_judged() -> None:
    """A1: an empty row has to be 0 with LSE -inf; a mean of masked values, NaN or a finite LSE fail."""
    values = np.repeat([[1.0], [3.0]], 8, axis=1)[None, None]
    case = problem(np.ones((1, 1, 5, 8)), np.zeros((1, 1, 2, 8)), values, causal=True)
    out, lse = rounded(case)
    assert judge(case, out, lse, plain_bound(case), power=True).passed
    for value in (2.0, np.nan):
        wrong = out.copy()
        wrong[0, 0, 0] = value
        assert judge(case, wrong, lse, plain_bound(case)).verdict is Verdict.FAIL
    wrong_lse = lse.copy()
    wrong_lse[0, 0, 0] = -1e30
    assert judge(case, out, wrong_lse, plain_bound(case)).verdict is Verdict.FAIL


@functools.cache
def narrow_values() -> AttentionProblem:
    """G2: values between 0.5 and 1, 256 tokens, several heads."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 2, 256, 64))
    return problem(q, k, rng.uniform(0.5, 1.0, (1, 2, 256, 64)), causal=True, scale=64**-0.5)


@functools.cache
def narrow_candidates() -> dict[str, np.ndarray]:
    """G2: answers that look plausible on narrow values."""
    case = narrow_values()
    found = oracle_float64.attention(case)
    late = np.clip(np.arange(256) + 1 - 128, 0, 256)
    return {
        "constant 0.75": np.full(found.out.shape, 0.75),
        "mean of all values": np.broadcast_to(case.v.astype(np.float64).mean(axis=2, keepdims=True), found.out.shape),
        "next head": np.roll(found.out, -1, axis=1),
        "mask one block off": oracle_float64.attention(case, visible=late).out,
        "random in range": np.random.default_rng(1).uniform(0.5, 1.0, found.out.shape),
    }


@pytest.mark.parametrize("name", narrow_candidates())
def test_plausible_answers_fail(name: str) -> None:
    """G2: on values between 0.5 and 1, every trivial candidate fails, and the right answer passes with power."""
    case = narrow_values()
    bound = plain_bound(case)
    assert judge(case, as_bf16(narrow_candidates()[name]), None, bound).verdict is Verdict.FAIL
    assert judge(case, *rounded(case), bound, power=True).verdict is Verdict.PASS


def test_a_bound_without_power_is_said_to_be() -> None:
    """G2: where the bound accepts trivial answers, a pass becomes "no power" and names them; a failure stays one."""
    case = narrow_values()
    out, lse = rounded(case)
    bound = plain_bound(case)
    wide = dataclasses.replace(bound, out=np.full_like(bound.out, 1.0))
    judgement = judge(case, out, lse, wide, power=True)
    assert judgement.verdict is Verdict.NO_POWER
    for name in (
        "the mean of the visible values",
        "a constant (the mean of all values)",
        "the output of the next KV head",
        "the output of the next query head",
        "a causal mask one key early",
        "a causal mask one key late",
        "a causal mask one block (128 keys) early",
        "a causal mask one block (128 keys) late",
    ):
        assert name in judgement.reason
    assert judge(case, out, lse, wide).verdict is Verdict.PASS
    assert judge(case, out * BF16.type(4.0), lse, wide, power=True).verdict is Verdict.FAIL


def test_power_against_one_answer_is_not_power_against_another() -> None:
    """Equal heads give equal answers, which do not count; nearly equal heads give answers that the bound accepts."""
    case = normal_problem(3, heads=2, kv_heads=2, q_len=64, kv_len=64)
    twins = {name: np.repeat(getattr(case, name)[:, :1], 2, axis=1) for name in ("q", "k", "v")}
    case = dataclasses.replace(case, **twins)
    assert judge(case, *rounded(case), plain_bound(case), power=True).verdict is Verdict.PASS
    nearly = case.v.copy()
    nearly[0, 1, 0] = as_bf16(nearly[0, 1, 0].astype(np.float64) * 1.001 + 1e-3)
    case = dataclasses.replace(case, v=nearly)
    judgement = judge(case, *rounded(case), plain_bound(case, 2.0**-2), power=True)
    assert judgement.verdict is Verdict.NO_POWER
    share, element = r"\(at most 0\.\d+ of the bound, at ", r"out\[0, \d, \d+, \d+\]: got \S+ \(0x[0-9a-f]{4}\)"
    place = rf"{share}{element}, want \S+ \(nearest 0x[0-9a-f]{{4}}\)\)"
    assert re.fullmatch(
        rf"the bound also accepts: the output of the next KV head {place}, the output of the next query head {place}",
        judgement.reason,
    ), judgement.reason


def test_the_right_answer_is_no_trivial_one() -> None:
    """With equal logits the mean of the visible values is f itself and does not count against the case."""
    rng = np.random.default_rng(4)
    case = problem(np.ones((1, 1, 40, 4)), np.zeros((1, 1, 40, 4)), rng.standard_normal((1, 1, 40, 4)), causal=True)
    assert judge(case, *rounded(case), plain_bound(case), power=True).verdict is Verdict.PASS


def mistaken(name: str) -> tuple[AttentionProblem, np.ndarray]:
    """A problem, and the output of a kernel with a well-known mistake."""
    case = causal_case()
    counts = case.visible_to(np.arange(case.q_len))
    masks = {
        "hides the diagonal": counts - 1,
        "one key late": np.minimum(counts + 1, 300),
        "128 keys) early": counts - 128,
        "aligned top-left": np.arange(40) + 1,
        "no causal mask": np.full(40, 300),
    }
    if name in masks:
        return case, oracle_float64.attention(case, visible=masks[name]).out
    changed = {
        "heads tiled": {"k": case.k[:, [0, 1, 0, 1]], "v": case.v[:, [0, 1, 0, 1]]},
        "read instead of": {"k": case.k[:, ::-1], "v": case.v[:, ::-1]},
        "not scaled": {"scale": 1.0},
        "scaled twice": {"scale": case.scale**2},
        "exp2 of natural-log logits": {"scale": case.scale * math.log(2.0)},
        "exp of log2 logits": {"scale": case.scale / math.log(2.0)},
        "uniform weights": {"scale": 0.0},
    }
    return case, oracle_float64.attention(dataclasses.replace(case, **changed[name])).out


@pytest.mark.parametrize(
    "name",
    [
        "hides the diagonal",
        "one key late",
        "128 keys) early",
        "aligned top-left",
        "no causal mask",
        "heads tiled",
        "read instead of",
        "not scaled",
        "scaled twice",
        "exp2 of natural-log logits",
        "exp of log2 logits",
        "uniform weights",
    ],
)
def test_a_well_known_mistake_is_named(name: str) -> None:
    """A wrong mask, head map or scale fails, and the reason says which mistake the worst row agrees with."""
    case, out = mistaken(name)
    out[:, :, 30:] = oracle_float64.attention(case).out[:, :, 30:]  # there, one and two keys late are the same
    judgement = judge(case, out.astype(np.float32), None, plain_bound(case, 2.0**-18))
    assert judgement.verdict is Verdict.FAIL
    assert "agrees with: " in judgement.reason, judgement.reason
    assert name in judgement.reason.split("agrees with: ")[1]


def test_a_row_too_small_for_any_format_fails_in_plain_words() -> None:
    """A row whose exact values lie below 2^-126 in size is the multiple of nothing, and its square is no divisor."""
    case = causal_case()
    q, k, v = np.zeros_like(case.q), np.zeros_like(case.k), np.zeros_like(case.v)
    q[..., 0], k[:, :, 0, 0], v[:, :, 1] = 1.0, 2.0**9, 1.0
    tiny = dataclasses.replace(case, q=q, k=k, v=v, scale=1.0)
    want = oracle_float64.attention(tiny).out
    assert want[0, 0, 0, 0] > 0.0
    assert want[0, 0, 0, 0] ** 2 == 0.0
    judgement = judge(tiny, np.ones_like(case.q), None, plain_bound(tiny, 2.0**-8))
    assert judgement.verdict is Verdict.FAIL
    assert "the right row times" not in judgement.reason


def test_a_dropped_tail_and_zeros_are_named() -> None:
    """Not causal, 300 keys: dropping the last partial block of 128, or giving zeros, is named."""
    case = dataclasses.replace(causal_case(), causal=False)
    tail = oracle_float64.attention(case, visible=np.full(40, 256)).out
    reason = judge(case, as_bf16(tail), None, plain_bound(case, 2.0**-8)).reason
    assert "agrees with: the last partial block of keys dropped" in reason
    reason = judge(case, np.zeros(tail.shape, BF16), None, plain_bound(case, 2.0**-8)).reason
    assert "agrees with: 0" in reason


def test_noise_is_not_explained() -> None:
    """An output that agrees with nothing gets no explanation."""
    case = causal_case()
    noise = np.random.default_rng(0).standard_normal((1, 4, 40, 16))
    assert "agrees with" not in judge(case, as_bf16(noise), None, plain_bound(case, 2.0**-8)).reason

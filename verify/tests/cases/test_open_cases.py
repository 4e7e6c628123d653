"""Known ways such kernels have gone wrong elsewhere, each with the right answer and how it is known.

The letters are those of the collection that these cases come from; the answers are closed forms.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from verify.attention import adversarial, oracle_arb, oracle_float64, oracle_mpmath
from verify.attention.examine import examine_problem
from verify.attention.problem import AttentionProblem
from verify.verdict import Verdict

BF16 = ml_dtypes.bfloat16
D = 64
ORACLES = {"mpmath": oracle_mpmath.attention, "arb": oracle_arb.attention, "float64": oracle_float64.attention}


def problem(
    q_len: int, scores: list[float], values: list[float], *, causal: bool = True, scale: float = 1.0
) -> AttentionProblem:
    """One head whose every query gives key j the logit scale * scores[j], exactly; V[j] is values[j] in every lane."""
    q = np.zeros((1, 1, q_len, D), BF16)
    q[..., :3] = 1
    k = np.zeros((1, 1, len(scores), D), BF16)
    for j, value in enumerate(scores):
        k[0, 0, j, :3] = [float.fromhex(part) for part in adversarial.bf16_parts(value)]
    v = np.broadcast_to(np.asarray(values, np.float64)[:, None], (len(values), D)).astype(BF16)[None, None]
    assert (v[0, 0, :, 0].astype(np.float64) == np.asarray(values)).all(), "a value that BF16 cannot hold"
    return AttentionProblem(q, k, v, causal, scale)


def check(case: AttentionProblem, out: list[float], lse: list[float] | None = None, *, power: bool = True) -> None:
    """Every oracle gives the closed form within its proved error, and the kernel passes its contract."""
    want_out = np.broadcast_to(np.asarray(out, np.float64)[:, None], (len(out), D))
    for name, oracle in ORACLES.items():
        reference = oracle(case)
        error = np.abs(reference.out[0, 0] - want_out)
        # The closed forms are given to binary64; their own rounding is 2**-52 relative.
        assert (error <= reference.out_error[0, 0] + 2.0**-51 * np.abs(want_out)).all(), name
        if lse is not None:
            for got, bound, want in zip(reference.lse[0, 0], reference.lse_error[0, 0], lse, strict=True):
                assert got == want or abs(got - want) <= bound + 2.0**-51 * abs(want), (name, got, want)
    judgement = examine_problem(case, power=power).judgement
    assert judgement.verdict is Verdict.PASS, judgement.reason


def test_a1_fully_masked_rows() -> None:
    """Rows without a visible key give 0 and LSE -inf, never NaN and never a mean of masked values."""
    check(problem(5, [0.0, 0.0], [1.0, 3.0]), [0, 0, 0, 1, 2], [-math.inf] * 3 + [0.0, math.log(2)])


def one_per_fragment(scores: list[float]) -> tuple[list[float], list[float]]:
    """Scores 128 keys apart, each the first of its fragment; the keys between are far below and carry no value."""
    spread = [-4096.0] * (128 * len(scores))
    values = [0.0] * len(spread)
    for n, score in enumerate(scores):
        spread[128 * n] = score
        values[128 * n] = float(2**n)
    return spread, values


def test_b2a_slow_drift() -> None:
    """A maximum that drifts by 7.9 log2 units per fragment: weights must stay in one frame."""
    scores, values = one_per_fragment([0.0, 7.9, 15.8])
    exact = [float(np.float32(s)) for s in (0.0, 7.9, 15.8)]
    weights = [2.0**s for s in exact]
    want = sum(w * 2.0**n for n, w in enumerate(weights)) / sum(weights)
    # 2e-6: FP32 cannot hold 7.9 and 15.8.
    assert abs(want - 3.9916094616081) < 2e-6
    case = problem(1, scores, values, causal=False, scale=math.log(2.0))
    check(case, [want], [math.log(sum(weights))])


def test_b2b_jumps_of_60_and_100_nats() -> None:
    """Natural scores 0, 60, 100: the answer is 4 - 8.5e-18."""
    scores, values = one_per_fragment([0.0, 60.0, 100.0])
    check(problem(1, scores, values, causal=False), [4.0 - 8.5e-18])


def test_b2c_first_key_far_above() -> None:
    """Natural scores 200, 0, 0: later terms underflow harmlessly, and nothing is replayed."""
    scores, values = one_per_fragment([200.0, 0.0, 0.0])
    case = problem(1, scores, values, causal=False)
    check(case, [1.0])
    assert examine_problem(case, config=(128, 128, 128)).result.replays.sum() == 0


def test_b2d_large_value_behind_a_jump() -> None:
    """Scores 0 and 65 nats with V = 1 and 2**35: a check of l alone passes while o overflows; 2**35 is owed."""
    scores, values = one_per_fragment([0.0, 65.0])
    values[128] = 2.0**35
    check(problem(1, scores, values, causal=False), [2.0**35])


@pytest.mark.parametrize("gap", ["limit-1ulp", "limit", "limit+1ulp", "article-tau"])
def test_b2e_gap_at_the_limit(gap: str) -> None:
    """At the limit, one ulp below and one above, the result is continuous: within the bound on both sides."""
    case = adversarial.by_name()[f"jump-{gap}-middle"]
    judgement = examine_problem(case.build(), config=case.config).judgement
    assert judgement.verdict is Verdict.PASS, judgement.reason


@pytest.mark.parametrize(("heads", "kv_heads"), adversarial.GQA_RATIOS)
def test_d1_head_map(heads: int, kv_heads: int) -> None:
    """Query head i reads KV head floor(i kv_heads / heads): V of KV head h holds h + 1, and so does the output."""
    case = adversarial.by_name()[f"heads-{heads}-{kv_heads}"]
    want = np.array([i * kv_heads // heads + 1 for i in range(heads)], np.float64)
    examined = examine_problem(case.build(), config=case.config)
    assert examined.judgement.verdict is Verdict.PASS, examined.judgement.reason
    # P is rounded to BF16 and the denominator is not, so that the mean of equal values may be off by 2**-8.
    assert (np.rint(examined.result.out.astype(np.float64)) == want[None, :, None, None]).all()
    for oracle in (oracle_float64.attention, oracle_arb.attention):
        reference = oracle(case.build())
        assert (np.abs(reference.out - want[None, :, None, None]) <= reference.out_error).all()


@pytest.mark.parametrize("length", [1, 7, 8, 9, 63, 64, 65, 127, 129, 192])
def test_e5_length_off_the_block(length: int) -> None:
    """Uniform attention over any length is the plain mean of V, whatever memory lies beyond; two runs agree bitwise."""
    values = [float(j % 8) for j in range(length)]
    case = problem(length, [0.0] * length, values, causal=False)
    examined = [examine_problem(case, config=(128, 128, 128)) for _ in range(2)]
    assert examined[0].judgement.verdict is Verdict.PASS, examined[0].judgement.reason
    words = [e.result.out.view(np.uint16) for e in examined]
    assert (words[0] == words[1]).all()
    mean = sum(values) / length
    assert (np.abs(examined[0].problem.v.astype(np.float64).mean() - mean)) < 2.0**-40
    reference = oracle_float64.attention(case)
    assert (np.abs(reference.out - mean) <= reference.out_error + 2.0**-51 * mean).all()


def test_e5_in_poisoned_memory() -> None:
    """The same with the output and all scratch memory filled with NaN beforehand."""
    case = problem(65, [0.0] * 65, [float(j % 8) for j in range(65)], causal=False)
    judgement = examine_problem(case, interpret="tpu").judgement
    assert judgement.verdict is Verdict.PASS, judgement.reason


def test_g3_bottom_right_alignment() -> None:
    """Three queries over 128 uniform keys with V[j] = j: 62.5, 63, 63.5; a top-left mask would give 0, 0.5, 1."""
    check(problem(3, [0.0] * 128, [float(j) for j in range(128)]), [62.5, 63.0, 63.5])

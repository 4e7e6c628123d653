"""Known ways such kernels have gone wrong elsewhere, each with the right answer and how it is known.

The inputs and their closed forms stand in `verify.attention.open_cases`.  Here the oracles must give the closed forms,
and our kernel must pass; `verify/tests/subjects` runs the same cases on every other kernel.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from verify.attention import adversarial, oracle_arb, oracle_float64, oracle_mpmath
from verify.attention.examine import examine_problem
from verify.attention.open_cases import BLOCKS, OPEN_CASES, OpenCase, planted
from verify.subjects import load
from verify.subjects.judging import judge_open_case
from verify.subjects.registry import BUILT_IN
from verify.verdict import Verdict

ORACLES = {"mpmath": oracle_mpmath.attention, "arb": oracle_arb.attention, "float64": oracle_float64.attention}
MOST_PAIRS = {"mpmath": 2_000, "arb": 20_000, "float64": math.inf}
"""Row and key pairs up to which an oracle is asked: the slower ones take the small cases only."""

WITH_CLOSED_FORM = {name: case for name, case in OPEN_CASES.items() if case.out is not None}


@pytest.mark.parametrize("name", WITH_CLOSED_FORM)
def test_oracles_give_the_closed_form(name: str) -> None:
    """Every oracle that is fast enough for the case gives its closed form within the oracle's proved error."""
    case = WITH_CLOSED_FORM[name]
    problem = case.build()
    want = np.asarray(case.out, np.float64)[..., None, :, None]  # heads and lanes are alike
    pairs = problem.batch * problem.heads * problem.q_len * problem.kv_len
    asked = [oracle for oracle in ORACLES if pairs <= MOST_PAIRS[oracle]]
    assert asked
    for oracle in asked:
        reference = ORACLES[oracle](problem)
        # The closed forms are given to binary64; their own rounding is 2**-52 relative.
        room = reference.out_error + 2.0**-51 * np.abs(want)
        assert (np.abs(reference.out - want) <= room).all(), oracle
        if case.lse is not None:
            due = np.asarray(case.lse, np.float64)
            seen = np.isfinite(due)
            assert (reference.lse[0][:, ~seen] == due[~seen]).all(), oracle
            distance = np.abs(reference.lse[0][:, seen] - due[seen])
            assert (distance <= reference.lse_error[0][:, seen] + 2.0**-51 * np.abs(due[seen])).all(), oracle


OURS = load("flywheel.attention")


def check_ours(case: OpenCase) -> None:
    """Our kernel passes, or lacks a feature that the case needs; a trivial answer would not pass."""
    judgement = judge_open_case(OURS, case).judgement
    if judgement.verdict is Verdict.SKIPPED:
        pytest.skip(f"flywheel.attention: {judgement.reason}")
    assert judgement.verdict is Verdict.PASS, judgement.reason


@pytest.mark.parametrize("case", [c for c in OPEN_CASES.values() if c.tier == "cover"], ids=lambda case: case.name)
def test_our_kernel(case: OpenCase) -> None:
    """flywheel.attention gives the right answer on every open case that it supports."""
    check_ours(case)


@pytest.mark.deep
@pytest.mark.parametrize("case", [c for c in OPEN_CASES.values() if c.tier == "deep"], ids=lambda case: case.name)
def test_our_kernel_on_the_rest(case: OpenCase) -> None:
    """The same on long cases, and on further sizes of the others."""
    check_ours(case)


def test_a3_the_window_hides_what_lies_before_it() -> None:
    """Query 300 with a window of 128 keys sees keys 173..300: the mean of j mod 16 is 7.5, whatever key 5 holds."""
    reference = oracle_float64.attention(OPEN_CASES["a3a-large-score-before-the-window"].build())
    assert (np.abs(reference.out[0, 0, 300] - 7.5) <= reference.out_error[0, 0, 300]).all()


def test_a3_a_fragment_hidden_by_segments_hides_nothing_else() -> None:
    """Query 383 sees key 300, 100 nats above the rest, with the value 5."""
    reference = oracle_float64.attention(OPEN_CASES["a3b-first-fragment-hidden-by-segments"].build())
    # 200 keys at weight e**-100 and values 1 instead of 5.
    assert (np.abs(reference.out[0, 0, 383] - 5.0) <= reference.out_error[0, 0, 383] + 800.0 * math.exp(-100.0)).all()


@pytest.mark.parametrize("window", [(383, None), (384, None)])
def test_a3_a_window_as_long_as_the_sequence_is_none(window: tuple[int, None]) -> None:
    """W = T, W = T + 1 and no window are the same, bit for bit, for every subject with windows; an off-by-one shows."""
    problems = [adversarial.AttentionCase("a3c", (1, 1, 1, 384, 384, 64), seed=3).build()]
    plain = problems[0]
    other = planted(384, [0.0] * 384, [0.0] * 384, window=window)
    windowed = type(plain)(plain.q, plain.k, plain.v, plain.causal, plain.scale, window=other.window)
    for name in BUILT_IN:
        subject = load(name)
        if subject.operation == "attention" and subject.unsupported(windowed) is None:
            first, second = subject(plain, config=BLOCKS), subject(windowed, config=BLOCKS)
            assert (first.out.view(np.uint16) == second.out.view(np.uint16)).all(), name
    reference, same = oracle_float64.attention(plain), oracle_float64.attention(windowed)
    assert (reference.out == same.out).all()


@pytest.mark.parametrize("name", BUILT_IN)
def test_e7_each_sequence_equals_a_solo_run(name: str) -> None:
    """Whatever stands behind or before a sequence, its rows have the bits that they have on their own."""
    subject = load(name)
    together = OPEN_CASES["e7-a-few-pairs-of-lengths"].build()
    if subject.operation != "attention" or subject.unsupported(together) is not None:
        pytest.skip(f"{name}: {subject.unsupported(together) or subject.operation}")
    assert together.q_segments is not None
    got = subject(together).out.view(np.uint16)
    for segment in (0, 1):
        ids = np.where(together.q_segments == segment, 0, -1).astype(np.int32)
        alone = dataclasses.replace(together, q_segments=ids, k_segments=np.where(ids < 0, -2, ids).astype(np.int32))
        rows = ids == 0
        assert (subject(alone).out.view(np.uint16)[:, 0][rows] == got[:, 0][rows]).all()


def test_b2c_no_replay_where_the_first_key_is_far_above() -> None:
    """Natural scores 200, 0, 0: later terms underflow harmlessly, and nothing is replayed."""
    case = OPEN_CASES["b2c-first-key-far-above"]
    assert examine_problem(case.build(), config=case.config).result.replays.sum() == 0


def test_b2a_agrees_with_the_published_value() -> None:
    """The slow drift's answer with scores that FP32 cannot hold: 7.9 and 15.8 are each off by up to 2**-24 relative."""
    want = WITH_CLOSED_FORM["b2a-slow-drift"].out
    assert want is not None
    # d(out)/d(score) is at most ln 2 times the spread of V, 3; two scores move by 2**-24 of 15.8 and of 7.9.
    assert abs(want[0] - 3.9916094616081) <= math.log(2.0) * 3.0 * (15.8 + 7.9) * 2.0**-24


def test_b6_each_head_has_its_own_sink() -> None:
    """Sinks ln 16 and ln 48 over 16 keys of logit 0 leave 16 / 32 and 16 / 64 of V = 1."""
    reference = oracle_float64.attention(OPEN_CASES["b6-sink-of-the-head"].build())
    want = np.array([0.5, 0.25])[None, :, None, None]
    # The sinks are FP32: off by 2**-24 of 2.77 and 3.87, which moves the output by at most a quarter of that.
    assert (np.abs(reference.out - want) <= reference.out_error + 2.0**-24).all()


@pytest.mark.parametrize(("s", "lse"), [(8, 10.137), (64, 64.459), (500, 500.0)])
def test_b7_the_lse_reads_the_scores(s: int, lse: float) -> None:
    """Keys from -s to s along the query: the LSE to the digits given; log2(e) rounded to BF16 makes it 0.18% larger."""
    problem = OPEN_CASES[f"b7-keys-from-minus-{s}-to-{s}"].build()
    for oracle in ORACLES.values():
        assert round(float(oracle(problem).lse[0, 0, 0]), 3) == lse


@pytest.mark.parametrize(("heads", "kv_heads"), adversarial.GQA_RATIOS)
def test_d1_head_map(heads: int, kv_heads: int) -> None:
    """Query head i reads KV head floor(i kv_heads / heads): V of KV head h holds h + 1, so the output names it."""
    problem = OPEN_CASES[f"d1-heads-{heads}-{kv_heads}"].build()
    want = np.array([i * kv_heads // heads + 1 for i in range(heads)], np.float64)[None, :, None, None]
    for oracle in (oracle_float64.attention, oracle_arb.attention):
        reference = oracle(problem)
        assert (np.abs(reference.out - want) <= reference.out_error).all()


@pytest.mark.parametrize("length", [65, 129])
def test_e5_two_runs_agree_bitwise(length: int) -> None:
    """Whatever memory lies beyond the last key, two runs give the same bits."""
    case = OPEN_CASES[f"e5-length-{length}"]
    words = [examine_problem(case.build(), config=case.config).result.out.view(np.uint16) for _ in range(2)]
    assert (words[0] == words[1]).all()


def test_e5_in_poisoned_memory() -> None:
    """The same with the output and all scratch memory filled with NaN beforehand."""
    judgement = examine_problem(OPEN_CASES["e5-length-65"].build(), interpret="tpu").judgement
    assert judgement.verdict is Verdict.PASS, judgement.reason

"""Adapters of peers' kernels for campaigns: what they ask, leave out and refuse; no peer is called."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import pytest

from fuzz.attention.ragged import RaggedSubject
from fuzz.case import Case, load_case
from fuzz.gdn.layer_case import LayerCase
from fuzz.gdn.record import in_json
from fuzz.gdn.subjects import LayerSubject
from fuzz.hunts import find
from verify.attention import oracle_float64
from verify.attention.cases import AttentionCase
from verify.attention.open_cases import OPEN_CASES
from verify.attention.subjects import SubjectResult
from verify.gdn.cases import GdnCase
from verify.gdn.float64_stages import rule_inputs
from verify.gdn.judge import GdnResult
from verify.gdn.problem import final_conv_state
from verify.gdn.steps import run
from verify.subjects.gdn import GdnSubject, judge_gdn_subject
from verify.subjects.jax_pallas import SPLASH, scaled_query
from verify.subjects.peers import below_mask, decode, deltanet_bridge, fenced, gdn_decode
from verify.subjects.peers.deltanet import STEPS
from verify.subjects.subject import Subject
from verify.verdict import Verdict

if TYPE_CHECKING:
    from verify.gdn.problem import DeltaRuleProblem, GdnProblem

HEADS = (1, 2, 128, 128)
ROOT = Path(__file__).resolve().parents[3]
CASES = sorted((ROOT / "verify" / "subjects" / "data" / "campaigns").glob("*.json"))
PAGE = ROOT / "docs" / "campaign-findings.md"


def _rule(problem: DeltaRuleProblem) -> GdnResult:
    found = run(problem, STEPS)
    return GdnResult(found.out, found.state)


def test_a_kernel_of_the_delta_rule_is_judged_by_the_rule_in_a_layer() -> None:
    """It gets the layer's queries, keys, values and gates, rounded, and is judged by them alone."""
    problem = GdnCase("random", "up to 1", "mild", lengths=(5, 3), heads=HEADS).layer()
    rule = deltanet_bridge.rule_of(problem)
    exact = rule_inputs(problem, 1)
    assert np.array_equal(rule.k[5:8], exact.k.value.astype(rule.k.dtype))
    assert np.array_equal(rule.beta[5:8], exact.beta.value.astype(np.float32))
    subject = GdnSubject("rule", _rule, steps=STEPS, computes=deltanet_bridge.rule_of)
    judged = judge_gdn_subject(subject, problem)
    assert judged.judgement.verdict is Verdict.PASS, judged.judgement.reason
    wrong = dataclasses.replace(subject, call=lambda problem: dataclasses.replace(_rule(problem), out=problem.v))
    assert judge_gdn_subject(wrong, problem).judgement.verdict is Verdict.FAIL


def test_deltanet_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an environment it is skipped with the way to one; with one, longer sequences than its contract's."""
    monkeypatch.delenv(deltanet_bridge.ENVIRONMENT, raising=False)
    short, long = (GdnCase("random", "1", "0", lengths=(n,), heads=HEADS).layer() for n in (64, 65))
    judged = judge_gdn_subject(deltanet_bridge.DELTANET, short)
    assert judged.judgement.verdict is Verdict.SKIPPED
    assert "peers.deltanet environment" in judged.judgement.reason
    monkeypatch.setenv(deltanet_bridge.ENVIRONMENT, "somewhere")
    assert deltanet_bridge.DELTANET.lacking(short) is None
    assert "up to 64" in str(deltanet_bridge.DELTANET.lacking(long))


RUNNER = """
import sys
from pathlib import Path
import numpy as np
results = Path(sys.argv[2])
results.mkdir()
for line in sys.stdin:
    case = Path(line.strip())
    with np.load(case) as x:
        if x["v"].min() < 0:
            found = {"error": np.array("ValueError: negative")}
        else:
            found = {"out": 2 * x["v"], "state": x["state"] + len(x["v"])}
    np.savez(results / case.name, **found)
    print(case, flush=True)
"""


def test_cases_and_results_go_through_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One process answers case after case, each in whole chunks; what it cannot take is a refusal."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (tmp_path / "runner.py").write_text(RUNNER)
    monkeypatch.setenv(deltanet_bridge.ENVIRONMENT, str(tmp_path))
    monkeypatch.setattr(deltanet_bridge, "RUNNER", tmp_path / "runner.py")
    problem = deltanet_bridge.rule_of(GdnCase("random", "1", "0", lengths=(3, 4), heads=HEADS).layer())
    problem = dataclasses.replace(problem, v=np.abs(problem.v))
    deltanet_bridge.runner.cache_clear()
    try:
        found = deltanet_bridge.DELTANET.call(problem)
        assert np.array_equal(found.out, 2 * problem.v)
        assert np.array_equal(found.state, problem.state + deltanet_bridge.WIDTH)
        with pytest.raises(ValueError, match="negative"):
            deltanet_bridge.DELTANET.call(dataclasses.replace(problem, v=-problem.v))
    finally:
        deltanet_bridge.runner().close()
        deltanet_bridge.runner.cache_clear()


def test_rows_that_are_decoded() -> None:
    """As many for every length, the first and the last among them, each with the keys that it sees."""
    for q_len in (1, 12, 300):
        rows = decode.decoded(q_len)
        assert len(rows) == decode.REQUESTS
        assert (rows[0], rows[-1]) == (0, q_len - 1)
    assert decode.lengths(3, 2, causal=True).tolist() == [0, 1, 2]
    assert decode.lengths(2, 5, causal=False).tolist() == [5, 5]
    problem = OPEN_CASES["b7-keys-from-minus-8-to-8"].build()
    assert np.asarray(decode.DECODED.contains(problem)).all(axis=1).any() or problem.q_len > decode.REQUESTS


def test_a_decode_step_of_a_layer_call() -> None:
    """Of each sequence the first token, with its slots; an empty sequence has none."""
    problem = GdnCase("random", "1", "0", lengths=(3, 1, 2), heads=HEADS).layer()
    step = gdn_decode.first_tokens(problem)
    assert np.array_equal(step.qkv, problem.qkv[[0, 3, 4]])
    assert step.sequences.lengths.tolist() == [1, 1, 1]
    assert step.sequences.write_slots is problem.sequences.write_slots
    assert gdn_decode.TOKAMAX.lacking(problem) is None
    empty = GdnCase("random", "1", "0", lengths=(3, 0), heads=HEADS).layer()
    assert "one token" in str(gdn_decode.TOKAMAX.lacking(empty))


def test_a_fence_leaves_out_what_is_known() -> None:
    """Values whose sum overflows and rows without a key lie outside; the kernel refuses such values everywhere."""
    largest, blind = (OPEN_CASES[name].build() for name in ("b10-largest-values", "a1-rows-without-a-key"))
    assert not np.any(fenced.JAX_SPLASH.domain.contains(largest))
    with pytest.raises(NotImplementedError, match="behind the fence"):
        fenced.JAX_SPLASH(largest)
    inside = np.asarray(fenced.JAX_SPLASH.domain.contains(blind))[0, 0]
    assert inside.tolist() == [False, False, False, True, True]
    assert fenced.JAX_SPLASH.features == SPLASH.features


def test_near_the_constant() -> None:
    """Logits that a caller's constant can take lie inside, those it cannot take outside."""
    name = "b3a-above-a-callers-constant", "b3b-below-a-callers-constant", "b7-keys-from-minus-8-to-8"
    inside = [np.any(fenced.near_the_constant(OPEN_CASES[case].build())) for case in name]
    assert inside == [False, False, True]


def test_a_product_that_is_flushed_is_no_question() -> None:
    """q times the scale below the normal numbers would be lost before the kernel sees it; q itself may be subnormal."""
    tiny = np.array([2.0**-126, 2.0**-130, 1.0], np.float32)
    with pytest.raises(NotImplementedError, match="normal numbers"):
        scaled_query(tiny, 0.5)
    with pytest.raises(NotImplementedError, match="normal numbers"):
        scaled_query(np.array([2.0**127], np.float32), 4.0)
    assert scaled_query(tiny[1:], 0.5)[1] == tiny[2] / 2


def test_an_infinite_error_has_a_place_in_a_record() -> None:
    """A kernel that returns infinities or NaN for a layer is a finding, not the end of the campaign."""
    hunt = find("gates")
    case = Case("gates", LayerCase("plain", lengths=(3,)))
    subject = LayerSubject("kernel", lambda _: GdnSubject("kernel", _infinite))
    record = hunt.evaluate()(case, subject=subject, name="kernel", reproduce="")
    assert record is not None
    assert record["root"] is not None
    json.dumps(record, allow_nan=False)
    assert in_json(math.nan) == in_json(math.inf) > in_json(2.0)


def _infinite(problem: GdnProblem) -> GdnResult:
    found = run(problem, STEPS)
    return GdnResult(np.full_like(found.out, np.inf), found.state, final_conv_state(problem))


def test_a_peers_refusal_of_a_packed_batch_is_no_finding() -> None:
    """NotImplementedError and ValueError are how a kernel says what it does not take; anything else is its result."""
    packed = AttentionCase("packed", (1, 1, 1, 4, 4, 64), cu_seqlens_q=(0, 2, 4), cu_seqlens_k=(0, 2, 4))
    case = Case("ragged", packed, (("padding", "none"),))

    def refusing(error: Exception) -> RaggedSubject:
        def call(_: object) -> NoReturn:
            raise error

        return RaggedSubject("peer", call)

    judge = find("ragged").evaluate()
    assert judge(case, subject=refusing(NotImplementedError("no")), name="peer", reproduce="") is None
    record = judge(case, subject=refusing(TypeError("what")), name="peer", reproduce="")
    assert record["root"] == "raised-TypeError"


def test_logits_below_a_mask_value(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The logits are finite FP32 numbers below -0.7 of the largest, in nats or in log2 units; kernels stand in turn."""
    largest = float(np.finfo(np.float32).max)
    logits = [query * below_mask.KEY for query in below_mask.QUERIES]
    assert logits[0] / math.log(2.0) < -0.7 * largest < logits[0]
    assert -largest < logits[1] < -0.7 * largest
    exact = Subject(
        "exact", lambda problem: SubjectResult(oracle_float64.attention(problem).out, None), takes_problem=True
    )
    monkeypatch.setattr(below_mask, "load", lambda _: exact)
    assert below_mask.main(["exact"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "exact" in line] == ["  exact : [0.0, 0.5, 63.5]"] * 2


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_case_that_peers_break_is_kept(path: Path) -> None:
    """It builds the bits that were promised, says where it is from, and the page names it."""
    case = load_case(path)
    assert case.sha256 == json.loads(path.read_text(encoding="utf-8"))["sha256"]
    assert case.provenance.startswith(("searched: ", "hand-picked: "))
    assert path.name in PAGE.read_text(encoding="utf-8")


@pytest.mark.deep
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_ours_keeps_its_contract_where_peers_do_not(path: Path) -> None:
    """What a campaign has found in another kernel is put to ours."""
    case = load_case(path)
    hunt = find(case.hunt)
    ours = hunt.attacks.subject
    record = hunt.evaluate()(case, subject=hunt.attacks.load(ours), name=ours, reproduce="")
    assert record is not None
    assert record["root"] is None, record["reason"]

"""Gated DeltaNet kernels as subjects: interface, verdicts on made-up kernels, findings, and the peers themselves."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from verify.devices import CPU_INTERPRET
from verify.gdn.cases import GdnCase
from verify.gdn.judge import GdnResult
from verify.gdn.open_cases import OPEN_CASES, layer
from verify.gdn.problem import GdnProblem, Sequences, final_conv_state
from verify.gdn.steps import BF16_STEPS, SPLIT_STEPS, run
from verify.records import REQUIRED
from verify.subjects import gdn_findings
from verify.subjects.gdn import (
    PEERS,
    GdnSubject,
    GdnSubjectError,
    all_single,
    in_dtype,
    judge_gdn_subject,
    layer_limits,
    load,
    names,
)
from verify.subjects.peers import deltanet
from verify.verdict import Verdict

if TYPE_CHECKING:
    from pathlib import Path


def emulated(problem: GdnProblem) -> GdnResult:
    """The contract's own algorithm as a kernel."""
    found = run(problem, BF16_STEPS)
    return GdnResult(found.out, found.state, final_conv_state(problem))


def emulated_split(problem: GdnProblem) -> GdnResult:
    """The same with hi/lo products."""
    found = run(problem, SPLIT_STEPS)
    return GdnResult(found.out, found.state, final_conv_state(problem))


def short() -> GdnProblem:
    """A quick layer call."""
    return layer([1.0, 2.0, 0.5], b=[0.0, 1.0, -1.0], a=-2.0, state=(0.25,))


def test_a_right_kernel_passes() -> None:
    """In both modes."""
    assert judge_gdn_subject(GdnSubject("bf16", emulated), short()).judgement.verdict is Verdict.PASS
    split = GdnSubject("hi/lo", emulated_split, steps=SPLIT_STEPS)
    assert judge_gdn_subject(split, short(), power=True).judgement.verdict is Verdict.PASS


def test_a_kernel_that_raises_fails_and_one_that_refuses_is_skipped() -> None:
    """An exception is a result; NotImplementedError and ValueError are refusals."""

    def broken(_: GdnProblem) -> GdnResult:
        message = "no such block"
        raise IndexError(message)

    def modest(_: GdnProblem) -> GdnResult:
        message = "only short sequences"
        raise NotImplementedError(message)

    failed = judge_gdn_subject(GdnSubject("broken", broken), short()).judgement
    assert failed.verdict is Verdict.FAIL
    assert "the kernel raised IndexError: no such block" in failed.reason
    skipped = judge_gdn_subject(GdnSubject("modest", modest), short()).judgement
    assert skipped.verdict is Verdict.SKIPPED
    assert "the kernel refuses the input" in skipped.reason


def test_a_kernel_with_exp_of_a_log_fails() -> None:
    """exp(a_log) formed in FP32 by itself overflows: NaN where the decay is 1, found by name."""

    def naive(problem: GdnProblem) -> GdnResult:
        with np.errstate(over="ignore", invalid="ignore"):
            rate = np.exp(problem.a_log) * np.log1p(np.exp(problem.a.astype(np.float32) + problem.dt_bias))
        found = emulated(problem)
        assert found.out is not None
        out = found.out + np.where(np.isfinite(rate), 0.0, np.nan)[:, :, None].astype(found.out.dtype)
        return dataclasses.replace(found, out=out)

    problem = OPEN_CASES["p10-large-a_log-far-from-a-gate"].build_layer()
    assert problem is not None
    judged = judge_gdn_subject(GdnSubject("naive", naive), problem)
    assert judged.judgement.verdict is Verdict.FAIL
    assert "NaN where a finite number is due" in judged.judgement.reason


def test_missing_packages_and_limits_are_skipped() -> None:
    """With the reason."""
    absent = GdnSubject("absent", emulated, modules=("no_such_module_anywhere",))
    assert "is not installed" in judge_gdn_subject(absent, short()).judgement.reason
    assert absent.version == ""
    limited = GdnSubject("limited", emulated, lacking=lambda _: "only on Sundays")
    assert judge_gdn_subject(limited, short()).judgement.reason == "only on Sundays"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"activation": "none"}, "silu, and l2norm"),
        ({"norm_eps": None}, "silu, and l2norm"),
        ({"beta_scale": 2.0}, "beta is the sigmoid itself"),
        ({"scale": 1.0}, "the scale is 1 / sqrt"),
        ({"b": np.zeros((3, 1), np.float32)}, "must be BF16"),
    ],
)
def test_layer_limits(change: dict[str, object], reason: str) -> None:
    """What the kernels in public use do not take."""
    assert layer_limits(short()) is None
    found = layer_limits(dataclasses.replace(short(), **change))  # type: ignore[arg-type]
    assert found is not None
    assert reason in found


def test_decode_is_one_token_per_sequence() -> None:
    """Which cases the decode kernels get."""
    decode = OPEN_CASES["f8-permuted-slots"].build_layer()
    assert decode is not None
    assert all_single(decode)
    assert not all_single(short())


def test_formats_are_narrowed_without_loss() -> None:
    """FP32 that holds BF16 numbers is BF16; anything else stays what it is."""
    x = np.array([1.0, 2.0**-7, np.nan], np.float32)
    assert in_dtype(x, short().qkv.dtype).dtype == short().qkv.dtype
    assert in_dtype(np.array([1.0 + 2.0**-12], np.float32), short().qkv.dtype).dtype == np.float32


def test_loading() -> None:
    """By name, by path, or a clear refusal."""
    for name in names():
        assert load(name).name == name
    assert load("verify.gdn.steps:run").steps == BF16_STEPS
    for bad in ("nothing", "no.module:here", "verify.gdn.steps:nothing"):
        with pytest.raises(GdnSubjectError, match="subject"):
            load(bad)
    with pytest.raises(GdnSubjectError, match="must be a GdnSubject or a function, got float"):
        load("verify.gdn.health:ACCURACY")


def test_recorded_findings_are_records() -> None:
    """Every line of the data has what a record needs, and the page names every failed case."""
    records = gdn_findings.read()
    assert records
    page = gdn_findings.table(records)
    for record in records:
        assert all(field in record for field in REQUIRED)
        if record["verdict"] == Verdict.FAIL.value:
            assert record["case"] in page
    assert "p10-large-a_log-far-from-a-gate" in page
    assert "p9-inverse-of" in page


def test_records_are_written_whole(tmp_path: Path) -> None:
    """A finding of a made-up kernel survives being written and read."""
    problem = OPEN_CASES["f8-flag-on"].build_layer()
    assert problem is not None
    judged = judge_gdn_subject(GdnSubject("kernel", emulated), problem)
    record = gdn_findings.record_of(OPEN_CASES["f8-flag-on"], judged)
    path = tmp_path / "found.jsonl"
    gdn_findings.write([record], path)
    assert gdn_findings.read(path) == [record]
    json.dumps(record, allow_nan=False)


def test_cases_for_another_environment(tmp_path: Path) -> None:
    """Case files hold one sequence each; results put together again are judged like any other."""
    cases = deltanet.write_cases(tmp_path / "cases")
    chosen = {name: cases[name] for name in ("f8-permuted-slots", "f3-no-decay", "e2-zero-length-sequences")}
    results = tmp_path / "results"
    results.mkdir()
    for name, (_, _, problem) in chosen.items():
        found = run(problem, deltanet.STEPS)
        for sequence in range(problem.sequences.count):
            span, slot = problem.sequences.span(sequence), int(problem.sequences.write_slots[sequence])
            if span.start < span.stop:
                out = found.out[span].astype(np.float32)
                np.savez(results / f"{name}--{sequence}.npz", out=out, state=found.state[slot])
    for name, judgement in deltanet.judge_results(results, chosen).items():
        assert judgement.verdict is Verdict.PASS, (name, judgement.reason)
    np.savez(results / "f3-no-decay--0.npz", error=np.array("ValueError: no"))
    failed = deltanet.judge_results(results, {"f3-no-decay": cases["f3-no-decay"]})["f3-no-decay"]
    assert failed.reason == "the kernel raised ValueError: no"


PEER_CASES = [name for name, case in OPEN_CASES.items() if case.build_layer() is not None and case.tier == "cover"]


@pytest.mark.deep
@pytest.mark.parametrize("subject", PEERS)
def test_peers_give_what_is_recorded(subject: str) -> None:
    """Every installed peer, on every layer: the verdict that the records hold."""
    if load(subject).missing() is not None:
        pytest.skip(f"{subject}: {load(subject).missing()}")
    recorded = {r["case"]: r["verdict"] for r in gdn_findings.read() if r["subject"] == subject}
    for record in gdn_findings.judge_cases(subject, PEER_CASES):
        assert record["verdict"] == recorded[record["case"]], record["reason"]


@pytest.mark.deep
@pytest.mark.parametrize("subject", [name for name in names() if not name.endswith("[decode]")])
def test_f8_f9_split_calls(subject: str) -> None:
    """48 tokens in calls of 16, 1, 2, 5 and 24: each call within its bound, from the states that the last one left."""
    kernel = load(subject)
    if kernel.missing() is not None:
        pytest.skip(f"{subject}: {kernel.missing()}")
    whole = GdnCase("random", "up to 1", "mild", seed=2, lengths=(48,), heads=(1, 1, 128, 128)).layer()
    state, conv, start = whole.state, whole.conv_state, 0
    for length in (16, 1, 2, 5, 24):
        rows = slice(start, start + length)
        piece = dataclasses.replace(
            whole,
            qkv=whole.qkv[rows],
            a=whole.a[rows],
            b=whole.b[rows],
            state=state,
            conv_state=conv,
            sequences=Sequences.single(length),
        )
        judged = judge_gdn_subject(kernel, piece)
        assert judged.judgement.verdict is Verdict.PASS, (start, judged.judgement.reason)
        assert judged.result is not None
        assert judged.result.conv_state is not None
        state, conv, start = judged.result.state, judged.result.conv_state, start + length


@pytest.mark.deep
def test_peers_inverse_is_within_the_bound_and_beyond_its_comment() -> None:
    """flywheel-tpu's inverse on repeated keys: within the proved bound, and beyond the 9e-3 of its comment."""
    subject = load("flywheel_tpu.fused_conv1d_gdn")
    if subject.missing() is not None:
        pytest.skip(str(subject.missing()))
    record = gdn_findings.stated_error()
    assert record["verdict"] == Verdict.PASS.value
    assert record["found"] > record["stated"]


def test_decode_kernels_are_held_to_the_recurrence() -> None:
    """One token in FP32: a bound far below that of BF16 operands, which a BF16 product would break."""
    problem = OPEN_CASES["f8-permuted-slots"].build_layer()
    assert problem is not None
    decode, prefill = (GdnSubject("kernel", emulated, recurrent=recurrent) for recurrent in (True, False))
    bounds = [subject.bound(problem, CPU_INTERPRET) for subject in (decode, prefill)]
    assert bounds[0].state.max() < bounds[1].state.max()
    for name in names():
        assert load(name).recurrent == name.endswith("[decode]")

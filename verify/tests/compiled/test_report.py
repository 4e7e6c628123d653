"""The figures of a report, and the command that prints them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from verify.compiled import __main__ as command
from verify.compiled.compile import Artifact, CompileError, Job, RefusedError
from verify.compiled.report import analyse_artifact
from verify.compiled.run import Assume
from verify.tests.compiled.conftest import KERNELS, kept_dumps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.mark.parametrize("name", kept_dumps("transposed"))
def test_a_transposed_product_on_every_generation(name: str, kept: Callable[[str], Artifact]) -> None:
    """256 x 256 x 256 with a transposed operand: 16 BF16 rows a `vmatmul`, half or all pushes transposed.

    v6e and v7x: 256/16 products on the 256-wide unit.  v5: a 2 x 2 grid of 128-wide tiles, so four times as many.
    """
    generation = name.split("-")[1]
    report = analyse_artifact(kept(name), flops=2 * 256**3)
    kernel = report.kernels[0]
    executed = kernel.executed
    assert executed is not None
    assert executed.products == {"bf16": 16 if generation in {"v6e", "v7x"} else 64}
    assert executed.transposed_pushes == executed.pushes["bf16"] // (2 if generation in {"v6e", "v7x"} else 1)
    assert executed.spills == executed.fills == 0
    assert kernel.issue_cycles == kernel.bundles
    assert report.share_of_peak is not None
    assert 0 < report.share_of_peak < 1
    (product,) = kernel.written
    assert (product.lhs, product.rhs, product.count) == ("bfloat16", "bfloat16", 1)
    assert kernel.fp32_passes is None
    assert kernel.reasons["fp32_passes"] == "no FP32 product was written"


def test_unknown_figures_have_reasons(kept: Callable[[str], Artifact]) -> None:
    """A figure that cannot be inferred is null in the JSON, and the reason stands beside it."""
    artifact = kept("lengths-v6e-0.0.50.1")
    for operand in artifact.meta["kernels"][0]["operands"].values():
        operand["value"] = None
    document = json.loads(json.dumps(analyse_artifact(artifact).to_json()))
    kernel = document["kernels"][0]
    assert kernel["executed"] is None
    assert kernel["seconds"] is None
    assert document["seconds"] is None
    assert "depends on a value that is not known here" in kernel["reasons"]["executed"]
    assert "lengths.1: the" in document["reasons"]["seconds"]
    assert document["reasons"]["share_of_peak"] == "the useful FLOP of a call were not given"


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, kept: Callable[[str], Artifact]) -> list[Job]:
    """The command's compiler, replaced by a kept dump; returns the jobs it was given."""
    jobs: list[Job] = []

    def compile_many(given: list[Job], **_: object) -> Iterator[tuple[Job, Artifact | CompileError]]:
        for job in given:
            jobs.append(job)
            yield (
                job,
                (
                    kept("lengths-v6e-0.0.50.1")
                    if job.generation == "v6e"
                    else RefusedError("lower", "NotImplementedError", "no such primitive", "mine.py:3: cumsum(x)")
                ),
            )

    monkeypatch.setattr(command, "compile_many", compile_many)
    return jobs


def test_the_command_prints_a_report(compiler: list[Job], capsys: pytest.CaptureFixture[str]) -> None:
    """`report` names the target, says *modelled*, and shows time, work, waits and blocks."""
    arguments = ["report", f"{KERNELS}:plain", "--shapes", "f32[8,128]", "x=i32[2]=1,2", "--options", '{"factor": 2}']
    assert command.main(arguments) == 0
    (job,) = compiler
    assert job.target.options == {"factor": 2}
    assert [argument.value for argument in job.target.arguments] == [None, (1, 2)]
    printed = capsys.readouterr().out
    for text in (
        "modelled from the compiler's schedule, not measured",
        "746 cycles issued",
        "vexp2.f32 16",
        "longest waits",
    ):
        assert text in printed


def test_the_command_reports_refusals(compiler: list[Job], capsys: pytest.CaptureFixture[str]) -> None:
    """A generation that does not compile fails the command, with the compiler's message and the kernel's line."""
    assert command.main(["report", f"{KERNELS}:product", "--factory", "--for", "v5e"]) == 1
    assert len(compiler) == 1
    printed = capsys.readouterr().out
    assert "v5e: lower failed with NotImplementedError: no such primitive" in printed
    assert "at mine.py:3: cumsum(x)" in printed


def test_the_command_prints_json(compiler: list[Job], capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` is one document, with reports and errors by generation."""
    assert command.main(["report", f"{KERNELS}:product", "--factory", "--for", "v6e", "v7x", "--json"]) == 1
    report, error = json.loads(capsys.readouterr().out)
    assert report["generation"] == "v6e"
    assert report["kernels"][0]["issue_cycles"] == 746
    assert error["generation"] == "v7x"
    assert "no such primitive" in error["error"]
    assert len(compiler) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "bf16"], "an argument reads"),
        ([], "needs the shapes of its array arguments"),
    ],
)
def test_wrong_calls(
    arguments: list[str], message: str, compiler: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong call ends with code 2 and a sentence, before anything is compiled."""
    assert command.main(["report", f"{KERNELS}:plain", *arguments]) == 2
    assert message in capsys.readouterr().out
    assert compiler == []


def test_nothing_is_assumed_in_vain(kept: Callable[[str], Artifact]) -> None:
    """A kernel that decides nothing on run-time values has no such note, whatever may be assumed."""
    assert analyse_artifact(kept("lengths-v6e-0.0.50.1"), assume=Assume.ZERO).kernels[0].notes == ()

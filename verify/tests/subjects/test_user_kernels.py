"""A user's kernel judged by name: the right one passes, and a wrong one fails with a message that names the mistake."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from verify.__main__ import main
from verify.attention import adversarial
from verify.attention.open_cases import OPEN_CASES
from verify.subjects import SubjectError, load
from verify.subjects.judging import judge_subject
from verify.subjects.selftest import AdapterError, self_test
from verify.verdict import Verdict

ROOT = Path(__file__).parents[3]
CASES = {**adversarial.by_name(), **OPEN_CASES}

WRONG = (
    ("TOP_LEFT", "g3-bottom-right-alignment", "aligned top-left instead of bottom-right"),
    ("TILED_HEADS", "random-heads-6-2", "heads tiled, not repeated"),
    ("NO_SCALE", "g2-narrow-values", "logits not scaled"),
    ("LOG2_LSE", "g2-narrow-values", "the LSE in log2 units instead of nats"),
    ("WRONG_ROW", "g2-narrow-values", "normalised by a wrong sum, that of row "),
    ("INT16_POSITIONS", "e1-positions-beyond-16-bits", "positions of queries and keys that wrap around in 16 bits"),
    ("TOP_LEFT_RAGGED", "g3-ragged-bottom-right-alignment", "rows aligned top-left instead of bottom-right"),
    ("BF16_ACCUMULATOR", "bell-logits-2^3", "the accumulator, rounded to BF16"),
)


@pytest.mark.parametrize(("kernel", "case", "cause"), WRONG, ids=[kernel.lower() for kernel, _, _ in WRONG])
def test_a_wrong_kernel_fails_and_the_message_names_the_mistake(
    kernel: str, case: str, cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`judge --subject` exits with 1, and says what the author did wrong, where, with both values and their bits."""
    assert main(["judge", "--subject", f"user_kernels:{kernel}", case]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert f"{case}: fail" in text
    assert cause in text, text
    assert re.search(r"got \S+ \(0x[0-9a-f]+\), want \S+", text)


@pytest.mark.parametrize(
    "case", ["g2-narrow-values", "random-heads-6-2", "g3-bottom-right-alignment", "bell-logits-2^3"]
)
def test_the_right_kernel_passes_where_the_wrong_ones_fail(case: str) -> None:
    """The same code without a mistake passes every one of those cases."""
    judged = judge_subject(load("user_kernels:RIGHT"), CASES[case].build(), power=True)
    assert judged.judgement.verdict is Verdict.PASS, judged.judgement.reason


@pytest.mark.parametrize(
    ("kernel", "case"), [("WINDOWED", "e1-positions-beyond-16-bits"), ("RAGGED", "g3-ragged-bottom-right-alignment")]
)
def test_the_right_kernels_with_features_pass(kernel: str, case: str) -> None:
    """Positions in 32 bits and rows aligned bottom-right pass, and adapters of that kind pass their self-test."""
    judged = judge_subject(load(f"user_kernels:{kernel}"), CASES[case].build())
    assert judged.judgement.verdict is Verdict.PASS, judged.judgement.reason
    self_test(load(f"user_kernels:{kernel}"))


def test_the_documentation_shows_the_example_that_runs() -> None:
    """docs/judge-your-kernel.md quotes docs/examples/my_attention.py to the letter, in fifteen lines or less."""
    code = (ROOT / "docs" / "examples" / "my_attention.py").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "judge-your-kernel.md").read_text(encoding="utf-8")
    shown = re.search(r"```python\n(@subject.*?)```", page, flags=re.DOTALL)
    assert shown
    assert shown[1].strip() in code
    assert len(shown[1].strip().splitlines()) <= 15


@pytest.mark.deep
def test_the_example_of_the_documentation_passes() -> None:
    """It passes its self-test, and every open case that it supports in the first tier, as the page says."""
    subject = load("my_attention:my_attention")
    self_test(subject)
    for name in (
        "a1-rows-without-a-key",
        "g2-narrow-values",
        "g3-bottom-right-alignment",
        "b7-keys-from-minus-500-to-500",
    ):
        judged = judge_subject(subject, OPEN_CASES[name].build(), power=OPEN_CASES[name].power)
        assert judged.judgement.verdict is Verdict.PASS, (name, judged.judgement.reason)


def test_pytest_judges_a_named_subject(tmp_path: Path) -> None:
    """`pytest verify --subject` runs the cases on it and nothing else, and fails where the kernel does."""
    command = [sys.executable, "-m", "pytest", "verify", "--subject", "user_kernels:LOG2_LSE", "-q", "-n0"]
    command += ["-k", "g3-bottom or g2-narrow"]
    run = subprocess.run(
        [*command, "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "t")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1, run.stdout[-2000:] + run.stderr[-2000:]
    assert "the LSE in log2 units instead of nats" in run.stdout
    assert re.search(r"^2 failed", run.stdout, flags=re.MULTILINE)


def test_a_plain_function_is_a_subject() -> None:
    """A function without a declaration is called with causal and scale, returns out alone, and can pass."""
    judged = self_test(load("user_kernels:plain"))
    assert [j.judgement.verdict for j in judged] == [Verdict.PASS] * 2
    assert judged[0].result is not None
    assert judged[0].result.lse is None


def test_a_wrong_layout_is_caught_by_the_self_test() -> None:
    """All sizes differ, so that an adapter that reads, or writes, other axes than it declares cannot pass."""
    for name in ("reads_another_layout", "swaps_batch_and_heads"):
        with pytest.raises(AdapterError, match=r"self-test 'plain' with q \(2, 6, 8, 64\)") as failed:
            self_test(load(f"user_kernels:{name}"))
        if name == "swaps_batch_and_heads":
            assert "the whole output lies nearest to: batch and heads exchanged" in str(failed.value)


def test_an_exception_is_a_verdict() -> None:
    """A kernel that raises fails; one that refuses the input is skipped; either way the words are kept."""
    problem = OPEN_CASES["g3-bottom-right-alignment"].build()
    raised = judge_subject(load("user_kernels:raises"), problem).judgement
    refused = judge_subject(load("user_kernels:refuses"), problem).judgement
    assert (raised.verdict, refused.verdict) == (Verdict.FAIL, Verdict.SKIPPED)
    assert "KeyError: 'no such thing'" in raised.reason
    assert "lowering: unsupported shape" in refused.reason
    with pytest.raises(AdapterError, match="skipped"):
        self_test(load("user_kernels:refuses"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("user_kernels", "must be package.module:object or one of"),
        ("no_such_module:f", "cannot be loaded: No module named 'no_such_module'"),
        ("user_kernels:absent", "has no attribute 'absent'"),
        ("user_kernels:LOG2_E", "must be a Subject or a function, got float"),
    ],
)
def test_a_name_that_is_no_subject_is_refused(name: str, text: str) -> None:
    """The error says what was expected and what stood there."""
    with pytest.raises(SubjectError, match=re.escape(text)):
        load(name)


def test_a_subject_that_is_not_there_is_an_unusable_argument(capsys: pytest.CaptureFixture[str]) -> None:
    """The command line exits with 2 and one line."""
    assert main(["judge", "--subject", "no_such_module:f", "g3-bottom-right-alignment"]) == 2
    assert "cannot be loaded" in capsys.readouterr().err

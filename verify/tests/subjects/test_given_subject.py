"""`pytest verify --subject NAME`: the self-test, the open cases and the adversarial families on your kernel."""

from __future__ import annotations

import pytest

from verify.attention import adversarial
from verify.attention.open_cases import OPEN_CASES, OpenCase
from verify.subjects import load
from verify.subjects.judging import judge_open_case, judge_subject
from verify.subjects.selftest import self_test
from verify.verdict import Verdict

CASES = {**OPEN_CASES, **adversarial.by_name()}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each subject given on the command line, and each case."""
    metafunc.parametrize("given_subject", metafunc.config.getoption("--subject"), scope="session")
    if "named_case" in metafunc.fixturenames:
        metafunc.parametrize("named_case", list(CASES))


def test_self_test_of_the_given_subject(given_subject: str) -> None:
    """Its adapter does what it declares."""
    self_test(load(given_subject))


def test_given_subject(given_subject: str, named_case: str) -> None:
    """It passes; what it does not support or promise is skipped with the reason."""
    case = CASES[named_case]
    subject = load(given_subject)
    if isinstance(case, OpenCase):
        judgement = judge_open_case(subject, case).judgement
    else:
        judgement = judge_subject(subject, case.build(), config=case.config).judgement
    if judgement.verdict in (Verdict.SKIPPED, Verdict.OUTSIDE_DOMAIN):
        pytest.skip(judgement.reason)
    words = f"{case.words} -> {case.answer}: " if isinstance(case, OpenCase) else ""
    assert judgement.verdict is Verdict.PASS, f"{words}{judgement.verdict}: {judgement.reason}"

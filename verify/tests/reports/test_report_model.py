"""What a report concludes from records."""

from __future__ import annotations

import math

import pytest
from report_records import ENVIRONMENT, measures, record

from reports.model import build_report

pytestmark = pytest.mark.smoke


def test_nothing_compared_is_a_failure() -> None:
    """No record, and a pass that compared no element, are both "nothing compared"."""
    assert build_report([]).empty
    assert not build_report([]).ok
    hollow = record(measures={"out": measures(0.1, count=0)})
    report = build_report([hollow])
    assert report.empty
    assert report.kernels[0].verdict == "nothing compared"
    assert any(
        "plain" in absence.what and "without a single compared element" in absence.why for absence in report.absences
    )


def test_one_kernel_without_comparison_fails_the_report() -> None:
    """A kernel of which everything was skipped is not covered by another kernel's success."""
    report = build_report([record(), record(subject="other", verdict="skipped", measures={}, reason="no libtpu")])
    assert [kernel.verdict for kernel in report.kernels] == ["pass", "nothing compared"]
    assert not report.ok
    assert any(absence.why == "skipped: no libtpu" for absence in report.absences)


def test_any_failure_fails_the_kernel() -> None:
    """One failing case among passing ones is the kernel's verdict, and stands first."""
    report = build_report([record(f"case-{n}") for n in range(5)] + [record("bad", 1.25, verdict="fail")])
    kernel = report.kernels[0]
    assert kernel.verdict == "fail"
    assert not report.ok
    assert kernel.rows[0].case == "bad"
    assert kernel.failures == kernel.rows[:1]


def test_a_failure_without_measures_counts() -> None:
    """A kernel that raised has no measures, and still fails."""
    report = build_report([record(), record("raised", verdict="fail", measures={}, reason="nothing came back")])
    assert report.kernels[0].verdict == "fail"


def test_an_unsound_backend_fails() -> None:
    """No verdict rests on a backend that failed its probes."""
    report = build_report([record(), record("probe", verdict="backend unsound", measures={})])
    assert report.kernels[0].verdict == "backend unsound"
    assert not report.ok


def test_nonfinite_errors_rank_worst() -> None:
    """NaN is a kernel's worst share before infinity, before any number."""
    rows = [
        record("big", 1e30, verdict="fail"),
        record("nan", math.nan, verdict="fail"),
        record("inf", math.inf, verdict="fail"),
    ]
    kernel = build_report([*rows, record("fine")]).kernels[0]
    assert [row.case for row in kernel.rows] == ["nan", "inf", "big", "fine"]
    assert math.isnan(kernel.worst_row.share)
    assert [row.case for row, _ in kernel.elements("out", 2)] == ["nan", "inf"]


def test_what_lies_outside_the_domain_does_not_count() -> None:
    """A case that the contract says nothing about lends its errors to no summary."""
    rows = [record(), record("outside", 7.0, verdict="outside the domain")]
    report = build_report(rows)
    assert report.kernels[0].most("out", "share") == 0.5
    assert len(report.kernels[0].judged) == 1
    assert any("outside" in absence.what for absence in report.absences)


def test_bound_of_an_element() -> None:
    """The bound that a page shows is |got - want| over the share, and nothing where that says nothing."""
    element = build_report([record(share=0.5)]).rows[0].part("out").worst
    assert element.bound == 0.015625
    assert element.where == "batch 0, head 1, row 2, lane 3"
    odd = build_report([record(measures={"out": measures(math.nan, got=math.nan)})]).rows[0].part("out").worst
    assert odd.bound is None


def test_a_later_record_replaces_an_earlier_one_and_says_so() -> None:
    """The same bits on the same backend count once; an earlier failure does not vanish without a word."""
    other = dict(ENVIRONMENT, interpret="tpu")
    report = build_report([record("a", 1.5, verdict="fail"), record("a", 0.5), record("a", 0.5, environment=other)])
    assert len(report.rows) == 2
    assert report.ok
    assert any("1 of the earlier ones had failed" in absence.why for absence in report.absences)


def test_an_unfinished_record_gives_way_to_a_finished_one() -> None:
    """A case whose process died counts as a failure until it has been judged."""
    dead = record("a", verdict="fail", measures={}, unfinished=True, sha256="", environment={"interpret": "fast"})
    assert not build_report([dead]).ok
    report = build_report([dead, record("a")])
    assert len(report.rows) == 1
    assert report.ok


def test_kernels_stand_in_one_order() -> None:
    """Ours first, whatever was finished first, and configurations beside their kernel."""
    names = ["mine", "flywheel.gdn.triangular_inverse[bf16]", "flywheel.attention", "flywheel.attention[online]"]
    found = [kernel.name for kernel in build_report([record(subject=name) for name in names]).kernels]
    assert found == [*names[2:], names[1], names[0]]


def test_names_are_never_altered() -> None:
    """A subject's name goes through as it is, and two that differ in case alone are two kernels."""
    names = ["<script>alert(1)</script>", "Flywheel", "flywheel", " spaced  name "]
    report = build_report([record(subject=name) for name in names])
    assert [kernel.name for kernel in report.kernels] == names


def test_an_unknown_verdict_is_refused() -> None:
    """A verdict that the judge does not know is no record of ours."""
    with pytest.raises(ValueError, match=r"verdict must be one of pass, fail, .*, got 'fine' \(case 'plain'\)"):
        build_report([record(verdict="fine")])


@pytest.mark.parametrize("share", [1.0000001, math.inf, math.nan])
def test_a_pass_that_its_measures_contradict_is_a_failure(share: float) -> None:
    """A record from elsewhere cannot talk its way past the bound, or past a class mismatch."""
    report = build_report([record("boast", share)])
    assert report.kernels[0].verdict == "fail"
    assert "the record says pass, but out has 0 class mismatches" in report.rows[0].reason
    assert build_report([record(measures={"out": measures(0.1) | {"mismatches": 1}})]).kernels[0].verdict == "fail"


def test_bias_alarms_are_counted() -> None:
    """Alarms show by family, and never change a verdict."""
    alarming = measures(0.5)
    alarming["bias"] |= {"alarm": True, "lean": 9.0}
    kernel = build_report([record(), record("lean", measures={"out": alarming})]).kernels[0]
    assert [row.case for row in kernel.biased] == ["lean"]
    assert kernel.verdict == "pass"

"""What changed between two runs, and the rule that tells a change from noise."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from report_records import ENVIRONMENT, measures, profile, record

from reports.cli import main
from reports.compare import Run, compare, run_of
from reports.model import build_report
from reports.profile import RANK
from verify import records

if TYPE_CHECKING:
    from pathlib import Path

    from reports import compare as comparing

pytestmark = pytest.mark.smoke


def run(*rows: dict, code: str = "", versions: dict | None = None) -> Run:
    """A run of some records."""
    environment = ENVIRONMENT | {"versions": ENVIRONMENT["versions"] | (versions or {})}
    return run_of(build_report([row | {"code": code, "environment": environment} for row in rows]))


def kinds(found: comparing.Comparison) -> list[tuple[str, str]]:
    """Kinds and cases of what changed."""
    return [(change.kind, change.case) for change in found.changes]


def test_nothing_changed() -> None:
    """A run against itself: everything in common, nothing changed, and that is fine."""
    rows = [record("a", profile=profile(0.4)), record("b", 0.3)]
    found = compare(run(*rows), run(*rows))
    assert (found.changes, found.common, found.ok) == ((), 2, True)
    assert found.words == "2 cases in common: nothing changed"


def test_new_failures_and_repairs() -> None:
    """A case that passed and fails now is a new failure; the other way round it is fixed; both are named."""
    good, bad = record("a"), record("a", 2.0, verdict="fail")
    found = compare(run(good, record("b")), run(bad, record("b")))
    assert kinds(found) == [("new failure", "a")]
    assert found.changes[0].words == "pass became fail, share 0.500 -> 2.00"
    assert not found.ok
    back = compare(run(bad), run(good))
    assert kinds(back) == [("fixed", "a")]
    assert back.ok


@pytest.mark.parametrize(
    ("before", "nth", "kind"),
    [
        (0.50, 0.51, "worse"),
        (0.50, 0.50, None),
        (0.50, 0.20, None),
        (math.inf, math.nan, "worse"),
        (math.nan, math.nan, None),
    ],
)
def test_worse_by_more_than_noise(before: float, nth: float, kind: str | None) -> None:
    """An array is worse if its 30th-worst row exceeds the worst row of the run before; NaN exceeds infinity."""
    old = record("a", before, verdict="fail" if not before <= 1 else "pass")
    new = record("a", max(nth, 0.6) if nth == nth else nth, profile=profile(nth), verdict=old["verdict"])  # noqa: PLR0124
    found = compare(run(old), run(new))
    assert [change.kind for change in found.changes] == ([kind] if kind else [])


def test_better_is_told_by_the_same_rule() -> None:
    """What was worse before, by the same rule, is better now, and fails nothing."""
    found = compare(run(record("a", 0.9, profile=profile(0.8))), run(record("a", 0.5, profile=profile(0.4))))
    assert kinds(found) == [("better", "a")]
    assert found.ok


def test_few_rows_cannot_tell() -> None:
    """A case without a 30th row raises no alarm on its own."""
    assert compare(run(record("a", 0.1)), run(record("a", 0.9))).ok


@pytest.mark.parametrize("distribution", ["normal", "uniform", "exponential", "cauchy"])
def test_noise_raises_no_alarm(distribution: str) -> None:
    """Two runs that draw their rows from one distribution are told apart with at most 2^-30, whatever it is.

    The exact probability is the product of the docstring; here a rank of 6 is drawn often enough to check it.
    """
    rank, n, draws = 6, 200, 4000
    rng = np.random.default_rng(1)
    draw = {
        "normal": rng.standard_normal,
        "uniform": rng.random,
        "exponential": rng.standard_exponential,
        "cauchy": rng.standard_cauchy,
    }[distribution]
    first, second = (np.sort(np.abs(draw((draws, n))), axis=1) for _ in range(2))
    alarms = int(np.count_nonzero(second[:, -rank] > first[:, -1]))
    exact = math.prod((n - i) / (2 * n - i) for i in range(rank))
    assert exact <= 2.0**-rank
    assert 2.0**-RANK <= 1e-9
    # Six standard deviations of a binomial count.
    assert abs(alarms - draws * exact) <= 6 * math.sqrt(draws * exact)


def test_many_small_steps_are_seen_by_the_sign_test() -> None:
    """Forty ordinary cases that all use a little more are worse; half up, half down is noise."""
    old = run(*(record(f"c{n}", 0.5) for n in range(40)))
    up = compare(old, run(*(record(f"c{n}", 0.51) for n in range(40))))
    assert kinds(up) == [("worse", "every case")]
    assert "40 of 40 ordinary cases that moved use more" in up.changes[0].words
    mixed = compare(old, run(*(record(f"c{n}", 0.51 if n % 2 else 0.49) for n in range(40))))
    assert mixed.changes == ()


def test_the_same_code_must_give_the_same_bits() -> None:
    """Equal sources, versions and backend leave no room: a difference is irreproducible, even a better one."""
    found = compare(run(record("a", 0.5), code="c"), run(record("a", 0.499), code="c"))
    assert kinds(found) == [("irreproducible", "a")]
    assert not found.ok
    other = compare(run(record("a", 0.5), code="c"), run(record("a", 0.499), code="c", versions={"jax": "0.13"}))
    assert other.ok
    assert other.versions == (("jax", "0.12.0", "0.13"),)
    nan = record("a", math.nan, verdict="fail")
    assert compare(run(nan, code="c"), run(nan, code="c")).changes == ()


def test_what_is_gone_is_said() -> None:
    """A case without a record is lost, and a kernel without any fails the comparison."""
    found = compare(run(record("a"), record("b")), run(record("a")))
    assert kinds(found) == [("lost", "b")]
    assert found.ok
    gone = compare(run(record("a"), record("a", subject="other")), run(record("a")))
    assert kinds(gone) == [("lost", "every case")]
    assert not gone.ok
    skipped = compare(run(record("a")), run(record("a", verdict="skipped", measures={})))
    assert kinds(skipped) == [("lost", "a")]


def test_other_bits_are_not_compared() -> None:
    """A case that builds other bits under the same name says nothing about the earlier one."""
    found = compare(run(record("a", 0.1)), run(record("a", 0.9, sha256="f" * 64)))
    assert (found.common, found.other_bits, found.ok) == (0, 1, False)


def test_a_run_survives_its_file() -> None:
    """What a site keeps of a run reads back as it was, NaN and markup included."""
    odd = record("<b>", math.nan, verdict="fail", subject="<i>", profile=profile(math.inf))
    kept = run(odd, record("fine", profile=profile(0.2)))
    again = Run.from_json(kept.to_json())
    assert again.to_json() == kept.to_json()
    assert again.digest == kept.digest
    with pytest.raises(ValueError, match=r"format must be flywheel-run/1, got 'x'"):
        Run.from_json({"format": "x"})


def test_compare_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command names what changed, and its exit code is for CI: 0, 1 for something worse or nothing in common."""
    paths = {}
    for name, rows in {"a": [record("a")], "b": [record("a", 2.0, verdict="fail")], "none": [record("z")]}.items():
        paths[name] = tmp_path / f"{name}.jsonl"
        for row in rows:
            records.append(paths[name], row)
    assert main(["compare", str(paths["a"]), str(paths["a"])]) == 0
    assert main(["compare", str(paths["a"]), str(paths["b"])]) == 1
    assert "new failure: flywheel.attention: a: pass became fail" in capsys.readouterr().out
    assert main(["compare", str(paths["a"]), str(paths["none"])]) == 1
    assert "nothing was compared" in capsys.readouterr().out
    assert main(["compare", str(paths["a"]), str(tmp_path / "absent")]) == 2


def test_measures_of_several_arrays() -> None:
    """Each array has a rule of its own: an LSE that is worse shows although the output is not."""
    parts = {"out": measures(0.5), "lse": measures(0.1, array="lse")}
    worse = record("a", measures=parts | {"lse": measures(0.4, array="lse")}, profile=profile(0.3, array="lse"))
    found = compare(run(record("a", measures=parts)), run(worse))
    assert [change.words for change in found.changes] == ["lse: share 0.100 -> 0.400"]

"""The page: what stands in it, and what never does."""

from __future__ import annotations

import html.parser
import json
import math
import re
from typing import TYPE_CHECKING

import pytest
from report_records import measures, record

from reports.build import write_page
from reports.cli import main
from reports.findings import of_rows
from reports.model import build_report
from reports.page import MOST_ROWS, Contents, render
from reports.sources import SourceError, read
from verify import records

if TYPE_CHECKING:
    from pathlib import Path

MARKUP = "<script>alert('x')</script> & \"q\" $x^2$ {{ 7 * 7 }}"


class _Reader(html.parser.HTMLParser):
    """Collects tags, ids, addresses and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
            if name in ("href", "src", "xlink:href", "srcset", "action", "data") and value:
                self.addresses.append(value)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def page(*rows: dict) -> str:
    """The page of some records."""
    return render(Contents(build_report(rows)), records_link="records.jsonl", sources=["records.jsonl"])


def hostile() -> list[dict]:
    """Records that try to break a page."""
    odd = {
        "out": measures(math.nan, got=math.nan, want=math.inf, ulp=math.nan),
        "lse": measures(math.inf, array="lse", got=-math.inf, want=1e-320),
    }
    return [
        record(MARKUP, subject=MARKUP, family=MARKUP, verdict="fail", reason=MARKUP, reproduce=MARKUP, measures=odd),
        record("tiny", 1e-320, measures={"out": measures(1e-320, got=1e-320, want=-1e-320, ulp=1e-320)}),
        record("huge", 1.7e308, verdict="fail"),
        record(
            "bare",
            measures={},
            shape={},
            environment={},
            replay_map=None,
            replays=None,
            query_blocks=None,
            seconds=None,
        ),
        record("everywhere", math.nan, verdict="fail"),
        record("no-share", measures={"out": measures(0.5) | {"share": None, "bias": None}}),
    ]


@pytest.mark.smoke
def test_page_is_self_contained() -> None:
    """Nothing is loaded: no address leaves the page but to the records, and every fragment exists once."""
    text = page(record(), record("second", family="adversarial"))
    reader = _Reader(text)
    outside = [address for address in reader.addresses if not address.startswith("#")]
    assert sorted(outside) == ["data:,", "records.jsonl"]
    assert len(reader.ids) == len(set(reader.ids))
    assert {address[1:] for address in reader.addresses if address.startswith("#")} <= set(reader.ids)
    assert not {"link", "img", "iframe", "object"} & set(reader.tags) - {"link"}
    assert "@import" not in text
    assert re.findall(r"url\((?!#)", text) == []


@pytest.mark.smoke
def test_texts_from_records_are_escaped() -> None:
    """Markup in a name, a family, a reason or a command shows as text, in figures too."""
    reader = _Reader(page(*hostile()))
    assert reader.tags.count("script") == 1
    words = " ".join(reader.words)
    assert MARKUP in words
    assert "49" not in [word.strip() for word in reader.words]


def test_nonfinite_values_are_words() -> None:
    """NaN and infinities appear as words, subnormals as numbers."""
    words = " ".join(_Reader(page(*hostile())).words)
    for word in ("NaN", "infinity", "−infinity", "1e-320", "−9.99988867e-321"):  # noqa: RUF001
        assert word in words
    assert not re.search(r"\b(nan|inf)\b", words)


@pytest.mark.smoke
def test_empty_page_says_so() -> None:
    """A run without records says that nothing was compared, in the place of the answer."""
    text = page()
    assert "Nothing was compared." in text
    assert "keep the contract" not in text


def test_failures_show_values_bits_bound_and_command() -> None:
    """A failure has its reason and command; its worst element both values, their bits and the bound."""
    bad = record("bad", 2.0, verdict="fail", reason="out[0, 0, 0, 0]: too far")
    report = build_report([bad, record()])
    text = render(Contents(report, failures=tuple(of_rows(report.rows[:1]))), records_link=None, sources=[])
    words = " ".join(_Reader(text).words)
    for expected in ("1 of 2 judged cases breaks the contract", "too far", "0x3f81", "0x3f80", "1.0078125", "0.00391",
                     "uv run python -m reports case bad"):  # fmt: skip
        assert expected in words


def test_a_passing_page_words_its_claim_precisely() -> None:
    """The bound is certified, errors are measured, and the page says that nothing is modelled."""
    words = " ".join(" ".join(_Reader(page(record(share=0.9996))).words).split())
    assert "The one judged case keeps the contract" in words
    assert "0.9996" in words
    assert "Only speed is modelled" in words.replace(" .", ".")
    assert "Any TPU" not in words  # the page of bare records: `write_page` adds what stands for every run


def test_a_long_table_is_cut_with_a_word() -> None:
    """More rows than anyone reads are left to the records, and the page says how many there are."""
    rows = [record(f"case-{n}", n / 4000) for n in range(MOST_ROWS + 5)]
    text = page(*rows)
    assert f"{MOST_ROWS:,} of {MOST_ROWS + 5:,} cases are listed" in text
    assert len(text) < 5_000_000


def _write(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    for row in rows:
        records.append(path, row)
    return path


@pytest.mark.parametrize(
    ("rows", "code", "words"),
    [
        ([record()], 0, "All 1 "),
        ([record(), record("bad", 2.0, verdict="fail")], 1, "breaks the contract"),
        ([], 1, "Nothing was compared"),
        ([record(verdict="skipped", measures={}, reason="no time")], 1, "Nothing was compared"),
    ],
    ids=["pass", "fail", "empty", "skipped"],
)
def test_build_from_records(tmp_path: Path, rows: list[dict], code: int, words: str) -> None:
    """`build --from` writes the page whatever the verdict, and its exit code is the verdict."""
    source = _write(tmp_path / "in" / "records.jsonl", rows)
    assert main(["build", "--from", str(source), "--out", str(tmp_path / "out")]) == code
    text = (tmp_path / "out" / "index.html").read_text("utf-8")
    assert words.replace("All 1 ", "The one judged case") in text
    assert list(records.read(tmp_path / "out" / "shown.jsonl")) == rows
    if rows:
        assert "What was not run" in text
        assert "no record comes from one" in text


def test_several_sources_are_one_report(tmp_path: Path) -> None:
    """Records of several machines, named as files or as report directories, make one page."""
    first = _write(tmp_path / "a" / "records.jsonl", [record("one")])
    second = _write(tmp_path / "b.jsonl", [record("two", subject="other.kernel")])
    assert main(["build", "--from", str(first.parent), str(second), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "index.html").read_text("utf-8")
    assert "other.kernel" in text
    assert "flywheel.attention" in text


def test_planned_cases_without_record_are_named(tmp_path: Path) -> None:
    """What a plan holds and no record has stands under what was not run."""
    source = _write(tmp_path / "records.jsonl", [record("one")])
    own = "flywheel.attention"
    plan = {"grid": "quick", "items": [[own, "ordinary", "one", "fast"], [own, "adversarial", "absent-one", "fast"]]}
    (tmp_path / "plan.json").write_text(json.dumps(plan), "utf-8")
    report = write_page(tmp_path, [source], why_missing="interrupted").report
    assert (report.absences[0].what, report.absences[0].why) == (
        "1 adversarial case of flywheel.attention of the plan",
        "interrupted: absent-one",
    )


def test_unreadable_sources_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A source that is missing, or no records file, is named; no page is written over an old one."""
    with pytest.raises(
        SourceError, match=r"--from must name a records file, a JSON file, or the directory .*, got .*nowhere"
    ):
        read([tmp_path / "nowhere"])
    bad = tmp_path / "bad.jsonl"
    bad.write_text("not json\n{}\n", "utf-8")
    (tmp_path / "index.html").write_text("old", "utf-8")
    assert main(["build", "--from", str(bad), "--out", str(tmp_path)]) == 2
    assert "bad.jsonl, line 1: not JSON" in capsys.readouterr().out.replace("\n", " ")
    assert (tmp_path / "index.html").read_text("utf-8") == "old"

"""The site: permanent pages, a small index, and an old site that stands until the new one is complete."""

from __future__ import annotations

import html.parser
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from report_records import ENVIRONMENT, profile, record
from test_report_page import MARKUP, hostile

from reports.build import write_page
from reports.cli import main
from reports.site import publish as publishing
from reports.site.publish import publish
from reports.site.store import PublishError, Site
from verify import records

ROOT = Path(__file__).parents[3]


KILLER = """
import os, signal, sys, time
from pathlib import Path
from reports.site.publish import publish
for line in sys.stdin:
    site, run, delay = line.rstrip().split("\\t")
    child = os.fork()  # after the imports, which take far longer than publishing
    if child == 0:
        publish(Path(site), [Path(run)])
        os._exit(0)
    start = time.monotonic()
    if delay != "never":
        time.sleep(float(delay))
        os.kill(child, signal.SIGKILL)
    end = "killed" if os.WIFSIGNALED(os.waitpid(child, 0)[1]) else "finished"
    print(end, time.monotonic() - start, flush=True)
"""
"""Publishes in a child that it kills after a delay."""

PLAIN = '<title>a report</title><!-- site --><a href="records.jsonl">records.jsonl</a><script></script></html>'


def report(directory: Path, *rows: dict, whole: bool = False) -> Path:
    """A report's directory, as `build` leaves it; with the whole page, or a plain one in its place."""
    source = directory / "records.jsonl"
    directory.mkdir(parents=True)
    source.touch()
    for row in rows:
        records.append(source, row)
    if whole:
        write_page(directory, [directory], why_missing="not measured")
    else:
        (directory / "index.html").write_text(PLAIN, "utf-8")
    return directory


def day(n: int) -> dict:
    """The environment of one day."""
    return {"environment": ENVIRONMENT | {"date": f"2026-11-{n:02d}T10:00:00+00:00"}}


class _Links(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.scripts = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            if name == "href" and value and not value.startswith("data:"):
                self.links.append(value)


def dangling(site: Path) -> list[str]:
    """Links reachable from the index that lead nowhere, fragments included."""
    found, seen, todo = [], set(), [site / "index.html"]
    pages: dict[Path, _Links] = {}
    while todo:
        page = todo.pop()
        if page in seen:
            continue
        seen.add(page)
        pages[page] = pages.get(page) or _Links(page.read_text("utf-8"))
        for link in pages[page].links:
            address, _, fragment = link.partition("#")
            target = (page.parent / address).resolve() if address else page
            if not target.exists():
                found.append(f"{page.relative_to(site)}: {link}")
            elif target.suffix == ".html":
                pages[target] = pages.get(target) or _Links(target.read_text("utf-8"))
                if fragment and fragment not in pages[target].ids:
                    found.append(f"{page.relative_to(site)}: {link}")
                todo.append(target)
    return found


def test_publish_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs become pages with history, and every link reachable from the index leads somewhere."""
    first = report(tmp_path / "a", record("x", profile=profile(0.4)), record("y"), whole=True)
    second = report(tmp_path / "b", record("x", 2.0, verdict="fail") | day(30), record("y") | day(30))
    site = tmp_path / "site"
    assert main(["publish", "--site", str(site), str(first)]) == 0
    assert main(["publish", "--site", str(site), str(second)]) == 0
    assert capsys.readouterr().out.count("published") == 2
    assert dangling(site.resolve()) == []
    index = (site / "index.html").read_text("utf-8")
    assert "2 runs, each under a permanent address" in index
    assert re.search(r"<b class=\"bad\">1 new failure</b>", index)
    changes = next(site.glob("runs/2026-11-30-*/changes.html")).read_text("utf-8")
    assert "pass became fail, share 0.500 → 2.00".replace("→", "-&gt;") in changes
    assert 'id="since-2026-11-29-' in changes
    assert 'data-runs="1-1"' in changes
    again = publish(site, [first])
    assert not again[0].new


def test_a_published_run_never_changes(tmp_path: Path) -> None:
    """Later runs leave the files of earlier ones alone; publishing one again adds nothing."""
    site = tmp_path / "site"
    publish(site, [report(tmp_path / "a", record("x"))])
    before = {path: path.read_bytes() for path in site.glob("runs/*/*") if path.is_file()}
    publish(site, [report(tmp_path / "b", record("x", 0.6) | day(30)), tmp_path / "a"])
    assert {path: path.read_bytes() for path in before} == before
    assert len(Site(site).entries()) == 2


def test_names_and_texts_are_escaped(tmp_path: Path) -> None:
    """Markup in a kernel's name, a family, a case or a version shows as text on every page of the site."""
    site = tmp_path / "site"
    odd = [row | {"environment": row["environment"] | {"versions": {MARKUP: MARKUP}}} for row in hostile()]
    publish(
        site,
        [report(tmp_path / "a", *odd, whole=True), report(tmp_path / "b", record("other", subject="plain") | day(30))],
    )
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        assert _Links(text).scripts == 1, page
        assert "<script>alert" not in text
    assert dangling(site.resolve()) == []


def test_an_empty_run_is_a_failure_on_the_site_too(tmp_path: Path) -> None:
    """A run that compared nothing is published as such."""
    site = tmp_path / "site"
    publish(site, [report(tmp_path / "a")])
    assert "nothing compared" in (site / "index.html").read_text("utf-8")


def test_what_cannot_be_published_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory without a report, a site that is none, and a site in use are named; nothing is written."""
    with pytest.raises(PublishError, match=r"RUN must be a directory that `reports build` has written, got .*nowhere"):
        publish(tmp_path / "site", [tmp_path / "nowhere"])
    assert not (tmp_path / "site").exists()
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "index.html").write_text("mine", "utf-8")
    run = report(tmp_path / "a", record("x"))
    assert main(["publish", "--site", str(strange), str(run)]) == 2
    assert "--site must be a site of this program or an empty directory" in capsys.readouterr().out.replace("\n", " ")
    assert (strange / "index.html").read_text("utf-8") == "mine"
    with Site(tmp_path / "used").owned(), pytest.raises(PublishError, match="another publisher is at work"):
        publish(tmp_path / "used", [run])


def test_the_index_changes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever step fails, the index stays as it was and leads to complete pages; the next publisher finishes."""
    site = tmp_path / "site"
    publish(site, [report(tmp_path / "a", record("x"))])
    old = (site / "index.html").read_bytes()
    second = report(tmp_path / "b", record("x", 0.6) | day(30))
    for place, name in ((publishing.pages, "changes_page"), (publishing.shutil, "copyfileobj"),
                        (publishing.pages, "index_page"), (Site, "save")):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(place, name, _fails)
            with pytest.raises(OSError, match="no space"):
                publish(site, [second])
        assert (site / "index.html").read_bytes() == old
        assert dangling(site.resolve()) == []
    publish(site, [second])
    assert len(Site(site).entries()) == 2
    assert [path.name for path in (site / "runs").iterdir() if path.name.startswith(".")] == []
    assert dangling(site.resolve()) == []


def _fails(*_: object, **__: object) -> None:
    message = "no space"
    raise OSError(message)


KILLS, FINISHES, PATIENCE = 120, 3, 10
"""Publishers killed and finished at least, and kills in a row after which later moments are drawn too."""


@pytest.mark.deep
def test_killed_at_any_moment_the_old_site_stands(tmp_path: Path) -> None:
    """A publisher is killed at random moments: the index is the old one or the new one, never in between."""
    runs = [
        report(tmp_path / f"run-{n}", *(record(f"c{i}", 0.3 + n / 100) | day(n + 1) for i in range(40)))
        for n in range(8)
    ]
    site = tmp_path / "site"
    publish(site, [runs[0]])
    rng = random.Random(0)  # noqa: S311  no secret
    known = [(site / "index.html").read_bytes()]
    ends = {"killed": 0, "finished": 0}
    with subprocess.Popen(
        [sys.executable, "-c", KILLER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as killer:
        assert killer.stdin is not None
        assert killer.stdout is not None

        def run_publisher(target: Path, delay: str) -> tuple[str, float]:
            killer.stdin.write(f"{site}\t{target}\t{delay}\n")
            killer.stdin.flush()
            end, seconds = killer.stdout.readline().split()
            return end, float(seconds)

        _, whole = run_publisher(runs[1], "never")
        known.append((site / "index.html").read_bytes())
        attempt = idle = 0
        while ends["killed"] < KILLS or ends["finished"] < FINISHES:
            target = runs[min(len(Site(site).entries()), len(runs) - 1)]
            end, _ = run_publisher(target, str(rng.random() * whole))
            ends[end] += 1
            attempt, idle = attempt + 1, 0 if end == "finished" else idle + 1
            if idle == PATIENCE:  # a busy machine: publishing takes longer than when it was timed
                whole, idle = 1.5 * whole, 0
            index = (site / "index.html").read_bytes()
            if index not in known:
                known.append(index)
            assert b"</html>" in index
            if attempt % 10 == 0:
                assert dangling(site.resolve()) == []
        killer.stdin.close()
    print(f"{ends}, {len(known)} states of the index")
    assert len(known) > 2, "no publisher got as far as the index"
    assert dangling(site.resolve()) == []
    numbers = [int(n) for text in known for n in re.findall(rb"<h1>(\d+) run", text)]
    assert numbers == sorted(numbers)


def many_runs(site: Path, count: int, cases: int) -> None:
    """A site with so many runs, as publishing them one by one would leave it, written at once."""
    kernels = ["flywheel.attention", *(f"other.kernel-{n}" for n in range(9))]
    made = Site(site)
    entries = []
    with made.owned():
        for number in range(1, count + 1):
            name = f"2026-01-01-{number:010x}"
            body = {
                "name": "", "other": False, "verdict": "pass", "shares": {"out": 0.8 + number / 1e5, "lse": 0.02},
                "judged": cases, "failures": number % 50 == 0, "replays": 5, "query_blocks": 400,
            }  # fmt: skip
            rows = [[kernels[0], "ordinary", f"case-{c}", "fast", "pass", "0" * 16,
                     {"out": [0.5 + (number // 7 + c) % 3 / 10, 0.4]}] for c in range(cases)]  # fmt: skip
            run = {"format": "flywheel-run/1", "date": "2026-01-01", "code": str(number),
                   "versions": {"jax": str(number // 9)}, "kernels": [], "cases": rows}  # fmt: skip
            with made.new_run(name) as directory:
                (directory / "run.json").write_text(json.dumps(run), "utf-8")
                for page in ("index.html", "changes.html"):
                    (directory / page).write_text("<html></html>", "utf-8")
            shown = tuple(body | {"name": kernel, "other": kernel != kernels[0]} for kernel in kernels)
            entries.append(
                publishing.Entry(number, name, "2026-01-01", "pass", shown, {"jax": "1"}, {"worse": 1, "common": 9})
            )
        made.save(entries)


@pytest.mark.deep
def test_a_thousand_runs_stay_small(tmp_path: Path) -> None:
    """With a thousand runs of ten kernels the index stays under 1 MB, and one more run adds less than 1 MB."""
    site = tmp_path / "site"
    many_runs(site, 1000, 300)
    run = report(tmp_path / "a", *(record(f"case-{c}", 0.6, profile=profile(0.55), sha256="") for c in range(300)))
    start = time.process_time()
    publish(site, [run])
    print(f"{time.process_time() - start:.1f} CPU-seconds")
    assert len(Site(site).entries()) == 1001
    index = (site / "index.html").stat().st_size
    own = site / "runs" / Site(site).entries()[-1].id
    print(f"index {index}, changes {(own / 'changes.html').stat().st_size}")
    assert index < 1_000_000
    assert (own / "changes.html").stat().st_size < 1_000_000
    assert (site / "archive-1.html").stat().st_size < 1_000_000
    assert dangling(site.resolve()) == []


def test_archives_take_the_oldest_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs leave the index in whole chunks, for a page that is written once and links to them."""
    monkeypatch.setattr(publishing, "CHUNK", 2)
    site = tmp_path / "site"
    for n in range(1, 6):
        publish(site, [report(tmp_path / f"{n}", record("x", n / 10) | day(n))])
    index = (site / "index.html").read_text("utf-8")
    assert '<a href="archive-1.html">#1 to #2</a>' in index
    assert (site / "archive-1.html").exists()
    assert not (site / "archive-2.html").exists()
    assert dangling(site.resolve()) == []

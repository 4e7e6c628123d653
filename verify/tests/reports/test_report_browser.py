"""The page in a real browser: Chromium, headless, network off."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlparse
from urllib.request import url2pathname

import pytest
from report_records import inverse_record, layer_record, measures, packed_record, profile, record
from test_report_page import MARKUP, hostile
from test_report_publish import day, report

from reports import inverse
from reports.build import write_page
from reports.site.publish import publish
from verify import records

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync")  # fmt: skip
WIDTHS = (360, 1440)
MOST_FOLLOWED = 60
"""Links to fragments followed per page: all of them but on pages of thousands of rows."""

MODES = ("light", "dark")


def ordinary() -> list[dict]:
    """A run as it usually is."""
    rows = []
    for n, length in enumerate((1, 7, 128, 512)):
        for head_dim in (64, 128, 256):
            shape = record()["shape"] | {"kv_len": length, "q_len": length, "head_dim": head_dim}
            body = record(f"length-{length}-d{head_dim}", 0.2 + 0.2 * n, shape=shape, profile=profile(0.2))
            body["measures"]["out"]["growth"] = growth(length)
            rows.append(body)
    alarming = measures(0.4)
    alarming["bias"] |= {"alarm": True, "lean": 9.0}
    rows.append(record("jump", 0.33, family="adversarial", replays=2, replay_map=[[[0, 1], [0, 1]]], query_blocks=4))
    rows.append(record("lean", family="trace", measures={"out": alarming}))
    return rows


def growth(tokens: int) -> dict:
    """Growth over tokens as a record has it."""
    worst = {"value": 0.4, "index": [0, 0, 0, 0], "got": 1.0, "want": 1.0, "got_bits": "0x3f80", "want_bits": "0x3f80"}
    firsts = [0, *(2**n for n in range(tokens.bit_length()) if 2**n < tokens)]
    ranges = [{"first": first, "last": max(2 * first - 1, 0), "worst": worst} for first in firsts]
    return {"normalised_by": "bound", "slope": 0.1, "standard_error": 0.2, "certain": False, "ranges": ranges}


def peers() -> list[dict]:
    """Ours beside a peer that fails a case."""
    bad = record("jump", 3.0, verdict="fail", subject="jax.splash_attention", reason="too far", subject_version="0.12")
    return [*ordinary(), bad, record("plain", subject="jax.splash_attention"), record("sunk", 2.0, verdict="fail")]


def many() -> list[dict]:
    """Ten thousand rows."""
    return [record(f"case-{n}", n / 10000, family=("ordinary", "fuzz", "corpus")[n % 3]) for n in range(10_000)]


def nothing_but_nan() -> list[dict]:
    """NaN everywhere."""
    part = measures(math.nan, got=math.nan, want=math.nan, ulp=math.nan)
    return [record(f"nan-{n}", verdict="fail", measures={"out": part, "lse": part}) for n in range(5)]


def operations() -> list[dict]:
    """Packed attention, layers and inverses, with names that hold markup and shares that are no numbers."""
    rows = [packed_record(f"packed-{length}", length=length) for length in (1, 64, 300)]
    for n, keys in enumerate(("random", "near-duplicate", MARKUP)):
        rows += [layer_record(f"length-{length}-{keys}", 0.1 + 0.2 * n, length=length, keys=keys) for length in (1, 64)]
        rows.append(inverse_record(f"{keys} keys", 0.3, keys=keys, decay="0.9375" if n else "1"))
    rows.append(layer_record("odd", math.nan, keys="random") | {"verdict": "fail", "reason": "NaN"})
    return rows


KINDS = {
    "ordinary": ordinary,
    "operations": operations,
    "peers": peers,
    "hostile": hostile,
    "nan": nothing_but_nan,
    "many": many,
    "empty": list,
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium; without it the tests are skipped with the reason."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (group `browser`)")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium on this machine (Debian: package chromium)")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=list(FLAGS))
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One page per kind of records."""
    found = {}
    for kind, make in KINDS.items():
        out = tmp_path_factory.mktemp(kind)
        source = out / "records.jsonl"
        source.touch()
        for body in make():
            records.append(source, body)
        if kind == "peers":
            keep_beside(out)
        found[kind] = write_page(out, [source], why_missing="not measured").page
    site = tmp_path_factory.mktemp("site")
    base = tmp_path_factory.mktemp("published")
    runs = [report(base / "1", *ordinary(), whole=True)]
    first, *rest = peers()
    changed = first | {"verdict": "fail", "reason": "too far"}
    runs.append(report(base / "2", *(row | day(30) for row in (changed, *rest)), whole=True))
    odd = [row | {"environment": row["environment"] | {"versions": {MARKUP: MARKUP}}} for row in hostile()]
    runs.append(report(base / "3", *odd, record("plain"), whole=True))
    published = publish(site, runs, title=MARKUP)
    found["index"] = site / "index.html"
    found["changes"] = site / "runs" / published[1].id / "changes.html"
    found["hostile changes"] = site / "runs" / published[2].id / "changes.html"
    found["published"] = site / "runs" / published[1].id / "index.html"
    return found


def keep_beside(out: Path) -> None:
    """Lemmas, a ranking and the inverse's table beside the records."""
    lemma = {
        "name": "a_lemma", "statement": "1 < 2", "constants": {"ONE": "1"}, "methods": ["exact"], "holds": True,
        "assumptions": [{"text": "numbers", "covered_by": "a::test"}], "finding": "2 numbers", "seconds": 0.1,
        "tools": [{"tool": "coq", "outcome": "not checked here", "finding": "no coqc", "axioms": [], "seconds": 0}],
    }  # fmt: skip
    effect = {"error": "inf", "output": 0, "index": [0], "found": 1.0, "exact": 1.0}
    equation = {"primitive": "tanh", "dtype": "float32", "shape": [4], "file": "a.py", "line": 3, "text": "t = tanh(x)",
                "alone": effect, "without": effect}  # fmt: skip
    ranking = {"format": "flywheel-emulation/1", "function": MARKUP, "words": MARKUP, "arithmetic": "adversarial",
               "device": "", "measure": "relative", "together": effect, "equations": [equation]}  # fmt: skip
    rows = [
        {"keys": keys, "beta": "up to 1", "precision": precision, "level": level, "matrices": 2, "site": "level 4",
         "error": 1e-3 * level, "bound": 0.5, "share": 0.5}
        for keys in ("random", "identical") for precision in ("bf16", "bf16x3") for level in (4, 16, 64)
    ]  # fmt: skip
    (out / "equations").mkdir()
    (out / "lemmas.json").write_text(json.dumps({"lemmas": [lemma]}), "utf-8")
    (out / "equations" / "f.json").write_text(json.dumps(ranking), "utf-8")
    (out / "inverse.json").write_text(json.dumps({"format": inverse.FORMAT, "subject": "s", "rows": rows}), "utf-8")


SITE = ("index", "changes", "hostile changes", "published")


@pytest.fixture
def opened(browser: Browser, pages: dict[str, Path]) -> Iterator[object]:
    """Opens pages, and checks at the end that nothing was complained about or asked of the network."""
    contexts, complaints = [], []

    def open_page(kind: str, width: int = 1440, mode: str = "light", **options: object) -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=mode, offline=True, **options
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: request.url.startswith(("file:", "data:")) or complaints.append(request.url))
        page.goto(pages[kind].as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", [*KINDS, *SITE])
def test_opens_offline_and_fits(opened, kind: str, width: int, mode: str) -> None:  # noqa: ANN001
    """Every kind of page opens from disk without a console message or request, and never scrolls sideways."""
    page = opened(kind, width, mode)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("h1").is_visible()
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (mode == "light")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", [*(kind for kind in KINDS if kind != "many"), *SITE])
def test_axe_finds_nothing_serious(opened, kind: str, width: int, mode: str) -> None:  # noqa: ANN001
    """No axe rule of serious or critical impact is violated, contrast in both modes included."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    found = axe.Axe().run(opened(kind, width, mode)).response["violations"]
    serious = [(v["id"], v["nodes"][0]["html"][:200]) for v in found if v["impact"] in ("serious", "critical")]
    assert serious == []


@pytest.mark.parametrize("kind", [*KINDS, *SITE])
def test_each_internal_link_is_followed(opened, kind: str) -> None:  # noqa: ANN001
    """Each link to a fragment is followed, and its target is then in view; each other link names a file that exists."""
    page = opened(kind)
    addresses = page.evaluate("[...new Set([...document.links].map(a => a.href))]")
    here = page.url.partition("#")[0]
    followed = [address for address in addresses if address.startswith(here + "#")]
    for address in followed if len(followed) <= MOST_FOLLOWED else followed[:: len(followed) // MOST_FOLLOWED]:
        page.evaluate("address => { location.hash = new URL(address).hash }", address)
        page.locator(":target").wait_for(state="attached")
    for address in set(addresses) - set(followed):
        assert address.startswith("file:")
        assert Path(url2pathname(urlparse(address).path)).exists(), address


def test_a_link_leads_to_its_row(opened) -> None:  # noqa: ANN001
    """Each link to a fragment has its target, and the answer's link moves to the row of the worst case."""
    page = opened("ordinary")
    dangling = page.evaluate(
        "[...document.querySelectorAll('a[href^=\"#\"]')].map(a => a.getAttribute('href').slice(1))"
        ".filter(id => !document.getElementById(id))"
    )
    assert dangling == []
    page.locator(".scale a").click()
    assert page.evaluate("document.querySelector('tr:target th').textContent").startswith("length-512")


def test_sorting(opened) -> None:  # noqa: ANN001
    """A click on a heading sorts by size, NaN above infinity above numbers, and says so to assistive technology."""
    page = opened("hostile")
    table = page.locator("table.cases").first
    heading = table.locator("thead th").nth(3)
    heading.get_by_role("button").click()
    assert heading.get_attribute("aria-sort") == "descending"
    cells = table.locator("tbody tr td:nth-child(4)").all_text_contents()
    assert cells[0] == "NaN"
    assert cells[1] == "1.7e+308"
    heading.get_by_role("button").press("Enter")
    assert heading.get_attribute("aria-sort") == "ascending"
    assert table.locator("tbody tr td:nth-child(4)").all_text_contents() == cells[::-1]


def test_filtering(opened) -> None:  # noqa: ANN001
    """Words and a verdict leave the rows that match, with a count; a link to a hidden case brings it back."""
    page = opened("ordinary")
    page.get_by_label("Name or words").first.fill("length-7 d64")
    assert page.locator("table.cases tbody tr:visible").count() == 1
    assert page.locator(".filter output").first.text_content() == "1 of 14 cases"
    page.locator(".scale a").click()
    assert page.locator("table.cases tbody tr:visible").count() == 14
    assert page.get_by_label("Verdict").first.locator("option").all_text_contents() == ["every verdict", "pass"]


def test_reads_without_scripts(opened) -> None:  # noqa: ANN001
    """Without scripts the table is there, in the order that matters, and no dead control is shown."""
    page = opened("hostile", java_script_enabled=False)
    assert page.locator("button, input, select").count() == 0
    assert page.locator("table.cases tbody tr").count() == len(hostile())
    assert page.get_by_text(MARKUP).first.is_visible()


def test_two_runs_are_chosen(opened) -> None:  # noqa: ANN001
    """The index leads from any two runs to the page of the later one, which then shows what differs between them."""
    page = opened("index")
    page.get_by_label("What changed from run").select_option("1")
    page.get_by_label("to run").select_option("2")
    page.get_by_role("button", name="Compare").click()
    page.wait_for_url("**/changes.html#since-*")
    page.locator("[data-since-words]", has_text="From run #1 to this one: ").wait_for()
    assert page.locator("table[data-since] tbody tr:visible").count() > 0
    page.evaluate("location.hash = ''")
    page.locator("[data-since-words]", has_text="Every case that differs").wait_for()


def test_prints(opened, tmp_path: Path) -> None:  # noqa: ANN001
    """In print the tables are whole, the controls are gone, and a PDF comes out."""
    page = opened("ordinary")
    page.emulate_media(media="print")
    assert page.locator(".filter:visible").count() == 0
    assert page.evaluate("getComputedStyle(document.querySelector('.tall')).overflowY") == "visible"
    page.pdf(path=tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").stat().st_size > 10_000

"""The page in a real browser: Chromium, headless, network off."""

from __future__ import annotations

import math
import shutil
from typing import TYPE_CHECKING

import pytest
from report_records import measures, record
from test_report_page import MARKUP, hostile

from reports.build import write_page
from verify import records

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync")  # fmt: skip
WIDTHS = (360, 1440)
MODES = ("light", "dark")


def ordinary() -> list[dict]:
    """A run as it usually is."""
    rows = []
    for n, length in enumerate((1, 7, 128, 512)):
        for head_dim in (64, 128, 256):
            shape = record()["shape"] | {"kv_len": length, "q_len": length, "head_dim": head_dim}
            rows.append(record(f"length-{length}-d{head_dim}", 0.2 + 0.2 * n, shape=shape))
    alarming = measures(0.4)
    alarming["bias"] |= {"alarm": True, "lean": 9.0}
    rows.append(record("jump", 0.33, family="adversarial", replays=2, replay_map=[[[0, 1], [0, 1]]], query_blocks=4))
    rows.append(record("lean", family="trace", measures={"out": alarming}))
    return rows


def many() -> list[dict]:
    """Two thousand rows."""
    return [record(f"case-{n}", n / 2000, family=("ordinary", "fuzz", "corpus")[n % 3]) for n in range(2000)]


def nothing_but_nan() -> list[dict]:
    """NaN everywhere."""
    part = measures(math.nan, got=math.nan, want=math.nan, ulp=math.nan)
    return [record(f"nan-{n}", verdict="fail", measures={"out": part, "lse": part}) for n in range(5)]


KINDS = {"ordinary": ordinary, "hostile": hostile, "nan": nothing_but_nan, "many": many, "empty": list}


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
        found[kind] = write_page(out, [source], why_missing="not measured").page
    return found


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
@pytest.mark.parametrize("kind", KINDS)
def test_opens_offline_and_fits(opened, kind: str, width: int, mode: str) -> None:  # noqa: ANN001
    """Every kind of page opens from disk without a console message or request, and never scrolls sideways."""
    page = opened(kind, width, mode)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("h1").is_visible()
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (mode == "light")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "many"])
def test_axe_finds_nothing_serious(opened, kind: str, width: int, mode: str) -> None:  # noqa: ANN001
    """No axe rule of serious or critical impact is violated, contrast in both modes included."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    found = axe.Axe().run(opened(kind, width, mode)).response["violations"]
    serious = [(v["id"], v["nodes"][0]["html"][:200]) for v in found if v["impact"] in ("serious", "critical")]
    assert serious == []


def test_internal_links_lead_somewhere(opened) -> None:  # noqa: ANN001
    """Each link to a fragment has its target, and following one moves there."""
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
    table = page.locator("table.cases").nth(1)
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
    page.get_by_label("Name, family or shape").fill("length-7 d64")
    assert page.locator("table.cases tbody tr:visible").count() == 1
    assert page.locator(".filter output").text_content() == "1 of 14 cases"
    page.locator(".scale a").click()
    assert page.locator("table.cases tbody tr:visible").count() == 14
    assert page.get_by_label("Verdict").locator("option").all_text_contents() == ["every verdict", "pass"]


def test_reads_without_scripts(opened) -> None:  # noqa: ANN001
    """Without scripts the table is there, in the order that matters, and no dead control is shown."""
    page = opened("hostile", java_script_enabled=False)
    assert page.locator("button, input, select").count() == 0
    assert page.locator("table.cases tbody tr").count() == len(hostile())
    assert page.get_by_text(MARKUP).first.is_visible()


def test_prints(opened, tmp_path: Path) -> None:  # noqa: ANN001
    """In print the tables are whole, the controls are gone, and a PDF comes out."""
    page = opened("ordinary")
    page.emulate_media(media="print")
    assert not page.locator(".filter").is_visible()
    assert page.evaluate("getComputedStyle(document.querySelector('.tall')).overflowY") == "visible"
    page.pdf(path=tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").stat().st_size > 10_000

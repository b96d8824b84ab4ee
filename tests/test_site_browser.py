"""The built site in a browser: nothing is cut off or faint, search works, nothing is fetched."""

import json
import re
import subprocess
import sys
import urllib.parse
from pathlib import Path
from typing import Any

import pytest

import poptorch
from helpers import patience
from helpers.browser import BROWSER, opened
from helpers.source_tree import ROOT

HARNESS = ROOT / "tests" / "helpers" / "layout.html"
WORD, PAGE = "dampening", "Differences from PopTorch"
WITHOUT = pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")
pytestmark = [pytest.mark.slow, WITHOUT]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The site that ``make`` has built, if nothing has changed since, or one of our own."""
    pytest.importorskip("material", reason="the site needs: pip install 'poptorch[docs]'")
    made = ROOT / "build" / "site" / "index.html"
    folders = [ROOT / name for name in ("docs", "examples", "scripts", "src")]
    sources = [path for each in folders for path in each.rglob("*") if path.suffix != ".pyc"]
    newest = max(path.stat().st_mtime for path in [*sources, *ROOT.glob("*.*")] if path.is_file())
    if made.exists() and made.stat().st_mtime > newest:
        return made.parent
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, timeout=patience.HANGS)
    return folder


@pytest.mark.long
def test_nothing_is_cut_off_and_all_text_has_contrast(site: Path, tmp_path: Path) -> None:
    """At 1280 and 390 pixels; in the light and the dark scheme."""
    pages = sorted(site.rglob("*.html"))
    pages.remove(site / "404.html")
    assert len(pages) > 40
    shown = opened(f"{HARNESS.as_uri()}?{','.join(page.as_uri() for page in pages)}", tmp_path)
    (report,) = re.findall('<pre id="report">(.*)</pre>', shown)
    assert json.loads(report) == {"seen": len(pages), "cut": {}, "faint": {}}


@pytest.mark.full("builds the site, which make test-full does anyway")
def test_the_search_of_the_site_works_without_a_server(site: Path, tmp_path: Path) -> None:
    shown = opened(f"{(site / 'index.html').as_uri()}?q={WORD}", tmp_path)
    assert f"<h1>{PAGE}</h1>" in shown.split('class="md-search-result__list"')[1]


ANSWERS = {
    "loss is nan": "The loss is NaN",
    "serving": "Serving a model",
    "slow": "Too slow? What you can choose",
    "out of memory": "Out of memory",
    "resume": "Resume after a stop",
    "mixed precision": "Train in mixed precision",
    "migrate": "Migrate a script",
}


@pytest.mark.long
@pytest.mark.parametrize("words, section", ANSWERS.items())
def test_the_first_page_found_has_the_section_that_answers(
    words: str, section: str, site: Path, tmp_path: Path
) -> None:
    address = f"{(site / 'index.html').as_uri()}?q={urllib.parse.quote(words)}"
    found = opened(address, tmp_path).split('class="md-search-result__list"')[1]
    (first, *_) = re.findall(r'<li class="md-search-result__item">(.*?)</li>', found, re.S)
    titles = [re.sub("<.*?>", "", text) for text in re.findall(r"<h[12]>(.*?)</h[12]>", first)]
    assert section in titles


@pytest.mark.full("builds the site, which make test-full does anyway")
def test_pages_fetch_nothing_and_lead_on(site: Path) -> None:
    page = (site / "guide" / "concepts.html").read_text()
    assert re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(https?:[^"]*)"', page) == []
    for part in ('rel="next"', 'rel="prev"', f"poptorch {poptorch.__version__}"):
        assert part in page
    (source,) = re.findall(r'href="([^"]*)" title="View source of this page"', page)
    copied = (site / "guide" / source).resolve().read_text()
    assert copied == (ROOT / "docs" / "guide" / "concepts.md").read_text()

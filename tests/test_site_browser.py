"""The built site in a browser: nothing is cut off or faint, search works, nothing is fetched."""

from __future__ import annotations

import functools
import http.server
import json
import queue
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from helpers import patience
from helpers.source_tree import ROOT

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
HARNESSES = ROOT / "tests" / "helpers"
WORD, PAGE = "dampening", "Differences from PopTorch"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="chromium opens the pages, and is not installed"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def command(folder: Path) -> list[str]:
    return [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu",
        "--disable-background-networking", f"--user-data-dir={folder}",
    ]  # fmt: skip


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the site and what a harness needs, and takes the harness's report."""

    def __init__(self, *args: Any, extra: Path, reports: queue.Queue[Any], **words: Any) -> None:
        self.extra, self.reports = extra, reports
        super().__init__(*args, **words)

    def translate_path(self, path: str) -> str:
        extra = self.extra / path.lstrip("/")
        return str(extra) if extra.is_file() else super().translate_path(path)

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.reports.put(json.loads(self.rfile.read(length)))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def reported(site: Path, harness: str, folder: Path) -> Any:
    """Return what a harness sends back from the site; other files of a folder are served, too."""
    shutil.copy(HARNESSES / harness, folder / harness)
    reports: queue.Queue[Any] = queue.Queue()
    handler = functools.partial(Handler, directory=str(site), extra=folder, reports=reports)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/{harness}"
        browser = subprocess.Popen(
            [*command(folder / "user"), "--remote-debugging-port=0", address],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            return reports.get(timeout=patience.HANGS)
        finally:
            browser.terminate()
            browser.wait(patience.HANGS)
            server.shutdown()


@pytest.mark.long
def test_nothing_is_cut_off_and_all_text_stands_out(site: Path, tmp_path: Path) -> None:
    """At 1280 and 390 pixels; in the light and the dark scheme."""
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    pages.remove("404.html")
    assert len(pages) > 40
    (tmp_path / "pages.json").write_text(json.dumps(pages))
    report = reported(site, "layout.html", tmp_path)
    assert report == {"cut": {}, "faint": {}}, json.dumps(report, indent=1)


@pytest.mark.long
def test_the_search_works_over_http(site: Path, tmp_path: Path) -> None:
    assert reported(site, "search.html", tmp_path)


def test_the_search_works_from_the_disk(site: Path, tmp_path: Path) -> None:
    address = f"{(site / 'index.html').as_uri()}?q={WORD}"
    done = subprocess.run(
        [*command(tmp_path / "user"), "--virtual-time-budget=20000", "--dump-dom", address],
        capture_output=True, text=True, check=True, timeout=patience.HANGS,
    )  # fmt: skip
    results = done.stdout.split('class="md-search-result__list"')[1]
    assert f"<h1>{PAGE}</h1>" in results


def test_pages_fetch_nothing_and_lead_on(site: Path) -> None:
    page = (site / "guide" / "concepts.html").read_text()
    fetched = re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(https?:[^"]*)"', page)
    assert fetched == []
    assert 'rel="next"' in page
    assert 'rel="prev"' in page
    assert "poptorch 0.1.0" in page
    (source,) = re.findall(r'href="([^"]*)" title="View source of this page"', page)
    copied = (site / "guide" / source).resolve().read_text()
    assert copied == (ROOT / "docs" / "guide" / "concepts.md").read_text()

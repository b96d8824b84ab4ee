"""``report.html``: every view is there, nothing comes from outside, and a browser draws it."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers import patience
from poptorch import _systems
from poptorch._ipu_model import page, profile

VIEWS = ("summary", "memory", "liveness", "schedule", "operators", "program", "measured",
         "settings", "comparison")  # fmt: skip
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    """A profile of two stages, with made-up measurements."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).eval()
    poptorch.BeginBlock(model[1], "b", ipu_id=1)
    executor = poptorch.inferenceModel(model, poptorch.Options().deviceIterations(2))
    priced = executor.estimate(torch.empty(8, 64, device="meta"), system="bow:2")
    executor.destroy()
    calls = (profile.Call(0, 0, 0.25, 0.5, 0.25), profile.Call(1.5, 0.5, 0.1, 0.5, 0.1))
    times = (
        (profile.ActionTime("forward", 2, 0.125),),
        (profile.OperatorTime("F", "aten.addmm", "0", "net.py:3", 2, 0.0625),),
    )
    measured = profile.Measured("</script><b>", 1.0, 2, calls, 1 << 20, *times)
    return profile.profile(
        dataclasses.asdict(priced), _systems.KINDS["bow"], measured, {"loops.replicas": "1"}
    )


def test_every_view_has_what_it_shows(content: dict[str, Any]) -> None:
    page_text = page.html(content, "", content)
    parts = re.findall(r'<section id="(\w+)">(.*?)</section>', page_text, re.DOTALL)
    views = {name: re.sub(r"\s*\n\s*", "", text) for name, text in parts}
    assert set(views) == set(VIEWS)
    assert "It fits." in views["summary"]
    assert "param.0.weight" in views["liveness"]
    assert "addmm" in views["operators"]
    here = views["operators"].partition("On this machine")[2]
    assert ">62.5<" in here  # ms, measured
    (row,) = [r for r in content["estimated"]["operators"]
              if (r["name"], r["module"]) == ("aten.addmm", "0")]  # fmt: skip
    modelled = 2 * (row["compute"] + row["exchange"] + row["sync"]) / 1.85e9 * 1e3
    assert f'data-value="{modelled}"' in here
    assert ">125<" in views["measured"]
    assert "fullest tile" in views["memory"]
    assert "0F on IPU 0, 2 times" in views["program"]
    assert "&lt;/script&gt;" in views["measured"]
    assert "loops.replicas" in views["settings"]
    assert "+0.0%" in views["comparison"]
    drawn = page.figures(content)
    memory = drawn["figure-memory"]["data"]
    peak = sum(content["estimated"]["chips"][1]["peak"].values()) / 2**20
    assert sum(bar["y"][1] for bar in memory if bar["type"] == "bar") == pytest.approx(peak)
    tiles = drawn["figure-tiles"]["data"]
    assert [len(line["y"]) for line in tiles] == [1472, 1472, 2]
    assert tiles[2]["y"] == [624, 624]  # KiB, the limit
    assert sum(len(bar["x"]) for bar in drawn["figure-schedule"]["data"]) == 4
    assert [bar["y"][1] for bar in drawn["figure-measured"]["data"]] == [500, 100, 500, 100]


def test_nothing_is_fetched_and_text_cannot_become_markup(content: dict[str, Any]) -> None:
    text = page.html(content, "/* plotly */", content)
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", text)
    assert text.count("</script>") == 2
    assert "prefers-color-scheme: dark" in text


MARKUP = "</script><!--<script>alert(1)</script><img src=x onerror=alert(1)>"


def with_markup(value: Any) -> Iterator[Any]:
    """Yield copies of nested data, in each of which one value, or one key, is markup."""
    if isinstance(value, (dict, list)):
        items = list(value.items() if isinstance(value, dict) else enumerate(value))
        for key, inside in items[:40]:
            for other in with_markup(inside):
                changed = copy.copy(value)
                changed[key] = other
                yield changed
        if isinstance(value, dict) and value:
            yield {MARKUP if key == items[0][0] else key: inside for key, inside in items}
    else:
        yield MARKUP


def test_no_value_of_a_profile_becomes_markup_wherever_it_stands(content: dict[str, Any]) -> None:
    small = json.loads(json.dumps(content))
    priced = small["estimated"]
    for name in ("operators", "schedule", "chips", "advice", "guesses"):
        priced[name] = priced[name][:1]
    for chip in priced["chips"]:
        chip["largest"], chip["live"] = chip["largest"][:1], chip["live"][:1]
    whole = page.html(small, "", small)
    written = 0
    for hostile in with_markup(small):
        try:
            text = page.html(hostile, "", hostile)
        except (LookupError, TypeError, ValueError, AttributeError):
            continue  # ``poptorch report`` says that it is no report
        written += 1
        for tag in ("<script", "</script", "<img", "<!--"):
            assert text.count(tag) == whole.count(tag)
    assert written > 30


def test_without_plotly_it_says_how_to_get_it(
    content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    monkeypatch.setattr(page, "_said", [])
    assert not page.write(content, tmp_path / "report.html")
    assert not page.write(content, tmp_path / "report.html")
    (line,) = [record.getMessage() for record in caplog.records]
    assert "pip install 'poptorch[report]'" in line
    assert not (tmp_path / "report.html").exists()


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="chromium draws the page, and is not installed")
def test_a_browser_draws_every_view(content: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="the page needs plotly: pip install 'poptorch[report]'")
    path = tmp_path / "report.html"
    assert page.write(content, path, content)
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000",
        "--enable-logging=stderr", "--window-size=1000,2000", f"--user-data-dir={tmp_path}/user",
    ]  # fmt: skip
    dump = subprocess.run(
        [*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, check=True,
        timeout=patience.HANGS,
    )  # fmt: skip
    assert "CONSOLE" not in dump.stderr, dump.stderr
    assert 'data-ready="yes"' in dump.stdout
    for view in VIEWS:
        assert f'<section id="{view}">' in dump.stdout
    assert dump.stdout.count('class="main-svg"') >= 2 * len(page.figures(content))
    assert dump.stdout.count('class="point"') >= 4  # bars
    picture = tmp_path / "page.png"
    subprocess.run(
        [*command, f"--screenshot={picture}", path.as_uri()], check=True, timeout=patience.HANGS,
        capture_output=True,
    )  # fmt: skip
    assert picture.stat().st_size > 20_000  # an empty page of this size has about 8 000 bytes


def test_budgets_name_what_grew(content: dict[str, Any]) -> None:
    more = {**content, "estimated": {**content["estimated"]}}
    more["estimated"]["cycles"] = 1.02 * content["estimated"]["cycles"]
    changes = profile.compare(content, more)
    assert not profile.exceeded(changes, profile.parse_budget("memory=0%, cycles=3%"))
    (over,) = profile.exceeded(changes, profile.parse_budget("memory=0%,cycles=1%"))
    assert (over.name, round(over.change, 6)) == ("cycles", 0.02)
    for wrong in ("cycles", "speed=1%", "memory=1"):
        with pytest.raises(poptorch.Error, match="That is no budget"):
            profile.parse_budget(wrong)

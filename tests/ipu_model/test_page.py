"""``report.html``: every view is there, nothing comes from outside, and a browser draws it."""

import copy
import dataclasses
import json
import re

import pytest

from helpers.browser import BROWSER, drawn
from helpers.pricing import meta, priced, two_stages
from poptorch import _systems
from poptorch._ipu_model import page, profile

VIEWS = ("measured", "summary", "memory", "liveness", "schedule", "operators", "program",
         "settings", "comparison")  # fmt: skip
MARKUP = "</script><!--<script>alert(1)</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def content():
    """A profile of two stages, with made-up measurements."""
    estimate = priced(two_stages, meta(8, 64), steps=2, system="bow:2", advice=True)
    calls = [profile.Call(3 * at, 0, 0.25, 0.5, 0.25) for at in range(2)]  # timed by parts
    calls += [profile.Call(6 + 3 * at, 2, 0.5, each, 0.25) for at, each in enumerate((2, 1, 0))]
    product = profile.OperatorTime("F", "aten.addmm", "0", "net.py:3", 2, 0.0625)
    times = ((profile.ActionTime("forward", 2, 0.125),), (product,))
    measured = profile.Measured("</script><b>", 1.0, 5, tuple(calls), 1 << 20, *times)
    kind, settings = _systems.KINDS["bow"], {"loops.replicas": "1"}
    return profile.profile(dataclasses.asdict(estimate), kind, measured, settings)


def test_every_view_has_what_it_shows(content) -> None:
    page_text = page.html(content, content)
    parts = re.findall(r'<section id="(\w+)">(.*?)</section>', page_text, re.DOTALL)
    views = {name: re.sub(r"\s*\n\s*", "", text) for name, text in parts}
    assert tuple(views) == VIEWS
    marked = {name for name, t in views.items() if "<h2>" in t and ">estimated</small>" in t}
    assert marked == set(VIEWS) - {"measured", "settings"}
    priced = content["estimated"]
    first, second = priced["chips"]
    peak = max(sum(chip["peak"].values()) for chip in (first, second))
    assert f"It fits: the fullest IPU needs {peak / second['limit']:.0%} of its" in views["summary"]
    assert f"<b>{priced['seconds'] * 1e3:.3g} ms</b>per call" in views["summary"]
    assert f"<code>{priced['advice'][0]['change']}</code>" in views["summary"]
    widths = re.findall(r'width:([\d.e-]+)%" title="(\w+)', views["memory"])
    full = sum(sum(chip["peak"].values()) / chip["limit"] for chip in (first, second))
    assert sum(float(width) for width, _ in widths) / 100 == pytest.approx(full)
    assert "fullest tile" in views["memory"]
    assert "H1472V100Z" in views["memory"]  # the last tile
    assert "param.0.weight" in views["liveness"]
    seen = re.findall(r"<title>(\S+): [\d.]+ MiB; largest: (\S+ \d),", views["liveness"])
    assert seen[:2] == [("0F0", "addmm 0"), ("0F1", "addmm 0")]
    actions = re.findall(r"<title>(\d\w+): [\d.e-]+ ms from", views["schedule"])
    assert sorted(actions) == ["0F0", "0F1", "1F0", "1F1"]
    assert "addmm" in views["operators"]
    here = views["measured"]
    assert "<b>1,750 ms</b>per call, median" in here  # without the first two
    assert ">62.5<" in here  # ms
    (row,) = [r for r in priced["operators"] if (r["name"], r["module"]) == ("aten.addmm", "0")]
    modelled = 2 * (row["compute"] + row["exchange"] + row["sync"]) / 1.85e9 * 1e3
    assert f'data-value="{modelled}"' in here
    assert "0F on IPU 0, 2 times" in views["program"]
    assert ">125<" in here
    assert here.count("M1.1 ") == 4  # the second call, in four parts
    assert "&lt;/script&gt;" in here
    assert "loops.replicas" in views["settings"]
    assert "+0.0%" in views["comparison"]


def test_a_page_before_the_first_call_and_one_of_an_estimate_say_so(content) -> None:
    text = page.html({**content, "measured": {**content["measured"], "calls": 0, "first": ()}})
    assert "<b>no call yet</b>" in text
    assert text.index("Measured on this machine") < text.index("It fits")
    text = page.html({**content, "measured": None})
    assert "estimated for IPUs; nothing was run" in text
    assert "on this machine" not in text


def test_a_page_is_small_names_its_script_and_fetches_nothing(content) -> None:
    text = page.html({**content, "name": "train.py: Net, training"}, content)
    assert len(text) < 50_000
    close = {**content, "estimated": {**content["estimated"], "verdict": "close"}}
    assert '<p class="verdict close">Close, 0.9 to 1.1 of the limit: the full' in page.html(close)
    assert "<title>train.py: Net, training on bow:2</title>" in text
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", text)
    assert text.count("</script>") == 1
    assert "prefers-color-scheme: dark" in text
    assert "<pattern" not in text  # solid fills only


def with_markup(value):
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


def test_no_value_of_a_profile_becomes_markup_wherever_it_stands(content) -> None:
    small = json.loads(json.dumps(content))
    priced = small["estimated"]
    for name in ("operators", "schedule", "chips", "advice", "guesses"):
        priced[name] = priced[name][:1]
    for chip in priced["chips"]:
        chip["largest"], chip["live"] = chip["largest"][:1], chip["live"][:1]
    whole = page.html(small, small)
    written = 0
    for hostile in with_markup(small):
        try:
            text = page.html(hostile, hostile)
        except (LookupError, TypeError, ValueError, AttributeError):
            continue  # ``poptorch report`` says that it is no report
        written += 1
        for tag in ("<script", "</script", "<img", "<!--"):
            assert text.count(tag) == whole.count(tag)
    assert written > 30


MEASURE = """
Object.assign(parent.document.body.dataset, {
  views: [...document.querySelectorAll("section")].map(each => each.id).join(" "),
  fold: document.querySelector(".advice").getBoundingClientRect().bottom,
  color: getComputedStyle(document.querySelector(".verdict")).color,
});"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="chromium draws the page, and is not installed")
@pytest.mark.parametrize(
    ("width", "scheme", "color"), [(390, 0, "rgb(87, 211, 100)"), (1280, 1, "rgb(26, 127, 55)")]
)
def test_a_browser_draws_every_view_inside_its_column(content, tmp_path, width, scheme, color):
    """Dark and light; what was measured, verdict and advice are above a phone's fold."""
    advice = {"change": "options." + 30 * "long", "saves": 1.0, "costs": 1.0, "fits": True}
    changed = {**content, "settings": {"line": 100 * "wide"}}
    changed["estimated"] = {**content["estimated"], "advice": [advice, advice]}
    page_text, colors = page.html(changed, content), f"preferredColorScheme={scheme}"
    seen = drawn(page_text, tmp_path, width, MEASURE, f"--blink-settings={colors}")
    assert (seen["ready"], seen["width"], seen["wide"]) == ("yes", str(width), "")
    assert seen["views"].split() == list(VIEWS)
    assert seen["color"] == color
    assert float(seen["fold"]) < 844

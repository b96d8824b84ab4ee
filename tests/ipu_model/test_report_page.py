"""The page of a report: it has every view, escapes what it shows, and browsers draw it."""

import copy
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.browser import BROWSER, drawn
from helpers.pricing import meta, priced, two_stages
from poptorch import _ipu_systems
from poptorch._ipu_model import profile, report_page

VIEWS = (
    "measured",
    "summary",
    "memory",
    "liveness",
    "schedule",
    "operators",
    "program",
    "settings",
    "comparison",
)
Content = dict[str, Any]


@pytest.fixture(scope="module")
def content() -> Content:
    """A profile of two stages, with made-up measurements of five calls.

    The first two calls were timed in four parts each, the other three as wholes.
    """
    estimate = priced(two_stages, meta(8, 64), steps=2, system="bow:2", advice=True)
    by_parts = [profile.CallTimes(3 * at, 0, 0.25, 0.5, 0.25) for at in range(2)]
    whole = [profile.CallTimes(6 + 3 * at, 2, 0.5, each, 0.25) for at, each in enumerate((2, 1, 0))]
    product = profile.OperatorTime("F", "aten.addmm", "0", "net.py:3", 2, 0.0625)
    measured = profile.Measured(
        "</script><b>",
        1.0,
        5,
        (*by_parts, *whole),
        1 << 20,
        (profile.ActionTime("forward", 2, 0.125),),
        (product,),
    )
    settings = {"loops.replicas": "1"}
    return profile.profile(
        dataclasses.asdict(estimate), _ipu_systems.KINDS["bow"], measured, settings
    )


@pytest.fixture(scope="module")
def views(content: Content) -> dict[str, str]:
    """The sections of a page, by their name, on one line each."""
    parts = re.findall(
        r'<section id="(\w+)">(.*?)</section>', report_page.html(content, content), re.DOTALL
    )
    return {name: re.sub(r"\s*\n\s*", "", text) for name, text in parts}


def test_a_page_has_every_view_in_its_order(views: dict[str, str]) -> None:
    assert tuple(views) == VIEWS


def test_views_of_estimates_are_marked_as_estimated(views: dict[str, str]) -> None:
    marked = {
        name for name, text in views.items() if "<h2>" in text and ">estimated</small>" in text
    }

    assert marked == set(VIEWS) - {"measured", "settings"}


def fullness(chip: dict[str, Any]) -> float:
    """How much of its limit a chip needs at its fullest moment."""
    share: float = sum(chip["peak"].values()) / chip["limit"]
    return share


def test_the_summary_says_whether_the_fullest_chip_fits(
    views: dict[str, str], content: Content
) -> None:
    fullest = max(map(fullness, content["estimated"]["chips"]))

    assert f"It fits: the fullest IPU needs {fullest:.0%} of its" in views["summary"]


def test_the_summary_has_the_time_of_a_call_and_the_first_advice(
    views: dict[str, str], content: Content
) -> None:
    milliseconds = content["estimated"]["seconds"] * 1e3
    advice = content["estimated"]["advice"][0]["change"]

    assert f"<b>{milliseconds:.3g} ms</b>per call" in views["summary"]
    assert f"<code>{advice}</code>" in views["summary"]


def test_bars_of_memory_are_as_wide_as_the_chips_are_full(
    views: dict[str, str], content: Content
) -> None:
    full = sum(map(fullness, content["estimated"]["chips"]))

    widths = re.findall(r'width:([\d.e-]+)%" title="\w+', views["memory"])

    assert sum(map(float, widths)) / 100 == pytest.approx(full)


def test_memory_is_shown_tile_by_tile(views: dict[str, str]) -> None:
    last_tile = "H1472V100Z"

    assert "fullest tile" in views["memory"]
    assert last_tile in views["memory"]


def test_liveness_shows_every_pass_and_its_largest_tensors(views: dict[str, str]) -> None:
    passes = re.findall(r"<title>(\S+): [\d.]+ MiB; largest: (\S+ \d),", views["liveness"])

    assert passes[:2] == [("0F0", "addmm 0"), ("0F1", "addmm 0")]
    assert "param.0.weight" in views["liveness"]


def test_each_colour_of_the_schedule_means_one_thing(views: dict[str, str]) -> None:
    colours = re.findall(r'<li><i class="(c\d+)">', views["schedule"])

    assert len(colours) > 3
    assert len(colours) == len(set(colours))


def test_the_schedule_shows_every_pass(views: dict[str, str]) -> None:
    actions = re.findall(r"<title>(\d\w+): [\d.e-]+ ms from", views["schedule"])

    assert sorted(actions) == ["0F0", "0F1", "1F0", "1F1"]


def test_operators_and_settings_and_comparison_show_theirs(views: dict[str, str]) -> None:
    assert "addmm" in views["operators"]
    assert "loops.replicas" in views["settings"]
    assert "+0.0%" in views["comparison"]


def test_the_program_shows_its_passes_and_how_long_they_took(views: dict[str, str]) -> None:
    assert "0F on IPU 0, 2 times" in views["program"]
    assert ">125<" in views["measured"]  # ms


def test_the_median_of_calls_leaves_out_those_timed_by_parts(views: dict[str, str]) -> None:
    assert "<b>1,750 ms</b>per call, median" in views["measured"]


def test_a_measured_operator_is_shown_next_to_its_estimate(
    views: dict[str, str], content: Content
) -> None:
    rows = content["estimated"]["operators"]
    (row,) = [row for row in rows if (row["name"], row["module"]) == ("aten.addmm", "0")]
    estimated = 2 * (row["compute"] + row["exchange"] + row["sync"]) / 1.85e9 * 1e3

    assert ">62.5<" in views["measured"]  # ms
    assert f'data-value="{estimated}"' in views["measured"]


def test_a_call_timed_by_parts_is_drawn_in_four_parts(views: dict[str, str]) -> None:
    second_call = "M1.1 "

    assert views["measured"].count(second_call) == 4


def test_the_name_of_the_processor_is_escaped(views: dict[str, str]) -> None:
    assert "&lt;/script&gt;" in views["measured"]


def test_a_page_before_the_first_call_says_so(content: Content) -> None:
    measured = {**content["measured"], "calls": 0, "first": ()}

    text = report_page.html({**content, "measured": measured})

    assert "<b>no call yet</b>" in text
    assert text.index("Measured on this machine") < text.index("It fits")


def test_a_page_of_an_estimate_says_that_nothing_was_run(content: Content) -> None:
    text = report_page.html({**content, "measured": None})

    assert "estimated for IPUs; nothing was run" in text
    assert "on this machine" not in text


def test_a_page_says_that_it_is_close(content: Content) -> None:
    close = {**content["estimated"], "verdict": "close"}

    text = report_page.html({**content, "estimated": close})

    assert '<p class="verdict close">It is close to the limit (0.9 to 1.1): the full' in text


@pytest.fixture(scope="module")
def named_page(content: Content) -> str:
    return report_page.html({**content, "name": "train.py: Net, training"}, content)


def test_the_title_of_a_page_names_script_and_system(named_page: str) -> None:
    assert "<title>train.py: Net, training on bow:2</title>" in named_page


def test_a_page_is_small(named_page: str) -> None:
    assert len(named_page) < 50_000


def test_a_page_fetches_nothing(named_page: str) -> None:
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", named_page)


def test_a_page_has_one_script_a_dark_scheme_and_solid_fills(named_page: str) -> None:
    assert named_page.count("</script>") == 1
    assert "prefers-color-scheme: dark" in named_page
    assert "<pattern" not in named_page


# Markup in values.

MARKUP = "</script><!--<script>alert(1)</script><img src=x onerror=alert(1)>"


def with_markup(value: Any) -> Iterator[Any]:
    """Yield copies of nested data, in each of which one value, or one key, is markup."""
    if not isinstance(value, (dict, list)):
        yield MARKUP
        return
    items = list(value.items() if isinstance(value, dict) else enumerate(value))
    for key, inside in items[:40]:
        for other in with_markup(inside):
            changed = copy.copy(value)
            changed[key] = other
            yield changed
    if isinstance(value, dict) and value:
        yield {MARKUP if key == items[0][0] else key: inside for key, inside in items}


@pytest.fixture
def small(content: Content) -> Content:
    """The profile with one row of everything."""
    small: Content = json.loads(json.dumps(content))
    estimated = small["estimated"]
    for name in ("operators", "schedule", "chips", "advice", "guesses"):
        estimated[name] = estimated[name][:1]
    for chip in estimated["chips"]:
        chip["largest"] = chip["largest"][:1]
        chip["live"] = chip["live"][:1]
    return small


def test_no_value_of_a_profile_becomes_markup(small: Content) -> None:
    """``poptorch report`` says of a profile that raises an error that it is no report."""
    tags = ("<script", "</script", "<img", "<!--")
    whole = report_page.html(small, small)
    written = 0

    for hostile in with_markup(small):
        try:
            text = report_page.html(hostile, hostile)
        except (LookupError, TypeError, ValueError, AttributeError):
            continue
        written += 1
        for tag in tags:
            assert text.count(tag) == whole.count(tag), tag

    assert written > 30


# What a browser draws.

MEASURE = """
Object.assign(parent.document.body.dataset, {
  views: [...document.querySelectorAll("section")].map(each => each.id).join(" "),
  fold: document.querySelector(".advice").getBoundingClientRect().bottom,
  color: getComputedStyle(document.querySelector(".verdict")).color,
});"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="chromium draws the page, and is not installed")
@pytest.mark.parametrize(
    ("width", "scheme", "color"),
    [(390, 0, "rgb(87, 211, 100)"), (1280, 1, "rgb(26, 127, 55)")],
    ids=["a phone, dark", "a screen, light"],
)
def test_a_browser_draws_every_view_inside_its_column(
    content: Content, tmp_path: Path, width: int, scheme: int, color: str
) -> None:
    """What was measured, the verdict and the advice are above a phone's fold."""
    phones_height = 844
    advice = {"change": "options." + 30 * "long", "saves": 1.0, "costs": 1.0, "fits": True}
    changed = {**content, "settings": {"line": 100 * "wide"}}
    changed["estimated"] = {**content["estimated"], "advice": [advice, advice]}
    text = report_page.html(changed, content)

    seen = drawn(text, tmp_path, width, MEASURE, f"--blink-settings=preferredColorScheme={scheme}")

    assert seen["ready"] == "yes"
    assert seen["width"] == str(width)
    assert seen["wide"] == "", "elements that are wider than their column"
    assert tuple(seen["views"].split()) == VIEWS
    assert seen["color"] == color
    assert float(seen["fold"]) < phones_height

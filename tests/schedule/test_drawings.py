"""Schedules as drawings and as traces."""

import json
from typing import Any
from xml.etree import ElementTree

import pytest

from helpers.workloads import chain, parsed
from poptorch._ir.spec import Placement
from poptorch._schedule import make

SCHEDULE = make(chain([0, 1], 3), Placement())
ACTIONS = [str(action) for _, _, action in SCHEDULE.cells()]
STREAMED = parsed("chip 3: L0F0 0F0 S0F0")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def drawing() -> ElementTree.Element:
    return ElementTree.fromstring(SCHEDULE.to_svg())


@pytest.fixture(scope="module")
def boxes(drawing: ElementTree.Element) -> list[ElementTree.Element]:
    return drawing.findall(f"{SVG}rect")


def test_a_drawing_names_chips_and_actions(drawing: ElementTree.Element) -> None:
    assert [text.text for text in drawing.findall(f"{SVG}text")] == ["chip 0", "chip 1", *ACTIONS]


def test_a_drawing_has_one_box_for_every_action(
    boxes: list[ElementTree.Element],
) -> None:
    places = {(box.get("x"), box.get("y")) for box in boxes}

    assert len(boxes) == len(ACTIONS)
    assert len(places) == len(boxes)


def test_a_drawing_has_a_row_for_every_chip(boxes: list[ElementTree.Element]) -> None:
    assert len({box.get("y") for box in boxes}) == 2


def test_a_drawing_is_wide_enough_for_its_boxes(
    drawing: ElementTree.Element, boxes: list[ElementTree.Element]
) -> None:
    ends = [float(box.get("x", "")) + float(box.get("width", "")) for box in boxes]

    assert max(ends) <= float(drawing.get("width", ""))


def test_a_box_describes_its_action(boxes: list[ElementTree.Element]) -> None:
    assert boxes[0].findtext(f"{SVG}title") == "forward of stage 0, micro-batch 0"


def test_a_box_says_that_something_is_loaded() -> None:
    assert "load for forward of stage 0, micro-batch 0" in STREAMED.to_svg()


Event = dict[str, Any]


@pytest.fixture(scope="module")
def events() -> list[Event]:
    """The trace of the schedule, with 10 microseconds for a column."""
    events: list[Event] = json.loads(SCHEDULE.to_trace(microseconds=10))["traceEvents"]
    return events


def spans(events: list[Event]) -> list[Event]:
    return [event for event in events if event["ph"] == "X"]


def test_a_trace_has_a_thread_for_each_chip(events: list[Event]) -> None:
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}

    assert names == {0: "chip 0", 1: "chip 1"}


def test_a_trace_has_a_span_for_every_action_in_its_column(events: list[Event]) -> None:
    assert [span["name"] for span in spans(events)] == ACTIONS
    for span in spans(events):
        column = int(span["ts"] / 10)
        assert str(SCHEDULE.rows[span["tid"]][column]) == span["name"]
        assert span["dur"] == 10


def test_a_trace_distinguishes_passes(events: list[Event]) -> None:
    assert {span["cat"] for span in spans(events)} == {"forward", "backward", "update"}


def test_a_trace_distinguishes_loads_and_stores_from_passes() -> None:
    events = json.loads(STREAMED.to_trace())["traceEvents"]

    assert [span["cat"] for span in spans(events)] == ["load", "forward", "store"]

"""Drawings: SVG that parses, and a trace with one event for each action."""

import json
from xml.etree import ElementTree

from helpers.workloads import chain, parsed
from poptorch._ir.spec import Placement
from poptorch._schedule import make

SCHEDULE = make(chain([0, 1], 3), Placement())
ACTIONS = [str(action) for _, _, action in SCHEDULE.cells()]
SVG = "{http://www.w3.org/2000/svg}"


def test_svg_shows_every_action_in_its_row_and_column() -> None:
    root = ElementTree.fromstring(SCHEDULE.to_svg())
    assert [text.text for text in root.findall(f"{SVG}text")] == ["chip 0", "chip 1", *ACTIONS]
    boxes = root.findall(f"{SVG}rect")
    cells = {(float(box.get("x")), float(box.get("y"))) for box in boxes}
    assert len(cells) == len(boxes) == len(ACTIONS)
    assert len({y for _, y in cells}) == 2
    width = float(root.get("width"))
    assert all(x + float(boxes[0].get("width")) <= width for x, _ in cells)
    assert boxes[0].find(f"{SVG}title").text == "forward of stage 0, micro-batch 0"


def test_the_trace_has_a_thread_for_each_chip_and_moves_are_drawn_as_such() -> None:
    events = json.loads(SCHEDULE.to_trace(microseconds=10))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {0: "chip 0", 1: "chip 1"}
    spans = [event for event in events if event["ph"] == "X"]
    assert [span["name"] for span in spans] == ACTIONS
    for span in spans:
        assert str(SCHEDULE.rows[span["tid"]][int(span["ts"] / 10)]) == span["name"]
        assert span["dur"] == 10
    assert {span["cat"] for span in spans} == {"forward", "backward", "update"}
    schedule = parsed("chip 3: L0F0 0F0 S0F0")
    events = json.loads(schedule.to_trace())["traceEvents"]
    assert [e["cat"] for e in events if e["ph"] == "X"] == ["load", "forward", "store"]
    assert "load for forward of stage 0, micro-batch 0" in schedule.to_svg()

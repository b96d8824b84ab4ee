"""Schedules as pictures: SVG, and the trace format that browsers' trace viewers open."""

from __future__ import annotations

import json
from xml.sax.saxutils import escape

from .schedule import Action, Schedule
from .stage_pass import Direction

_CELL = 44, 26
_MARGIN = 64, 8
_COLOURS = {
    Direction.FORWARD: "#9ecae1",
    Direction.BACKWARD: "#fdae6b",
    Direction.UPDATE: "#a1d99b",
}
_MOVED = "#d9d9d9"


def to_svg(schedule: Schedule) -> str:
    """Return the grid as an SVG picture: a row for each chip, a column for each step."""
    width, height = _CELL
    left, top = _MARGIN
    rows = list(schedule.rows)
    size = left + schedule.columns * width + top, 2 * top + len(rows) * height
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" '
        'font-family="monospace" font-size="11">',
        *(
            f'<text x="{top}" y="{top + i * height + height * 0.65:.1f}" fill="currentColor">'
            f"chip {chip}</text>"  # the page's colour: it may be a dark one
            for i, chip in enumerate(rows)
        ),
    ]
    for column, chip, action in schedule.cells():
        x, y = left + column * width, top + rows.index(chip) * height
        lines.append(
            f'<rect x="{x}" y="{y}" width="{width - 2}" height="{height - 2}" rx="3" '
            f'fill="{_colour(action)}"><title>{escape(_described(action))}</title></rect>'
            f'<text x="{x + width / 2 - 1}" y="{y + height * 0.65:.1f}" text-anchor="middle">'
            f"{escape(str(action))}</text>"
        )
    return "\n".join([*lines, "</svg>\n"])


def to_trace(schedule: Schedule, microseconds: float = 1000.0) -> str:
    """Return the schedule as Chrome trace JSON, a thread for each chip.

    Args:
        microseconds: shown length of a column; the schedule itself knows no times.
    """
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": chip, "args": {"name": f"chip {chip}"}}
        for chip in schedule.rows
    ]
    events += [
        {
            "ph": "X", "name": str(action), "cat": _category(action), "pid": 0, "tid": chip,
            "ts": column * microseconds, "dur": microseconds,
            "args": {"what": _described(action)},
        }
        for column, chip, action in schedule.cells()
    ]  # fmt: skip
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=1)


def _colour(action: Action) -> str:
    return _MOVED if action.traffic else _COLOURS[action.stage_pass.direction]


def _category(action: Action) -> str:
    return (action.traffic or action.stage_pass.direction).name.lower()


def _described(action: Action) -> str:
    stage_pass = action.stage_pass
    if stage_pass.is_update:
        what = f"update on chip {stage_pass.stage}, round {stage_pass.round}"
    else:
        direction = stage_pass.direction.name.lower()
        what = f"{direction} of stage {stage_pass.stage}, micro-batch {action.micro_batch}"
    return f"{action.traffic.name.lower()} for {what}" if action.traffic else what

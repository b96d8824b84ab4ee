"""The drawings of a report, as plain data for Plotly: memory, liveness, schedule, calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PATTERNS = ("", "/", "x", "-", "|", "+", ".", "\\")
DASHES = ("solid", "dash", "dot", "dashdot")
MOST_ACTIONS = 4000
"""More bars than that make browsers slow."""
_MEBI = 1 << 20

Profile = Mapping[str, Any]


def figures(profile: Profile) -> dict[str, dict[str, Any]]:
    """Return the drawings by the id of their place."""
    drawn = {
        "figure-memory": _memory(profile),
        "figure-tiles": _tiles(profile),
        "figure-liveness": _liveness(profile),
        "figure-schedule": _schedule(profile),
    }
    if profile["measured"] and profile["measured"]["first"]:
        drawn["figure-measured"] = _calls(profile)
    return drawn


def _layout(x: str, y: str, **more: Any) -> dict[str, Any]:
    return {
        "xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}},
        "margin": {"t": 30, "r": 20}, **more,
    }  # fmt: skip


def _memory(profile: Profile) -> dict[str, Any]:
    """Bytes at the fullest moment of each chip, by category, under the limit."""
    chips = profile["estimated"]["chips"]
    names = [f"IPU {chip['chip']}" for chip in chips]
    bars = [
        {
            "type": "bar", "name": category, "x": names,
            "y": [chip["peak"].get(category, 0) / _MEBI for chip in chips],
            "marker": {"pattern": {"shape": PATTERNS[at % len(PATTERNS)]}},
        }
        for at, category in enumerate(chips[0]["peak"])
    ]  # fmt: skip
    limit = {
        "type": "scatter", "mode": "lines", "name": "limit", "x": names,
        "y": [chip["limit"] / _MEBI for chip in chips], "line": {"dash": "dash"},
    }  # fmt: skip
    return {"data": [*bars, limit], "layout": _layout("", "MiB", barmode="stack")}


def _tiles(profile: Profile) -> dict[str, Any]:
    """Bytes of every tile at the fullest moment of its chip, under the limit."""
    chips = profile["estimated"]["chips"]
    lines = [
        {
            "type": "scatter", "mode": "lines",
            "name": f"IPU {chip['chip']}", "y": [round(size / 1024, 3) for size in chip["tiles"]],
            "line": {"shape": "hv", "dash": DASHES[chip["chip"] % 4]},
        }
        for chip in chips
    ]  # fmt: skip
    limit = profile["target"]["tile_bytes"] / 1024
    last = max(len(chip["tiles"]) for chip in chips) - 1
    line = {
        "type": "scatter", "mode": "lines", "name": "limit", "x": [0, last], "y": [limit, limit],
        "line": {"dash": "longdash"},
    }  # fmt: skip
    return {"data": [*lines, line], "layout": _layout("tile", "KiB")}


def _liveness(profile: Profile) -> dict[str, Any]:
    """Bytes of every chip along the schedule."""
    lines = [
        {
            "type": "scatter", "mode": "lines", "name": f"IPU {chip['chip']}",
            "x": list(range(len(chip["live"]))), "y": [size / _MEBI for size in chip["live"]],
            "line": {"shape": "hv", "dash": DASHES[chip["chip"] % 4]},
        }
        for chip in profile["estimated"]["chips"]
    ]  # fmt: skip
    return {"data": lines, "layout": _layout("column of the schedule", "MiB")}


def _schedule(profile: Profile) -> dict[str, Any]:
    """A lane per chip; the forward, backward and update passes."""
    scale = 1e3 / profile["estimated"]["clock"]
    actions = profile["estimated"]["schedule"][:MOST_ACTIONS]
    bars = []
    for at, (letter, name) in enumerate((("F", "forward"), ("B", "backward"), ("U", "update"))):
        own = [a for a in actions if letter in a["name"]]
        bars.append(
            {
                "type": "bar", "orientation": "h", "name": name,
                "y": [f"IPU {a['chip']}" for a in own], "base": [a["start"] * scale for a in own],
                "x": [(sum(a["parts"].values()) + a["sent"]) * scale for a in own],
                "text": [a["name"] for a in own], "textposition": "inside",
                "marker": {"pattern": {"shape": PATTERNS[at]}},
                "hovertemplate": "%{text}: %{x:.4g} ms from %{base:.4g} ms<extra></extra>",
            }
        )  # fmt: skip
    layout = _layout("ms (estimated)", "", barmode="overlay")
    layout["yaxis"]["autorange"] = "reversed"
    return {"data": [bar for bar in bars if bar["x"]], "layout": layout}


def _calls(profile: Profile) -> dict[str, Any]:
    """What the first calls took on this machine."""
    calls = profile["measured"]["first"]
    bars = [
        {
            "type": "bar", "name": part, "x": list(range(len(calls))),
            "y": [call[part] * 1e3 for call in calls],
            "marker": {"pattern": {"shape": PATTERNS[at]}},
        }
        for at, part in enumerate(("outside", "prepare", "device", "collect"))
    ]  # fmt: skip
    layout = _layout("call", "ms (measured here)", barmode="stack")
    return {"data": bars, "layout": layout}

"""``report.html``: a profile as one file that a browser opens without server or network."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._base import log
from .._base.tables import size_text
from .parts import Advice
from .profile import (
    Folded,
    Profile,
    compare,
    direction_of,
    folded,
    of_modules,
    pass_of_action,
    whole_cycles,
)

GET_PLOTLY = "pip install 'poptorch[report]'"

_MOST_ROWS = 500
_MOST_ACTIONS = 4000  # more bars than that make browsers slow
_PATTERNS = ("", "/", "x", "-", "|", "+", ".", "\\")
_DASHES = ("solid", "dash", "dot", "dashdot")
_MEBI = 1 << 20
_said: list[Path] = []


def write(profile: Profile, path: Path, before: Profile | None = None) -> bool:
    """Say whether a report was written: without plotly it is not, and a warning says so once."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        if not _said:
            _said.append(path)
            log.python.warning("No %s is written, which needs plotly: %s", path, GET_PLOTLY)
        return False
    path.write_text(html(profile, get_plotlyjs(), before), encoding="utf-8")
    return True


def html(profile: Profile, plotly: str, before: Profile | None = None) -> str:
    import jinja2  # which torch's compiler brings

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"size": size_text, "shown": _number_text, "modules": of_modules}
    template = environment.from_string(Path(__file__).with_name("report.html").read_text())
    drawn = figures(profile)
    sections = ["summary", "memory", "liveness", "schedule", "operators", "program"]
    optional = {"measured": profile["measured"], "settings": profile["settings"]}
    changes = [] if before is None else compare(before, profile)
    optional["comparison"] = changes
    try:
        return template.render(
            profile=profile, changes=changes, figures=drawn, plotly=plotly,
            sections=[*sections, *(name for name, content in optional.items() if content)],
            advice=[str(Advice(**each)) for each in profile["estimated"]["advice"]],
            operators=folded(profile["estimated"]["operators"])[:_MOST_ROWS],
            whole=whole_cycles(profile["estimated"]), scale=1e3 / profile["estimated"]["clock"],
            operators_here=_operators_here(profile), passes=list(_passes(profile["estimated"])),
            # No text ends the script, or begins a comment.
            data=json.dumps(drawn).replace("<", "\\u003c"),
        )  # fmt: skip
    except jinja2.UndefinedError as error:
        raise LookupError(str(error)) from None


def _number_text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"


def _operators_here(profile: Profile) -> list[tuple[Mapping[str, Any], float | str]]:
    """Operators that ran here, and the ms that they are estimated to take on IPUs."""
    clock = profile["estimated"]["clock"]
    modelled: dict[tuple[str, str, str], float] = defaultdict(float)
    for each in profile["estimated"]["operators"]:
        key = direction_of(each["stage_pass"]), each["name"], each["module"]
        cycles = each["compute"] + each["exchange"] + each["sync"]
        modelled[key] += each["runs"] * cycles / clock * 1e3
    return [
        (each, modelled.get((each["direction"], each["name"], each["module"]), ""))
        for each in (profile["measured"] or {}).get("operators", ())[:_MOST_ROWS]
    ]


def _passes(priced: Mapping[str, Any]) -> Iterator[tuple[str, int, int, list[Folded]]]:
    """Yield name, chip, how often it is done, operators."""
    passes: dict[tuple[int, str], list[Mapping[str, Any]]] = defaultdict(list)
    for each in priced["operators"]:
        passes[each["chip"], each["stage_pass"]].append(each)
    runs = Counter(pass_of_action(action["name"].lstrip("LS")) for action in priced["schedule"])
    for (chip, name), own in sorted(passes.items()):
        yield name, chip, runs[name], folded(own)


def figures(profile: Profile) -> dict[str, dict[str, Any]]:
    priced, measured = profile["estimated"], profile["measured"]
    chips = priced["chips"]
    drawn = {
        "figure-memory": _memory(chips),
        "figure-tiles": _tiles(chips, profile["target"]["tile_bytes"]),
        "figure-liveness": _liveness(chips),
        "figure-schedule": _schedule(priced),
    }
    if measured and measured["first"]:
        drawn["figure-measured"] = _calls(measured["first"])
    return drawn


def _layout(x: str, y: str, **more: Any) -> dict[str, Any]:
    return {
        "xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}},
        "margin": {"t": 30, "r": 20}, **more,
    }  # fmt: skip


def _line(name: str, y: Sequence[float], **more: Any) -> dict[str, Any]:
    return {"type": "scatter", "mode": "lines", "name": name, "y": y, **more}


def _steps(chip: Mapping[str, Any], y: Sequence[float], **more: Any) -> dict[str, Any]:
    style = {"shape": "hv", "dash": _DASHES[chip["chip"] % 4]}
    return _line(f"IPU {chip['chip']}", y, line=style, **more)


def _bar(name: str, at: int, **more: Any) -> dict[str, Any]:
    pattern = {"shape": _PATTERNS[at % len(_PATTERNS)]}
    return {"type": "bar", "name": name, "marker": {"pattern": pattern}, **more}


def _memory(chips: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = [f"IPU {chip['chip']}" for chip in chips]
    bars = [
        _bar(category, at, x=names, y=[chip["peak"].get(category, 0) / _MEBI for chip in chips])
        for at, category in enumerate(chips[0]["peak"])
    ]
    limits = [chip["limit"] / _MEBI for chip in chips]
    limit = _line("limit", limits, x=names, line={"dash": "dash"})
    return {"data": [*bars, limit], "layout": _layout("", "MiB", barmode="stack")}


def _tiles(chips: Sequence[Mapping[str, Any]], tile_bytes: int) -> dict[str, Any]:
    lines = [_steps(chip, [round(size / 1024, 3) for size in chip["tiles"]]) for chip in chips]
    last = max(len(chip["tiles"]) for chip in chips) - 1
    limit = _line("limit", 2 * [tile_bytes / 1024], x=[0, last], line={"dash": "longdash"})
    return {"data": [*lines, limit], "layout": _layout("tile", "KiB")}


def _liveness(chips: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    lines = [
        _steps(chip, [size / _MEBI for size in chip["live"]], x=list(range(len(chip["live"]))))
        for chip in chips
    ]
    return {"data": lines, "layout": _layout("column of the schedule", "MiB")}


def _schedule(priced: Mapping[str, Any]) -> dict[str, Any]:
    scale = 1e3 / priced["clock"]
    bars = []
    for at, (letter, name) in enumerate((("F", "forward"), ("B", "backward"), ("U", "update"))):
        own = [a for a in priced["schedule"][:_MOST_ACTIONS] if letter in a["name"]]
        bars.append(
            _bar(
                name, at, orientation="h", y=[f"IPU {a['chip']}" for a in own],
                base=[a["start"] * scale for a in own],
                x=[(sum(a["parts"].values()) + a["sent"]) * scale for a in own],
                text=[a["name"] for a in own], textposition="inside",
                hovertemplate="%{text}: %{x:.4g} ms from %{base:.4g} ms<extra></extra>",
            )
        )  # fmt: skip
    layout = _layout("ms (estimated)", "", barmode="overlay")
    layout["yaxis"]["autorange"] = "reversed"
    return {"data": [bar for bar in bars if bar["x"]], "layout": layout}


def _calls(calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    bars = [
        _bar(part, at, x=list(range(len(calls))), y=[call[part] * 1e3 for call in calls])
        for at, part in enumerate(("outside", "prepare", "device", "collect"))
    ]
    return {"data": bars, "layout": _layout("call", "ms (measured here)", barmode="stack")}

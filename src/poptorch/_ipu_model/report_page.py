"""Write ``report.html``: a profile as one file that a browser opens without server or network."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._base import pages, safe_files
from .._base.tables import size_text
from .parts import Advice
from .profile import (
    DIRECTIONS,
    OperatorGroup,
    Profile,
    compare,
    cycles_of,
    direction_of,
    folded,
    of_modules,
    pass_of_action,
    settled,
    trace,
    whole_cycles,
)

_MOST_ROWS = 500
_MOST_BARS = 5000  # more would make browsers slow
_MOST_COLUMNS = 300
_HERE = ("outside", "prepare", "device", "collect")


def write(profile: Profile, path: Path, before: Profile | None = None) -> None:
    safe_files.write_text_for_user(path, html(profile, before))


def html(profile: Profile, before: Profile | None = None) -> str:
    import jinja2  # installed, because torch's compiler requires it

    priced, measured = profile["estimated"], profile["measured"] or {}
    advice = [Advice(**each) for each in priced["advice"]]
    changes = [] if before is None else compare(before, profile)
    sections = ["memory", "liveness", "schedule", "operators", "program"]
    optional = {"settings": profile["settings"], "comparison": changes}
    try:
        return pages.template(Path(__file__).with_name("report.html")).render(
            profile=profile, priced=priced, measured=measured, changes=changes, advice=advice,
            modules=of_modules,
            sections=[*sections, *(name for name, content in optional.items() if content)],
            settled=settled(measured) if measured.get("first") else None,
            directions=DIRECTIONS, ms=1e3 / priced["clock"],
            whole=whole_cycles(priced), operators=folded(priced["operators"])[:_MOST_ROWS],
            operators_here=_measured_operators(profile), passes=list(_passes(priced)),
            bound=[(name, f"{share:.0%}", share) for name, share in priced["bound"].items()],
            shares={name: f"{share:.0%}" for name, share in priced["bound"].items() if share},
            chips=_chips(profile), trace=_trace(profile), calls=_calls(measured.get("first", ())),
        )  # fmt: skip
    except jinja2.UndefinedError as error:
        raise LookupError(str(error)) from None


def _measured_operators(profile: Profile) -> list[tuple[Mapping[str, Any], float | str]]:
    """Return the operators that ran here, and their estimated milliseconds on IPUs."""
    modelled: dict[tuple[str, str, str], float] = defaultdict(float)
    for each in profile["estimated"]["operators"]:
        key = direction_of(each["stage_pass"]), each["name"], each["module"]
        modelled[key] += cycles_of(each) / profile["estimated"]["clock"] * 1e3
    return [
        (each, modelled.get((each["direction"], each["name"], each["module"]), ""))
        for each in (profile["measured"] or {}).get("operators", ())[:_MOST_ROWS]
    ]


def _passes(priced: Mapping[str, Any]) -> Iterator[tuple[str, int, int, list[OperatorGroup]]]:
    """Yield name, chip, runs per call, operators."""
    passes: dict[tuple[int, str], list[Mapping[str, Any]]] = defaultdict(list)
    for each in priced["operators"]:
        passes[each["chip"], each["stage_pass"]].append(each)
    for (chip, name), own in sorted(passes.items()):
        yield name, chip, own[0]["runs"], folded(own)


# Pictures are SVG with the width of their place. y goes from 0 at the top to 100.


def _chips(profile: Profile) -> list[dict[str, Any]]:
    """Return what the page shows about each chip; shares are relative to the largest limit
    or peak.
    """
    chips, tile_bytes = profile["estimated"]["chips"], profile["target"]["tile_bytes"]
    most = max(max(chip["limit"], sum(chip["peak"].values())) for chip in chips)
    made = []
    for chip in chips:
        used, live = sum(chip["peak"].values()), _live(profile["estimated"], chip)
        most_of_tile = max(tile_bytes, *chip["tiles"])
        made.append(
            {
                "chip": chip["chip"], "used": used, "share": used / chip["limit"],
                "segments": [(n, size_text(size), size / most) for n, size in chip["peak"].items()],
                "limit": chip["limit"] / most,
                "tiles": _area(chip["tiles"], most_of_tile), "count": len(chip["tiles"]),
                "tile_limit": tile_bytes / most_of_tile,
                "fullest": max(chip["tiles"]), "average": sum(chip["tiles"]) / len(chip["tiles"]),
                "live": live, "area": _area([size for size, _ in live], most),
                "always": sum(chip["always"].values()) / most,
            }
        )  # fmt: skip
    return made


def _area(values: Sequence[float], most: float) -> str:
    """Return the path around the area below a step curve with steps of width 1."""
    path, at = "M0 100", 0
    for value, run in itertools.groupby(values):
        at += len(list(run))
        path += f"V{100 - 100 * value / most:.1f}H{at}"
    return f"{path}V100Z"


def _live(priced: Mapping[str, Any], chip: Mapping[str, Any]) -> list[tuple[float, str]]:
    """Return bytes for at most as many columns as a screen shows, the fullest of each group, with
    their contents.
    """
    own = (action for action in priced["schedule"] if action["chip"] == chip["chip"])
    names = {action["column"]: action["name"] for action in own}
    texts = {
        name: f"; largest: {big['name']} {big['module']}, {size_text(big['bytes'])} {big['line']}"
        for name, big in chip["moments"].items()
    }
    columns = []
    for at, size in enumerate(chip["live"]):
        name = names.get(at, "")
        largest = texts.get(pass_of_action(name.lstrip("LS")), "")
        columns.append((size, f"{name or 'waiting'}: {size_text(size)}{largest}"))
    width = -(-len(columns) // _MOST_COLUMNS) or 1
    return [max(columns[at : at + width]) for at in range(0, len(columns), width)]


def _trace(profile: Profile) -> dict[str, Any]:
    """Return the schedule's first actions by chip, and paths for their activities; x is in
    thousandths.
    """
    events = trace({**profile, "measured": None})["traceEvents"]
    events = [each for each in events if each["ph"] == "X"][:_MOST_BARS]
    end = max((each["ts"] + each["dur"] for each in events), default=0) or 1
    bars: dict[int, list[tuple[float, float, str, str]]] = defaultdict(list)
    parts: dict[int, dict[str, str]] = defaultdict(lambda: defaultdict(str))
    names = {}
    for each in events:
        chip, name = each["pid"], each["cat"]
        at, width = 1000 * each["ts"] / end, 1000 * each["dur"] / end
        if name == "action":
            name = DIRECTIONS[direction_of(each["name"].lstrip("LS"))]
            text = f"{each['name']}: {each['dur'] / 1e3:.3g} ms from {each['ts'] / 1e3:.3g} ms"
            bars[chip].append((at, width, name, text))
        else:
            parts[chip][name] += f"M{at:.2f} 0h{width:.2f}v100h-{width:.2f}z"
        names[name] = ""
    shown = sum(map(len, bars.values()))
    return {"bars": bars, "parts": parts, "names": names, "ms": end / 1e3, "shown": shown}


def _calls(calls: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return a path for each part of the calls on this machine, with one column per call."""
    most = max((sum(call[part] for part in _HERE) for call in calls), default=0) or 1
    paths: dict[str, str] = defaultdict(str)
    for at, call in enumerate(calls):
        top = 100.0
        for part in _HERE:
            height = 100 * call[part] / most
            top -= height
            paths[part] += f"M{at}.1 {top:.2f}h.8v{height:.2f}h-.8z"
    return paths

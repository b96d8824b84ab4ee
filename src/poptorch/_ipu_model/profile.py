"""Write ``profile.json``: a program's estimated cost on IPUs and measured cost here, as text and
trace.

The guide to costs on IPUs describes the form. Readers must accept unknown keys. A change that
breaks readers increases ``format``.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._base import VERSION, archive
from .._base.errors import Error
from .._base.tables import TextPart, size_text, table, time_text
from .._ipu_systems import ChipKind
from .._ir.block_labels import Direction
from . import scaling
from .parts import VERDICTS, Advice, Culprit

Profile = Mapping[str, Any]
FORMAT = 3
NAME = "profile.json"
DIRECTIONS = {each.value: each.name.lower() for each in Direction}  # as pages name them
TIMED = 2
"""The number of calls that are timed operator by operator, which slows them down. The report shows
the last one.
"""


@dataclass(frozen=True)
class CallTimes:
    """Seconds of one call on this machine."""

    start: float  # after the first call began
    outside: float  # since the last call: the script's own work, waiting for data
    prepare: float  # checking and reading the batch
    device: float  # running the program
    collect: float  # joining the results


@dataclass(frozen=True)
class ActionTime:
    """Seconds of one action in the last call that was timed by parts."""

    name: str  # a graph of the program (forward, micro, update, step) or an action of the schedule
    count: int
    seconds: float  # in total


@dataclass(frozen=True)
class OperatorTime:
    """Seconds of one kind of operator of one module, in the same call."""

    direction: str  # F, B or U: forward, backward, update
    name: str
    module: str
    line: str  # description of the user's line, or ""
    count: int
    seconds: float  # in total


@dataclass(frozen=True)
class Measured:
    """What was measured on this machine."""

    tier: str  # a line of text about what ran the program
    compile_seconds: float
    calls: int
    first: tuple[CallTimes, ...]
    process_bytes: int  # peak memory of the process
    actions: tuple[ActionTime, ...] = ()
    operators: tuple[OperatorTime, ...] = ()  # the most expensive first; compiled code has none


def profile(
    estimated: Mapping[str, Any],
    kind: ChipKind,
    measured: Measured | None,
    settings: Mapping[str, str],
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "poptorch": VERSION,
        "torch": torch.__version__,
        "name": ": ".join(filter(None, (estimated["script"], estimated["name"]))),
        "target": {
            "kind": kind.name, "generation": kind.generation, "tiles": kind.tiles,
            "tile_bytes": kind.tile_bytes, "clock": kind.clock_mhz * 1e6,
        },
        "estimated": estimated,
        "measured": None if measured is None else asdict(measured),
        "settings": dict(settings),
    }  # fmt: skip


_FIX = f"pass a {NAME} of version {FORMAT}, which options.enableProfiling(DIR) writes"


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    file = Path(path)
    file = file / NAME if file.is_dir() else file
    try:
        content = json.loads(archive.read_text(file))
    except (archive.InvalidFile, OSError, ValueError, RecursionError) as error:
        below = sorted(Path(path).glob(f"*/{NAME}"))
        folders = ", ".join(str(each.parent) for each in below)
        fix = f"pass a folder that contains a profile: {folders}" if below else _FIX
        raise Error("This path contains no profile", got=f"{file}: {error}", fix=fix) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        form = content.get("format") if isinstance(content, dict) else None
        raise Error(
            "The profile has an unknown format", got=f"{file} has the format {form}", fix=_FIX
        )
    return content


def cycles_of(operator: Mapping[str, Any]) -> float:
    """Return the cycles per call."""
    return float(operator["runs"] * (operator["compute"] + operator["exchange"] + operator["sync"]))


class OperatorGroup(NamedTuple):
    """An operator in all modules that use it in the same way, such as ``layers.*``, for
    one call.
    """

    name: str
    module: str
    modules: int
    direction: str  # F, B or U
    runs: int  # per module
    line: str
    compute: float  # cycles, as for the next two
    exchange: float
    sync: float
    flops: float

    @property
    def cycles(self) -> float:
        return self.compute + self.exchange + self.sync


def folded(operators: Iterable[Mapping[str, Any]]) -> list[OperatorGroup]:
    """Return operators by their cost per call. Repeated layers are joined."""
    alike: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for each in operators:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", each["module"])
        same = each["name"], each["count"], each["runs"], each["flops"], each["compute"]
        alike[direction_of(each["stage_pass"]), pattern, *same].append(each)
    rows = []
    for (direction, pattern, *_), own in alike.items():
        first, modules = own[0], {each["module"] for each in own}
        rows.append(
            OperatorGroup(
                first["name"], pattern if len(modules) > 1 else first["module"], len(modules),
                direction, first["runs"] * first["count"], first["line"],
                *(
                    float(sum(each[part] * each["runs"] for each in own))
                    for part in ("compute", "exchange", "sync", "flops")
                ),
            )
        )  # fmt: skip
    return sorted(rows, key=lambda row: -row.cycles)


def direction_of(stage_pass: str) -> str:
    return stage_pass.lstrip("0123456789")[:1]


def whole_cycles(priced: Mapping[str, Any]) -> float:
    """Return the cycles of a call on all chips of a replica, including waiting."""
    return float(sum(sum(chip["parts"].values()) for chip in priced["chips"]))


def pass_of_action(name: str) -> str:
    """Return the pass of an action: ``1F3`` does ``1F``; ``0U1`` is a pass itself."""
    match = re.fullmatch(r"(\d+[FB])\d+", name)
    return match[1] if match else name


def of_modules(row: OperatorGroup) -> str:
    return row.module if row.modules == 1 else f"{row.module}, {row.modules} times"


def shown(profile: Profile) -> Iterator[TextPart]:
    """Yield the lines and tables to show, starting with what was measured."""
    if profile["measured"]:
        yield from _measured(profile)
    priced, culprit = profile["estimated"], Culprit(**profile["estimated"]["culprit"])
    bound, chips, replicas = priced["bound"], priced["chips"], priced["replicas"]
    yield (
        f"{profile['name']}, on {priced['system']}: {_counted(replicas, 'replica')} of "
        f"{_counted(len(chips), 'IPU')}, {replicas * len(chips)} in use (estimated; estimates of "
        f"{priced['kind']} programs are within a factor of {priced['error_band']:g} of published "
        "results)"
    )
    yield f"{VERDICTS[priced['verdict']]}: {culprit}"
    yield (
        f"{priced['items_per_second']:,.0f} items/s, {time_text(priced['seconds'])} per call, "
        f"{priced['cycles']:,.0f} cycles, {priced['share_of_peak']:.1%} of peak, bound by "
        f"{max(bound, key=lambda part: float(bound[part]))}"
    )
    yield "  ".join(f"{name} {share:.0%}" for name, share in bound.items())
    yield [["ipu", "busy", "peak", "of limit", "at", "largest parts"], *map(_chip, chips)]
    scale, whole = 1e3 / priced["clock"], whole_cycles(priced)
    dear = [
        [o.name, of_modules(o), o.direction, f"{o.cycles * scale:.3g}", f"{o.cycles / whole:.1%}"]
        for o in folded(priced["operators"])[:10]
    ]
    yield [["operator", "module", "direction", "ms per call", "share"], *dear]
    guesses = [f"{each['name']} {each['share']:.0%}" for each in priced["guesses"][:4]]
    if guesses:
        yield f"shares that depend on guessed constants: {', '.join(guesses)}"
    yield from (f"advice: {Advice(**each)}" for each in priced["advice"][:3])
    if priced.get("scaling"):
        yield from scaling.shown(priced["scaling"])


def settled(measured: Mapping[str, Any]) -> float:
    """Return the median of the calls' seconds, without calls that were timed by parts if
    possible.
    """
    calls = [call["prepare"] + call["device"] + call["collect"] for call in measured["first"]]
    return float(statistics.median(calls[TIMED:] or calls))


def _measured(profile: Profile) -> Iterator[TextPart]:
    measured = profile["measured"]
    calls = _counted(measured["calls"], "call")
    each = f", {time_text(settled(measured))} each (median)" if measured.get("first") else ""
    yield f"{profile['name']}, measured here: {calls}{each}, {measured['tier']}"
    measured_rows = [
        [o["name"], o["module"], o["direction"], str(o["count"]), f"{o['seconds'] * 1e3:.3g}"]
        for o in measured.get("operators", ())[:10]
    ]
    if measured_rows:
        yield [["operator (here)", "module", "direction", "count", "ms per call"], *measured_rows]
    yield (
        "The following is an estimate for IPUs. None of it was run, because this machine has no "
        "IPUs:"
    )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _chip(chip: Mapping[str, Any]) -> list[str]:
    used = sum(chip["peak"].values())
    top = sorted(chip["peak"].items(), key=lambda item: -item[1])[:3]
    return [
        str(chip["chip"]), f"{chip['cycles'] / sum(chip['parts'].values()):.0%}", size_text(used),
        f"{used / chip['limit']:.0%}", chip["peak_at"],
        ", ".join(f"{name} {size_text(size)}" for name, size in top),
    ]  # fmt: skip


BUDGETS = ("memory", "cycles")


class ProfileChange(NamedTuple):
    """One figure before and after. Less is better, except for items per second."""

    name: str
    before: float
    after: float

    @property
    def change(self) -> float:
        if self.before == self.after:
            return 0.0
        return self.after / self.before - 1 if self.before else float("inf")


def compare(before: Profile, after: Profile) -> list[ProfileChange]:
    old, new = _figures(before), _figures(after)
    return [ProfileChange(name, old.get(name, 0.0), new.get(name, 0.0)) for name in {**old, **new}]


def _figures(profile: Profile) -> dict[str, float]:
    priced = profile["estimated"]
    fullest = max(priced["chips"], key=lambda chip: sum(chip["peak"].values()))
    return {
        "memory": sum(fullest["peak"].values()),
        "cycles": priced["cycles"],
        "items per second": priced["items_per_second"],
        **{f"memory: {name}": size for name, size in fullest["peak"].items()},
    }


def parse_budget(text: str) -> dict[str, float]:
    allowed = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+(?:\.\d+)?)\s*%\s*", part)
        if match is None or match[1] not in BUDGETS:
            raise Error(
                "The budget of poptorch report has an invalid format",
                got=repr(part),
                fix="for example --budget memory=3%,cycles=1%",
            )
        allowed[match[1]] = float(match[2]) / 100
    return allowed


def changes_text(changes: list[ProfileChange]) -> str:
    head = ["figure", "before", "now", "change"]
    rows = [[c.name, f"{c.before:,.0f}", f"{c.after:,.0f}", f"{c.change:+.1%}"] for c in changes]
    return "\n".join(table([head, *rows]))


# Trace events for Perfetto and browsers: Trace Event Format, JSON; times in microseconds.

_PARTS = ("streaming memory", "host link", "compute", "exchange", "sync")
_LANES = ("action", *_PARTS)
_HERE = 1000  # the process number of this machine, different from those of chips
_MEASURED = ("calls", "actions", "operators")


def trace(profile: Profile, spans: Iterable[tuple[str, float, float, bool]] = ()) -> dict[str, Any]:
    priced, calls = profile["estimated"], (profile["measured"] or {}).get("first", ())
    events: list[dict[str, Any]] = []
    for chip in priced["chips"]:
        events += _process(chip["chip"], f"IPU {chip['chip']} (estimated)", _LANES)
    for action in priced["schedule"]:
        events += _action_bars(action, 1e6 / priced["clock"])
    if calls:
        events += _process(_HERE, "this machine (measured)", _MEASURED)
    for number, call in enumerate(calls):
        at = call["start"]
        for part in ("prepare", "device", "collect"):
            name = f"call {number}: {part}"
            events.append(_bar(_HERE, 0, name, at * 1e6, call[part] * 1e6, part))
            at += call[part]
    for name, start, seconds, is_action in spans:
        lane = 1 if is_action else 2
        events.append(_bar(_HERE, lane, name, start * 1e6, seconds * 1e6, _MEASURED[lane]))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _process(number: int, name: str, lanes: Iterable[str]) -> Iterator[dict[str, Any]]:
    named = [("process_name", 0, name), *(("thread_name", at, own) for at, own in enumerate(lanes))]
    for what, thread, own in named:
        yield {"ph": "M", "name": what, "pid": number, "tid": thread, "args": {"name": own}}


def _action_bars(action: Mapping[str, Any], scale: float) -> Iterator[dict[str, Any]]:
    """Return a bar for the action, with its parts below. On a chip, these actually alternate."""

    def bar(lane: str, name: str, start: float, length: float) -> dict[str, Any]:
        at = _LANES.index(lane)
        return _bar(action["chip"], at, name, start * scale, length * scale, lane)

    name, at, parts = action["name"], action["start"], action["parts"]
    yield bar("action", name, at, sum(parts.values()))
    for part in _PARTS:
        if length := parts.get(part, 0.0):
            yield bar(part, f"{name} {part}", at, length)
            at += length
    if action["sent"]:
        yield bar("exchange", f"{name} sends", at, action["sent"])


def _bar(
    process: int, thread: int, name: str, start: float, length: float, kind: str
) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "pid": process, "tid": thread,
        "ts": round(start, 3), "dur": round(length, 3), "cat": kind,
    }  # fmt: skip

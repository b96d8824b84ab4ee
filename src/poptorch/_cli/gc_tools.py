"""Implement ``gc-monitor`` and ``gc-info``: list the devices of the system, and who uses them."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

from .. import _ipu_systems, _pod
from .._base import VERSION
from .._base.errors import one_line
from .._ipu_systems import System
from .._pod import Holder
from .commands import Misuse, command, misuse, page

_CARD_HEAD = (
    "IPU-M", "Serial", "IPU-M SW", "Server version", "ICU FW", "Type", "ID", "IPU#", "Routing",
)  # fmt: skip
_CARD_WIDTHS = (13, 20, 8, 14, 10, 7, 4, 6, 7)
_PROCESS_HEAD = ("PID", "Command", "Time", "User", "ID", "Clock", "Temp", "Temp", "Power")
_PROCESS_WIDTHS = (8, 82, 8, 12, 4, 10, 8, 8, 8)
_UNKNOWN = "N/A"


@command
def monitor(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gc-monitor",
        description="List the devices of the system, and the processes that hold them.",
        **page("gc-monitor\ngc-monitor --json --no-card-info"),
    )
    parser.add_argument("--no-card-info", action="store_true", help="do not list devices")
    parser.add_argument("-j", "--json", action="store_true", help="print JSON")
    chosen = parser.parse_args(arguments)
    with misuse():
        system = _ipu_systems.current()
        holders = _pod.holders(system)
    if chosen.json:
        print(json.dumps(_facts(system, holders, not chosen.no_card_info), indent=2))
        return 0
    if not chosen.no_card_info:
        title = f"Partition: {system.name} [active] has {system.chips} reconfigurable IPUs"
        cards = [[str(v) for v in _card(system, at).values()] for at in range(system.chips)]
        print(box([("gc-monitor", 15), (title, 81)], _CARD_WIDTHS, [_CARD_HEAD, *cards]))
    print(_processes(system, holders))
    return 0


def _card(system: System, chip: int) -> dict[str, Any]:
    """Return the facts of one chip. As on real boards, the last chip has number 0, and the two
    chips of a card have the same serial number.
    """
    kind = system.kind
    board, at = divmod(chip, kind.per_board)
    number = kind.per_board - 1 - at
    return {
        "ipum": "localhost",
        "serial": f"0000.{number // 2 + 1:04d}.{board:07d}",
        "ipum_software": "",
        "server_version": VERSION,
        "firmware": _UNKNOWN,
        "type": kind.board,
        "id": chip,
        "ipu": number,
        "routing": "DNC",
    }


def _processes(system: System, holders: Sequence[Holder]) -> str:
    if not holders:
        return f"No attached processes in partition {system.name}"
    rows = [
        (
            str(holder.process.pid), one_line(holder.process.command), _elapsed(holder),
            one_line(holder.process.user), str(chip), f"{system.kind.clock_mhz}MHz",
            _UNKNOWN, _UNKNOWN, _UNKNOWN,
        )
        for holder in holders
        for chip in holder.chips
    ]  # fmt: skip
    title = f"Attached processes in partition {system.name}"
    titles = [(title, 113), ("IPU", 24), ("Board", 17)]
    return box(titles, _PROCESS_WIDTHS, [_PROCESS_HEAD, *rows])


def _elapsed(holder: Holder) -> str:
    seconds = max(0, int(time.time() - holder.since))
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def _facts(system: System, holders: Sequence[Holder], cards: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {"partition": system.name, "ipus": system.chips}
    if cards:
        facts["cards"] = [_card(system, chip) for chip in range(system.chips)]
    facts["processes"] = [
        {
            "pid": holder.process.pid,
            "command": holder.process.command,
            "user": holder.process.user,
            "device": holder.device,
            "ipus": list(holder.chips),
            "seconds": round(time.time() - holder.since, 1),
            "clock_mhz": system.kind.clock_mhz,
        }
        for holder in holders
    ]
    return facts


@command
def info(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gc-info",
        description="List the device ids of the system: single chips, and groups of chips.",
        **page("gc-info\ngc-info --device-id 0 --json"),
    )
    parser.add_argument(
        "-l", "--list-devices", action="store_true", help="list every device id (the default)"
    )
    parser.add_argument("-d", "--device-id", type=int, metavar="N", help="show only one device")
    parser.add_argument("-j", "--json", action="store_true", help="print JSON")
    chosen = parser.parse_args(arguments)
    with misuse():
        system = _ipu_systems.current()
        devices = _devices(system)
    if chosen.device_id is not None:
        if not 0 <= chosen.device_id < len(devices):
            raise Misuse(f"There is no device {chosen.device_id} in {system.name}")
        kind = system.kind
        details = {
            "board": kind.board,
            "ipu_version": f"ipu{kind.generation}",
            "tiles_per_ipu": kind.tiles,
            "memory_per_tile": f"{kind.tile_bytes} bytes",
            "clock": f"{kind.clock_mhz}MHz",
        }
        devices = [devices[chosen.device_id] | details]
    if chosen.json:
        print(json.dumps(devices, indent=2))
    elif chosen.device_id is not None:
        print("\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in devices[0].items()))
    else:
        print("\n".join(map(_line, devices)) or f"No IPU detected in {system.name}")
    return 0


def _devices(system: System) -> list[dict[str, Any]]:
    busy = {chip: holder for holder in _pod.holders(system) for chip in holder.chips}
    return [
        {
            "id": number,
            "type": "single" if len(chips) == 1 else "group",
            "ipus": list(chips),
            "held_by": sorted({busy[chip].process.pid for chip in chips if chip in busy}),
        }
        for number, chips in enumerate(system.devices)
    ]


def _line(device: dict[str, Any]) -> str:
    ipus = ", ".join(map(str, device["ipus"]))
    members = f"IPU {ipus}" if device["type"] == "single" else f"IPUs {ipus}"
    held = "".join(f", held by process {pid}" for pid in device["held_by"])
    return f"Id {device['id']}: {device['type']}, {members}{held}"


def box(
    titles: Sequence[tuple[str, int]], widths: Sequence[int], rows: Sequence[Sequence[str]]
) -> str:
    """Return a table with borders below a line of titles, (text, width), as the original tools draw
    it.
    """
    sizes = [max(w, *(len(row[i]) for row in rows)) for i, w in enumerate(widths)]
    spans = [width for _, width in titles]
    spans[-1] += sum(sizes) - sum(widths)
    rule = _edged(["-" * size for size in sizes], "+")
    head, *body = [_edged(_centred(row, sizes), "|") for row in rows]
    top = [_edged(["-" * width for width in spans], "+")]
    top.append(_edged(_centred([text for text, _ in titles], spans), "|"))
    return "\n".join([*top, rule, head, rule, *body, *([rule] if body else [])])


def _centred(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        f"{' ' * ((width - len(cell)) // 2)}{cell}".ljust(width)
        for cell, width in zip(cells, widths, strict=True)
    ]


def _edged(cells: Sequence[str], edge: str) -> str:
    return f"{edge}{edge.join(cells)}{edge}"

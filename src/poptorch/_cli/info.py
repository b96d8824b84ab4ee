"""``gc-info``: the device ids of the system, single chips and groups of them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from .. import _pod, _systems
from .._base.errors import Error
from .._systems import System
from .commands import quiet_when_closed, shown


@quiet_when_closed
def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is asked for; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="gc-info",
        description=__doc__,
        epilog=shown("gc-info --list-devices\ngc-info --device-id 0 --json"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-l", "--list-devices", action="store_true", help="list every device id")
    parser.add_argument("-d", "--device-id", type=int, metavar="N", help="tell about one device")
    parser.add_argument("-j", "--json", action="store_true", help="print JSON")
    chosen = parser.parse_args(arguments)
    if not chosen.list_devices and chosen.device_id is None:
        parser.error("choose --list-devices or --device-id N")
    try:
        system = _systems.current()
        devices = _devices(system)
    except Error as error:
        print(error.message, file=sys.stderr)
        return 1
    if chosen.device_id is not None:
        if not 0 <= chosen.device_id < len(devices):
            print(f"There is no device {chosen.device_id} in {system.name}", file=sys.stderr)
            return 1
        devices = [{**devices[chosen.device_id], **_details(system)}]
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


def _details(system: System) -> dict[str, Any]:
    kind = system.kind
    return {
        "board": kind.board,
        "ipu_version": f"ipu{kind.generation}",
        "tiles_per_ipu": kind.tiles,
        "memory_per_tile": f"{kind.tile_bytes} bytes",
        "clock": f"{kind.clock_mhz}MHz",
    }


def _line(device: dict[str, Any]) -> str:
    ipus = ", ".join(map(str, device["ipus"]))
    members = f"IPU {ipus}" if device["type"] == "single" else f"IPUs {ipus}"
    held = "".join(f", held by process {pid}" for pid in device["held_by"])
    return f"Id {device['id']}: {device['type']}, {members}{held}"


if __name__ == "__main__":
    raise SystemExit(main())

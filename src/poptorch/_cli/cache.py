"""``poptorch cache``: list, explain and trim cached executables."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from .._base import env
from .._compile.cache import Entry, differences, entries, trim
from .commands import add

MEGABYTE = 1_000_000
DAY = 86400


def add_parser(commands: Any) -> None:
    """Add this command."""
    parser = add(
        commands,
        "cache",
        "list, explain and trim cached executables",
        "poptorch cache --dir ./cache list\npoptorch cache explain 3f2a",
    )
    parser.add_argument(
        "--dir", help="the cache; default POPTORCH_CACHE_DIR, then POPART_CACHE_DIR"
    )
    actions = parser.add_subparsers(required=True, metavar="action")
    example = "poptorch cache --dir ./cache list"
    listing = add(actions, "list", "one line per entry, the latest first", example)
    listing.set_defaults(run=_list)
    explain = add(
        actions,
        "explain",
        "what an entry was compiled from, or two differ in",
        "poptorch cache explain 3f2a\npoptorch cache explain 3f2a 81b0",
    )
    explain.add_argument("key", help="the first characters of a key")
    explain.add_argument("other", nargs="?", help="another key; default: show all of the first")
    explain.set_defaults(run=_explain)
    example = "poptorch cache trim --max-mb 500 --days 30"
    trimming = add(actions, "trim", "remove damaged entries and others", example)
    trimming.add_argument("--max-mb", type=float, help="keep the latest, up to so many megabytes")
    trimming.add_argument("--days", type=float, help="remove what was not used for so many days")
    trimming.set_defaults(run=_trim)


def _folder(chosen: argparse.Namespace) -> Path:
    name = chosen.dir or env.get("POPTORCH_CACHE_DIR") or env.get("POPART_CACHE_DIR")
    if not name:
        sys.exit("No cache directory: pass --dir, or set POPTORCH_CACHE_DIR")
    folder = Path(name)
    if not folder.is_dir():
        sys.exit(f"{folder} is no directory")
    return folder


def _list(chosen: argparse.Namespace) -> int:
    present = entries(_folder(chosen))
    for entry in present:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        print(f"{entry.key}  {when}  {entry.size / MEGABYTE:8.2f} MB  {entry.headline}")
    total = sum(entry.size for entry in present)
    print(f"{len(present)} entries, {total / MEGABYTE:.2f} MB")
    return 0


def _explain(chosen: argparse.Namespace) -> int:
    present = entries(_folder(chosen))
    entry = _one(present, chosen.key)
    if chosen.other is None:
        lines = [f"{name}: {value}" for name, value in entry.facts.items()]
    else:
        lines = differences(entry.facts, _one(present, chosen.other).facts)
    print("\n".join(lines))
    return 0


def _one(present: list[Entry], start: str) -> Entry:
    matching = [entry for entry in present if entry.key.startswith(start)]
    if len(matching) != 1:
        sys.exit(f"{len(matching)} entries have a key that starts with {start}")
    return matching[0]


def _trim(chosen: argparse.Namespace) -> int:
    keep = None if chosen.max_mb is None else int(chosen.max_mb * MEGABYTE)
    newer = None if chosen.days is None else time.time() - chosen.days * DAY
    removed = trim(_folder(chosen), keep, newer)
    for path in removed:
        print(f"removed {path.name}")
    print(f"{len(removed)} entries removed")
    return 0

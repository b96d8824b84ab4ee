"""Implement ``poptorch cache``: list, explain and trim the entries of a folder of compiled
programs.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from .._base import env
from .._base.errors import one_line
from .._compile.cache import Entry, differences, entries, trim
from .commands import Misuse

MEGABYTE = 1_000_000


def _folder(chosen: argparse.Namespace) -> Path:
    name = chosen.dir or env.get("POPTORCH_CACHE_DIR") or env.get("POPART_CACHE_DIR")
    if not name:
        raise Misuse("No cache directory: pass --dir, or set POPTORCH_CACHE_DIR")
    folder = Path(name)
    if not folder.is_dir():
        raise Misuse(f"{folder} is not a folder")
    return folder


def list_entries(chosen: argparse.Namespace) -> int:
    present = entries(_folder(chosen))
    for entry in present:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        key = one_line(entry.path.stem)
        print(f"{key}  {when}  {entry.size / MEGABYTE:8.2f} MB  {entry.headline}")
    total = sum(entry.size for entry in present)
    print(f"{len(present)} entries, {total / MEGABYTE:.2f} MB")
    return 0


def explain(chosen: argparse.Namespace) -> int:
    present = entries(_folder(chosen))
    entry = _one(present, chosen.key)
    if chosen.other is None:
        lines = [f"{name}: {value}" for name, value in entry.facts.items()]
    else:
        lines = differences(entry.facts, _one(present, chosen.other).facts)
    print("\n".join(lines))
    return 0


def _one(present: list[Entry], start: str) -> Entry:
    matching = [entry for entry in present if entry.path.stem.startswith(start)]
    if len(matching) != 1:
        raise Misuse(f"{len(matching)} entries have a key that starts with {start}")
    return matching[0]


def trim_folder(chosen: argparse.Namespace) -> int:
    keep = None if chosen.max_mb is None else int(chosen.max_mb * MEGABYTE)
    newer = None if chosen.days is None else time.time() - chosen.days * 86400
    removed = trim(_folder(chosen), keep, newer)
    for path in removed:
        print(f"removed {one_line(path.name)}")
    print(f"{len(removed)} entries removed")
    return 0

"""The command ``poptorch``: options, cache, doctor, passes, estimate, report, export, migrate."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._base import VERSION, env
from .._base.errors import described, one_line
from .._compile import passes_text
from .._compile.cache import Entry, differences, entries, trim
from ..options import Options
from ..options.overview import describe
from . import costs, doctor, exports, migrate
from .commands import Misuse, add, command, page

MEGABYTE = 1_000_000


@command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="poptorch",
        description="Tools for scripts that use poptorch. Each command has its own --help.",
        **page("poptorch doctor --help"),
    )
    parser.add_argument("--version", action="version", version=f"poptorch {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for add_command in COMMANDS.values():
        add_command(commands)
    chosen = parser.parse_args(arguments)
    return chosen.run(chosen)  # type: ignore[no-any-return]


def _add_options(commands: Any) -> None:
    parser = add(
        commands,
        "options",
        "show every option, its value and its effect here",
        "poptorch options\npoptorch options training.cfg --all",
    )
    parser.add_argument("file", nargs="*", help="files of option calls, as for loadFromFile")
    parser.add_argument("--all", action="store_true", help="show backend settings not set, too")
    parser.set_defaults(run=_options)


def _options(chosen: argparse.Namespace) -> int:
    try:
        options = Options()
        for file in chosen.file:
            options.loadFromFile(file)
    except Exception as error:  # whatever a setter raises is about the file's line
        notes = [f"  {note}" for note in getattr(error, "__notes__", ())]
        raise Misuse("\n".join([described(error), *notes])) from None
    print(describe(options, every=chosen.all))
    return 0


def _add_passes(commands: Any) -> None:
    parser = add(
        commands,
        "passes",
        "list what a compilation does, in order",
        "poptorch passes",
        "With POPTORCH_LOG_LEVEL=DEBUG a compilation logs how long each of them takes.",
    )
    parser.set_defaults(run=_passes)


def _passes(_: argparse.Namespace) -> int:
    print(passes_text())
    return 0


def _add_cache(commands: Any) -> None:
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
        raise Misuse("No cache directory: pass --dir, or set POPTORCH_CACHE_DIR")
    folder = Path(name)
    if not folder.is_dir():
        raise Misuse(f"{folder} is no directory")
    return folder


def _list(chosen: argparse.Namespace) -> int:
    present = entries(_folder(chosen))
    for entry in present:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        key = one_line(entry.path.stem)
        print(f"{key}  {when}  {entry.size / MEGABYTE:8.2f} MB  {entry.headline}")
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
    matching = [entry for entry in present if entry.path.stem.startswith(start)]
    if len(matching) != 1:
        raise Misuse(f"{len(matching)} entries have a key that starts with {start}")
    return matching[0]


def _trim(chosen: argparse.Namespace) -> int:
    keep = None if chosen.max_mb is None else int(chosen.max_mb * MEGABYTE)
    newer = None if chosen.days is None else time.time() - chosen.days * 86400
    removed = trim(_folder(chosen), keep, newer)
    for path in removed:
        print(f"removed {one_line(path.name)}")
    print(f"{len(removed)} entries removed")
    return 0


COMMANDS = {
    "options": _add_options,
    "cache": _add_cache,
    "doctor": doctor.add_parser,
    "passes": _add_passes,
    "estimate": costs.add_estimate,
    "report": costs.add_report,
    "export": exports.add_export,
    "migrate": migrate.add_migrate,
}

if __name__ == "__main__":
    raise SystemExit(main())

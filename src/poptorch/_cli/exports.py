"""Implement ``poptorch export``: write a script's first program as plain PyTorch, or as a page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .._base.private import replaced
from .._session.files import check_export, export_for
from ..executor import PoplarExecutor
from .commands import EndOfScript, Misuse, misuse, run_script
from .parsers import add_outputs


def export(chosen: argparse.Namespace) -> int:
    file, _, function = chosen.script.partition(":")
    # these options follow the script, so they are among its arguments
    if not (chosen.output or chosen.html):
        behind = argparse.ArgumentParser("poptorch export", add_help=False, allow_abbrev=False)
        add_outputs(behind)
        chosen, chosen.arguments = behind.parse_known_args(chosen.arguments, chosen)
    if not Path(file).is_file():
        raise Misuse(f"There is no file {file}")
    files = [each for each in (chosen.output, chosen.html) if each is not None]
    if not files:
        raise Misuse("choose what to write: -o step.py, --html step.html, or both")
    with misuse():
        for each in files:
            check_export(each)
    exported: list[PoplarExecutor] = []

    def first(_: Any, executor: PoplarExecutor, /, *args: Any, **kwargs: Any) -> None:
        with misuse():
            export_for(executor._session, (args, kwargs), *files)
        exported.append(executor)
        raise EndOfScript

    with replaced(PoplarExecutor, "__call__", first), replaced(PoplarExecutor, "compile", first):
        run_script(file, chosen.arguments, function)
    if not exported:
        raise Misuse(f"{file} used no wrapped model")
    for each in files:
        print(f"wrote {each}{', and its weights and settings next to it' * (each.suffix == '.py')}")
    return 0

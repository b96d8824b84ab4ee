"""Implement ``poptorch export``: write a script's first program as plain PyTorch, or as a page."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from .._session.files import check_export, export_for
from ..executor import PoplarExecutor
from .commands import Misuse, check_file, misuse
from .parsers import add_outputs
from .scripts import at_first_call


def export(chosen: argparse.Namespace) -> int:
    file, _, function = chosen.script.partition(":")
    # these options follow the script, so they are among its arguments
    if not (chosen.output or chosen.html):
        behind = argparse.ArgumentParser("poptorch export", add_help=False, allow_abbrev=False)
        add_outputs(behind)
        chosen, chosen.arguments = behind.parse_known_args(chosen.arguments, chosen)
    check_file(file)
    files = [each for each in (chosen.output, chosen.html) if each is not None]
    if not files:
        raise Misuse("choose what to write: -o step.py, --html step.html, or both")
    with misuse():
        for each in files:
            check_export(each)

    def work(executor: PoplarExecutor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        with misuse():
            export_for(executor._session, (args, kwargs), *files)

    at_first_call(work, file, chosen.arguments, function)
    for each in files:
        print(f"wrote {each}{', and its weights and settings next to it' * (each.suffix == '.py')}")
    return 0

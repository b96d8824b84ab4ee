"""Implement ``poptorch passes``: list the passes of a compilation, or show what each one changes in
a script's first program.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .._base.private import replaced
from .._compile.compilation import Compilation
from .._compile.pass_diff import change, summary
from .._compile.passes import check_names, observed, passes_text
from .._ir.compiler_pass import Pass, leaving_out
from ..executor import PoplarExecutor
from .commands import EndOfScript, Misuse, misuse, run_script
from .parsers import add_passes_options


def passes(chosen: argparse.Namespace) -> int:
    if not chosen.script:
        if chosen.diff or chosen.without:
            raise Misuse("--diff and --without need a script, for example model.py:train")
        print(passes_text())
        return 0
    # these options may follow the script, so they are among its arguments
    behind = argparse.ArgumentParser("poptorch passes", add_help=False, allow_abbrev=False)
    add_passes_options(behind)
    chosen, chosen.arguments = behind.parse_known_args(chosen.arguments, chosen)
    file, _, function = chosen.script.partition(":")
    if not Path(file).is_file():
        raise Misuse(f"There is no file {file}")
    with misuse():
        check_names(chosen.without)
    compiled: list[PoplarExecutor] = []

    def seen(each: Pass, before: Compilation, after: Compilation) -> None:
        changed = change(before, after)
        print(summary(each, changed))
        if chosen.diff:
            print("\n".join(changed), end="\n" * bool(changed))

    def first(_: Any, executor: PoplarExecutor, /, *args: Any, **kwargs: Any) -> None:
        compiled.append(executor)
        session = executor._session
        with misuse(), session.lock(), observed(seen), leaving_out(chosen.without):
            session.compile((args, kwargs), background=True)
        raise EndOfScript

    with replaced(PoplarExecutor, "__call__", first), replaced(PoplarExecutor, "compile", first):
        run_script(file, chosen.arguments, function)
    if not compiled:
        raise Misuse(f"{file} used no wrapped model")
    return 0

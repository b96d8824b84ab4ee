"""Implement ``poptorch passes``: list the passes of a compilation, or show what each one changes in
a script's first program.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from .._compile.compilation import Compilation
from .._compile.pass_diff import change, summary
from .._compile.passes import check_names, observed, passes_text
from .._ir.compiler_pass import Pass, leaving_out
from ..executor import PoplarExecutor
from .commands import Misuse, check_file, misuse
from .parsers import add_passes_options
from .scripts import at_first_call


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
    check_file(file)
    with misuse():
        check_names(chosen.without)

    def seen(each: Pass, before: Compilation, after: Compilation) -> None:
        changed = change(before, after)
        print(summary(each, changed))
        if chosen.diff:
            print("\n".join(changed), end="\n" * bool(changed))

    def work(executor: PoplarExecutor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        session = executor._session
        with misuse(), session.lock(), observed(seen), leaving_out(chosen.without):
            session.compile((args, kwargs), background=True)

    at_first_call(work, file, chosen.arguments, function)
    return 0

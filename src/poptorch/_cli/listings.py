"""Implement ``poptorch options``: list options."""

from __future__ import annotations

import argparse

from .._base.errors import described
from ..options import Options
from ..options.overview import describe
from .commands import Misuse


def options(chosen: argparse.Namespace) -> int:
    try:
        shown = Options()
        for file in chosen.file:
            shown.loadFromFile(file)
    except Exception as error:  # report anything that a setter raises with the line of the file
        notes = [f"  {note}" for note in getattr(error, "__notes__", ())]
        raise Misuse("\n".join([described(error), *notes])) from None
    print(describe(shown, every=chosen.all))
    return 0

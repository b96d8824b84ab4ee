"""``poptorch passes``: what a compilation does, pass by pass, in order."""

from __future__ import annotations

import argparse
from typing import Any

from .commands import add


def add_parser(commands: Any) -> None:
    """Add this command."""
    parser = add(
        commands,
        "passes",
        "list what a compilation does, in order",
        "poptorch passes",
        "With POPTORCH_LOG_LEVEL=DEBUG a compilation logs how long each of them takes.",
    )
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> int:
    """Print the list."""
    from .._compile import passes_text

    print(passes_text())
    return 0

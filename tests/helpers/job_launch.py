"""``poprun`` in a process that has been forked for it."""

from __future__ import annotations

from poptorch._cli import poprun


def main(*arguments: str) -> int:
    """Run a job; return its status."""
    return poprun.main(arguments)

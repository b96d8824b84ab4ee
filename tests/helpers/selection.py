"""Which cases of a test a run takes: ``pytest --cases`` with the name of a part.

``make test`` runs the part ``short``, which is the first case of each test. ``make test-full`` also
runs the part ``rest``, which is everything else, so that no case is in neither. ``make check`` runs
the part ``quick``.
"""

import collections
from collections.abc import Sequence
from typing import NamedTuple

PARTS = "quick", "short", "rest"


class Case(NamedTuple):
    """A case of a test: one set of its parameters."""

    test: str
    """The file and the function."""
    slow: bool = False
    full: bool = False
    """Whether it is left to ``make test-full``, by the mark ``larger`` or ``full``."""


def is_in(part: str, cases: Sequence[Case]) -> list[bool]:
    """Return for each case whether it belongs to this part."""
    seen: collections.Counter[str] = collections.Counter()
    answers = []
    for case in cases:
        first = seen[case.test] == 0
        quick = first and not (case.slow or case.full)
        short = first and not case.full
        seen[case.test] += short
        answers.append({"quick": quick, "short": short, "rest": not short}[part])
    return answers

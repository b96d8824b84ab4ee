"""Cases of a test of which some are enough for ``make test``."""

import pytest


def long(*case):
    """Return a case that is left to ``make test-long``."""
    return pytest.param(*case, marks=pytest.mark.long)


def few(cases, *kept):
    """Return all cases, those that are not kept marked long."""
    return [case if case in kept else long(case) for case in cases]

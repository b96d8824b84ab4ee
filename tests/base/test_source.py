"""Where a function stands."""

from __future__ import annotations

import functools

from poptorch._base import source


def twice(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args), function(*args)

    return wrapper


@twice
@twice
def decorated(x):
    return x


def test_a_decorated_function_stands_where_its_def_does() -> None:
    line = source.definition_line(decorated)
    assert line is not None
    assert line.startswith("test_source.py:")
    assert line.endswith("def decorated(x):")
    assert source.definition_line(len) is None

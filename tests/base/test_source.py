"""Where a function stands."""

import functools

from poptorch._base import source


@functools.cache
@functools.cache
def decorated(x):
    return x


def test_a_decorated_function_stands_where_its_def_does() -> None:
    line = source.definition_line(decorated) or ""
    assert line.startswith("test_source.py:")
    assert line.endswith("def decorated(x):")
    assert source.definition_line(len) is None


def test_a_long_line_is_cut_where_it_still_says_something(tmp_path) -> None:
    words, calls = "value = " + "a + " * 40 + "b", "x = f(" + "a," * 60 + "b)"
    path = tmp_path / "train.py"
    path.write_text(f"{words}\n{calls}\nx  =  1\n")
    first, second, third = (source.describe(str(path), line) for line in (1, 2, 3))
    assert first.startswith("train.py:1, value = a + a")
    assert first.endswith("+ a + ...")
    assert (second[:24], second[-4:]) == ("train.py:2, x = f(a,a,a,", " ...")
    assert max(len(first), len(second)) <= len("train.py:1, ") + 100
    assert third == "train.py:3, x = 1"

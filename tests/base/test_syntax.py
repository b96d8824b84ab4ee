"""The user's syntax: which statement a frame executes, and the nodes of a function."""

import ast
import sys
from collections.abc import Callable, Iterator

import pytest

from poptorch._base import syntax


def here() -> str:
    """Return the source of what the caller executes."""
    node = syntax.executed(sys._getframe(1))
    assert node is not None
    return ast.unparse(node)


def a_statement_of_several_lines() -> str:
    values = [
        here(),
        "another line",
    ]
    return values[0]


def a_condition() -> str:
    if text := here():
        return text
    return "unreachable"


def a_with_block() -> str:
    with memoryview(here().encode()) as text:
        return bytes(text).decode()


class Source:
    """Iterates over what the loop executes that reads it."""

    def __iter__(self) -> Iterator[str]:
        node = syntax.executed(sys._getframe(1))
        assert node is not None
        yield ast.unparse(node)


class Later:
    """Is executed again for each element of a loop."""

    def __init__(self) -> None:
        self.text = ""

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self.text:
            raise StopIteration
        node = syntax.executed(sys._getframe(1))
        assert node is not None
        self.text = ast.unparse(node)
        return self.text


def a_loop(source: object) -> str:
    for text in source:  # type: ignore[attr-defined]
        found = text
    return found


def a_comprehension() -> str:
    texts = [each for each in Later()]  # noqa: C416 (the comprehension is what is looked for)
    return texts[0]


def kept(text: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Return a decorator that makes a function return a text."""
    return lambda function: lambda: text


@kept(here())
def a_decorator() -> str:
    return "unreachable"


CASES: dict[str, tuple[Callable[[], str], str]] = {
    "several lines": (a_statement_of_several_lines, "values = [here(), 'another line']"),
    "a condition": (a_condition, "(text := here())"),
    "a with block": (a_with_block, "memoryview(here().encode())"),
    "the start of a loop": (lambda: a_loop(Source()), "for text in source:\n    found = text"),
    "an iteration": (lambda: a_loop(Later()), "for text in source:\n    found = text"),
    "a comprehension": (a_comprehension, "texts = [each for each in Later()]"),
    "a decorator": (a_decorator, "kept(here())"),
    "one of two lambdas": ((lambda: 1, lambda: here())[1], "lambda: here()"),
}


@pytest.mark.parametrize("run, expected", CASES.values(), ids=CASES)
def test_a_frame_executes_a_loop_a_lambda_or_a_statement_without_a_body(
    run: Callable[[], str], expected: str
) -> None:
    assert run() == expected


def test_nothing_is_known_of_a_frame_without_source() -> None:
    names: dict[str, object] = {"syntax": syntax, "sys": sys}

    exec("found = syntax.executed(sys._getframe())", names)

    assert names["found"] is None


def test_the_nodes_of_a_function_have_the_lines_of_its_file() -> None:
    code = a_condition.__code__

    returns = [line for line, node in syntax.nodes_of(code) if isinstance(node, ast.Return)]

    assert sorted(returns) == [code.co_firstlineno + 2, code.co_firstlineno + 3]


def test_a_function_without_source_has_no_nodes() -> None:
    names: dict[str, Callable[[], object]] = {}

    exec("def function():\n    return 1", names)

    assert list(syntax.nodes_of(names["function"].__code__)) == []

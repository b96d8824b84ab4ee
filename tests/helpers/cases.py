"""Cases of a test of which some are enough for ``make test``; expressions that are cases."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch


def long(*case: Any) -> Any:
    """Return a case that is left to ``make test-long``."""
    return pytest.param(*case, marks=pytest.mark.long)


def few(cases: Any, *kept: Any) -> Any:
    """Return all cases, those that are not kept marked long."""
    return [case if case in kept else long(case) for case in cases]


def slow_but(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Return all cases, those that are not kept marked slow."""
    return [case if case in kept else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def slow_but_the_first(cases: Iterable[Any]) -> list[Any]:
    """Return all cases, all but the first marked slow."""
    first, *others = cases
    return [first, *(pytest.param(each, marks=pytest.mark.slow) for each in others)]


def every_pair(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[Any]:
    """Return every pair of a value of the left and one of the right, named after both.

    Pairs beyond those that it takes for each value to occur are marked slow.
    """
    one_of_each = zip(itertools.cycle(left), itertools.cycle(right), strict=False)
    few = {*itertools.islice(one_of_each, max(len(left), len(right)))}
    return [
        pytest.param(
            left[one],
            right[other],
            id=f"{one}-{other}",
            marks=[] if (one, other) in few else pytest.mark.slow,
        )
        for one, other in itertools.product(left, right)
    ]


EXPRESSIONS = Path(__file__).parents[1] / "capture" / "expressions.txt"


def expressions(section: str, arguments: str, **names: Any) -> dict[str, Callable[..., Any]]:
    """Return functions of the arguments by the text of the expressions of a section."""
    return {line: functions[0] for line, functions in pairs(section, arguments, **names).items()}


def pairs(section: str, arguments: str, **names: Any) -> dict[str, list[Callable[..., Any]]]:
    """Return the functions on both sides of an arrow by the text of a line of a section."""
    names |= {"torch": torch, "F": torch.nn.functional}
    _, _, rest = EXPRESSIONS.read_text().partition(f"[{section}]")
    lines = rest.partition("\n\n")[0].splitlines()[1:]
    return {
        line: [eval(f"lambda {arguments}: {part}", names) for part in line.split(" -> ")]
        for line in lines
    }


def together(section: str, arguments: str, **names: Any) -> Callable[..., list[Any]]:
    functions = expressions(section, arguments, **names).values()
    return lambda *given: [function(*given) for function in functions]

"""Cases of a test of which some are enough for ``make test``; expressions that are cases."""

from collections.abc import Callable
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

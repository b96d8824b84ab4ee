"""Decide whether two expressions are the same size for all sizes that satisfy some conditions.

Torch describes one size in several ways: with padding to a multiple of 4, the windows of a sequence
have ``4*((s0 + 3)//4)`` positions and ``s0 + Mod(-s0, 4)`` ones. Within a class of sizes that leave
the same remainders, sums, products, quotients and remainders by constants are polynomials, so they
are equal if they agree at enough sizes of each class. Maxima change at sizes near constants, which
are tried, too, and so are large sizes. Expressions with other functions are not compared.
"""

from __future__ import annotations

import functools
import math
import operator
import random
from collections.abc import Callable, Iterator
from typing import Any

from .conditions import LEAST, Conditions

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": max,
    "Min": min,
}
_REMAINDERS = ("FloorDiv", "Mod", "PythonMod")
_LONGEST = 256  # the largest number of classes
_OF_CLASS = 4  # sizes that are tried in each class
_FEW, _ENOUGH, _TRIED = 520, 24, 1500
_LARGE = (509, 1000, 1009, 2048, 4097, 10007, 65536, 100003, 999999, 1000003)


@functools.lru_cache(maxsize=4096)
def always_equal(one: Any, two: Any, conditions: Conditions) -> bool:
    """Return whether two sympy expressions, or numbers, are known to be equal for all sizes."""
    import sympy

    one, two = sympy.sympify(one), sympy.sympify(two)
    if one == two:
        return True
    known = [each for each in (_Expression(e) for e in conditions.expressions) if each.is_known]
    compared = [_Expression(one), _Expression(two)]
    names = sorted({name for each in (*compared, *known) for name in each.names})
    constants = {number for each in (*compared, *known) for number in each.constants}
    period = math.prod({number for each in compared for number in each.divisors})
    if not all(each.is_known for each in compared) or not names or period > _LONGEST:
        return False
    agreeing = 0
    for sizes in _trials(names, constants, period):
        try:
            if not all(each.value(sizes) for each in known):
                continue
            first, second = (each.value(sizes) for each in compared)
        except ZeroDivisionError:  # a size that cannot be
            continue
        if first != second:
            return False
        agreeing += 1
    return agreeing >= _ENOUGH


class _Expression:
    """An expression as a function of sizes by name."""

    def __init__(self, expression: Any) -> None:
        import sympy

        self.names = [str(each) for each in sorted(expression.free_symbols, key=str)]
        functions = {type(each).__name__ for each in expression.atoms(sympy.Function)}
        self.is_known = functions <= _FUNCTIONS.keys() and not expression.atoms(sympy.Float)
        numbers = expression.atoms(sympy.Integer)
        self.constants = {abs(int(each)) for each in numbers}
        self.divisors = {
            int(each.args[1])
            for each in expression.atoms(sympy.Function)
            if type(each).__name__ in _REMAINDERS and each.args[1].is_Integer
        }
        self._expression = expression

    def value(self, sizes: dict[str, int]) -> Any:
        return self._function(*(sizes[name] for name in self.names))

    @functools.cached_property
    def _function(self) -> Callable[..., Any]:
        import sympy

        def is_ours(part: Any) -> bool:
            return type(part).__name__ in _FUNCTIONS

        def call(part: Any) -> Any:  # sympy prints torch's classes without the brackets they need
            return sympy.Function(type(part).__name__)(*part.args)

        plain = self._expression.replace(is_ours, call)
        function: Callable[..., Any] = sympy.lambdify(self.names, plain, modules=[_FUNCTIONS])
        return function


def _trials(names: list[str], constants: set[int], period: int) -> Iterator[dict[str, int]]:
    near = {
        factor * each + more for each in constants for factor in (1, 2, 3) for more in (-1, 0, 1)
    }
    few = range(LEAST, max(_FEW, _OF_CLASS * period))
    chosen = sorted(size for size in {*few, *near, *_LARGE} if size >= LEAST)
    if len(names) == 1:
        yield from ({names[0]: size} for size in chosen)
        return
    draw = random.Random(0)
    for _ in range(_TRIED):
        yield {name: draw.choice(chosen) for name in names}

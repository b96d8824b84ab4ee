"""Represent conditions on symbolic sizes: what torch assumed about them, as sympy expressions.

A program has conditions, and so has its compiled code, because torch's compiler assumes more about
sizes than the graph does, for example that a sum has at most 4096 elements. Conditions of code are
stored with it, in a form that names operators and executes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .._base import private
from .._base.json_codec import Json

LEAST = 2  # sizes of 0 and 1 have their own programs, because such dimensions are broadcast
_SYMPY, _TORCH = "sympy", "torch"

Sizes = Mapping[str, int]  # by name of the symbol


def expression(size: Any) -> Any:
    """Return a size as a sympy expression if it is symbolic, and as a number otherwise."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


@dataclass(frozen=True)
class Conditions:
    """What sizes must satisfy. The symbols in the expressions have the names of slots."""

    expressions: tuple[Any, ...] = ()  # sympy expressions

    def hold(self, sizes: Sizes) -> bool:
        return all(size >= LEAST for size in sizes.values()) and all(self.truths(sizes))

    def truths(self, sizes: Sizes) -> tuple[bool, ...]:
        """Return for each expression whether the sizes satisfy it."""
        values = numbers(sizes)
        return tuple(_is_true(each, values) for each in self.expressions)

    def fixed(self) -> Any:
        """Return an expression of sizes that must equal a number, such as half a size, or None.

        A remainder is no such expression: many sizes have the same one.
        """
        import sympy

        remainders = [_class(_TORCH, name) for name in ("Mod", "PythonMod")]
        for each in self.expressions:
            if isinstance(each, sympy.Eq) and not each.has(*remainders):
                sides = [side for side in each.args if not side.is_number]
                if len(sides) == 1:
                    return sides[0]
        return None

    def without(self, other: Conditions) -> Conditions:
        """Return those that another one does not have."""
        known = set(other.expressions)
        return Conditions(tuple(each for each in self.expressions if each not in known))

    def __or__(self, other: Conditions) -> Conditions:
        return Conditions(tuple(dict.fromkeys((*self.expressions, *other.expressions))))

    def __str__(self) -> str:
        return ", ".join(map(str, self.expressions))

    def to_json(self) -> Json:
        """Return a form that ``from_json`` reads, or raise a TypeError."""
        return [_to_json(each) for each in self.expressions]

    @classmethod
    def from_json(cls, data: Json) -> Conditions:
        return cls(tuple(_from_json(each) for each in data))


ALWAYS = Conditions()


def _is_true(expression: Any, values: Mapping[Any, Any]) -> bool:
    """Return whether some numbers satisfy an expression. None satisfy it that make it divide by 0:
    a tensor that would then be empty was assumed not to be.
    """
    try:
        return bool(expression.xreplace(values))
    except ZeroDivisionError:
        return False


def symbol(name: str) -> Any:
    import sympy

    return sympy.Symbol(name, integer=True, positive=True)


def numbers(sizes: Sizes) -> dict[Any, Any]:
    """Return what takes the place of symbols in expressions."""
    import sympy

    return {symbol(name): sympy.Integer(size) for name, size in sizes.items()}


def _to_json(expression: Any) -> Json:
    if expression.is_Symbol:
        return str(expression)
    if expression.is_Integer:
        return int(expression)
    if expression.is_Rational:
        return [_SYMPY, "Rational", int(expression.p), int(expression.q)]
    kind = type(expression)
    library = _SYMPY if kind.__module__.startswith("sympy.") else _TORCH
    if not expression.args or _class(library, kind.__name__) is not kind:
        raise TypeError(f"{expression} has no JSON form")
    return [library, kind.__name__, *map(_to_json, expression.args)]


def _from_json(data: Json) -> Any:
    import sympy

    if isinstance(data, str):
        return symbol(data)
    if isinstance(data, int):
        return sympy.Integer(data)
    library, name, *args = data
    return _class(library, name)(*map(_from_json, args))


def _class(library: str, name: str) -> Any:
    """Return a class of expressions, and nothing else that has such a name."""
    import sympy

    home = sympy if library == _SYMPY else sys.modules[private.FloorDiv.__module__]
    found = getattr(home, name, None)
    if not isinstance(found, type) or not issubclass(found, sympy.Basic):
        raise TypeError(f"{library} has no expression {name}")
    return found

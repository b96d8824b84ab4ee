"""Provide pure forms of operators that write: they change copies, which are additional results.

Torch makes its own operators pure, but those of other libraries only within its compiler.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from .._base.errors import Error
from .._ir.operators import Operator
from .library import NAMESPACE, define

_ALIAS = re.compile(r"\(\w+!?\)(?= )")  # says that an argument is written
_OF_TORCH = ("aten", "prims", "prim", NAMESPACE)


def foreign(target: Any) -> bool:
    """Return whether an operator of another library writes to an argument."""
    if not isinstance(target, Operator) or target.namespace in _OF_TORCH:
        return False
    return bool(target._schema.is_mutable)


def call(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do the same as the operator, with its pure form and copies to the arguments that it
    writes.
    """
    arguments = operator._schema.arguments
    given = {a.name: value for a, value in zip(arguments, args, strict=False)} | kwargs
    values = [given.get(a.name, a.default_value) for a in arguments]
    found = pure_form(operator)(*values)
    results = list(found) if isinstance(found, (tuple, list)) else [found]
    for at in reversed(_written(operator)):
        values[at].copy_(results.pop())
    own = iter(results)
    sharing = {name: values[at] for at in _written(operator) for name in _names(arguments[at])}
    returned = [
        next(own) if each.alias_info is None else sharing[next(iter(_names(each)))]
        for each in operator._schema.returns
    ]
    return returned[0] if len(returned) == 1 else tuple(returned) or None


def check(operator: Any, where: str | None) -> None:
    """Refuse an operator that writes to other arguments than single tensors, or returns
    views of them.
    """
    schema = operator._schema
    written = [schema.arguments[at] for at in _written(operator)]
    kinds = {str(each.type) for each in (*written, *schema.returns)}
    memory = set[str]().union(*map(_names, written))
    shared = set[str]().union(*map(_names, schema.returns))
    if kinds - {"Tensor"} or shared - memory:
        raise Error(
            "A custom operator changes its arguments in a way that cannot be compiled",
            got=str(schema),
            where=where,
            fix=(
                "change the operator: let it change only arguments that are single tensors, and "
                "let it "
                "return new tensors instead of views and lists"
            ),
        )


@functools.cache
def pure_form(operator: Any) -> Any:
    """Return the operator that takes all arguments by position and changes none of them."""
    schema, written = operator._schema, _written(operator)

    def kernel(*args: Any) -> Any:
        # Torch omits arguments with default values.
        values = [*args, *(a.default_value for a in schema.arguments[len(args) :])]
        for at in written:
            values[at] = values[at].clone()
        count = sum(not a.kwarg_only for a in schema.arguments)
        named = {a.name: v for a, v in zip(schema.arguments, values, strict=True) if a.kwarg_only}
        found = operator(*values[:count], **named)
        several = found if isinstance(found, (tuple, list)) else () if found is None else (found,)
        own = (r for r, each in zip(several, schema.returns, strict=True) if not _names(each))
        results = (*own, *(values[at] for at in written))
        return results[0] if len(results) == 1 else results

    name = re.sub(r"\W+", "_", str(operator))
    return define(f"pure_{name}", _text(schema), kernel, kernel)


def _text(schema: Any) -> str:
    arguments = _ALIAS.sub("", str(schema).partition("(")[2].rpartition(") -> ")[0])
    count = sum(each.alias_info is None for each in schema.returns)
    count += sum(map(_is_written, schema.arguments))
    results = ", ".join(["Tensor"] * count)
    return f"({arguments.replace('*, ', '')}) -> {results if count == 1 else f'({results})'}"


def _written(operator: Any) -> list[int]:
    return [at for at, a in enumerate(operator._schema.arguments) if _is_written(a)]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _names(argument: Any) -> set[str]:
    return set() if argument.alias_info is None else set(argument.alias_info.before_set)

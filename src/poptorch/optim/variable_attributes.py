"""Which attributes of an optimizer may change after compilation."""

from __future__ import annotations

from collections.abc import Iterable

from .._base.errors import AssertionFailure


class VariableAttributes:
    """The attributes of one optimizer that are inputs of the program rather than compiled in.

    An attribute is variable if it was passed to the constructor. Changes count until the
    optimizer is first set on a model.
    """

    def __init__(self, variable_attributes: Iterable[str], allowed_attributes: Iterable[str]):
        self._variable_attributes = set(variable_attributes)
        self._allowed_attributes = list(allowed_attributes)

    def isConstant(self, attr: str) -> bool:
        """Tell whether the attribute is compiled in."""
        return attr not in self._variable_attributes

    def markAsConstant(self, attr: str) -> None:
        """Compile the attribute's value in.

        Raises:
            AssertionError: the optimizer has no such attribute.
        """
        self._check(attr)
        self._variable_attributes.discard(attr)

    def markAsVariable(self, attr: str) -> None:
        """Let the attribute's value change after compilation.

        Raises:
            AssertionError: the optimizer has no such attribute.
        """
        self._check(attr)
        self._variable_attributes.add(attr)

    def _check(self, attr: str) -> None:
        if attr not in self._allowed_attributes:
            raise AssertionFailure(
                f"Unknown attribute {attr!r}",
                fix=f"use one of {', '.join(self._allowed_attributes)}",
            )

"""Represent a number of a step so that the user's code sees a Python number.

In eager PyTorch, ``group["lr"]`` and ``tensor.item()`` are Python numbers. While a step is traced,
tensors replace them, because they change between updates. The objects in this file contain these
tensors. ``isinstance(lr, float)`` is true, ``torch.is_tensor(lr)`` is false, and ``lr.item`` does
not exist. Arithmetic and torch functions compute with the tensor. What needs the value, such as a
text, an index or ``round(lr, 2)``, reads it, and ``step_value_reads`` decides what happens.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from .step_values import is_number, is_whole

_OPERANDS = (int, float, complex, Tensor)
_SEQUENCES = (list, tuple)
_NESTED = frozenset(_SEQUENCES)
SHOWN = "a text"


def read_value(tensor: Tensor, what: str) -> NoReturn:
    """Read a value in Python. The mode that traces the step intercepts this function.

    ``what``: the operation that needs the value.
    """
    handle_torch_function(read_value, (tensor,), tensor, what)
    raise AssertionError(what)


class TracedNumber(torch.SymFloat):
    """A number. Torch's functions accept objects of its base class in place of numbers."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        number = int if is_whole(tensor) else float
        self._kind = bool if tensor.dtype is torch.bool else number

    __class__ = property(operator.attrgetter("_kind"))  # what isinstance() asks for

    def __getattr__(self, name: str) -> Any:
        kind = self._kind
        if hasattr(kind, name):
            read_value(self.tensor, f".{name}")
        raise AttributeError(f"'{kind.__name__}' object has no attribute '{name}'")

    def __copy__(self) -> TracedNumber:
        return self

    def __deepcopy__(self, memo: Any) -> TracedNumber:
        return self

    # Questions about the value.

    def __bool__(self) -> bool:
        return bool(self.tensor)

    def __float__(self) -> float:
        read_value(self.tensor, "float()")

    def __int__(self) -> int:
        read_value(self.tensor, "int()")

    def __complex__(self) -> complex:
        read_value(self.tensor, "complex()")

    def __index__(self) -> int:
        if self._kind is float:
            raise TypeError("'float' object cannot be interpreted as an integer")
        read_value(self.tensor, "an index")

    def __hash__(self) -> int:
        read_value(self.tensor, "hash()")

    def __repr__(self) -> str:
        read_value(self.tensor, SHOWN)

    def __str__(self) -> str:
        read_value(self.tensor, SHOWN)

    def __format__(self, spec: str) -> str:
        read_value(self.tensor, SHOWN)

    def __array__(self, *_: Any, **named: Any) -> Any:
        read_value(self.tensor, "numpy")

    def __round__(self, digits: int | None = None) -> Any:
        read_value(self.tensor, "round()")

    def __trunc__(self) -> Any:
        read_value(self.tensor, "int()")

    def is_integer(self) -> bool:
        read_value(self.tensor, ".is_integer")

    def as_integer_ratio(self) -> tuple[int, int]:
        read_value(self.tensor, ".as_integer_ratio")

    # Arithmetic.

    def conjugate(self) -> TracedNumber:
        return self

    real = property(conjugate)

    def __pos__(self) -> Any:
        return self

    def __neg__(self) -> Any:
        return seen_by_steps(-self.tensor)

    def __abs__(self) -> Any:
        return seen_by_steps(abs(self.tensor))

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self


def _forward(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def operate(self: TracedNumber, other: Any) -> Any:
        if not isinstance(other, _OPERANDS):
            return NotImplemented
        return seen_by_steps(function(self.tensor, tensor_of(other)))

    return operate


def _backward(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def operate(self: TracedNumber, other: Any) -> Any:
        if not isinstance(other, _OPERANDS):
            return NotImplemented
        return seen_by_steps(function(tensor_of(other), self.tensor))

    return operate


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _function = getattr(operator, _name)
    setattr(TracedNumber, f"__{_name}__", _forward(_function))
    setattr(TracedNumber, f"__r{_name}__", _backward(_function))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(TracedNumber, f"__{_name}__", _forward(getattr(operator, _name)))


def tensor_of(value: Any) -> Any:
    """Return the tensor of a number, and other values as they are."""
    return value.tensor if type(value) is TracedNumber else value


def seen_by_steps(value: Any) -> Any:
    """Return what a step gets for a value: an object that is like a Python number if the value
    represents one.
    """
    if isinstance(value, _SEQUENCES):
        return type(value)(map(seen_by_steps, value)) if any(map(is_number, value)) else value
    return TracedNumber(value) if is_number(value) else value


def holds_numbers(values: Iterable[Any]) -> bool:
    """Return whether numbers are among arguments, or in lists and tuples of these."""
    kinds = [*map(type, values)]
    if TracedNumber in kinds:
        return True
    if _NESTED.isdisjoint(kinds):
        return False
    return any(holds_numbers(each) for each in values if isinstance(each, _SEQUENCES))


def with_tensors(value: Any) -> Any:
    """Return nested arguments in which tensors replace the numbers."""
    kind = type(value)
    if kind in _SEQUENCES:
        return kind([with_tensors(each) for each in value])
    if kind is dict:  # keyword arguments
        return {key: with_tensors(each) for key, each in value.items()}
    return tensor_of(value)

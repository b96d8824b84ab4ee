"""What one element of a data set is: a flat container of tensors, taken apart and put together.

Source: PopTorch user guide, "Efficient data batching".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .._base import trees
from .._base.errors import AssertionFailure


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of one tensor of the elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def with_rows(self, rows: int) -> TensorSpec:
        """Return the same with another first dimension."""
        return TensorSpec((rows, *self.shape[1:]), self.dtype)


@dataclass(frozen=True)
class Form:
    """The kind of container that all elements of a data set are.

    Attributes:
        kind: ``torch.Tensor``, ``list`` (tuples arrive as lists), ``dict`` or a registered type.
        keys: of a dict, in the order of the first element.
        template: the first object of a registered type; its fields that are no tensors are those
            of every object.
    """

    kind: type
    keys: tuple[Any, ...] = ()
    template: Any = field(default=None, repr=False)

    @staticmethod
    def of(element: Any) -> Form:
        """Return the form of the first element."""
        kind = _kind_of(element)
        if kind in (torch.Tensor, list):
            return Form(kind)
        return Form(dict, tuple(element)) if kind is dict else Form(kind, template=element)

    def split(self, element: Any) -> list[torch.Tensor]:
        """Return the tensors of an element.

        Raises:
            AssertionFailure: the element is nested, has something else than tensors, or is of
                another form than the first one.
        """
        kind = _kind_of(element)
        if kind is not self.kind:
            raise AssertionFailure(
                "All elements of the data set must be of the same kind",
                got=f"{_name(type(element))} after {_name(self.kind)}",
            )
        if kind is torch.Tensor:
            tensors = [element]
        elif kind is dict:
            if set(element) != set(self.keys):
                raise AssertionFailure(
                    "All elements of the data set must have the same keys",
                    got=f"{list(element)} after {list(self.keys)}",
                )
            tensors = [element[key] for key in self.keys]
        elif kind is list:
            tensors = list(element)
        else:
            tensors = list(_parser(element).yieldTensors(element))
        for at, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                raise _no_tensor(at, tensor)
        return tensors

    def join(self, tensors: list[torch.Tensor]) -> Any:
        """Build an element around tensors."""
        if self.kind is torch.Tensor:
            return tensors[0]
        if self.kind is list:
            return tensors
        if self.kind is dict:
            return dict(zip(self.keys, tensors, strict=True))
        return _parser(self.template).reconstruct(self.template, iter(tensors))


def _kind_of(element: Any) -> type:
    if trees.exact_parser_of(element) is not None:
        return type(element)
    if isinstance(element, dict):
        return dict
    return list if isinstance(element, (list, tuple)) else torch.Tensor


def _parser(element: Any) -> trees.Parser:
    parser = trees.exact_parser_of(element)
    if parser is None:
        raise AssertionFailure(
            "The argument parser of the data set's elements is gone",
            got=_name(type(element)),
            fix="keep the parser registered for as long as the loader is used",
        )
    return parser


def _no_tensor(at: int, item: Any) -> AssertionFailure:
    return AssertionFailure(
        f"Tensor at index {at} is not a torch tensor. An asynchronous loader takes tensors, or a"
        " flat 1D container of tensors",
        got=f"{_name(type(item))} at index {at}",
        fix=(
            "let collate_fn return a tensor, or a tuple, list or dict of tensors",
            "register the element's own type with poptorch.registerCustomArgParser",
            "use poptorch.DataLoaderMode.Sync, which passes everything on as it is",
        ),
    )


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")

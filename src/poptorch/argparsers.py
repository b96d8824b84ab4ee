"""Support custom container types as arguments, results and elements of data sets.

Source: PopTorch user guide, "Features" and PopTorch user guide, "PopTorch ops".
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from typing import Any

import torch

from ._base import nested_values
from ._base.errors import Error, InvalidType

__all__ = ["ICustomArgParser", "registerCustomArgParser", "registerGeometricCustomArgParsers"]


class ICustomArgParser(abc.ABC):
    """Finds and replaces the tensors inside objects of one type."""

    @abc.abstractmethod
    def yieldTensors(self, struct: Any) -> Iterable[torch.Tensor]:
        """Yield all tensors of the object, always in the same order.

        Args:
            struct: an object of the registered type.
        """

    @abc.abstractmethod
    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[torch.Tensor]) -> Any:
        """Build a new object like the original one, around other tensors.

        Args:
            original_structure: the object that ``yieldTensors`` saw; it must not be changed.
            tensor_iterator: yields as many tensors as ``yieldTensors`` did, in that order.

        Returns:
            A new object. Fields that are not tensors are copied from the original object.
        """


def registerCustomArgParser(arg_data_type: type, arg_parser: ICustomArgParser | None) -> None:
    """Let models take and return objects of a type, and let data sets contain them.

    Lists, tuples, dicts and dataclasses need no parser. A subclass without a parser uses the parser
    of the base class that was registered first. Objects of other types are constants of the
    compiled program and must contain no tensors.

    Args:
        arg_data_type: the class of the objects.
        arg_parser: the parser for this class. It replaces an earlier one; None removes it.

    Raises:
        poptorch.Error: the parser does not derive from ``ICustomArgParser``, or
            ``arg_data_type`` is not a class.
    """
    if not isinstance(arg_data_type, type):
        raise InvalidType(
            "The first argument of registerCustomArgParser must be a class",
            got=repr(arg_data_type),
            fix="pass the class of the objects: registerCustomArgParser(MyBatch, MyParser())",
        )
    if arg_parser is not None and not isinstance(arg_parser, ICustomArgParser):
        raise Error(
            "Custom argument parsers must inherit from ICustomArgParser",
            got=f"{arg_parser!r} for {arg_data_type.__qualname__}",
            fix=("derive your parser from poptorch.ICustomArgParser, and pass an instance of it"),
        )
    nested_values.register(arg_data_type, arg_parser)


def registerGeometricCustomArgParsers() -> None:
    """Register the parsers of ``poptorch_geometric`` if that package can be imported."""
    for point in entry_points(group="poptorch.parsers"):
        # graph networks are optional, as the documentation says
        with contextlib.suppress(ImportError):
            point.load()()

"""Postpone host code that a step calls, for example logging, until the step has run.

The calls are then made with the step's results, once for each micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

import poptorch

from .._base import nested_values
from .._capture.forward import refuse_holders
from .._ir.symbolic import NotSymbolic

ResultsOfCalls = dict[int, list[torch.Tensor]]


class DeferredResult:
    """The future result of a postponed call. It can be passed to another such call."""

    def __init__(self, number: int, text: str, keys: tuple[Any, ...] = ()) -> None:
        self.__dict__.update(_number=number, _text=text, _keys=keys)

    def __getitem__(self, key: Any) -> DeferredResult:
        return DeferredResult(self._number, self._text, (*self._keys, key))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise poptorch.Error(
            "The value of a metric is known only after the step",
            got=f"the result of {self._text} is used inside the step",
            fix=(
                "pass the metric itself to self.log or self.log_dict",
                "or call compute() in a hook, for example on_validation_epoch_end",
            ),
        )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        leaves = nested_values.flatten((args, kwargs))[1].constants
        next(leaf for _, leaf in leaves if isinstance(leaf, cls))._refuse()


_OPERATORS = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg", "pow", "abs", "lt",
    "le", "gt", "ge", "float", "int", "bool", "iter", "len", "format",
)  # fmt: skip
for _operator in _OPERATORS:
    setattr(DeferredResult, f"__{_operator}__", DeferredResult._refuse)


@dataclasses.dataclass(eq=False)
class _DeferredCall:
    function: Callable[..., Any]
    arguments: nested_values.Structure
    # shape and dtype of each tensor in the arguments, for one micro-batch
    types: list[tuple[torch.Size, torch.dtype]]


class Calls:
    """The postponed calls of all programs of one module. A program returns the tensors of its own
    calls by number.
    """

    def __init__(self) -> None:
        self._calls: list[_DeferredCall] = []
        # The number of rows of the micro-batch for which calls are made; None if there is only one.
        self.rows: int | None = None

    def keep(
        self,
        results: ResultsOfCalls,
        function: Callable[..., Any],
        text: str,
        check: Callable[..., None] | None = None,  # checks the arguments while the step runs
    ) -> Callable[..., DeferredResult]:
        """Return a function that records calls of ``function`` and adds their tensors to the
        results.
        """

        def note(*args: Any, **kwargs: Any) -> DeferredResult:
            if check is not None:
                check(*args, **kwargs)
            tensors, structure = nested_values.flatten((args, kwargs), text)
            # A module among the arguments is a metric that is logged.
            others = [each for each in structure.constants if not isinstance(each[1], nn.Module)]
            refuse_holders(others, f"{text} gets an object whose tensors cannot be found")
            if any(isinstance(size, torch.SymInt) for each in tensors for size in each.shape):
                raise NotSymbolic(f"{text} keeps the shapes of tensors until the step has run")
            number = len(self._calls)
            types = [(tensor.shape, tensor.dtype) for tensor in tensors]
            self._calls.append(_DeferredCall(function, structure, types))
            results[number] = tensors
            return DeferredResult(number, text)

        return note

    def make(self, results: ResultsOfCalls, rows: Sequence[int] = (1,)) -> Any:
        """Make the calls for each of the micro-batches that were joined.

        Args:
            results: of the program.
            rows: of each micro-batch.

        Returns:
            The result of the last call.
        """
        parts = {
            number: [
                _cut(tensor, shape, rows)
                for tensor, (shape, _) in zip(tensors, self._calls[number].types, strict=True)
            ]
            for number, tensors in results.items()
        }
        values: dict[int, Any] = {}
        for step in range(len(rows)):
            self.rows = rows[step] if len(rows) > 1 else None
            for number, tensors in sorted(parts.items()):
                call = self._calls[number]
                own = [
                    tensor[step].to(dtype)
                    for tensor, (_, dtype) in zip(tensors, call.types, strict=True)
                ]
                args, kwargs = _known(call.arguments.unflatten(own), values)
                values[number] = call.function(*args, **kwargs)
        return values[max(values)]


def _cut(joined: torch.Tensor, shape: torch.Size, rows: Sequence[int]) -> Sequence[torch.Tensor]:
    """Return each micro-batch's own tensor; ``shape`` is that of the last one."""
    count = len(rows)
    if joined.numel() == count * shape.numel():
        return joined.reshape(count, *shape).unbind(0)
    return torch.split(joined, [size * shape[0] // rows[-1] for size in rows])


def _known(value: Any, values: Mapping[int, Any]) -> Any:
    if isinstance(value, DeferredResult):
        found = values[value._number]
        for key in value._keys:
            found = found[key]
        return found
    if isinstance(value, (tuple, list)):
        return type(value)(_known(item, values) for item in value)
    if isinstance(value, dict):
        return {key: _known(item, values) for key, item in value.items()}
    return value

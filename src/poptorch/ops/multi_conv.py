"""Provide ``MultiConv``: convolutions that are planned together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Self

import torch

from .._base import source
from .._base.errors import AssertionFailure, Error, InvalidValue
from .._ops.context import listener
from ..enums import MultiConvPartialsType, MultiConvPlanType

_Partials = torch.dtype | MultiConvPartialsType
_DTYPES = {MultiConvPartialsType.Float: torch.float32, MultiConvPartialsType.Half: torch.float16}


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


class MultiConv:
    """Make the convolutions of a scope of ``forward`` one group. Results stay the same.

    Set options before you enter; calls chain. A single number, or a list with one element, applies
    to all convolutions. A longer list needs one entry for each; compiling checks that.
    """

    def __init__(self) -> None:
        self._options: dict[str, tuple[Any, ...]] = {}
        self._scope = contextlib.ExitStack()

    def availableMemoryProportions(self, value: float | list[float] | tuple[float, ...]) -> Self:
        """Set the memory for temporaries: a share from 0 to 1 each; None for the default.

        Raises:
            AssertionError: the value is neither a float from 0 to 1 nor a list or tuple of them.
        """
        title = "Invalid available memory proportion"
        return self._set("availableMemoryProportions", value, _is_share, AssertionFailure, title)

    def partialsTypes(self, value: _Partials | list[_Partials] | tuple[_Partials, ...]) -> Self:
        """Set the dtype of partial sums: ``torch.float32`` or ``torch.float16``.

        It also takes ``MultiConvPartialsType`` of releases 1.4 to 2.0.

        Raises:
            ValueError: the value is another one.
        """
        given = value if isinstance(value, list | tuple) else [value]
        dtypes = [_DTYPES.get(v, v) if isinstance(v, MultiConvPartialsType) else v for v in given]
        title, known = "Invalid partials types", (torch.float32, torch.float16)
        return self._set("partialsTypes", dtypes, known.__contains__, InvalidValue, title)

    def enableConvDithering(self, value: bool | list[bool] | tuple[bool, ...]) -> Self:
        """Spread the tiles that convolutions start on; None for the default.

        Raises:
            ValueError: the value is neither a bool nor a list or tuple of bools.
        """
        title = "Convolution dithering must be bool or list of bools"
        return self._set("enableConvDithering", value, _is(bool), InvalidValue, title)

    def planType(self, value: MultiConvPlanType | None) -> Self:
        """Run the convolutions side by side or one after another; None for side by side.

        Raises:
            AssertionError: the value is not a ``MultiConvPlanType``.
        """
        value = MultiConvPlanType.Parallel if value is None else value
        return self._set_one(
            "planType", value, MultiConvPlanType, "poptorch.MultiConv: Invalid plan type"
        )

    def perConvReservedTiles(self, value: int) -> Self:
        """Reserve this number of tiles for each convolution.

        Raises:
            AssertionError: the value is not an int.
        """
        return self._set_one(
            "perConvReservedTiles", value, int, "poptorch.MultiConv: Invalid reserved tiles"
        )

    def cycleBackOff(self, value: float) -> Self:
        """Set how much slower than the fastest plan a smaller one may be, as a share.

        Raises:
            AssertionError: the value is not a float.
        """
        return self._set_one(
            "cycleBackOff", value, float, "poptorch.MultiConv: Invalid cycle back off"
        )

    def _set_one(self, name: str, value: Any, kind: type, title: str) -> Self:
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise AssertionFailure(
                title,
                got=repr(value),
                fix=f"pass a {kind.__name__} to {name}",
            )
        self._options[name] = (value,)
        return self

    def _set(
        self, name: str, value: Any, fits: Callable[[Any], bool], error: type[Error], title: str
    ) -> Self:
        if value is None:
            self._options.pop(name, None)
            return self
        values = tuple(value) if isinstance(value, list | tuple) else (value,)
        if not values or not all(map(fits, values)):
            raise error(
                title,
                got=repr(value),
                fix="pass one value, or one value for each convolution",
            )
        self._options[name] = values
        return self

    def __enter__(self) -> None:
        capture = listener()
        if capture is not None:
            self._scope.enter_context(capture.group(dict(self._options), source.calling_line()))

    def __exit__(self, *failure: Any) -> None:
        self._scope.__exit__(*failure)


def _is_share(value: Any) -> bool:
    return isinstance(value, float) and 0 <= value <= 1

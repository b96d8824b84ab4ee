"""The user's code holds the user's tensors; torch's functions get traced ones in their place.

Parameters and buffers keep their identity inside ``forward``: ``is``, ``isinstance``, attributes,
subclasses and dictionaries keyed by parameter give what they give in eager PyTorch, because the
user's code looks at the very objects. A function mode (``Overrides``) puts the traced tensors into
the arguments of each function of torch. A mode belongs to one thread, so other threads may use the
model meanwhile. Exchanging the contents of the tensors (``torch.utils.swap_tensors``) would show
the tracer's tensors to all threads, and torch refuses it for tensors with weak references, such as
the residency cells have.

The one place that does see a traced tensor is ``forward`` of an ``autograd.Function``, which torch
calls with what its C++ code was given. Traced tensors therefore carry the attributes of the
user's, and count as parameters where those do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .._base.errors import Error
from .trace import untraced

_NO_FUNCTIONS = nn.Parameter.__torch_function__  # classes with it leave torch's functions alone


class Held:
    """Which traced tensor stands for which tensor that the user's code holds."""

    def __init__(self) -> None:
        # Both hold their tensors, so that no other tensor gets the same number.
        self._traced: dict[int, torch.Tensor] = {}
        self._users: dict[int, torch.Tensor] = {}
        self.has_classes = False  # some have a ``__torch_function__``, which is asked first

    def add(self, users: torch.Tensor, traced: torch.Tensor) -> None:
        self._traced[id(users)] = traced
        self._users[id(traced)] = users
        self.has_classes |= overrides(type(users))
        for name, value in vars(users).items():
            if not hasattr(traced, name):
                setattr(traced, name, value)
        if isinstance(users, nn.Parameter):
            traced._is_param = True

    def traced(self, value: Any) -> Any:
        """Return the traced tensor of a held one, also inside lists, tuples and dicts."""
        if isinstance(value, torch.Tensor):
            return self._traced.get(id(value), value)
        kind = type(value)
        if kind in (list, tuple):
            return kind(map(self.traced, value))
        if kind is dict:
            return {key: self.traced(item) for key, item in value.items()}
        return value

    def users(self, result: Any) -> Any:
        """Return the held tensor if a function returned its traced one, as ``w.mul_(2)`` does."""
        if isinstance(result, torch.Tensor):
            return self._users.get(id(result), result)
        kind = type(result)
        if kind in (list, tuple) and any(id(each) in self._users for each in result):
            return kind(map(self.users, result))
        return result

    def caught(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of an operator that the user's own tensors have come to.

        Torch was not asked on the way, and its autograd would give gradients to the user's tensor.
        """
        if not any(id(each) in self._traced for each in _tensors((*args, *kwargs.values()))):
            return args, kwargs
        given = self.traced(args), self.traced(kwargs)
        trained = any(each.requires_grad for each in _tensors((*given[0], *given[1].values())))
        if torch.is_grad_enabled() and trained:
            raise Error(
                "A trained weight reaches an operator in a way that loses its gradient",
                got=f"code that forward calls passes the weight itself to {func}",
                fix="pass a tensor derived from the weight: weight.view_as(weight)",
            )
        return given

    def as_class(self, cls: type[torch.Tensor], traced: torch.Tensor) -> torch.Tensor:
        """Return a tensor of a class of the user's that a traced one stands for from now on."""
        with untraced():
            shape = torch.empty(traced.shape, dtype=traced.dtype, device="meta")
            held = shape.requires_grad_(traced.requires_grad).as_subclass(cls)
        self.add(held, traced)
        return held

    def classes(self, args: Any, kwargs: Any) -> list[type[torch.Tensor]]:
        """Return the classes whose ``__torch_function__`` a call is for, subclasses first."""
        found: list[type[torch.Tensor]] = []
        for tensor in _tensors((*args, *kwargs.values())):
            kind = type(tensor)
            if id(tensor) in self._traced and overrides(kind) and kind not in found:
                bases = (at for at, each in enumerate(found) if issubclass(kind, each))
                found.insert(next(bases, len(found)), kind)
        return found


def overrides(kind: type[torch.Tensor]) -> bool:
    return kind is not torch.Tensor and kind.__torch_function__ is not _NO_FUNCTIONS


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among values, also in lists and tuples of them."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif type(value) in (list, tuple):
            found += _tensors(value)
    return found

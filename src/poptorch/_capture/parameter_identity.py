"""Let user code refer to the user's tensors, and pass traced tensors to torch's functions instead.

Parameters and buffers keep their identity inside ``forward``: ``is``, ``isinstance``, attributes,
subclasses and dictionaries with parameters as keys give the same as in eager PyTorch, because user
code sees the same objects. A function mode (``Overrides``) replaces them by traced tensors in the
arguments of torch's functions. A mode belongs to one thread, so other threads may use the model in
the meantime. Swapping the contents of tensors (``torch.utils.swap_tensors``) would show the traced
tensors to all threads, and torch refuses this for tensors with weak references, which residency
cells use.

The only user code that sees a traced tensor is the ``forward`` of an ``autograd.Function``, which
torch calls with the arguments of its C++ code. Traced tensors therefore have the attributes of the
user's tensors, and are parameters if those are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .._base.errors import Error
from .trace import untraced

# classes with this function do not change torch's functions
_NO_FUNCTIONS = nn.Parameter.__torch_function__


class TracedTensors:
    """Maps each tensor to which user code refers to its traced tensor."""

    def __init__(self) -> None:
        # Both dicts keep their tensors alive, so that no other tensor gets the same id.
        self._traced: dict[int, torch.Tensor] = {}
        self._users: dict[int, torch.Tensor] = {}
        # whether some have their own ``__torch_function__``, which must be called first
        self.has_classes = False

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
        """Return the traced tensor for a tensor, also inside lists, tuples and dicts."""
        if isinstance(value, torch.Tensor):
            return self._traced.get(id(value), value)
        kind = type(value)
        if kind in (list, tuple):
            return kind(map(self.traced, value))
        if kind is dict:
            return {key: self.traced(item) for key, item in value.items()}
        return value

    def users(self, result: Any) -> Any:
        """Return the user's tensor if a function returned its traced tensor, as
        ``w.mul_(2)`` does.
        """
        if isinstance(result, torch.Tensor):
            return self._users.get(id(result), result)
        kind = type(result)
        if kind in (list, tuple) and any(id(each) in self._users for each in result):
            return kind(map(self.users, result))
        return result

    def caught(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of an operator that was called with the user's own tensors.

        Torch did not ask the function mode, and its autograd would give gradients to the user's
        tensors.
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
        """Return a tensor of one of the user's classes, which represents a traced tensor
        from now on.
        """
        with untraced():
            shape = torch.empty(traced.shape, dtype=traced.dtype, device="meta")
            held = shape.requires_grad_(traced.requires_grad).as_subclass(cls)
        self.add(held, traced)
        return held

    def classes(self, args: Any, kwargs: Any) -> list[type[torch.Tensor]]:
        """Return the classes whose ``__torch_function__`` applies to a call, subclasses first."""
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
    """Return the tensors among values, also in lists and tuples."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif type(value) in (list, tuple):
            found += _tensors(value)
    return found

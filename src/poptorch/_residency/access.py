"""Notice reads of a host tensor while a device has newer values of it. Warns of reads of its
``.grad``, and of optimizer steps on the host.

The tensor has one of our classes only during that time, so that nothing is slower or different
otherwise.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from .._base import log, source

Announce = Callable[[], object]
_MAKING = nn.Parameter.__new__.__code__
_NAME = "_poptorch_announce"  # the attribute of a watched tensor
_unwatched: Callable[..., Any] = nn.Parameter.__torch_function__
NO_GRADIENTS = (
    "Parameters of a wrapped model have no .grad, because gradients stay in the program. To "
    "get a gradient with each call, use options.anchorTensor('mine', 'Gradient___' + name) "
    "before you wrap the model"
)
# Functions that neither read nor change values.
_GETTERS = """
    device dtype grad grad_fn is_cpu is_cuda is_leaf is_meta is_nested is_quantized is_sparse
    itemsize layout nbytes ndim output_nr requires_grad retains_grad shape
"""
_METHODS = """
    __hash__ __len__ dim element_size is_complex is_contiguous is_floating_point is_inference
    ndimension nelement numel register_hook register_post_accumulate_grad_hook requires_grad_ size
    storage_offset stride
"""
_QUIET = {getattr(torch.Tensor, name).__get__ for name in _GETTERS.split()}
_QUIET |= {getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")}
_QUIET |= {getattr(torch.Tensor, name) for name in _METHODS.split()}
_GRADIENT = getattr(torch.Tensor, "grad").__get__  # noqa: B009 (its type is that of a value)
_has_warned: weakref.WeakSet[Announce] = (
    weakref.WeakSet()
)  # the devices about which a warning was given


def unwatched(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that reads tensors without triggering announcements."""
    return _unwatched(function, (), arguments, {})


class _Watched:
    """Announces reads of values. Copies and pickles are those of the plain tensor."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func not in _QUIET:
            _announce((args, kwargs))
        elif func == _GRADIENT:
            _warn_of_gradient(args[0], sys._getframe(1))
        result = _unwatched(func, types, args, kwargs or {})
        if func is torch.Tensor.detach and sys._getframe(1).f_code is _MAKING:
            # the constructor expects the data that it was given
            return nn.Parameter(result, requires_grad=False)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._plain().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def _plain(self) -> Any:
        _announce(self)
        unwatch(self)  # by now its values were copied from the device, or never will be
        return self


class Parameter(_Watched, nn.Parameter):
    """A parameter whose newer values are on a device."""


class Tensor(_Watched, torch.Tensor):
    """A buffer whose newer values are on a device."""


_WATCHED: dict[type, type] = {nn.Parameter: Parameter, torch.Tensor: Tensor}
_PLAIN = {watched: plain for plain, watched in _WATCHED.items()}


def watch(tensor: torch.Tensor, announce: Announce) -> None:
    """Call a function before the tensor's values are read. Tensors of other classes are
    not watched.
    """
    watched = _WATCHED.get(type(tensor))
    if watched is not None:
        tensor.__dict__[_NAME] = announce
        tensor.__class__ = watched


def unwatch(tensor: Any) -> None:
    plain = _PLAIN.get(type(tensor))
    if plain is not None:
        tensor.__class__ = plain
        tensor.__dict__.pop(_NAME, None)


def _announce(arguments: Any) -> None:
    for tensor in _watched(arguments):
        announce = tensor.__dict__.get(_NAME)
        if announce is not None:  # otherwise, reading an earlier one has already copied it
            announce()


def _warn_of_gradient(tensor: Any, frame: types.FrameType | None) -> None:
    """Warn if the user's code reads a gradient or calls torch's ``step``, which reads one."""
    announce = tensor.__dict__.get(_NAME)
    if announce is None or announce in _has_warned or frame is None:
        return
    if source.is_own_file(frame.f_code.co_filename):
        what = NO_GRADIENTS
    elif _module(frame).startswith("torch.optim.") and _steps_for_user(frame):
        what = (
            "optimizer.step() has no effect on a wrapped model, because the call of the "
            "model has already made the update"
        )
    else:
        return
    _has_warned.add(announce)
    log.python.warning("%s", what)


def _steps_for_user(frame: types.FrameType | None) -> bool:
    """Return whether the user's own code called torch's ``step``.

    Other libraries, such as the training loops that ``integrations`` wraps, call it themselves.
    ``torch.compile`` adds frames of torch in between.
    """
    steps = False
    while frame is not None and _module(frame).startswith("torch."):
        steps = steps or frame.f_code.co_name == "step"
        frame = frame.f_back
    return steps and frame is not None and source.is_own_file(frame.f_code.co_filename)


def _module(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _watched(value: Any) -> Iterator[Any]:
    if isinstance(value, _Watched):
        yield value
    elif isinstance(value, tuple | list | dict):
        items: Iterable[Any] = value.values() if isinstance(value, dict) else value
        for item in items:
            yield from _watched(item)

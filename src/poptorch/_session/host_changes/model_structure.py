"""Check whether the model's layers, methods, hooks and parameters are those that were compiled."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..._base import private
from ..._capture import ModelTensor, hooks_of
from ...ops.blocks import starts_block
from .change_check import DESTROY, WRAP, ChangeCheck, shorten

_GLOBAL = (
    "global_forward_hooks", "global_forward_pre_hooks", "global_backward_hooks",
    "global_backward_pre_hooks",
)  # fmt: skip
_EVERYWHERE = -1  # the number of a layer, for hooks on all modules
_children = operator.methodcaller("values")
_own_forward = operator.methodcaller("get", "forward")
_requires_grad = operator.attrgetter("tensor.requires_grad")


def structure_checks(
    module: nn.Module, users: nn.Module, forward: Any, tensors: Mapping[str, ModelTensor]
) -> list[ChangeCheck]:
    """Return the checks of a model's structure.

    Args:
        module: a shallow copy of the user's module, which is compiled.
        users: the user's module.
        forward: the ``forward`` that was set on the user's module itself when it was wrapped.
        tensors: the model's parameters and buffers.
    """
    modules = list(module.modules())
    dicts = [each._modules for each in modules]
    owns = [each.__dict__ for each in modules]
    scripted = torch.jit.ScriptModule  # their classes have no forward that could be compared
    kinds = list({type(each) for each in users.modules() if not isinstance(each, scripted)})
    parameters = {path: tied for path, tied in tensors.items() if tied.is_parameter}
    trained, paths = list(parameters.values()), list(parameters)

    def layers() -> tuple[Any, ...]:
        return tuple(itertools.chain.from_iterable(map(_children, dicts)))

    def other_layers(before: tuple[Any, ...]) -> Iterator[str]:
        known = set(before)
        new = sorted(
            f"{type(holder).__name__}.{name}"
            for holder, children in zip(modules, dicts, strict=True)
            for name, child in children.items()
            if child not in known
        )
        yield f"layers ({shorten(new) or 'some were removed'})"

    def requires_grad_flags() -> list[bool]:
        return list(map(_requires_grad, trained))

    def other_gradients(before: list[bool]) -> Iterator[str]:
        for path, old, new in zip(paths, before, requires_grad_flags(), strict=True):
            if old != new:
                yield f"requires_grad of {path} is now {new}"

    users_own = _forwards(lambda: [users.__dict__.get("forward")], [type(users)], WRAP)
    users_own.expected = [forward]
    numbers = [tied for tied in trained if tied.tensor.is_floating_point()]
    return [
        ChangeCheck(layers, other_layers, DESTROY, of_layers=True),
        _forwards(lambda: list(map(_own_forward, owns)), [*map(type, modules)], DESTROY),
        _forwards(lambda: [kind.forward for kind in kinds], kinds, DESTROY),
        ChangeCheck(requires_grad_flags, other_gradients, DESTROY),
        _hooks(modules, trained),
        users_own,
        *map(_number_format, numbers[:1]),
    ]


def _forwards(read: Callable[[], list[Any]], kinds: Sequence[type], remedy: str) -> ChangeCheck:
    def changes(before: list[Any]) -> Iterator[str]:
        for kind, old, new in zip(kinds, before, read(), strict=True):
            if old != new:
                yield f"forward of a {kind.__name__.removeprefix('Poptorch')}"

    return ChangeCheck(read, changes, remedy)


def _hooks(modules: Sequence[nn.Module], parameters: Sequence[ModelTensor]) -> ChangeCheck:
    """Return the check of hooks. New hooks are visible in the handles that torch has given out."""
    of_all = [hooks for name in _GLOBAL if (hooks := private.optional(name)) is not None]

    def present() -> set[tuple[int, Any]]:
        layers = (
            (number, hook)
            for number, each in enumerate(modules)
            for hooks in _own_hooks(each)
            for hook in hooks.values()
            if not starts_block(hook)  # BeginBlock has its own warning
        )
        own = enumerate((hooks_of(p.tensor) for p in parameters), start=len(modules))
        everywhere = (
            (_EVERYWHERE, hook)
            for hooks in of_all
            for hook in list(hooks.values())
            if not str(getattr(hook, "__module__", "")).startswith("poptorch.")  # other threads
        )
        return {*layers, *everywhere, *((number, hook) for number, hooks in own for hook in hooks)}

    known = present()
    layers = [hooks for module in modules for hooks in _own_hooks(module) if hooks]
    own = [hooks for p in parameters if (hooks := p.tensor._backward_hooks)]

    def counts() -> tuple[int, list[int]]:
        return RemovableHandle.next_id, [len(hooks) for hooks in (*layers, *own, *of_all)]

    def changes(_: object) -> Iterator[str]:
        different = [number for number, _ in present() ^ known]
        everywhere = different.count(_EVERYWHERE)
        if len(different) > everywhere:
            yield f"{_count(len(different) - everywhere)} on layers or parameters"
        if everywhere:
            yield f"{_count(everywhere)} on all modules"

    return ChangeCheck(counts, changes, DESTROY)


def _count(hooks: int) -> str:
    return f"{hooks} hook{'s' * (hooks != 1)}"


def _own_hooks(module: nn.Module) -> tuple[dict[int, Any], ...]:
    forward = module._forward_hooks, module._forward_pre_hooks
    return (*forward, module._backward_hooks, module._backward_pre_hooks)


def _number_format(first: ModelTensor) -> ChangeCheck:
    """Return the check of the type of weights. half() and similar methods change all parameters,
    so one of them is enough.
    """

    def changes(before: torch.dtype) -> Iterator[str]:
        names = (str(kind).removeprefix("torch.") for kind in (before, first.tensor.dtype))
        yield "the number format was {} and is {}".format(*names)

    return ChangeCheck(lambda: first.tensor.dtype, changes, DESTROY)

"""Define blocks: which part of a model runs on which device (PopTorch user guide, "Parallel
execution").

Annotations have an effect only while an executor captures ``forward``, and none on the host.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any, Self

from torch import nn

from .._base import log
from .._base.errors import AssertionFailure, Error
from .._ops import annotate

_automatic = itertools.count()
_annotations = itertools.count()
_compiled: weakref.WeakKeyDictionary[object, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def remember_compiled(owner: object, model: nn.Module) -> None:
    """Remember that a model is compiled, as long as its owner exists. Annotations that are added
    now have no effect.
    """
    # a weak reference, because the model may refer to the owner
    _compiled[owner] = weakref.ref(model)


def _start(user_id: object, ipu_id: int | str | None) -> None:
    recorder = annotate.recorder()
    if recorder is not None:
        device = None if ipu_id is None else int(ipu_id)
        recorder.start(str(next(_automatic) if user_id is None else user_id), device)


class Block(nn.Module):
    """Put the operators of a ``with`` scope into one block.

    Operators after the scope need another block. You may enter a block inside another one, but
    leaving the inner block does not restore the outer one.

    Args:
        user_id: the id by which stages refer to the block. Blocks with the same id are one block.
            With None, each entry gets a new id.
        ipu_id: the device, as an index among the devices of the model. A stage may override it.
    """

    def __init__(self, user_id: str | None = None, ipu_id: int | None = None) -> None:
        super().__init__()
        self._user_id = user_id
        self._ipu_id = ipu_id

    def __enter__(self) -> None:
        _start(self._user_id, self._ipu_id)

    def __exit__(self, *_: object) -> None:
        recorder = annotate.recorder()
        if recorder is not None:
            recorder.end()

    @staticmethod
    def start(user_id: str | None = None, ipu_id: int | None = None) -> None:
        """Begin a block that lasts until the next one. The arguments are those of the class."""
        _start(user_id, ipu_id)

    @staticmethod
    def useAutoId() -> None:
        """Restart automatic ids at "0"; meant for the first line of ``forward``."""
        global _automatic
        if annotate.recorder() is not None:
            _automatic = itertools.count()


class _BeginBlockHook:
    """The forward pre-hook that starts a module's block. It is copied and pickled with the
    module.
    """

    def __init__(self, user_id: object, ipu_id: int | None) -> None:
        self._user_id = user_id
        self._ipu_id = ipu_id
        self._number = next(_annotations)
        self._has_warned = False

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        recorder = annotate.recorder()
        if recorder is None:
            return
        if self._user_id is None:
            self._user_id = str(next(_automatic))
        before = recorder.annotations
        if self._number not in before:
            if not self._has_warned and any(number > self._number for number in before):
                self._has_warned = True
                log.python.warning(
                    (
                        "Block %s was annotated before a block that runs earlier. Call "
                        "BeginBlock in the order in which the layers run"
                    ),
                    self._user_id,
                )
            before.append(self._number)
        _start(self._user_id, self._ipu_id)

    def __repr__(self) -> str:
        return f"BeginBlock(user_id={self._user_id}, ipu_id={self._ipu_id})"


class LegacyBeginBlockFn:
    """A callable that starts a block and then calls the wrapped object; see ``BeginBlock``."""

    def __init__(
        self,
        layer_to_call: Callable[..., Any],
        user_id: object | None = None,
        ipu_id: int | None = None,
    ) -> None:
        self._function = layer_to_call
        self._user_id = user_id
        self._ipu_id = ipu_id

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _start(self._user_id, self._ipu_id)
        return self._function(*args, **kwargs)


def BeginBlock(layer_to_call: Any, user_id: object | None = None, ipu_id: int | None = None) -> Any:
    """Begin a block where a module's ``forward`` begins; it lasts until the next block.

    Args:
        layer_to_call: a module, which is annotated in place; or another callable.
        user_id: the id by which stages refer to the block; None creates a new one.
        ipu_id: the device, as an index among the devices of the model. A stage may override it.

    Returns:
        The same module; for another callable, an object that starts the block and calls it.

    Raises:
        poptorch.Error: the argument is neither a module nor callable, or the module already begins
            a block.
    """
    if not isinstance(layer_to_call, nn.Module):
        if callable(layer_to_call):
            return LegacyBeginBlockFn(layer_to_call, user_id, ipu_id)
        raise Error(
            "The annotated object is not callable: module is not an instance of torch.nn.Module",
            got=f"an object of type {type(layer_to_call).__name__}",
            fix="pass a layer of the model: model.layer = BeginBlock(model.layer, ipu_id=1)",
        )
    present = _hook_of(layer_to_call)
    if present is not None:
        raise Error(
            "The module has already been assigned to a block",
            got=f"{type(layer_to_call).__name__} with {present}",
            fix="call poptorch.removeBlocks(module) first, or annotate each layer once",
        )
    models = [model for each in _compiled.values() if (model := each()) is not None]
    parts = (part for model in models for part in model.modules())
    # the same module, or a shallow copy of it
    if any(part._modules is layer_to_call._modules for part in parts):
        log.python.warning(
            (
                "BeginBlock was called on a %s of a model that is already compiled. The compiled "
                "program continues without the block. Call destroy() on the wrapped model, so "
                "that the next call compiles with the block"
            ),
            type(layer_to_call).__name__,
        )
    layer_to_call.register_forward_pre_hook(_BeginBlockHook(user_id, ipu_id))
    return layer_to_call


def starts_block(hook: object) -> bool:
    return isinstance(hook, _BeginBlockHook)


def _hook_of(module: nn.Module) -> _BeginBlockHook | None:
    hooks = module._forward_pre_hooks.values()
    return next((hook for hook in hooks if isinstance(hook, _BeginBlockHook)), None)


def removeBlocks(module: nn.Module) -> None:
    """Remove every ``BeginBlock`` annotation of a module and its sub-modules, and nothing else.

    Raises:
        AssertionError: the argument is not a module.
    """
    if not isinstance(module, nn.Module):
        raise AssertionFailure(
            "removeBlocks needs a torch.nn.Module",
            got=type(module).__name__,
            fix="pass the model or one of its layers",
        )
    for part in module.modules():
        hooks = part._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, _BeginBlockHook)]:
            del hooks[key]


def BlockFunction(
    user_id: str | None = None, ipu_id: int | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run the decorated function in a ``Block`` with these arguments. No block is active
    afterwards.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def inside_block(*args: Any, **kwargs: Any) -> Any:
            with Block(user_id, ipu_id):
                return function(*args, **kwargs)

        return inside_block

    return decorate


class IPU:
    """Deprecated since 1.0: ``IPU(1, layer)`` is ``BeginBlock(layer, ipu_id=1)``.

    You may write ``x = IPU(1, self.layer)(x)`` in ``forward``: a layer that already is on the
    device does not change. ``with IPU(1):`` is ``Block.start(ipu_id=1)``: later layers also belong
    to this block.

    Args:
        ipu_id: the device.
        layer_to_call: the layer to annotate, or None for use as a context manager.
    """

    def __new__(cls, ipu_id: int, layer_to_call: Any = None) -> Any:
        if layer_to_call is not None:
            present = _hook_of(layer_to_call) if isinstance(layer_to_call, nn.Module) else None
            if present is not None and present._ipu_id == ipu_id:
                return layer_to_call
            return BeginBlock(layer_to_call, ipu_id=ipu_id)
        self = super().__new__(cls)
        self._ipu_id = ipu_id
        return self

    _ipu_id: int

    def __enter__(self) -> None:
        Block.start(ipu_id=self._ipu_id)

    def __exit__(self, *_: object) -> None:
        """Do nothing: the block lasts until the next one."""


def module_repr(m: nn.Module) -> str:
    """Return ``repr(m)`` with ``BeginBlock(user_id=..., ipu_id=...)`` before annotated modules."""
    hooks = {module: _hook_of(module) for module in m.modules()}
    annotated = {module: hook for module, hook in hooks.items() if hook is not None}
    try:
        for module, hook in annotated.items():
            name = f"{hook} {module._get_name()}"  # type: ignore[no-untyped-call]
            # Set it on the instance, because torch looks the name up when it writes the text.
            module.__dict__["_get_name"] = lambda name=name: name
        return repr(m)
    finally:
        for module in annotated:
            module.__dict__.pop("_get_name", None)


def print(m: nn.Module) -> None:
    """Print a module with its annotations; see ``module_repr``."""
    builtins.print(module_repr(m))


class NameScope(contextlib.ContextDecorator):
    """Name the operators that ``forward`` creates within the scope; scopes nest with ``/``.

    The name appears before the path of the module: in estimates and reports, in errors about
    floating-point exceptions, in the log at DEBUG, and in ``getTensorNames()``.

    Args:
        name: one part of the path.

    Raises:
        AssertionError: the name is not a string.
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise AssertionFailure(
                "A name scope must be a string",
                got=f"{type(name).__name__} {name!r}",
                fix="for example: with poptorch.NameScope('encoder'):",
            )
        self._name = name
        self._entered: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> Self:
        scope = annotate.named(self._name)
        scope.__enter__()
        self._entered.append(scope)
        return self

    def __exit__(self, *failure: Any) -> None:
        self._entered.pop().__exit__(*failure)

"""``trainingModel`` and ``inferenceModel``. Source: PopTorch user guide, "Features"."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from . import _session
from ._base import source
from ._base.errors import AssertionFailure, Error, InvalidType, StateError
from .executor import PoplarExecutor
from .options import Options
from .options.freeze import prepare, reopen
from .options.legacy_call import read_call

DEFAULT_LEARNING_RATE = 0.01

registerPreCompileHook = _session.register_pre_compile
registerPostCompileHook = _session.register_post_compile


def trainingModel(
    model: nn.Module | PoplarExecutor | Callable[..., Any],
    options: Options | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *extra: Any,
    **keywords: Any,
) -> PoplarExecutor:
    """Wrap a module so that one call trains it on a combined batch.

    Args:
        model: a module whose ``forward`` computes a loss; changed in place into a
            ``Poptorch<Name>`` until ``destroy()``.
        options: frozen by this call; None for the defaults.
        optimizer: of ``torch.optim`` or ``poptorch.optim``; None for SGD with lr 0.01. Its
            hyper-parameters are read now, and at ``setOptimizer``.
        extra, keywords: deprecated forms: counts instead of options, and ``loss``, a function of
            the model's output and the call's second argument.

    Raises:
        TypeError: the model is no module and not callable, or superfluous arguments.
        RuntimeError: the model is wrapped for training already.
        AssertionError: unsupported optimizer type.
        poptorch.Error: ``options`` is no ``poptorch.Options``.
    """
    call = read_call(True, options, optimizer, extra, keywords)
    module = _module(model)
    if _session.is_wrapped(module):
        raise StateError(
            "The model has already been wrapped for training",
            got=type(module).__bases__[0].__name__,
            where=source.calling_line(),
            fix="call model.destroy() first, or go on with the first wrapper",
        )
    _check_buffers(module)
    chosen = call.optimizer
    if chosen is None:
        chosen = torch.optim.SGD(module.parameters(), lr=DEFAULT_LEARNING_RATE)
    return PoplarExecutor(module, prepare(call.options, training=True), chosen, call.loss)


def inferenceModel(
    model: nn.Module | PoplarExecutor | Callable[..., Any],
    options: Options | None = None,
    *extra: Any,
    **keywords: Any,
) -> PoplarExecutor:
    """Wrap a module so that one call evaluates it on a combined batch.

    Args:
        model: any module; it is not changed. One that is wrapped for training, before or after
            this call, shares its trained weights without copying by hand.
        options: frozen by this call; None for the defaults.
        extra, keywords: deprecated: counts instead of options.

    Raises:
        TypeError: the model is no module and not callable, or superfluous arguments.
        poptorch.Error: ``options`` is no ``poptorch.Options``, or its gradient accumulation is
            not 1.
    """
    call = read_call(False, options, None, extra, keywords)
    return PoplarExecutor(_module(model), prepare(call.options, training=False), None)


def load(
    filename: str | os.PathLike[str],
    edit_opts_fn: Callable[[Options], object] | None = None,
    trusted: bool = False,
) -> PoplarExecutor:
    """Rebuild model, options, optimizer and executor from one file, without capturing the model.

    Optimizer and random state continue where they were saved; a file that was compiled for no
    device runs here. The model of a training executor is ``executor.model``.

    Args:
        filename: written by ``save`` or ``compileAndExport``.
        edit_opts_fn: changes the options, which are not frozen, in place. What was compiled in
            stays.
        trusted: rebuild whatever objects the file names. By default only tensors, containers,
            modules that can be imported, and this library's own values are: a file can then do
            nothing but what the model's own classes do. Compiled code in the file is used only
            when it is trusted; otherwise it is taken from this machine's own, or compiled again.

    Raises:
        AssertionError: no such file of this version ("Invalid file"), something in it that is not
            allowed, or a file saved with ``export_model=False``.
    """
    saved = _session.read(filename, trusted)
    objects = saved.objects
    if "model" not in objects:
        raise AssertionFailure(
            "The file holds an executable without its model",
            got=f"{os.fspath(filename)} was saved with export_model=False",
            fix="wrap the model again and call executor.loadExecutable(path)",
        )
    options = objects["options"]
    reopen(options)
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    own = prepare(options, training=objects["optimizer"] is not None)
    executor = PoplarExecutor(objects["model"], own, objects["optimizer"], objects["loss"])
    _session.install(executor._session, saved, executor._settings(), whole=True)
    return executor


class _Function(nn.Module):
    """A plain function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


def _module(model: Any) -> nn.Module:
    if isinstance(model, PoplarExecutor):
        return model.model
    if isinstance(model, nn.Module):
        return model
    if callable(model) and not isinstance(model, type):
        return _Function(model)
    raise InvalidType(
        "Expected a torch.nn.Module or a callable",
        got=model.__name__ if isinstance(model, type) else type(model).__name__,
        where=source.calling_line(),
        fix="pass an instance of your module, not its class or its output",
    )


def _check_buffers(module: nn.Module) -> None:
    for name, buffer in module.named_buffers():
        if type(buffer) is not torch.Tensor:
            raise Error(
                "All buffers must be an instance of torch.Tensor",
                got=f'buffer "{name}" is a {type(buffer).__name__}',
                fix=f"register a plain tensor: self.register_buffer('{name}', tensor)",
            )

"""``trainingModel`` and ``inferenceModel``. Source: spec/executor.md section 1."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from . import _session
from ._base import source
from ._base.errors import Error, InvalidType, StateError
from .executor import PoplarExecutor
from .options import Options

DEFAULT_LEARNING_RATE = 0.01

registerPreCompileHook = _session.register_pre_compile
registerPostCompileHook = _session.register_post_compile


def trainingModel(
    model: nn.Module | PoplarExecutor,
    options: Options | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> PoplarExecutor:
    """Wrap a module so that one call trains it on a combined batch.

    Args:
        model: a module whose ``forward`` computes a loss; changed in place into a
            ``Poptorch<Name>`` until ``destroy()``.
        options: frozen by this call; None for the defaults.
        optimizer: of ``torch.optim`` or ``poptorch.optim``; None for SGD with lr 0.01.

    Raises:
        TypeError: the model is no module and not callable.
        RuntimeError: the model is wrapped for training already.
        poptorch.Error: ``options`` is no ``poptorch.Options``.
    """
    module = _module(model)
    own = _own_options(options)
    if _session.is_wrapped(module):
        raise StateError(
            "The model has already been wrapped for training",
            got=type(module).__bases__[0].__name__,
            where=source.calling_line(),
            fix="call model.destroy() first, or go on with the first wrapper",
        )
    _check_buffers(module)
    if optimizer is None:
        optimizer = torch.optim.SGD(module.parameters(), lr=DEFAULT_LEARNING_RATE)
    return PoplarExecutor(module, own, optimizer)


def inferenceModel(
    model: nn.Module | PoplarExecutor, options: Options | None = None
) -> PoplarExecutor:
    """Wrap a module so that one call evaluates it on a combined batch.

    Args:
        model: any module; it is not changed. One that is wrapped for training, before or after
            this call, shares its trained weights without copying by hand.
        options: frozen by this call; None for the defaults.

    Raises:
        TypeError: the model is no module and not callable.
        poptorch.Error: ``options`` is no ``poptorch.Options``, or its gradient accumulation is
            not 1.
    """
    return PoplarExecutor(_module(model), _own_options(options), None)


def _module(model: Any) -> nn.Module:
    if isinstance(model, PoplarExecutor):
        return model.model
    if isinstance(model, nn.Module):
        return model
    raise InvalidType(
        "Expected a torch.nn.Module or a callable",
        got=type(model).__name__,
        where=source.calling_line(),
        fix="pass an instance of your module, not its class or its output",
    )


def _own_options(options: Options | None) -> Options:
    if options is not None and not isinstance(options, Options):
        raise Error(
            "Invalid type: 'options' must be of type poptorch.Options",
            got=type(options).__name__,
            where=source.calling_line(),
            fix="pass poptorch.Options(), or nothing for the defaults",
        )
    given = options if options is not None else Options()
    own = given.clone()
    given._freeze()
    own._freeze()
    return own


def _check_buffers(module: nn.Module) -> None:
    for name, buffer in module.named_buffers():
        if type(buffer) is not torch.Tensor:
            raise Error(
                "All buffers must be an instance of torch.Tensor",
                got=f'buffer "{name}" is a {type(buffer).__name__}',
                fix=f"register a plain tensor: self.register_buffer('{name}', tensor)",
            )

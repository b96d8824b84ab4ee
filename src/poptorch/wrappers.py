"""``trainingModel`` and ``inferenceModel``. Source: spec/executor.md section 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from . import _session
from ._base import source
from ._base.errors import Error, InvalidType, StateError
from .executor import PoplarExecutor
from .options import Options
from .options.freeze import prepare
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
    entry = None
    if call.loss is not None:
        loss = call.loss
        entry = lambda traced: _with_loss(traced, loss)  # noqa: E731
    return PoplarExecutor(module, prepare(call.options, training=True), chosen, entry)


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


def _with_loss(model: nn.Module, loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return what 1.0 called: the model on its arguments, then a loss on the output."""

    def forward(args: Any, loss_inputs: Any = None) -> tuple[Any, Any]:
        if isinstance(args, dict):
            output = model(**args)
        elif isinstance(args, (list, tuple)):
            output = model(*args)
        else:
            output = model(args)
        return output, loss(output) if loss_inputs is None else loss(output, loss_inputs)

    return forward

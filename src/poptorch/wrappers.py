"""Define ``trainingModel``, ``inferenceModel`` and ``load``, which wrap models.

Source: PopTorch user guide, "Features".
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from . import _compile
from ._base.archive import InvalidFile
from ._base.errors import AssertionFailure, Error, InvalidType
from ._capture import refuse_uninitialized, tensors_of
from ._session import files, hooks, wrapping
from .enums import ConnectionType
from .executor import PoplarExecutor
from .optim import joint
from .options import Options
from .options.files import apply_calls, apply_data, as_calls
from .options.freeze_options import backend_name, cache_directory, freeze, prepare
from .options.legacy_call import read_call, takes_options

DEFAULT_LEARNING_RATE = 0.01

registerPreCompileHook = hooks.register_pre_compile
registerPostCompileHook = hooks.register_post_compile


@takes_options
def trainingModel(
    model: nn.Module | PoplarExecutor | Callable[..., Any],
    options: Options | None = None,
    optimizer: joint.Given | None = None,
    *extra: Any,
    **keywords: Any,
) -> PoplarExecutor:
    """Wrap a module: each call then trains it on a combined batch.

    Args:
        model: a module whose ``forward`` computes a loss. It is changed in place: its class is
            ``Poptorch<Name>`` until ``destroy()``.
        options: this call freezes them; None for the defaults.
        optimizer: from ``torch.optim`` or ``poptorch.optim``; None for SGD with lr 0.01. It is
            read now, and again by ``setOptimizer``. You can pass a list of ``torch.optim``
            optimizers of the same class, for example one for an actor and one for a critic. Each
            keeps its own hyper-parameters and ``state_dict()``.
        extra, keywords: deprecated: counts instead of options, or ``loss``, a function of the
            model's output and the call's second argument.

    Raises:
        TypeError: the model is neither a module nor callable, or there are too many arguments.
        RuntimeError: the model is already wrapped for training.
        AssertionError: the type of the optimizer is not supported.
        poptorch.Error: ``options`` is not a ``poptorch.Options``, or the optimizers of a list
            cannot be combined.
    """
    call = read_call(True, options, optimizer, extra, keywords)
    module = _module(model)
    wrapping.refuse_wrapped(module)
    refuse_uninitialized(tensors_of(module, values=False))
    _check_buffers(module)
    chosen = joint.joined(call.optimizer)
    if chosen is None:
        chosen = torch.optim.SGD(module.parameters(), lr=DEFAULT_LEARNING_RATE)
    return _ahead(PoplarExecutor(module, prepare(call.options, training=True), chosen, call.loss))


@takes_options
def inferenceModel(
    model: nn.Module | PoplarExecutor | Callable[..., Any],
    options: Options | None = None,
    *extra: Any,
    **keywords: Any,
) -> PoplarExecutor:
    """Wrap a module: each call then evaluates it on a combined batch.

    Args:
        model: any module; it is not changed. If you also wrap it for training, both wrappers
            share the weights, and you do not need to copy them.
        options: this call freezes them; None for the defaults.
        extra, keywords: deprecated: counts instead of options.

    Raises:
        TypeError: the model is neither a module nor callable, or there are too many arguments.
        poptorch.Error: ``options`` is not a ``poptorch.Options``, or its gradient accumulation is
            not 1.
    """
    call = read_call(False, options, None, extra, keywords)
    return _ahead(PoplarExecutor(_module(model), prepare(call.options, training=False), None))


def _ahead(executor: PoplarExecutor) -> PoplarExecutor:
    """Import the compiler in the time before the first call, if this slows down nobody."""
    _compile.wrapped(backend_name(executor.options), cache_directory(executor.options))
    return executor


def load(
    filename: str | os.PathLike[str],
    edit_opts_fn: Callable[[Options], object] | None = None,
    trusted: bool = False,
    *,
    model: nn.Module | Callable[..., Any] | None = None,
    optimizer: joint.Given | None = None,
    options: Options | None = None,
    loss: Callable[..., Any] | None = None,
) -> PoplarExecutor:
    """Load a saved model and continue with it.

    The file contains data: weights, the states of the optimizer and the random generator, settings,
    and the shapes of the arguments. You pass a model and an optimizer; ``load`` restores their
    state and compiles the model again. Compiled code comes from the cache of this machine if it is
    there. No code in the file runs, and nothing is imported because of it.

    The file also contains a pickled model and compiled code. They are used only if you trust the
    file, or if its signature shows that you saved it.

    Some arguments are not saved: objects, and values that ``forward`` read while it was compiled.
    In these cases the model is compiled by the first call.

    Args:
        filename: from ``save`` or ``compileAndExport``.
        edit_opts_fn: takes the options and may change them.
        trusted: unpickle the objects that you do not pass, and run the file's compiled code.
            **Both can do anything.** Use this only for files from people whom you would allow to
            run a program on this machine.
        model: a module like the saved one; it gets the saved weights.
        optimizer: for training: one like the saved one, or a list, over the model's parameters.
        options: these replace the options in the file.
        loss: the function that you passed to ``trainingModel``, if you passed one.

    Returns:
        An executor that continues where the saved one stopped.

    Raises:
        AssertionError: there is no such file of this version ("Invalid file"), or it was saved
            with ``export_model=False``.
        RuntimeError: the model is already wrapped for training.
        poptorch.Error: you passed no model and do not trust the file, or the model or the
            optimizer does not match the saved one. They keep their values then.
    """
    saved, chosen = files.read(filename, trusted), joint.joined(optimizer)
    if not saved.whole:
        raise AssertionFailure(
            "The file contains an executable without its model",
            got=f"{os.fspath(filename)} was saved with export_model=False",
            fix="wrap the model, and call loadExecutable(path) on the wrapped model",
        )
    if model is None and not saved.trusted:
        raise Error(
            "The file is not trusted to create Python objects",
            got=f"{os.fspath(filename)} is not signed with your key, and no model was passed",
            fix=(
                (
                    "create the model and pass it: poptorch.load(path, model=Net()); for "
                    "training also pass optimizer=SGD(...)"
                ),
                (
                    "if you trust the author of the file to run any code on this machine: "
                    "poptorch.load(path, trusted=True)"
                ),
            ),
        )
    with contextlib.ExitStack() as undo:
        if model is not None:
            module = _module(model)
            undo.callback(files.fill(saved, module, chosen, loss))
        else:
            objects = saved.objects()
            module, chosen, loss = objects.model, objects.optimizer, objects.loss
        own = _options_of(saved) if options is None else options.clone()
        if edit_opts_fn is not None:
            edit_opts_fn(own)
        training = chosen is not None
        executor = PoplarExecutor(module, prepare(own, training), chosen, loss)
        undo.callback(executor.destroy)
        files.resume(executor._session, saved, whole=True)
        undo.pop_all()
    return executor


def _options_of(saved: files.SavedModel) -> Options:
    """Return the options in a file, without those that only apply to the machine that wrote it."""
    edited, options = Options(), Options()
    try:
        apply_data(edited, saved.options)
        # once more, because the options in a file could name folders
        apply_calls(options, as_calls(edited))
        with contextlib.suppress(Error):  # compiling reports conditions that are not met
            freeze(options, training=saved.algorithm is not None)
    except Exception as error:  # setters raise errors of many types
        raise InvalidFile(
            "Invalid file",
            got=f"{saved.path}, its options: {error}",
            fix="load it with the version of poptorch that saved it, or save the model again",
        ) from error
    options.deleteIfExists("ipu_version")
    # for example, because it was compiled without a device
    if options.connection_type == ConnectionType.Never:
        options.connectionType(ConnectionType.Always)
    return options


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


def _module(model: Any) -> nn.Module:
    if isinstance(model, PoplarExecutor):
        return model.model
    if isinstance(model, nn.Module):
        _check_scripted(model)
        _check_parameters(model)
        return model
    if callable(model) and not isinstance(model, type):
        return _Function(model)
    raise InvalidType(
        "Expected a torch.nn.Module or a callable",
        got=model.__name__ if isinstance(model, type) else type(model).__name__,
        fix="pass an instance of your module, not its class or its output",
    )


def _check_scripted(module: nn.Module) -> None:
    """Refuse TorchScript code that reads its own weights, because a program could not
    update those.
    """
    for path, layer in module.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            weights = sum(1 for _ in (*layer.parameters(), *layer.buffers()))
            if weights:
                raise InvalidType(
                    "A TorchScript module with weights cannot be captured",
                    got=f"{path or 'the model'}, with {weights} parameters and buffers",
                    fix=(
                        "wrap the original module, before scripting or tracing; it may "
                        "contain scripted functions, and scripted modules without weights"
                    ),
                )


def _check_parameters(module: nn.Module) -> None:
    for path, tied in tensors_of(module, values=False).items():
        kind = type(tied.tensor)
        if tied.is_parameter and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise Error(
                "A parameter whose class redefines operators cannot be compiled",
                got=f"'{path}' is a {kind.__name__}, which defines __torch_dispatch__",
                fix="use nn.Parameter(tensor) with a plain tensor, and convert it in forward",
            )


def _check_buffers(module: nn.Module) -> None:
    for name, buffer in module.named_buffers():
        if type(buffer) is not torch.Tensor:
            raise Error(
                "All buffers must be an instance of torch.Tensor",
                got=f'buffer "{name}" is a {type(buffer).__name__}',
                fix=f"register a plain tensor: self.register_buffer('{name}', tensor)",
            )

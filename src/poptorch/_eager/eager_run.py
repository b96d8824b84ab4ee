"""Run one micro-batch in eager PyTorch, with the user's module, parameters, and autograd's
backward.

Everything that the user's code changes meanwhile is restored, also after an error or Ctrl-C.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from .._base import nested_values, private
from .._base.thread_safety import by_thread, only_in_this_thread
from .._capture import LOSS_FUNCTIONS, OverwriteContextManager, PythonState, Request
from .._capture.replaced_tensors import changed
from .._ir.operators import arguments_written, call_draws, generator_of
from .._ops.autocast import around_user_code
from .._ops.context import EagerRun, running_eagerly
from .eager_draws import EagerDraws
from .restored_state import NoticedWrites, gradients_of, random_states

ValueListener = Callable[[str, torch.Tensor], None]  # called with a path and a value


@dataclass(frozen=True, eq=False)
class EagerResults:
    """The results of one micro-batch in eager PyTorch."""

    outputs: list[torch.Tensor]
    gradients: Mapping[str, torch.Tensor | None]  # gradients of trained parameters, by path
    state: Mapping[str, torch.Tensor]  # new values of what forward and backward wrote, by path
    drawn: EagerDraws
    attributes: PythonState  # as forward left them
    written: Sequence[tuple[torch.Tensor, torch.Tensor]]  # other tensors, and their new values


@dataclass(frozen=True, eq=False)
class Listener:
    """Receives what each layer returns, and its gradient."""

    output: ValueListener
    gradient: ValueListener


@dataclass(eq=False)
class Loss:
    """Where the captured loss is among the values that ``forward`` computes."""

    output: int | None = None  # its index among the returned tensors
    marked: int | None = None  # or among the values that losses and ``identity_loss`` returned
    seed: torch.Tensor = field(default_factory=lambda: torch.ones(()))  # its gradient


def run(
    request: Request,
    before: PythonState,
    batch: Sequence[torch.Tensor],
    loss: Loss | None,
    listener: Listener | None = None,
    constants: Iterable[torch.Tensor] = (),
) -> EagerResults:
    """Run the user's module on one micro-batch; ``loss`` is None in inference.

    ``constants``: other tensors that ``forward`` uses, which may be outside of the model.
    """
    tensors = {path: tied.tensor for path, tied in request.tensors.items()}
    others = {id(each): each for each in (*before.tensors.values(), *constants)}
    everything = {id(each): each for each in tensors.values()} | others
    others = {at: each for at, each in others.items() if at not in set(map(id, tensors.values()))}
    buffers = [tied.tensor for tied in request.tensors.values() if not tied.is_parameter]
    writes, marked = NoticedWrites(everything.values(), buffers), EagerRun()
    parameters = [each for each in everything.values() if each.is_leaf and each.requires_grad]
    with random_states():
        drawn = EagerDraws(before.generators)
        with (
            _restoring(writes, drawn),
            before.once_more(),
            gradients_of(parameters),
            running_eagerly(marked),
            warnings.catch_warnings(),
            torch.inference_mode(False),
            torch.set_grad_enabled(request.training),
            around_user_code(request.casts),
            _notifying(request.module, listener),
            _marking(marked) if loss is not None and loss.marked is not None else _nothing(),
            _watching()(writes, drawn),
            OverwriteContextManager.active(),
            _without_dynamo(),
        ):
            warnings.simplefilter("ignore")  # the capture has already shown the warnings
            outputs, _ = nested_values.flatten(request.call(batch), "output")
            if loss is not None:
                _backward(outputs, loss, marked)
            gradients = {path: _dense(tensors[path].grad) for path in sorted(request.trained)}
            state = {p: t.detach().clone() for p, t in tensors.items() if writes.written(t)}
            state |= _replaced(request, tensors)
            outputs = [each.detach().clone() for each in outputs]
            attributes = before.now()
            written = [(t, t.detach().clone()) for t in others.values() if writes.written(t)]
    return EagerResults(outputs, gradients, state, drawn, attributes, written)


def _backward(outputs: Sequence[torch.Tensor], loss: Loss, marked: EagerRun) -> None:
    value = outputs[loss.output] if loss.output is not None else marked.losses[loss.marked or 0]
    seed = loss.seed.to(value.dtype).expand(value.shape)
    torch.autograd.backward(value, seed)


def _dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None:
        return None
    return gradient.to_dense() if gradient.is_sparse else gradient


def _replaced(
    request: Request, tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers to which forward assigned another tensor."""
    for path, tied in request.tensors.items():
        for owner, holder, name in tied.places:
            now = dict.get(vars(owner)[holder], name)
            if isinstance(now, torch.Tensor) and now is not tensors[path]:
                yield path, now.detach().clone()


@contextlib.contextmanager
def _restoring(writes: NoticedWrites, drawn: EagerDraws) -> Iterator[None]:
    try:
        yield
    finally:
        writes.undo()
        drawn.restore()


@contextlib.contextmanager
def _without_dynamo() -> Iterator[None]:
    """Disable torch's compiler. It does not work under a mode, and remembers forever what it skips
    once.
    """
    if "torch._dynamo" in sys.modules:
        with torch.compiler.set_stance("force_eager"):
            yield
    else:  # asking for the setting would import it, which takes a second
        with changed([(torch, "compile", by_thread(_as_it_is, torch.compile))]):
            yield


def _as_it_is(function: Any = None, **_: Any) -> Any:
    return _as_it_is if function is None else function


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextlib.contextmanager
def _notifying(root: nn.Module, listener: Listener | None) -> Iterator[None]:
    if listener is None:
        yield
        return
    paths = {part: path for path, part in root.named_modules()}

    def record_output(module: nn.Module, _: Any, output: Any) -> None:
        path = paths.get(module)
        for value in nested_values.flatten(output)[0] if path else ():
            listener.output(str(path), value)
            if value.requires_grad and value.grad_fn is not None:
                hook = functools.partial(listener.gradient, str(path))
                value.register_hook(hook)  # type: ignore[no-untyped-call]

    with register_module_forward_hook(only_in_this_thread(record_output)):
        yield


@functools.cache
def _watching() -> Callable[[NoticedWrites, EagerDraws], contextlib.AbstractContextManager[object]]:
    class Watching(private.TorchDispatchMode):  # type: ignore[misc]
        """Copies what is about to be written, and records draws."""

        supports_higher_order_operators = True

        def __init__(self, writes: NoticedWrites, drawn: EagerDraws) -> None:
            super().__init__()
            self._writes, self._drawn = writes, drawn

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            written = list(arguments_written(func, args, kwargs))
            for tensor in written:
                self._writes.about_to_write(tensor)
            if not call_draws(func, args, kwargs):
                return func(*args, **kwargs)
            generator = generator_of(func, args, kwargs)
            self._drawn.before(generator)
            result = func(*args, **kwargs)
            values = {id(each): each for each in (*nested_values.flatten(result)[0], *written)}
            self._drawn.after(str(func), list(values.values()), generator)
            return result

    return Watching


class _marking(TorchFunctionMode):  # noqa: N801 (it is used as a function)
    """Record the values of torch's loss functions, as a capture does."""

    def __init__(self, marked: EagerRun) -> None:
        super().__init__()
        self._marked = marked

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in LOSS_FUNCTIONS and isinstance(result, torch.Tensor):
            self._marked.losses.append(result)
        return result

"""What stands in the place of a module's tensors, and of code of torch's, while forward runs."""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Distribution
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from .._base import private, source
from .._base.errors import Error
from .._base.threads import OfThread, PerThread, by_thread

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_BATCH_NORM_FORWARD = nn.BatchNorm1d.forward  # the one of all dimensions
_HOLDERS = ("_parameters", "_buffers")
Place = tuple[nn.Module, str, str]  # the module, "_parameters" or "_buffers", the name in it
Change = tuple[Any, str, Any]  # an object or class, the attribute, what stands in its place
_ABSENT = object()


@dataclass(eq=False)
class ModelTensor:
    tensor: torch.Tensor
    is_parameter: bool
    places: list[Place] = field(default_factory=list)

    @property
    def is_statistic(self) -> bool:
        return any(isinstance(owner, BATCH_NORMS) for owner, _, _ in self.places)


def tensors_of(module: nn.Module, values: bool = True) -> dict[str, ModelTensor]:
    """Without ``values`` nothing comes from a device for it: what the tensors hold is not read."""
    items = operator.methodcaller("items") if values else dict.items
    by_identity: dict[int, tuple[str, ModelTensor]] = {}
    modules = [*module.named_modules()]
    for holder in _HOLDERS:
        for prefix, owner in modules:
            for name, tensor in items(getattr(owner, holder)):
                if tensor is None:
                    continue
                path = f"{prefix}.{name}" if prefix else name
                _, tied = by_identity.setdefault(
                    id(tensor), (path, ModelTensor(tensor, holder == "_parameters"))
                )
                tied.places.append((owner, holder, name))
    return dict(by_identity.values())


@contextlib.contextmanager
def replaced(
    root: nn.Module,
    places: Mapping[str, ModelTensor],
    values: Mapping[str, torch.Tensor],
    users: nn.Module,
    again: Callable[[], AbstractContextManager[object]],
) -> Iterator[dict[str, torch.Tensor]]:
    """``again`` makes the context in which checkpoints run again in the backward pass.

    Yields:
        After the block, what each buffer was reassigned to.
    """
    over, thread = False, threading.get_ident()

    def checkpointed(
        usual: Callable[..., Any], fn: Callable[..., Any], *rest: Any, **settings: Any
    ) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with again() if over else contextlib.nullcontext():
                return fn(*args, **kwargs)

        chosen = run if threading.get_ident() == thread else fn
        return usual(chosen, *rest, **settings)

    reassigned: dict[str, torch.Tensor] = {}
    # Checkpoints of the older kind start a backward pass inside of the one that is captured.
    newer = staticmethod(by_thread(_newer_checkpoint, CheckpointFunction.apply))
    changes = [
        *_tensors(places, values, users),
        *_methods(root),
        (CheckpointFunction, "apply", newer),
        # What Dynamo skips once, as nothing can be compiled here, it skips in eager code, too.
        (torch, "compile", by_thread(_as_it_is, torch.compile)),
        # It would look at values.
        (Distribution, "_validate_args", OfThread(False, Distribution._validate_args)),
    ]
    try:
        with changed(changes), _checkpoints(checkpointed), _without_dynamo():
            yield reassigned
            for path, tied in places.items():
                _check(path, tied, values[path], reassigned)
    finally:
        over = True


@contextlib.contextmanager
def changed(changes: list[Change]) -> Iterator[None]:
    before = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in changes]
    try:
        for change in changes:
            _set(*change)
        yield
    finally:
        for change in before:
            _set(*change)


def _set(owner: Any, name: str, value: Any) -> None:
    # Modules have a ``__setattr__`` of their own.
    kind = type if isinstance(owner, type) else object
    if value is _ABSENT:
        kind.__delattr__(owner, name)
    else:
        kind.__setattr__(owner, name, value)


def _tensors(
    places: Mapping[str, ModelTensor], values: Mapping[str, torch.Tensor], users: nn.Module
) -> Iterator[Change]:
    seen: dict[int, dict[str, torch.Tensor]] = {}  # by the dict that they stand in
    for path, tied in places.items():
        for owner, holder, name in tied.places:
            own = owner.__dict__[holder]
            seen.setdefault(id(own), dict(own))[name] = values[path]
    owners = {owner for tied in places.values() for owner, _, _ in tied.places}
    for owner in {*owners, users}:
        for holder in _HOLDERS:
            own = owner.__dict__[holder]
            if id(own) in seen:
                yield owner, holder, PerThread(own, seen[id(own)])


def _check(
    path: str, tied: ModelTensor, value: torch.Tensor, reassigned: dict[str, torch.Tensor]
) -> None:
    for owner, holder, name in tied.places:
        now = getattr(owner, holder).get(name)
        if now is value:
            continue
        fits = isinstance(now, torch.Tensor) and now.shape == value.shape
        if holder == "_buffers" and fits and now.dtype == value.dtype:
            reassigned[path] = now
            continue
        what = "parameter" if holder == "_parameters" else "buffer"
        verb = "removed from" if now is None else "reassigned within"
        raise Error(
            f"{what.capitalize()} '{path}' is {verb} the model",
            got=f"forward of {type(owner).__name__} binds another value to self.{name}",
            where=source.definition_line(type(owner).forward),
            fix=f"change its value in place: self.{name}.copy_(new_value)",
        )


def _methods(root: nn.Module) -> Iterator[Change]:
    ours: Callable[..., Any]
    for part in root.modules():
        if isinstance(part, nn.RNNBase) and "check_input" not in part.__dict__:
            name, ours = "check_input", _check_shape
        elif isinstance(part, BATCH_NORMS) and _averages(part):
            name, ours = "forward", _averaging_forward
        else:
            continue
        yield part, name, by_thread(functools.partial(ours, part), getattr(part, name))


def _check_shape(layer: Any, x: torch.Tensor, sizes: torch.Tensor | None) -> None:
    dtype: Any = layer.weight_ih_l0.dtype
    type(layer).check_input(layer, x.new_empty(x.shape, dtype=dtype, device="meta"), sizes)


def _averages(norm: nn.Module) -> bool:
    torchs = "forward" not in norm.__dict__ and type(norm).forward is _BATCH_NORM_FORWARD
    return torchs and norm.momentum is None and norm.running_mean is not None


def _averaging_forward(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """Torch's own makes a Python number of the count of batches."""
    if not (norm.training and norm.track_running_stats):
        return _BATCH_NORM_FORWARD(norm, x)
    norm._check_input_dim(x)
    # With momentum 1 what is left in place of the running statistics are those of this batch.
    of_batch = torch.zeros_like(norm.running_mean), torch.zeros_like(norm.running_var)
    out = F.batch_norm(x, *of_batch, norm.weight, norm.bias, True, 1.0, norm.eps)
    norm.num_batches_tracked.add_(1)
    wide = torch.promote_types(norm.running_mean.dtype, torch.float32)
    share = 1.0 / norm.num_batches_tracked.to(wide)
    for running, new in zip((norm.running_mean, norm.running_var), of_batch, strict=True):
        running.mul_(1.0 - share).add_(new * share)
    return out


def _as_it_is(function: Any = None, **_: Any) -> Any:
    return (lambda later: later) if function is None else function


def _newer_checkpoint(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


@contextlib.contextmanager
def _checkpoints(stand_in: Callable[..., Any]) -> Iterator[None]:
    """Without a stand-in what runs again would use the host's weights: an error instead."""
    stand_ins = {"checkpoint_without_reentrant_generator_impl": stand_in}
    with private.standing_in(stand_ins) as standing, contextlib.ExitStack() as stack:
        if not standing:
            refused = f"With torch {torch.__version__} {private.CHECKPOINTS}"
            stack.enter_context(torch.autograd.graph.disable_saved_tensors_hooks(refused))
        yield


@contextlib.contextmanager
def _without_dynamo() -> Iterator[None]:
    loaded = {"torch._dynamo", "torch.nn.attention.flex_attention"} & sys.modules.keys()
    if not loaded:  # nobody has compiled anything
        yield
        return
    with contextlib.ExitStack() as stack:
        if "torch._dynamo" in loaded:
            stack.enter_context(private.settings({"error_on_nested_fx_trace": False}))
        stack.enter_context(warnings.catch_warnings())
        # Hooks that listen to all modules are called for the wrapper, too: once more is no harm.
        warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when there are global")
        # Here it is compiled with the rest of the program.
        warnings.filterwarnings("ignore", r"flex_attention called without torch.compile")
        yield

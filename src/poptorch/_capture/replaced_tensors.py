"""Replace a module's tensors, and some of torch's code such as checkpoints and batch norms, while
``forward`` runs.
"""

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
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import CheckpointFunction, check_backward_validity, checkpoint

from .._base import private, source
from .._base.errors import Error
from .._base.thread_safety import OfThread, PerThread, by_thread
from .._ops import autocast

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_BATCH_NORM_FORWARD = nn.BatchNorm1d.forward  # used by all numbers of dimensions
TENSOR_HOLDERS = ("_parameters", "_buffers")
TensorPlace = tuple[nn.Module, str, str]  # the module, "_parameters" or "_buffers", the name in it
Replacement = tuple[Any, str, Any]  # an object or class, the attribute, its replacement
_ABSENT = object()


@dataclass(eq=False)
class ModelTensor:
    tensor: torch.Tensor
    is_parameter: bool
    places: list[TensorPlace] = field(default_factory=list)

    @property
    def is_statistic(self) -> bool:
        return any(isinstance(owner, BATCH_NORMS) for owner, _, _ in self.places)


def tensors_of(module: nn.Module, values: bool = True) -> dict[str, ModelTensor]:
    """Return the tensors of a module. Without ``values``, nothing is copied from a device, because
    only shapes and types are read.
    """
    items = operator.methodcaller("items") if values else dict.items
    by_identity: dict[int, tuple[str, ModelTensor]] = {}
    modules = [*module.named_modules()]
    for holder in TENSOR_HOLDERS:
        for prefix, owner in modules:
            held = getattr(owner, holder)
            # TorchScript's modules do not use dicts, and those that can be captured have no
            # tensors.
            for name, tensor in items(held) if isinstance(held, dict) else ():
                if tensor is None:
                    continue
                path = f"{prefix}.{name}" if prefix else name
                _, tied = by_identity.setdefault(
                    id(tensor), (path, ModelTensor(tensor, holder == "_parameters"))
                )
                tied.places.append((owner, holder, name))
    return dict(by_identity.values())


def refuse_uninitialized(tensors: Mapping[str, ModelTensor]) -> None:
    """Refuse the weights and buffers of lazy layers that have not run."""
    lazy = [path for path, tied in tensors.items() if is_lazy(tied.tensor)]
    if lazy:
        raise Error(
            "The model has parameters or buffers without a shape",
            got=f"{', '.join(lazy)}: lazy layers initialize them when they run for the first time",
            fix="call the module once without poptorch before you create the optimizer and wrap it",
        )


class _RecordingDict(dict[str, Any]):
    """A copy of a dict that records the user's line of each assignment and removal."""

    def __init__(self, before: dict[str, Any]) -> None:
        super().__init__(before)
        self.before = dict(self)
        self.lines: dict[str, str | None] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        self.lines[name] = source.calling_line()
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self.lines[name] = source.calling_line()
        super().__delitem__(name)


class DictsOfThread:
    """The dicts of parameters and buffers that only the capturing thread sees.

    They start with the user's own tensors. Tensors that ``forward`` assigns are in them when its
    checkpoints run again, and no other thread sees them.
    """

    def __init__(
        self, root: nn.Module, users: nn.Module, places: Mapping[str, ModelTensor]
    ) -> None:
        self._places = places
        self._paths = {part: path for path, part in root.named_modules()}
        self._mine: dict[tuple[nn.Module, str], _RecordingDict] = {}
        by_dict: dict[
            int, _RecordingDict
        ] = {}  # the user's module shares its dicts with the traced one
        for owner in dict.fromkeys((*root.modules(), users)):
            for holder in TENSOR_HOLDERS:
                own = owner.__dict__[holder]
                if isinstance(own, dict):  # TorchScript's are not dicts
                    mine = by_dict.setdefault(id(own), _RecordingDict(own))
                    self._mine[owner, holder] = mine

    def changes(self) -> Iterator[Replacement]:
        for (owner, holder), mine in self._mine.items():
            yield owner, holder, PerThread(owner.__dict__[holder], mine)

    def reassigned(self, traced: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors that were assigned to buffers, by path. Refuse what a program cannot
        follow.

        ``traced``: for each path, a tensor with the shape and type that the program keeps.
        """
        for (owner, holder), mine in self._mine.items():
            for name, tensor in mine.items():
                if tensor is not None and mine.before.get(name) is None:
                    raise self._filled(owner, holder, name, tensor)
        found: dict[str, torch.Tensor] = {}
        for path, tied in self._places.items():
            first, *others = (self._mine[place[:2]].get(place[2]) for place in tied.places)
            if first is tied.tensor and all(other is first for other in others):
                continue
            for place, now in zip(tied.places, (first, *others), strict=True):
                if now is not first or place[1] != "_buffers":
                    raise self._lost(path, place, now)
                if now is None or _kind(now) != _kind(traced[path]):
                    raise self._lost(path, place, now)
                found[path] = now
        return found

    def _lost(self, path: str, place: TensorPlace, now: Any) -> Error:
        owner, holder, name = place
        what = "parameter" if holder == "_parameters" else "buffer"
        verb = "removed from" if now is None else "reassigned within"
        return Error(
            f"{what.capitalize()} '{path}' is {verb} the model",
            got=f"forward of {type(owner).__name__} assigns another value to self.{name}",
            where=self._line(owner, holder, name),
            fix=f"change its values in place: self.{name}.copy_(new_value)",
        )

    def _filled(self, owner: nn.Module, holder: str, name: str, now: torch.Tensor) -> Error:
        path = ".".join(filter(None, (self._paths.get(owner, ""), name)))
        what, known = holder.strip("_")[:-1], name in self._mine[owner, holder].before
        return Error(
            f"forward creates a {what} that the model did not have",
            got=(
                f"{what} '{path}' {'was None' if known else 'did not exist'} before the run "
                f"and is a tensor of shape {tuple(now.shape)} afterwards; the state of a "
                "program is fixed when it is compiled"
            ),
            where=self._line(owner, holder, name),
            fix=(
                "call the module once without poptorch before you wrap it",
                f"or create it in __init__ with its final shape: self.{name} = ...",
            ),
        )

    def _line(self, owner: nn.Module, holder: str, name: str) -> str | None:
        line = self._mine[owner, holder].lines.get(name)
        return line or source.definition_line(type(owner).forward)


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


@contextlib.contextmanager
def replaced(
    root: nn.Module, own: DictsOfThread, user_context: Callable[[], AbstractContextManager[object]]
) -> Iterator[None]:
    """Replace tensors and code within the block. ``again`` makes the context for checkpoints that
    run again in the backward pass.
    """
    over, thread = False, threading.get_ident()

    def checkpointed(
        usual: Callable[..., Any], fn: Callable[..., Any], *rest: Any, **settings: Any
    ) -> Any:
        rules = autocast.rules_in_force()

        def run(*args: Any, **kwargs: Any) -> Any:
            if not over:
                return fn(*args, **kwargs)
            with user_context(), autocast.with_rules(rules):
                return fn(*args, **kwargs)

        chosen = run if threading.get_ident() == thread else fn
        return usual(chosen, *rest, **settings)

    # Reentrant checkpoints start a backward pass inside the captured one.
    newer = staticmethod(by_thread(_newer_checkpoint, CheckpointFunction.apply))
    changes = [
        *own.changes(),
        *_methods(root),
        (CheckpointFunction, "apply", newer),
        # Dynamo cannot compile anything here. What it skips once, it also skips later in eager
        # code.
        (torch, "compile", by_thread(_unchanged, torch.compile)),
        # This would read values.
        (Distribution, "_validate_args", OfThread(False, Distribution._validate_args)),
    ]
    try:
        with changed(changes), _checkpoints(checkpointed), _without_dynamo():
            yield
    finally:
        over = True


@contextlib.contextmanager
def changed(changes: list[Replacement]) -> Iterator[None]:
    before = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in changes]
    try:
        for change in changes:
            _set(*change)
        yield
    finally:
        for change in before:
            _set(*change)


def _set(owner: Any, name: str, value: Any) -> None:
    # Modules have their own ``__setattr__``.
    kind: Any = type(owner) if isinstance(owner, type) else object
    if value is _ABSENT:
        kind.__delattr__(owner, name)
    else:
        kind.__setattr__(owner, name, value)


def _methods(root: nn.Module) -> Iterator[Replacement]:
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
    dtype: Any = layer._flat_weights[0].dtype  # reading a parametrized weight computes it
    type(layer).check_input(layer, x.new_empty(x.shape, dtype=dtype, device="meta"), sizes)


def _averages(norm: nn.Module) -> bool:
    torchs = "forward" not in norm.__dict__ and type(norm).forward is _BATCH_NORM_FORWARD
    return torchs and norm.momentum is None and norm.running_mean is not None


def _averaging_forward(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """Replace a method of torch, which makes a Python number from the count of batches."""
    if not (norm.training and norm.track_running_stats):
        return _BATCH_NORM_FORWARD(norm, x)
    norm._check_input_dim(x)
    # With momentum 1, the running statistics become those of this batch.
    of_batch = torch.zeros_like(norm.running_mean), torch.zeros_like(norm.running_var)
    out = F.batch_norm(x, *of_batch, norm.weight, norm.bias, True, 1.0, norm.eps)
    norm.num_batches_tracked.add_(1)
    wide = torch.promote_types(norm.running_mean.dtype, torch.float32)
    share = 1.0 / norm.num_batches_tracked.to(wide)
    for running, new in zip((norm.running_mean, norm.running_var), of_batch, strict=True):
        running.mul_(1.0 - share).add_(new * share)
    return out


def _unchanged(function: Any = None, **_: Any) -> Any:
    return (lambda later: later) if function is None else function


def _newer_checkpoint(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """Use a non-reentrant checkpoint. A reentrant one warns, and trains nothing inside if no
    argument has a gradient.
    """
    if not any(isinstance(each, torch.Tensor) and each.requires_grad for each in args):
        check_backward_validity(args)
        with torch.no_grad():
            return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


@contextlib.contextmanager
def _checkpoints(replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace checkpoints. Without a replacement, recomputation would use the host's weights, so it
    is an error.
    """
    replacements = {"checkpoint_without_reentrant_generator_impl": replacement}
    with private.replacing(replacements) as replaced_names, contextlib.ExitStack() as stack:
        if not replaced_names:
            refused = f"With torch {torch.__version__} {private.CHECKPOINTS}"
            stack.enter_context(torch.autograd.graph.disable_saved_tensors_hooks(refused))
        yield


@contextlib.contextmanager
def _without_dynamo() -> Iterator[None]:
    loaded = {"torch._dynamo", "torch.nn.attention.flex_attention"} & sys.modules.keys()
    if not loaded:  # nothing was compiled
        yield
        return
    with contextlib.ExitStack() as stack:
        if "torch._dynamo" in loaded:
            stack.enter_context(private.settings({"error_on_nested_fx_trace": False}))
        stack.enter_context(warnings.catch_warnings())
        # Hooks that are called for all modules are called for the wrapper, too, which does no harm.
        warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when there are global")
        # Here it is compiled with the rest of the program.
        warnings.filterwarnings("ignore", r"flex_attention called without torch.compile")
        yield

"""Prepare the user's model for capturing (``Task``), and follow its training mode."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ... import _capture, _compile
from ..._base import log, private
from ..._base.errors import Error
from ..._data import loader_warnings
from ..._ir import slots
from ..._ir.slots import Slot, narrowed
from ..._ir.spec import OptimSpec, Spec
from ..calls import BoundArguments, Inputs, Share, Signature
from ..host_changes import ModuleAttributes
from .model_tensors import Grouping, GroupingRequest, ModelTensors

TrainingFlags = tuple[bool, ...]  # for each module, whether it is in training mode
# which layers train, and the type of an autocast around the call
CallMode = tuple[TrainingFlags, torch.dtype | None]
Paths = Mapping[int, str]
Freeze = Callable[[Paths, Spec], tuple[OptimSpec, dict[str, float]]]
_training = operator.attrgetter("training")
_own_training = operator.itemgetter("training")


@dataclass(frozen=True, eq=False)
class Task:
    spec: Spec
    reading: ModelTensors
    inputs: Inputs
    optim: OptimSpec | None  # None in inference
    hypers: Mapping[str, float]  # values that the optimizer leaves variable
    request: _capture.Request
    attributes: ModuleAttributes  # attributes of the modules, which become constants
    share: Share | None = None  # the share of a shorter batch that the arguments are, if any
    remainder: _compile.Remainder | None = None  # the micro-batches of such a share, to capture


class Model:
    """The user's model, and a shallow copy with the same tensors and layers, which is traced.

    ``entry`` is called with the user's arguments while tracing; None means the module itself. The
    copy has its own ``training`` flag: for training it follows the user's ``train()``, and for
    inference the user's ``eval()``. All layers below are the user's layers.
    """

    def __init__(
        self, module: nn.Module, users: nn.Module, entry: Callable[..., Any] | None, trained: bool
    ) -> None:
        self.module, self.users = module, users
        self.freeze: Freeze | None = None  # in training, reads the optimizer
        self.wrapped_forward = users.__dict__.get("forward")
        self.signature = Signature(entry or module.forward, type(module).__name__)
        self.groupings: dict[str, GroupingRequest] = {}
        self._entry = entry
        self._trained, self._has_warned = trained, False
        # torch's public function looks up the device by its name
        self._may_cast: Callable[[], bool] = private.optional("is_any_autocast_enabled") or _casts
        self._use_modules(list(module.modules()))
        self._flags = self._read_flags()
        # what train() of the user's model leaves, and the modes that are compiled
        self._after_train = self._flags[2:] if users.training else ()
        self._mode = self._flags[1:]

    def _use_modules(self, modules: list[nn.Module]) -> None:
        self._modules, every = modules, [self.users, *modules]
        owns = list(map(vars, every))  # looking these up takes two thirds of the time
        are_there = all("training" in own for own in owns)  # not the case for TorchScript modules
        read = (_own_training, owns) if are_there else (_training, every)
        self._flags_now: Callable[[], Iterator[bool]] = functools.partial(map, *read)

    def _read_flags(self) -> TrainingFlags:
        return tuple(self._flags_now())

    def follow_mode(self) -> CallMode:
        """Return the conditions for which separate programs are compiled."""
        self.observe_mode()
        if self._trained and not (self.users.training or self._has_warned or any(self._mode[1:])):
            self._has_warned = True
            log.python.warning(
                "All layers of a model are in eval mode during training, including dropout "
                "and batch norms. If you did not intend this, call train() on the model"
            )
        return self._mode, _autocast()

    def observe_mode(self) -> None:
        """Follow the mode that the user has set on the module, on the executor or on a layer.

        The outermost module of a training model stays in training mode, because the loss is
        computed there. The layers of an inference model belong to the user's model, too. If they
        are in training mode because the user's model is, an inference model in evaluation mode
        keeps its earlier mode.
        """
        flags = self._read_flags()
        if flags == self._flags:
            return
        users, switched = flags[0], flags[0] != self._flags[0]
        if switched and users is self._trained:
            self.module.training = users
            flags = (users, users, *flags[2:])
        if switched and users:
            self._after_train = flags[2:]
        now, before = flags[1:], self._flags[1:]
        if now[0] != before[0] or not self._keeps_mode():
            self._mode = now
        else:
            by_users = switched or self._is_left_by_train(now[1:])
            self._mode = tuple(
                kept if flag is earlier or (flag and by_users) else flag
                for kept, earlier, flag in zip(self._mode, before, now, strict=True)
            )
        self._flags = flags

    def _is_left_by_train(self, layers: TrainingFlags) -> bool:
        """Return whether ``train()`` of the user's model leaves its layers like this: all of them
        in training mode, unless a class has its own ``train()``.
        """
        if all(layers):
            return True
        has_own = any(type(each).train is not nn.Module.train for each in self._modules)
        return has_own and layers == self._after_train

    def is_still(self, before: CallMode) -> bool:
        """Return whether nothing has changed since ``follow_mode()`` returned this.

        This is faster than finding out the mode.
        """
        mode, dtype = before
        return (
            tuple(self._flags_now()) == self._flags
            and mode == self._mode
            and (_autocast() if self._may_cast() else None) is dtype
        )

    def _keeps_mode(self) -> bool:
        return not self._trained and self.users.training and not self.module.training

    @contextlib.contextmanager
    def in_mode(self) -> Iterator[None]:
        """Capture in this context. If the mode is kept, it changes layers back that are in training
        mode now.
        """
        if not self._keeps_mode():
            yield
            return
        set_by_user = self._read_flags()[1:]
        self._set_training(self._mode)
        try:
            yield
        finally:
            self._set_training(set_by_user)

    def _set_training(self, mode: TrainingFlags) -> None:
        for module, training in zip(self._modules, mode, strict=True):
            module.training = training

    def task(
        self,
        bound: BoundArguments,
        spec: Spec,
        placeholders: bool = False,
        share: Share | None = None,
        symbols: Mapping[tuple[int, int], str] = MappingProxyType({}),
    ) -> Task:
        """Return the task of compiling for these arguments.

        ``spec`` is for a complete batch. ``share`` says which part of a shorter batch the arguments
        are, if they are one. ``symbols``: see ``Inputs``.
        """
        replicas, spec = spec.loops.replicas, spec if share is None else share.spec(spec)
        if self.groupings and spec.loops.replicas < replicas:
            raise Error(
                "Replicas with different weights do not allow a shorter batch",
                got=f"replicaGrouping of {', '.join(self.groupings)}, {replicas} replicas",
                fix="pass as many rows as in the first call",
            )
        self._find_modules()
        self.follow_mode()
        inputs = Inputs(
            bound, self.signature, spec, placeholders, quiet=share is not None, symbols=symbols
        )
        if self._trained and share is None:
            loader_warnings.other_counts(bound.tensors, spec.loops)
        reading = self._read(spec)
        optim, hypers = (None, {}) if self.freeze is None else self.freeze(reading.paths, spec)
        request, remainder = self._request(reading, inputs, spec, optim), None
        if share is not None and not share.updates:
            remainder = self._remainder(share, inputs, replicas, reading, spec, optim)
        attributes = ModuleAttributes(self.module, self.users, self._trained, bound.constants)
        return Task(spec, reading, inputs, optim, hypers, request, attributes, share, remainder)

    def _find_modules(self) -> None:
        """Read the modes of the layers that the model has now. New ones are used in their mode."""
        earlier = self._mode, self._flags[1:]
        modes, seen = (dict(zip(map(id, self._modules), each, strict=True)) for each in earlier)
        self._use_modules(list(self.module.modules()))
        self._mode = tuple(modes.get(id(each), each.training) for each in self._modules)
        flags = (seen.get(id(each), each.training) for each in self._modules)
        self._flags = (self._flags[0], *flags)

    def _remainder(
        self,
        share: Share,
        inputs: Inputs,
        replicas: int,
        reading: ModelTensors,
        spec: Spec,
        optim: OptimSpec | None,
    ) -> _compile.Remainder:
        requests, counts = [], []
        for part, count in share.parts(inputs.bound):
            cut = replace(spec, loops=replace(spec.loops, accumulation=count))
            own = Inputs(part, self.signature, cut, quiet=True)
            request = self._request(reading, own, spec, optim)
            requests.append(replace(request, replicas=replicas))  # which may exchange tensors
            counts.append(count)
        return _compile.Remainder(tuple(requests), tuple(counts), replicas)

    def _read(self, spec: Spec) -> ModelTensors:
        tensors = _capture.tensors_of(self.module)
        groups = {}
        for path, asked in self.groupings.items():
            grouping = asked.resolve(path, tensors[path].tensor, spec.loops.all_replicas)
            if grouping is not None:
                groups[path] = grouping
        buffers = {path for path, tied in tensors.items() if not tied.is_parameter}
        unknown = sorted(set(spec.updatable_buffers) - buffers)
        if unknown:
            raise Error(
                "updatableNamedBuffers names a buffer that the model does not have",
                got=", ".join(unknown),
                fix=(
                    "use the name of a buffer of the model: "
                    f"{', '.join(sorted(buffers)) or 'it has none'}"
                ),
            )
        return ModelTensors(self.module, tensors, groups)

    def _request(
        self, reading: ModelTensors, inputs: Inputs, spec: Spec, optim: OptimSpec | None
    ) -> _capture.Request:
        _capture.refuse_uninitialized(reading.tensors)
        state = tuple(
            _state_slot(path, tied, spec.precision.narrow_64bit, reading.groups.get(path))
            for path, tied in reading.tensors.items()
        )
        trained: frozenset[str] = frozenset()
        scaling: tuple[float | Slot, ...] = ()
        if optim is not None:
            trained = frozenset(path for group in optim.groups for path in group.params)
            half = any(s.dtype == torch.float16 and s.weight in trained for s in state)
            automatic = spec.reduction.automatic_loss_scaling
            if automatic and not half:
                log.python.warning(
                    "Training.setAutomaticLossScaling has no effect: it observes the "
                    "gradients of float16 weights, and the model trains no float16 weights"
                )
            scaling = _loss_scaling(optim, half and automatic)
        bound = inputs.bound
        return _capture.Request(
            module=self.module,
            users=self.users,
            call=self.signature.caller(self._entry or self.module.__call__, bound),
            tensors=reading.tensors,
            state=state,
            batch=inputs.slots(),
            trained=trained,
            training=optim is not None,
            loss_scaling=scaling,
            precision=spec.precision,
            replicas=spec.loops.replicas,
            processes=spec.loops.processes,
            anchors=spec.inner_anchors,
            module_scopes=spec.module_scopes,
            grouped={path: grouping.of_replica for path, grouping in reading.groups.items()},
            arguments=dict(bound.parts),
            examples=inputs.first_micro_batch,
            sample=inputs.sample,
            casts=_autocast(),
        )


def _casts() -> bool:
    return torch.is_autocast_enabled("cpu")


def _autocast() -> torch.dtype | None:
    return torch.get_autocast_dtype("cpu") if _casts() else None


def _state_slot(
    path: str, tied: _capture.ModelTensor, narrow: bool, grouped: Grouping | None
) -> Slot:
    dtype = tied.tensor.dtype
    if narrow and dtype.is_floating_point:
        dtype = narrowed(dtype)
    shape = tuple(tied.tensor.shape)
    if grouped is not None:
        shape = (grouped.groups, *shape[1:])
    return (slots.param if tied.is_parameter else slots.buffer)(path, shape, dtype)


def _loss_scaling(optim: OptimSpec, automatic: bool) -> tuple[float | Slot, ...]:
    factor = (slots.LOSS_SCALE_FACTOR,) if automatic else ()
    if slots.LOSS_SCALING.name in optim.variables:
        return (slots.LOSS_SCALING, *factor)
    value = dict(optim.settings).get("loss_scaling", 1.0)
    assert isinstance(value, float)
    return (value, *factor)

"""Manage the optimizer of a session: reads it when it is wrapped or replaced, compiles it, and
moves its state between device and host.

Hyper-parameters are read only when the user passes an optimizer. To change them, the user calls
``setOptimizer``.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ... import optim
from ..._base import log
from ..._base.errors import Error
from ..._base.user_modes import without_user_modes
from ..._compile import agreement
from ..._eager import EagerOptimizer
from ..._ir.slots import narrowed, unchanged
from ..._ir.spec import OptimSpec, Spec
from ..._ir.traced_step import StepHooks
from ..._residency import Lock
from ..._update import discover
from ...enums import ReductionType
from ...optim.freeze_optimizer import freeze, path_of
from ...optim.joint import Joint, class_of, members_of
from ...optim.names import from_ipu_param, from_ipu_state, state_keys, to_ipu_param, to_ipu_state
from ...optim.replacement import AttributeWatch, check_replacement, needs_running_mean
from ...optim.step_hooks import note_hooks, present_hooks
from ..host_changes import shorten
from ..programs import Paths, Task
from ..weights import StateStore
from .torch_state import NAMES, TorchState
from .traced_state import TracedState
from .unfollowed_changes import OptimizerChangeChecks, warn_of_steps

_attached: weakref.WeakSet[SessionOptimizer] = weakref.WeakSet()


class SessionOptimizer:
    """The user's present optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, lock: Lock) -> None:
        self.lock = lock
        self._hooks = _hooks_of(optimizer)
        self._snapshot = _snapshot(optimizer, self._hooks)
        self._state = _state_of(optimizer, self._snapshot)  # errors are reported immediately
        self.given, self._members = optimizer, members_of(optimizer)
        self.spec: OptimSpec | None = None  # the compiled form
        # whether the user's optimizer has another structure than the compiled one
        self.outdated = False
        # whether hyper-parameters changed since the processes of a job compared them
        self._untold = False
        self._loaded: dict[str, str] = {}  # digests of state that was loaded since then
        self._watch = AttributeWatch(optimizer)
        self.change_checks = OptimizerChangeChecks(optimizer, self._matters)
        warn_of_steps(optimizer)
        self._asked: dict[str, float] = {}
        self._values: dict[str, float] = {}
        self.paths: Paths = {}
        # parameters with a different value in each group of replicas
        self._grouped: Collection[str] = ()
        self._settings: Spec | None = None
        self._store: StateStore | None = None
        self._kept: Mapping[str, torch.Tensor] = {}

    @property
    def needs_running_mean(self) -> bool:
        return needs_running_mean(freeze(self._snapshot, {})[0])

    def frozen(self, paths: Paths, spec: Spec) -> tuple[OptimSpec, dict[str, float]]:
        """Return the form to compile, from the hyper-parameters that were read before."""
        state = self._state
        if self.spec is None and isinstance(state, TorchState) and state.was_loaded:
            # a loaded state includes hyper-parameters
            self._snapshot = _snapshot(self.given, self._hooks)
            self.change_checks.expect()
        _check_membership(self._snapshot, paths)
        frozen, values = self._frozen(self._snapshot, paths, spec, self.spec)
        if frozen.traced is None:
            return frozen, values
        narrow = narrowed if spec.precision.narrow_64bit else unchanged
        frozen = discover(frozen, narrow)
        return self._frozen(self._snapshot, paths, spec, frozen)

    def _frozen(
        self, snapshot: Any, paths: Paths, spec: Spec, like: OptimSpec | None = None
    ) -> tuple[OptimSpec, dict[str, float]]:
        """Return the immutable form. With ``like``, the same values are constants and variables."""
        automatic = spec.reduction.automatic_loss_scaling
        return freeze(snapshot, paths, automatic_loss_scaling=automatic, compiled=like)

    def in_eager(self, hypers: Mapping[str, float]) -> EagerOptimizer | None:
        """Return the optimizer that eager PyTorch would step, or None if there is none.

        The classes of ``poptorch.optim`` only update in programs.
        """
        given = self._snapshot
        if isinstance(given, optim.Optimizer) or len(members_of(self.given)) > 1:
            return None
        kinds = {each.algorithm: each.moments for each in optim.KINDS}
        names = {
            kinds[algorithm][prefix]: torchs
            for algorithm, by_prefix in NAMES.items()
            if type(given).__name__.lower() == algorithm
            for prefix, torchs in by_prefix.items()
        }
        return EagerOptimizer(given, hypers, names)

    def compiled(self, task: Task) -> None:
        self.spec, self._asked, self._values = task.optim, dict(task.hypers), dict(task.hypers)
        self.outdated = False
        self.paths, self._settings = task.reading.paths, task.spec
        self._grouped = task.reading.groups.keys()
        traced = None if task.optim is None else task.optim.traced
        self._watch.expect(kept.leaf.name for kept in (traced.kept or () if traced else ()))

    def adopt(self, optimizer: torch.optim.Optimizer, paths: Paths, relaxed: bool = False) -> None:
        """Use another optimizer, or the same one with other values."""
        hooks = self._hooks if optimizer is self.given else _hooks_of(optimizer)
        snapshot, spec = _snapshot(optimizer, hooks), self._settings
        if self.spec is None or spec is None:
            freeze(snapshot, {})
        else:
            new, asked = self._frozen(snapshot, paths, spec, self.spec)
            is_torchs = not isinstance(optimizer, optim.Optimizer)
            averages = spec.reduction.type == ReductionType.Mean
            strategy = spec.reduction.strategy if averages else None
            self.outdated = check_replacement(self.spec, new, strategy, is_torchs)
            self._untold |= self.outdated or asked != self._asked
            if asked != self._asked and not self.outdated:
                self._asked, self._values = asked, dict(asked)
                if self._store is not None:
                    self._store.write_hypers(asked)
        self._watch.check(optimizer, relaxed)
        self._snapshot, self._hooks = snapshot, hooks
        if self.spec is not None:
            self.paths = paths
        if optimizer is self.given:
            self.change_checks.expect()
        else:
            self.change_checks = OptimizerChangeChecks(optimizer, self._matters)
            warn_of_steps(optimizer)
            self._replace(optimizer)

    def _matters(self) -> bool:
        """Return whether the user's optimizer now means another update, or has other numbers."""
        if self.spec is None or self._settings is None:
            return True
        try:
            snapshot = _snapshot(self.given, self._hooks)
            spec, asked = self._frozen(snapshot, self.paths, self._settings, self.spec)
        except (Error, AttributeError):  # setOptimizer reports what is wrong
            return True
        return (spec, asked) != (self.spec, self._asked)

    def _replace(self, optimizer: torch.optim.Optimizer) -> None:
        self._state._detach_device()
        self.given, self._members = optimizer, members_of(optimizer)
        self._state = _state_of(optimizer, self._snapshot)
        if self._store is None:
            return
        self._state._attach_device(self)
        if self._state.has_state():
            self._upload(with_values=False)  # the values were already read
            self._note_loaded()
            return
        # to change values of a torch optimizer, scripts create a new one
        if isinstance(optimizer, optim.Optimizer):
            self._store.reset_optimizer_state()
            self._note_loaded()
        self._state.host_state_is_dirty = True

    # On the device.

    def attach(self, store: StateStore, restored: bool) -> None:
        """Write hyper-parameters, and state that was loaded into the optimizer, to a device.

        With ``restored``, the store already contains the state from when the device was detached.
        """
        self._store = store
        self._warn_of_common_weights()
        self._state._attach_device(self)
        state, is_ours = self._state, isinstance(self.given, optim.Optimizer)
        was_loaded = state.ipu_state_is_dirty
        if was_loaded or (state.has_state() and not restored):
            self._upload(with_values=was_loaded)
            if was_loaded and store.agreed:
                self._note_loaded()
        elif not state.has_state() and (is_ours or restored):
            state.host_state_is_dirty = True
        store.write_hypers(self._values)

    def _warn_of_common_weights(self) -> None:
        """Warn that another model has separate moments for the same optimizer.

        With a torch optimizer, the moments go from one device to another when the first one is
        detached.
        """
        ours = isinstance(self.given, optim.Optimizer)
        for other in _attached:
            if other is self or {*members_of(other.given)}.isdisjoint(members_of(self.given)):
                continue
            common = not self.paths.keys().isdisjoint(other.paths)
            if other.spec is not None if ours else other._store is not None and common:
                log.python.warning(
                    "Another training model already uses this optimizer. Each model keeps "
                    "its own moments, and state_dict() returns those of only one model. "
                    "Create one optimizer for each model, or call destroy() on the other "
                    "model first"
                )
                break
        _attached.add(self)

    def detach(
        self, local_only: bool = False, kept: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Read the state from a device that is about to be detached. With ``local_only``, skip
        shared state.

        ``kept``: state that stays in memory. The optimizer uses these tensors instead of copies.
        """
        if self._store is None:
            return
        state = self._state
        if local_only and self._store.layout.is_in_parts and state.host_state_is_dirty:
            log.python.info(
                "The optimizer state is divided among the processes and is not collected"
            )
            state.host_state_is_dirty = False
        self._kept = kept or {}
        # the device was collected, and its state already removed
        if state._device is not None and state._link is None:
            state._attach_device(self)
        state._detach_device()
        self._store, self._kept = None, {}

    def release(self) -> None:
        """Forget a device that could not be attached, because there is nothing to read."""
        self._store, self._state._device = None, None

    def read(self) -> None:
        """Update the user's optimizer from the device. If processes have parts of the state, all
        must call this.
        """
        if self._store is not None:
            self._state._synchronise()

    def forget(self) -> None:
        """Forget the program and the device without reading from it."""
        self.spec = self._settings = self._store = None
        state = self._state
        state.host_state_is_dirty = False
        state._detach_device()
        if isinstance(state, optim.Optimizer):
            # keep the cached state for the next device
            state.set_state_dict(state.get_state_dict())

    def is_settled(self) -> bool:
        """Return whether ``prepare_run`` would do nothing."""
        return self._state._is_settled() and not (self.outdated or self._untold)

    def prepare_run(self) -> bool:
        """Write state to the device that was loaded since the last run. Return whether another
        program is needed.
        """
        self._take_loaded()
        if self._untold and self._settings is not None and self._settings.runs_together:
            agreement.check_numbers(self._values, self._loaded, self.outdated)
        self._untold, self._loaded = False, {}
        return self.outdated

    def _take_loaded(self) -> None:
        if self._state.ipu_state_is_dirty:
            before = self._values
            with without_user_modes():
                self._upload(with_values=True)
                self._note_loaded()
            self._untold |= self._values != before
        else:
            self._state._warn_of_lost_edits()

    def count_steps(self) -> Mapping[str, float]:
        """Return the number of steps of each weight, by path, for a run that continues
        elsewhere.
        """
        return self._state.count() if isinstance(self._state, TorchState) else {}

    def begin_at(self, steps: Mapping[str, float]) -> None:
        """Continue counting from what ``count_steps`` returned."""
        if isinstance(self._state, TorchState):
            self._state.steps = steps

    def before_save(self, kept: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Use the state that was loaded since the last call. Return the state to save, detached."""
        if self._store is not None:
            self._take_loaded()
        elif self.spec is not None and self._state.ipu_state_is_dirty:
            loaded = self._state.get_state_dict()["ipu_state"] or {}
            kept = {**kept, **from_ipu_state(self.spec, kept, loaded)}
        return kept

    def _note_loaded(self) -> None:
        """Record that state was written, because it must be the same in all processes of a job."""
        if self._settings is not None and self._settings.runs_together:
            self._untold = True
            state = self._state.get_state_dict()["ipu_state"] or {}
            traced = tuple(f"___{path}" for path in self._grouped)
            common = {name: value for name, value in state.items() if not name.endswith(traced)}
            self._loaded = agreement.digests(common)

    def after_run(self, updates: int) -> None:
        self._state._ran(updates)
        if self._state.writes_numbers:
            # values that the step itself changes in groups are not changed settings
            self._state._synchronise()
            self.change_checks.expect()
        # Torch's schedulers warn if no step was made, but the device has made the steps.
        for each in self._members:
            each._opt_called = True  # type: ignore[attr-defined]

    def _upload(self, with_values: bool) -> None:
        assert self._store is not None
        assert self.spec is not None
        state = self._state
        if isinstance(state, TorchState) and state.was_loaded:
            self.adopt(self.given, self.paths)
        cached = state.get_state_dict()
        if isinstance(state, optim.Optimizer):
            cached["ipu_state"] = state._state_of_present_weights(self)
        loaded = from_ipu_state(self.spec, self._store.shapes(), cached["ipu_state"])
        if with_values:
            self._values = from_ipu_param(self.spec, self._values, cached["ipu_param"])
            self._store.write_hypers(self._values)
            self.change_checks.expect()
        log.engine.debug("Writing optimiser state tensors from host to IPU memory")
        for key, value in loaded.items():
            self._store.write(key, value)
        state.ipu_state_is_dirty = False
        state.host_state_is_dirty = True  # merged with state that was not loaded

    def names(self) -> list[str]:
        """Return the names of hyper-parameters and state on the device."""
        assert self.spec is not None
        return [*to_ipu_param(self.spec, self._values), *state_keys(self.spec)]

    def read_state(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return ``ipu_state`` and ``ipu_param`` as host tensors, for ``state_dict()``."""
        assert self._store is not None
        assert self.spec is not None
        log.engine.debug("Writing optimiser state tensors from IPU to host")
        tensors = {**self._store.readable(), **self._kept}
        state = to_ipu_state(self.spec, tensors, self._kept)
        return state, to_ipu_param(self.spec, self._values)


def _check_membership(optimizer: Any, paths: Paths) -> None:
    strangers, count = [], 0
    for index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [""] * len(group["params"])
        for place, (name, parameter) in enumerate(zip(names, group["params"], strict=True)):
            count += 1
            if path_of(parameter, paths) is None:
                what = f"'{name}'" if name else f"number {place} of group {index}"
                strangers.append(f"{what}, shape {tuple(parameter.shape)}")
    if not strangers:
        return
    if len(strangers) == count:
        raise Error(
            "None of the optimizer's parameters belongs to the model",
            got=f"{count} parameters: {shorten(strangers)}",
            fix="create the optimizer from model.parameters() of the model that you wrap",
        )
    log.python.warning(
        f"{len(strangers)} of the optimizer's {count} parameters do not belong to the model and "
        f"are not trained: {shorten(strangers)}"
    )


def _state_of(optimizer: torch.optim.Optimizer, snapshot: Any) -> optim.Optimizer | TorchState:
    frozen, _ = freeze(snapshot, {})
    if isinstance(optimizer, optim.Optimizer):
        return optimizer
    if frozen.traced is not None:
        return TracedState(members_of(optimizer))
    algorithm = frozen.algorithm
    return TorchState(members_of(optimizer), NAMES[algorithm], counted=algorithm != "sgd")


def _hooks_of(optimizer: Any) -> list[StepHooks]:
    """Return the hooks of each optimizer that the user passed."""
    if not issubclass(class_of(optimizer), torch.optim.Optimizer):
        return []  # code that reads it will refuse it
    return [present_hooks(each) for each in members_of(optimizer)]


def _snapshot(optimizer: torch.optim.Optimizer, hooks: Sequence[StepHooks]) -> Any:
    """Return a copy that can be read like the optimizer and does not follow its changes.

    The parameters are shared. Compiling decides which of them are trained.
    """
    if not issubclass(class_of(optimizer), torch.optim.Optimizer):
        return optimizer  # code that reads it will refuse it
    copies = [_copied(*each) for each in zip(members_of(optimizer), hooks, strict=True)]
    return copies[0] if len(copies) == 1 else Joint(copies)


def _copied(optimizer: torch.optim.Optimizer, hooks: StepHooks) -> Any:
    snapshot_copy: Any = type(optimizer).__new__(type(optimizer))
    copied: dict[int, Any] = {}  # by the identity of what was copied: one tensor stays one
    snapshot_copy.param_groups = [
        {
            name: value if name == "params" else copy.deepcopy(value, copied)
            for name, value in group.items()
        }
        for group in optimizer.param_groups
    ]
    attributes = {name: copied.get(id(v), v) for name, v in vars(optimizer).items()}
    snapshot_copy.__dict__.update(attributes | {"param_groups": snapshot_copy.param_groups})
    note_hooks(snapshot_copy, hooks)
    if isinstance(optimizer, optim.Optimizer):
        snapshot_copy.variable_attrs = copy.deepcopy(optimizer.variable_attrs)
    return snapshot_copy

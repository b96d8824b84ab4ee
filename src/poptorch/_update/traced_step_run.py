"""Run an optimizer's own ``step`` once, on given tensors.

The step gets an object of the user's class that was not initialised. Its groups contain
placeholders for the parameters, and its state is what was kept from the last step. The user's own
object does not change.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._base import private
from .._base.errors import Error, composed
from .._base.source import raising_line
from .._ir.state_views import WEIGHT, StatePlace, Views, views_among
from .._ir.traced_step import (
    Leaf,
    TracedGroup,
    TracedOptimizer,
    TracedParam,
    TracedStep,
    flat,
    of_group,
    of_optimizer,
    structures,
    substituted,
)
from .absent_gradients import Absent
from .absent_gradients import enter as enter_absent
from .hook_calls import call_step, unhooked_step
from .step_value_reads import ValueNeeded, value_needed
from .step_values import is_number, unobserved
from .traced_numbers import TracedNumber, seen_by_steps, tensor_of
from .value_origins import Identifier, Origins

_CONTAINERS = (dict, list, tuple, collections.deque)


@dataclass
class StepTensors:
    """The tensors of one run, which may change them."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[StatePlace, Tensor] = field(default_factory=dict)
    hypers: dict[StatePlace, Tensor] = field(default_factory=dict)
    origins: Origins | None = None  # records how values are computed
    hosts: dict[int, Tensor] = field(default_factory=dict)  # filled by the run

    def share_memory(self, views: Views) -> None:
        """Let the state share memory as it did after the last step."""
        for place, view in views.items():
            if place not in self.kept:
                continue
            owner, name = view.root
            root = self.kept.get(view.root, self.hypers.get(view.root))
            if name == WEIGHT and owner in self.weights:
                root = self.weights[owner].detach()  # what a run gets itself becomes a parameter
            if root is None or view.is_scattered:
                raise _shared(place, view.root, is_separate=root is None)
            self.kept[place] = view.of(root)


def _shared(place: StatePlace, root: StatePlace, is_separate: bool) -> Error:
    owner, name = root
    why = "is updated separately" if is_separate else "has some of its elements"
    other = f"the state '{name}' of '{owner}'" if name != WEIGHT else f"the weight '{owner}'"
    return Error(
        "The optimizer's state shares memory in a way that cannot be compiled",
        got=f"the state '{place[1]}' of '{place[0]}' is a part of {other}, which {why}",
        fix="store a tensor with its own memory: state['name'] = tensor.clone()",
    )


def several_elements(leaf: Leaf) -> Error:
    return Error(
        "The optimizer has a tensor with several elements that is not the state of a parameter",
        got=f"{leaf.name}, of shape {leaf.shape}",
        fix="store the tensor in the state of a parameter: optimizer.state[parameter]",
    )


class _Entry(dict[Any, Any]):
    """The state of a weight that its first step fills. It records what the step stores."""

    def __init__(self, note: Callable[[str, Any], Any]) -> None:
        super().__init__()
        self._note = note

    def __setitem__(self, key: Any, value: Any) -> None:
        if key not in self:
            value = substituted(value, str(key), self._noted)
        super().__setitem__(key, value)

    def _noted(self, name: str, value: Any) -> Any:
        return seen_by_steps(self._note(name, tensor_of(value)))

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **named: Any) -> None:
        for key, value in dict(*args, **named).items():
            self[key] = value


class _States(collections.defaultdict[Any, Any]):
    """``optimizer.state`` during a run. A dict that is stored in it becomes an entry that
    records.
    """

    def __init__(self, make: Callable[[Any], dict[Any, Any]], hosts: Mapping[int, Tensor]) -> None:
        super().__init__(dict)
        self._make, self._hosts = make, hosts

    def __missing__(self, key: Any) -> Any:
        if id(key) in self._hosts:
            return self[self._hosts[id(key)]]
        made = self._make(key)
        super().__setitem__(key, made)
        return made

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(self._hosts.get(id(key), key))

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self._hosts.get(id(key), key), default)

    def __setitem__(self, key: Any, value: Any) -> None:
        key = self._hosts.get(id(key), key)
        entry = self._make(key)
        entry.update(value)
        super().__setitem__(key, entry)


class _RecordingGroup(dict[Any, Any]):
    """A parameter group during a run, which records what is read."""

    def __init__(self, values: Mapping[Any, Any], note: Callable[[Any], None]) -> None:
        super().__init__(values)
        self._note = note

    def __getitem__(self, key: Any) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._note(key)
        return super().get(key, default)

    def items(self) -> Any:
        self._note_all()
        return super().items()

    def values(self) -> Any:
        self._note_all()
        return super().values()

    def keys(self) -> Any:
        self._note_all()
        return super().keys()

    def _note_all(self) -> None:
        for key in self:
            self._note(key)


class StepRun:
    """One run of the step on given tensors."""

    def __init__(
        self,
        traced: TracedStep,
        inputs: StepTensors,
        first: bool,
        put: Callable[[str, str, Any], Any] | None = None,
        read: Callable[[int, str], None] | None = None,
    ) -> None:
        """Prepare a run.

        Args:
            put: returns what is kept for a value that the first step stores in the state of a
                weight.
            read: called with what the step reads from groups.
        """
        self._own, self._inputs, self._first = traced, inputs, first
        self._put, self._read = put, read
        self.traced_params: dict[str, Tensor] = {}
        self.absent: list[Absent] = []
        self._paths: dict[int, str] = {}
        self._hosts = inputs.hosts  # traced parameters by the id of the user's tensor
        self._hosts.clear()
        self.groups: list[_RecordingGroup] = []
        self.objects: list[Any] = []
        self.given: dict[str, dict[str, Any]] = {}
        self.structures: dict[str, dict[str, str]] = {}  # structures of the given values
        self.before: dict[StatePlace, Identifier] = {}

    def step(self) -> None:
        with unobserved():
            made = [[*map(self._traced_param, group.params)] for group in self._own.groups]
        for at, group in enumerate(self._own.groups):
            self.groups.append(self._group(at, group, made[at]))
        for number, optimizer in enumerate(self._own.optimizers):
            self.objects.append(self._object(number, optimizer))
        self._note_given()
        for each, optimizer in zip(self.objects, self._own.optimizers, strict=True):
            with _explained(each), _as_written():
                call_step(each, optimizer.hooks, unhooked_step(each))

    def _group(self, at: int, group: TracedGroup, params: list[Tensor]) -> _RecordingGroup:
        owner = of_group(at)
        values = {
            name: substituted(value, name, functools.partial(self._given, owner))
            for name, value in group.values.items()
        }
        values = {name: self._with_traced_params(value) for name, value in values.items()}
        values |= self._added(owner, values)
        self._note_contents(owner, values)
        values["params"] = params
        names = [param.name for param in group.params]
        if any(name is not None for name in names):
            values["param_names"] = names
        return _RecordingGroup(values, lambda key: self._read(at, str(key)) if self._read else None)

    def _note_contents(self, owner: str, values: dict[str, Any]) -> None:
        self.given[owner] = _copied(values)
        self.structures[owner] = structures(values)

    def _added(self, owner: str, values: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return what an earlier step has stored there."""
        kept = self._inputs.kept.items()
        return {
            name: seen_by_steps(value)
            for (traced, name), value in kept
            if traced == owner and name not in flat(values)
        }

    def _given(self, owner: str, name: str, value: Any) -> Any:
        place = owner, name
        inputs = self._inputs
        known = inputs.kept.get(place)
        known = inputs.hypers.get(place) if known is None else known
        if known is not None or not isinstance(value, Leaf):
            return value if known is None else seen_by_steps(known)
        number = self._own.numbers.get(place)
        if number is None:
            raise several_elements(value)
        if not value.number:
            return torch.full(value.shape, number, dtype=value.dtype)
        return int(number) if value.number == "int" else number

    def _traced_param(self, param: TracedParam) -> Tensor:
        value = self._inputs.weights.get(param.path) if param.path else None
        if value is None:
            value = torch.empty(param.shape, dtype=param.dtype)
        made = _as_parameter(value, param.requires_grad)
        made.__dict__.update(
            {k: v for k, v in param.attributes.items() if not isinstance(v, Tensor)}
        )
        if param.path in self._inputs.gradients:
            made.grad = self._inputs.gradients[param.path]
            self.traced_params[param.path] = made
        if param.path not in self._inputs.weights and self._inputs.origins is not None:
            self.absent.append(enter_absent(self._inputs.origins, made, param.path))
        self._paths[id(made)] = param.path
        if param.identity:
            self._hosts[param.identity] = made
        return made

    def _note_given(self) -> None:
        """Record how tensors of groups and optimizers are computed before the step."""
        origins = self._inputs.origins
        if origins is not None:
            self.before = {
                (owner, name): origins.identifier(value)
                for owner, values in self.given.items()
                for name, value in flat(values).items()
                if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
            }

    def _with_traced_params(self, value: Any) -> Any:
        """Return nested values in which traced parameters, and their ``id``, replace the user's
        parameters, and the ``id`` of these.
        """
        if isinstance(value, Tensor):
            return self._hosts.get(id(value), value)
        if type(value) is int:
            return id(self._hosts[value]) if value in self._hosts else value
        if isinstance(value, dict):
            pairs = [
                (self._with_traced_params(k), self._with_traced_params(v)) for k, v in value.items()
            ]
            made = copy.copy(value)
            made.clear()
            made.update(pairs)
            return made
        if type(value) in (list, tuple, set, frozenset):
            return type(value)(map(self._with_traced_params, value))
        return value

    def _object(self, number: int, optimizer: TracedOptimizer) -> Any:
        owner = of_optimizer(number)
        cls: Any = optimizer.cls
        made = cls.__new__(cls)
        given = {
            name: substituted(value, name, functools.partial(self._given, owner))
            for name, value in optimizer.attributes.items()
        }
        given = {name: self._with_traced_params(value) for name, value in given.items()}
        given |= self._added(owner, given)
        self._note_contents(owner, given)
        made.__dict__.update(given)
        made.param_groups = [self.groups[at] for at in optimizer.groups]
        made.state = _States(self._new_entry, self._hosts)
        for param in (p for at in optimizer.groups for p in self._own.groups[at].params):
            layout = self._own.layouts.get(param.path) if param.path else None
            known = optimizer.state.get(param.path) if self._first else layout
            if known and param.path in self.traced_params:
                give = functools.partial(self._given, param.path)
                entry = substituted(known, "", give)
                dict.__setitem__(made.state, self.traced_params[param.path], entry)
        return made

    def _new_entry(self, key: Any) -> dict[Any, Any]:
        path = self._paths.get(id(key)) if isinstance(key, Tensor) else None
        if path == "":
            raise Error(
                "The optimizer's step uses the state of a parameter that has no gradient",
                got=f"a frozen parameter of shape {tuple(key.shape)}",
                fix=(
                    "pass only parameters to the optimizer that the model trains",
                    "or skip parameters in step: if parameter.grad is None: continue",
                ),
            )
        if path is None:
            raise Error(
                "The optimizer has state that is not the state of a parameter",
                got="optimizer.state of a tensor that is not a parameter of the optimizer"
                if isinstance(key, Tensor)
                else f"optimizer.state[{key!r}]",
                fix="store it in optimizer.param_groups[0], or in the state of each parameter",
            )
        put = self._put
        return {} if put is None else _Entry(lambda name, value: put(path, name, value))

    def states(self) -> Iterator[tuple[str, dict[Any, Any]]]:
        for each in self.objects:
            for key, entry in each.state.items():
                yield self._paths[id(key)], _with_tensors(entry)

    def owned(self) -> Iterator[tuple[str, dict[Any, Any]]]:
        """Yield groups and objects as (owner, present contents)."""
        for at, group in enumerate(self.groups):
            held = {k: dict.get(group, k) for k in list(group) if k != "params"}
            yield of_group(at), _with_tensors(held)
        for number, each in enumerate(self.objects):
            skipped = ("param_groups", "state")
            held = {k: v for k, v in vars(each).items() if k not in skipped}
            yield of_optimizer(number), _with_tensors(held)

    def views(self) -> Views:
        """Return which tensors share memory after the step."""
        held = {(owner, n): v for owner, values in self.owned() for n, v in flat(values).items()}
        held |= {(path, WEIGHT): weight for path, weight in self.traced_params.items()}
        for path, entry in self.states():
            held |= {(path, name): value for name, value in flat(dict(entry)).items()}
        tensors = {p: v for p, v in held.items() if isinstance(v, Tensor) and not is_number(v)}
        with unobserved():
            return views_among(tensors)


def _as_parameter(value: Tensor, requires_grad: bool) -> Tensor:
    """Return a parameter. Torch makes one of a tensor without values by detaching it, which takes
    a third of a millisecond, and by marking the result.
    """
    if type(value) is Tensor:
        return nn.Parameter(value, requires_grad=requires_grad)
    value._is_param = True
    return value.requires_grad_(requires_grad)


@contextlib.contextmanager
def _as_written() -> Iterator[None]:
    """Run functions that ``torch.compile`` has compiled as they are written."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled
        yield
        return
    inlined = private.settings({"error_on_nested_fx_trace": False})
    with inlined, torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def _explained(optimizer: Any) -> Iterator[None]:
    """Add a note to exceptions from the user's code, and explain torch's errors about values that
    are read.
    """
    try:
        yield
    except (Error, ValueNeeded):
        raise
    except Exception as error:
        name = type(optimizer).__qualname__
        note = f"While poptorch traced the step of {name}"
        fix = "to reproduce the failure, call optimizer.step() once without poptorch"
        if isinstance(error, private.optional("DataDependentOutputException") or ()):
            raise value_needed(f"{error} in the step of {name}", raising_line(error)) from error
        if isinstance(error, private.optional("DynamicOutputShapeException") or ()):
            what = f"{error} in the step of {name}: the size of a result depends on values"
            raise value_needed(what, raising_line(error)) from error
        error.add_note(composed(note, "", raising_line(error), fix))
        raise


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    """Return values in new containers, which the step does not change, with tensors in place of
    the numbers.
    """
    copied: dict[str, Any] = substituted(values, "", lambda _, each: tensor_of(each), every=True)
    return copied


def _with_tensors(values: dict[Any, Any]) -> dict[Any, Any]:
    """Return values in which tensors represent the numbers."""
    kinds = {*map(type, values.values())}
    if TracedNumber in kinds or any(issubclass(kind, _CONTAINERS) for kind in kinds):
        return _copied(dict(values))
    return values

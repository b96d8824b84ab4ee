"""Compare updates that are traced from an optimizer's step with those of the step in eager PyTorch.

Both sides update all weights of a small model. In a large model, they update one weight of each
kind if the others are proven to be updated in the same way. A step may amplify rounding errors, for
example by taking signs. The program therefore repeats the updates with slightly different
gradients, and a difference is reported only if it also exists for other random gradients.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .. import _update
from .._base.errors import described
from .._capture import Request
from .._ir import slots
from .._ir.closeness import Difference, difference, movement
from .._ir.slots import Kind, Slot
from .._ir.spec import OptimSpec
from .._ir.state_views import WEIGHT, Views
from .._ir.tensors import TensorsByKey
from .._ir.traced_step import TracedStep, flat, of_group, of_optimizer, substituted
from .._ops.dispatch import answering

_UPDATES = 3
_ROUNDINGS = 64
_SEEDS = (0, 1)
_FEW = 16  # up to this number of weights, all are compared
_MOST = 1 << 18  # elements of all weights, if all are compared
_LARGEST = 1 << 16  # elements of a weight that represents others, if it is not the smallest one


class NotCompared(Exception):  # noqa: N818 (nothing went wrong)
    """The updates cannot be compared. The message says why."""


@dataclass(frozen=True)
class _Draw:
    """Weights and gradients of one comparison, by path."""

    weights: TensorsByKey
    gradients: Sequence[TensorsByKey]  # the gradients of each update

    def nudged(self, narrowest: torch.dtype) -> _Draw:
        """Return slightly different gradients. ``narrowest``: the type with the coarsest rounding
        in which a step computes.
        """
        generator = torch.Generator().manual_seed(2)

        def moved(value: torch.Tensor) -> torch.Tensor:
            noise = torch.randn(value.shape, dtype=value.dtype, generator=generator)
            rounding = torch.finfo(min(value.dtype, narrowest, key=_digits)).eps
            return value * (1 + rounding * noise)

        gradients = [{path: moved(value) for path, value in one.items()} for one in self.gradients]
        return _Draw(self.weights, gradients)


def traced_differences(
    request: Request,
    spec: OptimSpec,
    optimizer: torch.optim.Optimizer,
    hypers: Mapping[str, float],
) -> list[Difference]:
    """Return where weights or state differ after some updates.

    Raises:
        NotCompared: they cannot be compared.
    """
    assert spec.traced is not None
    chosen = _chosen(request, spec, spec.traced)
    comparison = _Comparison(request, spec, optimizer, hypers, chosen)
    found: list[Difference] = []
    for seed in _SEEDS:
        found = comparison.differences(seed)
        if not found:
            break
    return found


def _chosen(request: Request, spec: OptimSpec, traced: TracedStep) -> list[Slot]:
    """Return weights that represent all weights: the smallest of those that are updated in the same
    way.
    """
    members = {path: at for at, group in enumerate(spec.groups) for path in group.params}
    weights = [
        slot
        for slot in request.state
        if slot.path in request.trained and slot.path in members and slot.numel
    ]
    signatures = {slot.path: traced.signatures.get(slot.path) for slot in weights}
    elements = sum(slot.numel for slot in weights)
    if len(weights) <= _FEW and elements <= _MOST:
        return weights
    if not traced.examples and not all(signatures.values()):
        if elements > _MOST:
            raise NotCompared("its step needs all weights, and these are too large")
        return weights
    smallest: dict[Any, Slot] = {}
    for slot in sorted(weights, key=lambda each: each.numel):
        alike = signatures[slot.path] or traced.examples[slot.path]
        smallest.setdefault((members[slot.path], slot.dtype, alike), slot)
    first, *others = smallest.values()
    if first.numel > _MOST:
        raise NotCompared("all its weights are too large")
    return [first, *(slot for slot in others if slot.numel <= _LARGEST)]


class _Comparison:
    def __init__(
        self,
        request: Request,
        spec: OptimSpec,
        optimizer: torch.optim.Optimizer,
        hypers: Mapping[str, float],
        chosen: Sequence[Slot],
    ) -> None:
        self.request, self.optimizer, self.hypers = request, optimizer, hypers
        self.slots = list(chosen)
        self.spec = _over(spec, {slot.path for slot in chosen})
        self.hosts = {slot.path: request.tensors[slot.path].tensor for slot in chosen}
        self.state: dict[str, Mapping[str, Any]] = {
            path: dict.get(optimizer.state, host) or {} for path, host in self.hosts.items()
        }
        self._narrowest = self._coarsest  # type in which the program computes

    def differences(self, seed: int) -> list[Difference]:
        drawn = self._draw(seed)
        expected = self._in_eager(drawn)
        traced = self._by_program(drawn)
        found = self._compared(traced, expected, traced)
        if not found:
            return []
        return self._compared(traced, expected, self._by_program(drawn.nudged(self._narrowest)))

    def _draw(self, seed: int) -> _Draw:
        generator = torch.Generator().manual_seed(seed)

        def drawn(slot: Slot) -> torch.Tensor:
            return torch.randn(slot.shape, dtype=slot.dtype, generator=generator)

        weights = {slot.path: self.hosts[slot.path].detach().to(slot.dtype) for slot in self.slots}
        gradients = [{slot.path: drawn(slot) for slot in self.slots} for _ in range(_UPDATES)]
        return _Draw(weights, gradients)

    def _compared(
        self, traced: TensorsByKey, expected: _EagerCopy, near: TensorsByKey
    ) -> list[Difference]:
        found = []
        for name, key, theirs in self._pairs(expected):
            mine = traced[key]
            dtype = mine.dtype if mine.dtype.is_floating_point else torch.get_default_dtype()
            share = _ROUNDINGS * torch.finfo(min(dtype, self._coarsest, key=_digits)).eps
            theirs = theirs.detach().to(mine.dtype).reshape(mine.shape)
            found.append(difference(name, mine, theirs, share, movement(mine, near[key])))
        return [each for each in found if each is not None]

    @property
    def _coarsest(self) -> torch.dtype:
        return min((slot.dtype for slot in self.slots), key=_digits)

    def _pairs(self, expected: _EagerCopy) -> Iterator[tuple[str, str, torch.Tensor]]:
        for slot in self.slots:
            yield f"'{slot.path}' after {_UPDATES} updates", slot.key, expected.weights[slot.path]
        assert self.spec.traced is not None
        held = expected.held()
        for kept in self.spec.traced.kept or ():
            value = held.get(kept.place)
            if value is not None:
                theirs = torch.as_tensor(
                    value, dtype=None if kept.leaf.number == "" else torch.float64
                )
                yield f"'{kept.leaf.name}' of '{kept.owner}'", kept.slot.key, theirs

    def _in_eager(self, drawn: _Draw) -> _EagerCopy:
        assert self.spec.traced is not None
        eager_copy = _EagerCopy(self.optimizer, self.hosts, self.state)
        try:
            eager_copy.run(drawn.weights, drawn.gradients, self.spec.traced.first_views)
        except Exception as error:
            raise NotCompared(f"eager PyTorch raises {described(error)}") from error
        return eager_copy

    def _by_program(self, drawn: _Draw) -> TensorsByKey:
        lowered = _update.lower(self.spec, self.slots)
        tensors = {
            each.key: torch.full(each.shape, lowered.initial.get(each.key, 0.0), dtype=each.dtype)
            for each in lowered.inputs
        }
        for each in lowered.inputs:
            if each.kind is Kind.HYPER:
                tensors[each.key].fill_(self.hypers[each.key])
        tensors |= {slot.key: drawn.weights[slot.path].clone() for slot in self.slots}
        tensors |= self._state_before()
        with torch.no_grad(), answering(self._computed):
            for gradients in drawn.gradients:
                for each in lowered.inputs:
                    if each.kind is Kind.GRADIENT:
                        tensors[each.key] = gradients[each.path].to(each.dtype)
                tensors |= lowered.function(tensors)
        return tensors

    def _computed(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator, and note the type of its result."""
        result = operator(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.dtype.is_floating_point:
            self._narrowest = min(self._narrowest, result.dtype, key=_digits)
        return result

    def _state_before(self) -> dict[str, torch.Tensor]:
        """Return the state of the steps that the optimizer has already made, by key."""
        assert self.spec.traced is not None
        known = {path: flat(dict(entry)) for path, entry in self.state.items()}
        state: dict[str, torch.Tensor] = {}
        for kept in self.spec.traced.kept or ():
            value = known.get(kept.owner, {}).get(kept.leaf.name)
            if value is not None:
                state[kept.slot.key] = torch.as_tensor(value).detach().to(kept.slot.dtype).clone()
                if kept.made:
                    state[slots.STEPPED.key] = torch.ones((), dtype=slots.STEPPED.dtype)
        return state


def _over(spec: OptimSpec, paths: Collection[str]) -> OptimSpec:
    """Return an optimizer over a few of its weights, without a limit of the gradient norm."""
    assert spec.traced is not None
    groups = tuple(
        replace(group, params=tuple(param for param in group.params if param.path in paths))
        for group in spec.traced.groups
    )
    settings = tuple(each for each in spec.settings if each[0] != "max_grad_norm")
    return replace(spec, traced=replace(spec.traced, groups=groups), settings=settings, common=())


def _digits(dtype: torch.dtype) -> float:
    return -torch.finfo(dtype).eps


class _EagerCopy:
    """A copy of the user's optimizer over the user's own parameters, which it updates temporarily.

    Code may distinguish parameters by their identity, or reach them through the model.
    """

    def __init__(
        self,
        optimizer: Any,
        hosts: Mapping[str, torch.Tensor],
        state: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._hosts = hosts
        known = {id(host) for host in hosts.values()}
        kind: Any = type(optimizer)
        self._optimizer: Any = kind.__new__(kind)
        vars(self._optimizer).update(
            {name: _copied(value) for name, value in vars(optimizer).items() if name != "state"}
        )
        vars(self._optimizer).pop("step", None)  # the wrapper of a scheduler
        self._optimizer.param_groups = [
            _group_over(known, group) for group in optimizer.param_groups
        ]
        self._optimizer.state = defaultdict(dict)
        for path, entry in state.items():
            if entry:
                self._optimizer.state[hosts[path]] = _copied(dict(entry))
        self.weights: dict[str, torch.Tensor] = {}

    def run(self, weights: TensorsByKey, gradients: Sequence[TensorsByKey], views: Views) -> None:
        """Make an update for each set of gradients, and restore the user's parameters
        afterwards. ``views`` says which tensors of the user's state share memory.
        """
        before = [(host, host.data, host.grad) for host in self._hosts.values()]
        try:
            for path, host in self._hosts.items():
                host.data = weights[path].to(host.dtype, copy=True)
            self._share_memory(views)
            for one in gradients:
                self._step(one)
            self.weights = {path: host.detach() for path, host in self._hosts.items()}
        finally:
            for host, data, gradient in before:
                host.data, host.grad = data, gradient

    def _share_memory(self, views: Views) -> None:
        tensors = self.held()
        tensors |= {(path, WEIGHT): host.detach() for path, host in self._hosts.items()}
        for path, host in self._hosts.items():

            def shared(name: str, value: Any, path: str = path) -> Any:
                view = views.get((path, name))
                return value if view is None else view.of(tensors[view.root])

            if host in self._optimizer.state:
                self._optimizer.state[host] = substituted(self._optimizer.state[host], "", shared)

    def _step(self, gradients: TensorsByKey) -> None:
        for path, host in self._hosts.items():
            host.grad = gradients[path].to(host.dtype, copy=True)
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._optimizer.step()

    def held(self) -> dict[tuple[str, str], Any]:
        """Return the state of weights, groups and the optimizer itself, by owner and name."""
        paths = {id(host): path for path, host in self._hosts.items()}
        owned = [(paths[id(key)], entry) for key, entry in self._optimizer.state.items()]
        groups = self._optimizer.param_groups
        owned += [
            (of_group(at), {name: value for name, value in group.items() if name != "params"})
            for at, group in enumerate(groups)
        ]
        attributes = {k: v for k, v in vars(self._optimizer).items() if k not in _OF_TORCH}
        owned.append((of_optimizer(0), attributes))
        return {
            (owner, name): value
            for owner, values in owned
            for name, value in flat(dict(values)).items()
        }


_OF_TORCH = {"param_groups", "state", "defaults"}


def _group_over(known: Collection[int], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a group with only those parameters whose identities are known."""
    chosen = [id(parameter) in known for parameter in group["params"]]
    made = {
        name: _copied(value)
        for name, value in group.items()
        if name not in ("params", "param_names")
    }
    for name in ("params", "param_names"):
        if name in group:
            made[name] = [*itertools.compress(group[name], chosen)]
    return made


def _copied(value: Any) -> Any:
    """Return nested values that share no tensor and no container with the user's values."""
    if isinstance(value, OrderedDict):
        return copy.copy(value)  # hooks

    def traced(name: str, each: Any) -> Any:
        is_tensor = isinstance(each, torch.Tensor) and not isinstance(each, nn.Parameter)
        return each.detach().clone() if is_tensor else each

    return substituted(value, "", traced)

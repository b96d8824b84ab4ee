"""Changes on the host that a compiled program does not follow: each is said once.

What was wanted comes with the next compilation, or with ``setOptimizer``; without a word the old
layer would run, and the old numbers would train.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .._base import compiled, log
from .._capture import Tied, hooks_of
from ..ops.blocks import starts_block
from ..optim import KINDS

_layers_of = operator.methodcaller("values")
_forward_of = operator.methodcaller("get", "forward")
_NUMBERS = sorted({name for kind in KINDS for name in kind.hypers})
_IN_TURN = 4  # layers whose forward one call looks at: a model of 60 costs less than 1 us then
_ANEW = "Call destroy() on the executor, so that the next call compiles anew"


class ModelChanges:
    """Remembers the layers of a model, what they run, its number format, hooks and gradients.

    Args:
        module: what was compiled.
        tensors: its parameters and buffers by path.
        users: the user's module, of which that is a copy that shares the layers.
        forward: the ``forward`` of its own that the user's module had when it was copied.
    """

    def __init__(
        self, module: nn.Module, tensors: Mapping[str, Tied], users: nn.Module, forward: Any
    ) -> None:
        self._holders = [(m, m._modules) for m in module.modules() if m._modules]
        self._dicts = [children for _, children in self._holders]
        self._layers = self._now()
        # Layers without others inside: that one is put there, by a parametrization, shows at once.
        self._no_layers = [m._modules for m in module.modules() if not m._modules]
        self._users, self._forward = users, forward
        self._modules = list(module.modules())
        self._turns = self._forwards()
        scripted = torch.jit.ScriptModule  # whose classes have no forward to look at
        layers = (layer for layer in users.modules() if not isinstance(layer, scripted))
        kinds = {type(layer): type(layer).forward for layer in layers}
        self._kinds, self._classes = kinds, itertools.cycle(kinds)
        self._parameters = {p: tied.tensor for p, tied in tensors.items() if tied.is_parameter}
        numbers = (p for p in self._parameters.values() if p.is_floating_point())
        self._first = next(numbers, torch.empty(0))  # half() and its like change all of them
        self._format = self._first.dtype
        self._wanted = self._requires_grad()
        self._hooks = self._parameter_hooks()
        # Dicts of hooks that are empty: that one is put there shows at once, and they need not be
        # looked at while torch has given out no handle of a hook.
        self._handles = RemovableHandle.next_id
        dicts = ((m._forward_hooks, m._forward_pre_hooks) for m in module.modules())
        self._no_hooks = [hooks for pair in dicts for hooks in pair if not hooks]
        compiled.remember(self, module)

    def _now(self) -> tuple[Any, ...]:
        return tuple(itertools.chain.from_iterable(map(_layers_of, self._dicts)))

    def _forwards(self) -> Iterator[tuple[list[dict[str, Any]], list[Any]]]:
        """Return without end the attributes of the next few layers, and their own forwards."""
        owns = [module.__dict__ for module in self._modules]
        groups = [owns[start : start + _IN_TURN] for start in range(0, len(owns), _IN_TURN)]
        return itertools.cycle([(group, _own_forwards(group)) for group in groups])

    def _requires_grad(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters.values()]

    def _parameter_hooks(self) -> list[tuple[Any, ...]]:
        return [hooks_of(parameter) for parameter in self._parameters.values()]

    def say_layers(self) -> None:
        """Warn of layers put in, taken out or replaced, of hooks and formats; for every call.

        A layer's own ``forward``, and that of a class, is looked at in every few calls, the model's
        in each.
        """
        if RemovableHandle.next_id != self._handles:
            self._say_module_hooks()
        if any(self._no_layers):
            self._say_inner_layers()
        if self._first.dtype is not self._format:
            self._say_format()
        if self._users.__dict__.get("forward") != self._forward:
            self._forward = self._users.__dict__.get("forward")
            _say_forward(type(self._users), "wrapped", "Wrap the model again, after destroy()")
        group, forwards = next(self._turns)
        if _own_forwards(group) != forwards:
            self._say_layers_forward(group, forwards)
        kind = next(self._classes)
        if kind.forward != self._kinds[kind]:
            self._kinds[kind] = kind.forward
            _say_forward(kind, "compiled", _ANEW)
        layers = self._now()
        if layers == self._layers:
            return
        before, self._layers = set(self._layers), layers
        new = sorted(
            f"{type(holder).__name__}.{name}"
            for holder, children in self._holders
            for name, child in children.items()
            if child not in before
        )
        _say_layers(", ".join(new) or "some were taken out")

    def _say_inner_layers(self) -> None:
        names = sorted({name for children in self._no_layers for name in children})
        self._no_layers = []
        _say_layers(f"new inside of others: {', '.join(names)}")

    def _say_format(self) -> None:
        before, self._format = self._format, self._first.dtype
        log.python.warning(
            "The model was compiled in %s and is %s now: the compiled program goes on in %s. Call "
            "destroy() on the executor, so that the next call compiles the model as it is now",
            *(str(kind).removeprefix("torch.") for kind in (before, self._format, before)),
        )

    def _say_layers_forward(self, group: list[dict[str, Any]], before: list[Any]) -> None:
        now = _own_forwards(group)
        index = next(i for i, (new, old) in enumerate(zip(now, before, strict=True)) if new != old)
        layer = next(module for module in self._modules if module.__dict__ is group[index])
        self._turns = self._forwards()
        _say_forward(type(layer), "compiled", _ANEW)

    def _say_module_hooks(self) -> None:
        self._handles = RemovableHandle.next_id
        if not any(self._no_hooks):
            return
        hooks = [hook for present in self._no_hooks for hook in present.values()]
        self._no_hooks = []
        new = [hook for hook in hooks if not starts_block(hook)]  # BeginBlock warns
        if new:
            _say_hooks("layers", len(new))

    def say_gradients(self) -> None:
        """Warn if ``requires_grad`` of a parameter, or its hooks, changed."""
        hooks, before = self._parameter_hooks(), self._hooks
        if hooks != before:
            self._hooks = hooks
            counts = (len({*new} ^ {*old}) for new, old in zip(hooks, before, strict=True))
            _say_hooks("parameters", sum(counts))
        now = self._requires_grad()
        if now == self._wanted:
            return
        pairs = zip(self._parameters, self._wanted, now, strict=True)
        changed = [f"{path} is now {new}" for path, old, new in pairs if old != new]
        self._wanted = now
        log.python.warning(
            "requires_grad changed after the model was compiled (%s): the compiled program trains "
            "the parameters from before. Call destroy() on the executor, so that the next call "
            "compiles the model as it is now",
            ", ".join(changed[:5]) + (", ..." if len(changed) > 5 else ""),
        )


def _own_forwards(group: list[dict[str, Any]]) -> list[Any]:
    return list(map(_forward_of, group))


def _say_forward(kind: type[nn.Module], when: str, remedy: str) -> None:
    log.python.warning(
        "forward of a %s was replaced after the model was %s: the program goes on with the one "
        "from before. %s",
        kind.__name__.removeprefix("Poptorch"),
        when,
        remedy,
    )


def _say_layers(which: str) -> None:
    log.python.warning(
        "The layers of the model changed after it was compiled (%s): the compiled program goes on "
        "with those from before. Call destroy() on the executor, so that the next call compiles "
        "the model as it is now",
        which,
    )


def _say_hooks(holders: str, count: int) -> None:
    log.python.warning(
        "%d hooks were put on %s or taken from them after the model was compiled: the compiled "
        "program goes on with those from before. Call destroy() on the executor, so that the next "
        "call compiles the model as it is now",
        count,
        holders,
    )


class OptimizerChanges:
    """Remembers the numbers of an optimizer's groups; warns once that others are not used yet.

    Args:
        optimizer: as it was set.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._said = False
        self.look(optimizer)

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the numbers that are used from now on."""
        groups = optimizer.param_groups
        self._names = [name for name in _NUMBERS if all(name in group for group in groups)]
        self._read = operator.itemgetter(*self._names)
        self._used = copy.deepcopy([self._read(group) for group in groups])

    def say(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn once if a number is not the one that was set; cheap, for every call."""
        if self._said:
            return
        now = list(map(self._read, optimizer.param_groups))
        if now == self._used:
            return
        self._said = True
        log.python.warning(
            "Numbers of the optimizer changed, and the device still uses those from before: %s. "
            "They take effect with executor.setOptimizer(optimizer), also after scheduler.step()",
            ", ".join(self._differences(now)) or "there are more or fewer groups",
        )

    def _differences(self, now: Sequence[tuple[Any, ...]]) -> list[str]:
        return [
            f"{name} of group {index} was {old} and is {new}"
            for index, (before, after) in enumerate(zip(self._used, now, strict=False))
            for name, old, new in zip(self._names, before, after, strict=True)
            if old != new
        ]


def say_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Warn that hooks on an optimizer's steps do not run, if it has any."""
    before = len(optimizer._optimizer_step_pre_hooks)
    after = len(optimizer._optimizer_step_post_hooks)
    if before or after:
        log.python.warning(
            "Hooks of the optimizer do not run (%d before each step, %d after it): the compiled "
            "program does the steps, several in one call. Call what they do after the executor, "
            "or put it into forward",
            before,
            after,
        )

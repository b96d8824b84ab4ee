"""Check before each call whether values that were compiled into a program have changed.

The table lists everything that a program does not follow. Without these checks, a change would
silently have no effect. Each row is reported once, in one message with all changes.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import operator
import textwrap
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .._base import interrupts, log, seeding
from .._capture import Decision, ModelTensor, hooks_of
from .._ir.graph import Graph
from .._ir.operators import draws
from .._residency import DeviceCopies, unwatched
from ..ops.blocks import starts_block
from .wrapping import HOLDERS

CHECK_EVERY, CHEAP = 0.02, 2e-4
"""Seconds between two checks of the guards, and seconds that a check may take. A slower check
delays the next one in proportion. The layers are not in the processor's caches when a call begins:
checking a small model took 40 of 650 us, and a ResNet 0.7 of 2.5 ms.
"""
SHARE = 0.01
"""A check is made immediately if it takes no more than this share of the time since the
last call.
"""
FIRST = 20
"""The number of calls that are always checked, because scripts often edit weights after a
call or two.
"""
DESTROY = (
    "call destroy() on the wrapped model, so that the next call compiles the model as it is now"
)
_WRAP = "wrap the model again, after destroy()"
_WEIGHTS = (
    "call copyWeightsToDevice() on the wrapped model after you change weights, or use "
    "load_state_dict() of the wrapped model, which also copies them"
)

_children = operator.methodcaller("values")
_own_forward = operator.methodcaller("get", "forward")
_requires_grad = operator.attrgetter("tensor.requires_grad")
_version = operator.attrgetter("_version")


@dataclasses.dataclass(eq=False)
class Guard:
    """One row of the table."""

    # returns the current value, which is compared with the expected one by ==
    read: Callable[[], Any]
    # describes the changes; yields nothing if the value is equivalent
    changes: Callable[[Any], Iterable[str]]
    remedy: str  # what the user can do so that a change takes effect
    # copies the value, so that later changes do not affect the copy
    keep: Callable[[Any], Any] = copy.copy
    expected: Any = dataclasses.field(init=False)
    reported: bool = False
    of_layers: bool = False  # whether a program is not that of the model as it is now

    def __post_init__(self) -> None:
        self.accept()

    def accept(self) -> None:
        self.expected = self.keep(self.read())

    def holds(self) -> bool:
        """Compare quickly. False may also mean a different but equivalent value."""
        try:
            return bool(self.read() == self.expected)
        # errors of many types, because something no longer exists or is a tensor now
        except Exception:
            return False


def replaced_layers(guards: Iterable[Guard]) -> list[str]:
    """Return the layers that the model has now and that were not compiled."""
    failed = (guard for guard in guards if guard.of_layers and not guard.holds())
    return [each for guard in failed for each in guard.changes(guard.expected)]


def check(guards: Iterable[Guard]) -> None:
    """Report everything that changed in one warning, and each row only once."""
    failed = [guard for guard in guards if not (guard.reported or guard.holds())]
    if not failed:
        return
    changes_by_remedy: dict[str, list[str]] = {}
    for guard in failed:
        changes = list(guard.changes(guard.expected))
        if changes:
            guard.reported = True
            changes_by_remedy.setdefault(guard.remedy, []).extend(dict.fromkeys(changes))
        else:
            guard.accept()
    if changes_by_remedy:
        log.python.warning(
            "The compiled program does not follow what changed on the host: %s",
            ". ".join(f"{shorten(texts)}: {remedy}" for remedy, texts in changes_by_remedy.items()),
        )


class OfOptimizer(Protocol):
    """The rows of an optimizer. Some of them are so cheap that every call checks them."""

    rows: list[Guard]

    def numbers_hold(self) -> bool: ...


class Checks:
    """Checks the table from time to time, and immediately if the weights were accessed."""

    def __init__(self, weights: Guard) -> None:
        self._weights = weights
        self.due = 0.0
        self._cost = 0.0  # seconds that the last check took
        self._calls, self._latest = 0, 0.0

    def adopted(self) -> None:
        """Record that the device has copies of the host's present weights."""
        self._weights.accept()
        self.due = 0.0

    def run(self, rows: Iterable[Guard], optimizer: OfOptimizer | None) -> None:
        """Check before a call. The optimizer's numbers are checked in every call.

        A call also checks the rest if this takes only a small part of the time since the last call.
        """
        moment = time.monotonic()
        is_cheap = self._calls < FIRST or self._cost < (moment - self._latest) * SHARE
        self._calls, self._latest = self._calls + 1, moment
        if moment >= self.due or is_cheap or not (optimizer is None or optimizer.numbers_hold()):
            with interrupts.deferred():  # an exception from a signal handler is not a change
                unwatched(check, [*rows, self._weights, *(optimizer.rows if optimizer else ())])
            self._cost = time.monotonic() - moment
            self.due = moment + CHECK_EVERY * max(1.0, self._cost / CHEAP)


def shorten(texts: Sequence[str]) -> str:
    return ", ".join(texts[:5]) + (", ..." if len(texts) > 5 else "")


# The model.


def of_model(
    module: nn.Module, users: nn.Module, forward: Any, tensors: Mapping[str, ModelTensor]
) -> list[Guard]:
    """Return the rows about a model's structure.

    Args:
        module: a shallow copy of the user's module, which is compiled.
        users: the user's module.
        forward: the ``forward`` that was set on the user's module itself when it was wrapped.
        tensors: the model's parameters and buffers.
    """
    modules = list(module.modules())
    dicts = [each._modules for each in modules]
    owns = [each.__dict__ for each in modules]
    scripted = torch.jit.ScriptModule  # their classes have no forward that could be compared
    kinds = list({type(each) for each in users.modules() if not isinstance(each, scripted)})
    parameters = {path: tied for path, tied in tensors.items() if tied.is_parameter}
    trained, paths = list(parameters.values()), list(parameters)

    def layers() -> tuple[Any, ...]:
        return tuple(itertools.chain.from_iterable(map(_children, dicts)))

    def other_layers(before: tuple[Any, ...]) -> Iterator[str]:
        known = set(before)
        new = sorted(
            f"{type(holder).__name__}.{name}"
            for holder, children in zip(modules, dicts, strict=True)
            for name, child in children.items()
            if child not in known
        )
        yield f"layers ({shorten(new) or 'some were removed'})"

    def requires_grad_flags() -> list[bool]:
        return list(map(_requires_grad, trained))

    def other_gradients(before: list[bool]) -> Iterator[str]:
        for path, old, new in zip(paths, before, requires_grad_flags(), strict=True):
            if old != new:
                yield f"requires_grad of {path} is now {new}"

    users_own = _forwards(lambda: [users.__dict__.get("forward")], [type(users)], _WRAP)
    users_own.expected = [forward]
    numbers = [tied for tied in trained if tied.tensor.is_floating_point()]
    return [
        Guard(layers, other_layers, DESTROY, of_layers=True),
        _forwards(lambda: list(map(_own_forward, owns)), [*map(type, modules)], DESTROY),
        _forwards(lambda: [kind.forward for kind in kinds], kinds, DESTROY),
        Guard(requires_grad_flags, other_gradients, DESTROY),
        _hooks(modules, trained),
        users_own,
        *map(_number_format, numbers[:1]),
    ]


def _forwards(read: Callable[[], list[Any]], kinds: Sequence[type], remedy: str) -> Guard:
    def changes(before: list[Any]) -> Iterator[str]:
        for kind, old, new in zip(kinds, before, read(), strict=True):
            if old != new:
                yield f"forward of a {kind.__name__.removeprefix('Poptorch')}"

    return Guard(read, changes, remedy)


def _hooks(modules: Sequence[nn.Module], parameters: Sequence[ModelTensor]) -> Guard:
    """Return the row about hooks. New hooks are visible in the handles that torch has given out."""

    def present() -> set[tuple[int, Any]]:
        layers = (
            (number, hook)
            for number, each in enumerate(modules)
            for hooks in _own_hooks(each)
            for hook in hooks.values()
            if not starts_block(hook)  # BeginBlock has its own warning
        )
        own = enumerate((hooks_of(p.tensor) for p in parameters), start=len(modules))
        return {*layers, *((number, hook) for number, hooks in own for hook in hooks)}

    known = present()
    layers = [hooks for module in modules for hooks in _own_hooks(module) if hooks]
    own = [hooks for p in parameters if (hooks := p.tensor._backward_hooks)]

    def counts() -> tuple[int, list[int]]:
        return RemovableHandle.next_id, [len(hooks) for hooks in (*layers, *own)]

    def changes(_: object) -> Iterator[str]:
        different = present() ^ known
        if different:
            yield f"{len(different)} hooks on layers or parameters"

    return Guard(counts, changes, DESTROY)


def _own_hooks(module: nn.Module) -> tuple[dict[int, Any], ...]:
    forward = module._forward_hooks, module._forward_pre_hooks
    return (*forward, module._backward_hooks, module._backward_pre_hooks)


def _number_format(first: ModelTensor) -> Guard:
    """Return the row about the type of weights. half() and similar methods change all parameters,
    so one of them is enough.
    """

    def changes(before: torch.dtype) -> Iterator[str]:
        names = (str(kind).removeprefix("torch.") for kind in (before, first.tensor.dtype))
        yield "the number format was {} and is {}".format(*names)

    return Guard(lambda: first.tensor.dtype, changes, DESTROY)


def of_seed(graphs: Iterable[Graph]) -> list[Guard]:
    """Return the row about the host's seed, if a graph of the program draws random numbers."""
    if not any(draws(node) for graph in graphs for node in graph.operators):
        return []

    seeding.listen()

    def changes(_: object) -> Iterator[str]:
        seed = torch.initial_seed()
        if not seeding.is_ours(seed):
            yield f"torch.manual_seed({seed})"

    remedy = (
        "assign [seed] to rng_state of the wrapped model, or call options.randomSeed(seed) "
        "before you wrap the model"
    )
    return [Guard(seeding.last, changes, remedy)]


def of_decisions(decided: Sequence[Decision], tensors: Mapping[str, ModelTensor]) -> Guard:
    """Return the row about buffers and frozen weights whose values decided branches of forward."""
    pairs = [(each, tensors[each.path]) for each in decided]

    def versions() -> int:
        return sum(tied.tensor._version for _, tied in pairs)

    def changes(_: object) -> Iterator[str]:
        for decision, tied in pairs:
            if not torch.equal(decision.value, tied.tensor):
                yield (
                    f"the values of '{decision.path}', on which forward branches at {decision.line}"
                )

    remedy = f"{DESTROY}; to decide when the program runs, use torch.where or poptorch.cond"
    return Guard(versions, changes, remedy)


# Attributes of modules other than weights, which are constants of the program.

_PLAIN = (bool, int, float, str)
_LISTS = (list, tuple)
_LONGEST = 64  # longer lists and dicts contain data or logs
_MOST_BYTES = 1 << 16  # bytes in an array; comparing more would take longer than a call
_NOT_HELD = object()


class Attributes:
    """The attributes of a model's modules just before ``forward`` was captured.

    These are numbers, flags, texts, tensors that the program reads, lists, tuples and dicts of all
    these, and dataclasses and namespaces. Not included are names that begin with an underscore,
    which belong to libraries, values that ``forward`` itself changes, such as counters, and values
    that only grow, such as logs. With ``trained``, the user's module and its copy have the same
    attributes; each inference wrapper has its own copy. ``arguments`` are constant arguments of
    ``forward``, by path.
    """

    def __init__(
        self,
        module: nn.Module,
        users: nn.Module,
        trained: bool,
        arguments: Iterable[tuple[str, object]] = (),
    ) -> None:
        if trained:
            names = [*_held(vars(users)), *(name for *_, name, _ in _settings([("", users)]))]
            vars(module).update({name: vars(users)[name] for name in names})
        owners: list[tuple[str, object]] = [("", users), *module.named_modules()]
        owners += [(path, each) for path, each in arguments if hasattr(each, "__dict__")]
        # How to look up a value, its path, the object that had it, and the object whose value is
        # compiled. The last two differ if the user's module was changed after it was wrapped for
        # inference.
        holders: list[tuple[Callable[[str], Any], str, object, object]] = [
            (vars(owner).get, path, owner, module if owner is users else owner)
            for path, owner in owners
        ]
        for path, owner, place, own in _settings(owners):
            traced = vars(module).get(place, own) if owner is users else own
            holders.append((_inside(vars(owner), place), path, own, traced))
        self._before = [
            (get, name, value, compiled.get(name, value), _attribute(path, owner, name))
            for get, path, owner, traced in holders
            for compiled in [_held(vars(traced))]
            for name, value in _held(vars(owner)).items()
        ]
        self._remedy = (
            f"pass values that change to forward as a tensor, or {DESTROY if trained else _WRAP}"
        )

    def guards(self, constants: Iterable[torch.Tensor]) -> list[Guard]:
        """Return the rows about attributes that the capture itself has not changed.

        ``constants``: tensors other than weights and buffers that the program starts with.
        """
        tensors = [tensor for tensor in constants if not tensor.is_inference()]
        read = set(map(id, tensors))
        set_inside = {
            text for get, name, value, _, text in self._before if not is_same(get(name), value)
        }
        readers = []
        compiled = []
        named: dict[int, str] = {}
        for get, name, _, value, text in self._before:
            inside = list(map(id, _tensors(value)))
            if text not in set_inside and (not inside or not read.isdisjoint(inside)):
                readers.append((get, name, text))
                compiled.append(value)
                named |= dict.fromkeys(inside, text)
        values = self._values(readers)
        values.expected = compiled
        return [values, self._versions(tensors, named)]

    def _values(self, readers: list[tuple[Callable[[str], Any], str, str]]) -> Guard:
        def read() -> list[Any]:
            return [get(name) for get, name, _ in readers]

        def keep(values: list[Any]) -> list[Any]:
            return list(map(_copy, values))

        def changes(before: list[Any]) -> Iterator[str]:
            for (get, name, attribute), old in zip(readers, before, strict=True):
                now = get(name)
                if not is_same(now, old) and not _grown(now, old):
                    yield f"{attribute} was {_text(old)} and is {_text(now)}"

        return Guard(read, changes, self._remedy, keep)

    def _versions(self, tensors: list[torch.Tensor], named: Mapping[int, str]) -> Guard:
        known = [tensor._version for tensor in tensors]

        def changes(_: object) -> Iterator[str]:
            for tensor, version in zip(tensors, known, strict=True):
                if tensor._version != version:
                    own = named.get(id(tensor), f"a tensor of shape {tuple(tensor.shape)}")
                    yield f"{own} was changed in place"

        return Guard(lambda: sum(map(_version, tensors)), changes, self._remedy)


def _attribute(path: str, owner: object, name: str) -> str:
    kind = type(owner).__name__.removeprefix("Poptorch")
    return f"{kind}.{name}{f' of {path}' if path else ''}"


def _text(value: Any) -> str:
    if type(value) is torch.Tensor and value.numel() > 4:
        return f"a tensor of shape {tuple(value.shape)}"
    return textwrap.shorten(repr(value), 80, placeholder=" ...")


def of_arrays(arguments: Iterable[tuple[str, Any]]) -> Guard:
    """Return the row about small arrays among the arguments, which are constants, too."""
    arrays = {
        path: value
        for path, value in arguments
        if hasattr(value, "tobytes") and getattr(value, "nbytes", _MOST_BYTES) < _MOST_BYTES
    }

    def read() -> list[bytes]:
        return [value.tobytes() for value in arrays.values()]

    def changes(before: list[bytes]) -> Iterator[str]:
        for path, old, new in zip(arrays, before, read(), strict=True):
            if old != new:
                yield f"the array of argument '{path}' was changed in place"

    return Guard(read, changes, f"pass the value as a tensor, or {DESTROY}")


def _inside(owner: dict[str, Any], place: str) -> Callable[[str], Any]:
    """Return a function that reads attributes of the object that an attribute of a module refers to
    now.
    """
    return lambda name: getattr(owner.get(place), "__dict__", {}).get(name)


def _settings(owners: Iterable[tuple[str, object]]) -> list[tuple[str, object, str, object]]:
    """Return the dataclasses and namespaces in modules, each once: path, holder, name."""
    kinds = (types.SimpleNamespace, argparse.Namespace)
    settings = {
        id(value): (f"{path}.{name}" if path else name, owner, name, value)
        for path, owner in reversed([*owners])
        for name, value in vars(owner).items()
        if not name.startswith("_")
        and not isinstance(value, type | nn.Module)
        and hasattr(value, "__dict__")
        and (dataclasses.is_dataclass(value) or isinstance(value, kinds))
    }
    return [*settings.values()]


def _held(own: dict[str, Any]) -> dict[str, Any]:
    copies = {
        name: _copy(value)
        for name, value in own.items()
        if name != "training" and not name.startswith("_")  # each mode has its own program
    }
    return {name: value for name, value in copies.items() if value is not _NOT_HELD}


def _copy(value: Any, room: int = _LONGEST) -> Any:
    kind = type(value)
    if kind in _PLAIN or kind is torch.Tensor:
        return value
    if (kind in _LISTS or kind is dict) and 0 < len(value) <= room:
        each = (room - 1) // len(value)
        parts = [_copy(part, each) for part in (value.values() if kind is dict else value)]
        if not any(part is _NOT_HELD for part in parts):
            return dict(zip(value, parts, strict=True)) if kind is dict else kind(parts)
    return _NOT_HELD


def _tensors(value: Any) -> list[torch.Tensor]:
    if type(value) is torch.Tensor:
        return [value]
    parts = value.values() if type(value) is dict else value if type(value) in _LISTS else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def is_same(now: Any, value: Any) -> bool:
    if now is value:
        return True
    if type(now) is not type(value):
        return False
    if type(value) is torch.Tensor:
        return now.dtype is value.dtype and not now.is_meta and torch.equal(now, value)
    if type(value) is dict:
        return now.keys() == value.keys() and all(is_same(now[key], value[key]) for key in value)
    if type(value) in _LISTS:
        return len(now) == len(value) and all(map(is_same, now, value))
    return bool(now == value)


def _grown(now: Any, value: Any) -> bool:
    if type(now) is type(value) is dict:
        return is_same({key: now[key] for key in value if key in now}, value)
    return type(now) is type(value) is list and is_same(now[: len(value)], value)


# Host tensors.


def of_weights(device: DeviceCopies, module: nn.Module) -> Guard:
    """Return the row about host weights and buffers that have copies on a device.

    Torch counts writes to a tensor, but not writes through its ``.data``.
    """
    modules: list[nn.Module] = []
    # tensors with a copy on the device: path, owner, name, id
    places: list[tuple[str, Any, str, int]] = []

    def read() -> tuple[bool, list[int]]:
        holders = (own.__dict__[name] for own in modules for name in HOLDERS)
        entries = (dict.values(each) for each in holders if isinstance(each, dict))
        return device.is_untouched(), list(map(id, itertools.chain(*entries)))

    def keep(_: object) -> tuple[bool, list[int]]:
        copies = device.by_host()
        modules[:] = module.modules()
        places[:] = [
            (f"{prefix}.{name}" if prefix else name, owner, name, id(tensor))
            for prefix, owner in module.named_modules()
            for holder in HOLDERS
            for name, tensor in _entries(owner, holder).items()
            if id(tensor) in copies
        ]
        device.settle()
        return read()

    def changes(_: object) -> Iterator[str]:
        copies, seen = device.by_host(), set()
        for path, owner, name, known in places:
            tensor = _entries(owner, "_parameters").get(name, _entries(owner, "_buffers").get(name))
            if tensor is None:
                yield f"'{path}' was removed, but the device continues to use it"
                continue
            own = copies.get(known) if id(tensor) == known else None
            if own is None or (known not in seen and own.differs_from(tensor)):
                yield f"'{path}' on the host, but the device continues to use its own values"
            seen.add(known)

    return Guard(read, changes, _WEIGHTS, keep)


def _entries(owner: nn.Module, holder: str) -> dict[str, Any]:
    """Return the entries of a module without triggering notifications. TorchScript modules do not
    use dicts.
    """
    entries = owner.__dict__[holder]
    return dict(dict.items(entries)) if isinstance(entries, dict) else {}

"""Check whether attributes of modules, whose values are constants of the program, have changed."""

from __future__ import annotations

import argparse
import dataclasses
import operator
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .change_check import DESTROY, WRAP, ChangeCheck, is_same

_version = operator.attrgetter("_version")
_PLAIN = (bool, int, float, str)
_LISTS = (list, tuple)
_LONGEST = 64  # longer lists and dicts contain data or logs
_MOST_BYTES = 1 << 16  # bytes in an array; comparing more would take longer than a call
_NOT_HELD = object()


class ModuleAttributes:
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
            f"pass values that change to forward as a tensor, or {DESTROY if trained else WRAP}"
        )

    def checks(self, constants: Iterable[torch.Tensor]) -> list[ChangeCheck]:
        """Return the checks of attributes that the capture itself has not changed.

        ``constants``: tensors other than weights and buffers that the program starts with, or whose
        values decided branches or shapes.
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

    def _values(self, readers: list[tuple[Callable[[str], Any], str, str]]) -> ChangeCheck:
        def read() -> list[Any]:
            return [get(name) for get, name, _ in readers]

        def keep(values: list[Any]) -> list[Any]:
            return list(map(_copy, values))

        def changes(before: list[Any]) -> Iterator[str]:
            for (get, name, attribute), old in zip(readers, before, strict=True):
                now = get(name)
                if not is_same(now, old) and not _grown(now, old):
                    yield f"{attribute} was {_text(old)} and is {_text(now)}"

        return ChangeCheck(read, changes, self._remedy, keep, _are_same)

    def _versions(self, tensors: list[torch.Tensor], named: Mapping[int, str]) -> ChangeCheck:
        known = [tensor._version for tensor in tensors]

        def changes(_: object) -> Iterator[str]:
            for tensor, version in zip(tensors, known, strict=True):
                if tensor._version != version:
                    own = named.get(id(tensor), f"a tensor of shape {tuple(tensor.shape)}")
                    yield f"{own} was changed in place"

        return ChangeCheck(lambda: sum(map(_version, tensors)), changes, self._remedy)


def _are_same(now: list[Any], values: list[Any]) -> bool:
    """Compare values that are usually the same objects, such as numbers that nobody assigned.

    Equal values may give other results: -0.0 divides differently from 0.0, and an integer times 1.0
    is no integer.
    """
    pairs = zip(now, values, strict=True)
    return all(one is other or is_same(one, other) for one, other in pairs)


def _attribute(path: str, owner: object, name: str) -> str:
    kind = type(owner).__name__.removeprefix("Poptorch")
    return f"{kind}.{name}{f' of {path}' if path else ''}"


def _text(value: Any) -> str:
    if type(value) is torch.Tensor and value.numel() > 4:
        return f"a tensor of shape {tuple(value.shape)}"
    return textwrap.shorten(repr(value), 80, placeholder=" ...")


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
        if kind is tuple and all(map(operator.is_, parts, value)):
            return value
        if not any(part is _NOT_HELD for part in parts):
            return dict(zip(value, parts, strict=True)) if kind is dict else kind(parts)
    return _NOT_HELD


def _tensors(value: Any) -> list[torch.Tensor]:
    if type(value) is torch.Tensor:
        return [value]
    parts = value.values() if type(value) is dict else value if type(value) in _LISTS else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _grown(now: Any, value: Any) -> bool:
    if type(now) is type(value) is dict:
        return is_same({key: now[key] for key in value if key in now}, value)
    return type(now) is type(value) is list and is_same(now[: len(value)], value)


def array_check(arguments: Iterable[tuple[str, Any]]) -> ChangeCheck:
    """Return the check of small arrays among the arguments, which are constants, too."""
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

    return ChangeCheck(read, changes, f"pass the value as a tensor, or {DESTROY}")

"""What modules hold besides weights: constants of the program, whatever becomes of it.

An annealed temperature, another dropout rate or weight of a loss term, a mask that is replaced
would have no effect, without a word.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import operator
import textwrap
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from .._base import log

_PLAIN = (bool, int, float, str)
_LISTS = (list, tuple)
_LONGEST = 64  # longer lists and dicts are data or logs
_FOLLOWED = "training"  # a program for each mode
_IN_TURN = 4  # layers and tensors that one call looks at

_version_of = operator.attrgetter("_version")
_Held = tuple[str, type, dict[str, Any], dict[str, Any]]


class Attributes:
    """What a model's modules held when it was compiled; warns once that it is not that any more.

    Looks at numbers, flags, texts, at tensors that the program reads, at lists, tuples and dicts of
    all these, and into dataclasses and namespaces. Names that begin with an underscore are left
    out, as those of libraries, and so is what ``forward`` itself changes, as a counter, and what
    only grows, as a log.

    Args:
        module: what is compiled.
        users: the user's module, of which that is a copy that shares the layers.
        trained: whether they are one to the user; of inference each wrapper has a copy.
    """

    def __init__(self, module: nn.Module, users: nn.Module, trained: bool) -> None:
        if trained:
            module.__dict__.update({name: users.__dict__[name] for name in _held(users.__dict__)})
        owners: list[tuple[str, object]] = [("", users), *module.named_modules()]
        owners += _settings(owners)
        self._held: list[_Held] = [
            (path, type(owner), owner.__dict__, _held(owner.__dict__)) for path, owner in owners
        ]
        self._remedy = (
            "call destroy() on the executor, so that the next call compiles anew"
            if trained
            else "wrap the model again"
        )
        self._said = False
        self._constants: list[tuple[torch.Tensor, int]] = []

    def settle(self, constants: Iterable[torch.Tensor]) -> None:
        """From now on look at what is as it was before ``forward`` was captured.

        Args:
            constants: tensors besides weights and buffers that the program begins with.
        """
        self._constants = [(t, _version_of(t)) for t in constants if not t.is_inference()]
        read = {id(tensor) for tensor, _ in self._constants}
        set_inside = {
            (path, name)
            for path, _, own, held in self._held[1:]
            for name, value in held.items()
            if not _same(own.get(name), value)
        }

        def counts(path: str, name: str, value: Any) -> bool:
            tensors = _tensors(value)
            is_read = not tensors or any(id(tensor) in read for tensor in tensors)
            return is_read and (path, name) not in set_inside

        self._look_at(counts)

    def _look_at(self, wanted: Callable[[str, str, Any], bool]) -> None:
        """From now on look at what is held and the same as before, if it is wanted."""
        self._held = [
            (
                path,
                kind,
                own,
                {
                    name: _copy(own[name])
                    for name, value in held.items()
                    if wanted(path, name, value) and _same(own.get(name), value)
                },
            )
            for path, kind, own, held in self._held
        ]
        looks = [(path, _Look(own, held)) for path, _, own, held in self._held if held]
        model = [look for path, look in looks if not path]
        layers = [look for path, look in looks if path]
        self._turns = itertools.cycle([model + group for group in _groups(layers)])
        self._tensor_turns = itertools.cycle(
            [
                ([t for t, _ in group], sum(v for _, v in group))
                for group in _groups(self._constants)
            ]
        )

    def say(self) -> None:
        """Warn, once, if something changed; for every call.

        Each looks at the model itself and at a few of its layers, and of the tensors.
        """
        if self._said:
            return
        tensors, versions = next(self._tensor_turns)
        if sum(map(_version_of, tensors)) == versions:
            for look in next(self._turns):
                if look.differs():
                    break
            else:
                return
        changed = dict.fromkeys([*self._other_values(), *self._edited()])
        if not changed:  # logs have grown, or others have the same values
            self._look_at(lambda path, name, value: True)
            return
        self._said = True
        log.python.warning(
            "Attributes of the model changed after it was compiled (%s): they are constants of "
            "the program, which goes on with those from before. Pass what changes to forward as a "
            "tensor, or %s",
            ", ".join(list(changed)[:5]) + (", ..." if len(changed) > 5 else ""),
            self._remedy,
        )

    def _other_values(self) -> Iterable[str]:
        for path, kind, own, held in self._held:
            for name, value in held.items():
                now = own.get(name)
                if not _same(now, value) and not _grown(now, value):
                    yield f"{_name(path, kind, name)} was {_text(value)} and is {_text(now)}"

    def _edited(self) -> Iterable[str]:
        edited = {id(t): t for t, version in self._constants if _version_of(t) != version}
        for path, kind, _, held in self._held:
            for name, value in held.items():
                for tensor in _tensors(value):
                    if edited.pop(id(tensor), None) is not None:
                        yield f"{_name(path, kind, name)} was written in place"
        for tensor in edited.values():
            yield f"a tensor of shape {tuple(tensor.shape)} was written in place"


def _groups(every: list[Any]) -> list[list[Any]]:
    return [every[start : start + _IN_TURN] for start in range(0, len(every), _IN_TURN)] or [[]]


def _name(path: str, kind: type, name: str) -> str:
    return f"{kind.__name__.removeprefix('Poptorch')}.{name}{f' of {path}' if path else ''}"


def _text(value: Any) -> str:
    if type(value) is torch.Tensor and value.numel() > _IN_TURN:
        return f"a tensor of shape {tuple(value.shape)}"
    return textwrap.shorten(repr(value), 80, placeholder=" ...")


def _settings(owners: Iterable[tuple[str, object]]) -> list[tuple[str, object]]:
    """Return the objects with settings that modules hold, each once, with the path to it."""
    settings = {
        id(value): (f"{path}.{name}" if path else name, value)
        for path, owner in owners
        for name, value in owner.__dict__.items()
        if not name.startswith("_") and hasattr(value, "__dict__") and _has_settings(value)
    }
    return [*settings.values()]


def _has_settings(value: object) -> bool:
    is_instance = not isinstance(value, type | nn.Module | torch.Tensor)
    kinds = (types.SimpleNamespace, argparse.Namespace)
    return is_instance and (dataclasses.is_dataclass(value) or isinstance(value, kinds))


_NOT_HELD = object()


def _held(own: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a module that are looked at: of lists and dicts copies."""
    copies = {
        name: _copy(value)
        for name, value in own.items()
        if name != _FOLLOWED and not name.startswith("_")
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
    """Return the tensors in what is held of an attribute."""
    if type(value) is torch.Tensor:
        return [value]
    parts = value.values() if type(value) is dict else value if type(value) in _LISTS else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _same(now: Any, value: Any) -> bool:
    if now is value:
        return True
    if type(now) is not type(value):
        return False
    if type(value) is torch.Tensor:
        return now.dtype is value.dtype and not now.is_meta and torch.equal(now, value)
    if type(value) is dict:
        return now.keys() == value.keys() and all(_same(now[key], value[key]) for key in value)
    if type(value) in _LISTS:
        return len(now) == len(value) and all(map(_same, now, value))
    return bool(now == value)


def _grown(now: Any, value: Any) -> bool:
    """Tell whether a list or dict has what it had, and more."""
    if type(now) is not type(value) or type(value) not in (list, dict):
        return False
    if type(value) is dict:
        return all(key in now and _same(now[key], value[key]) for key in value)
    return _same(now[: len(value)], value)


class _Look:
    """One look at attributes of a module."""

    def __init__(self, own: dict[str, Any], held: dict[str, Any]) -> None:
        self._own, self._read = own, operator.itemgetter(*held)
        self._expected = self._read(held)

    def differs(self) -> bool:
        """Tell whether some are not what they were."""
        try:
            return bool(self._read(self._own) != self._expected)
        except Exception:  # of many kinds: one is gone, or a tensor now
            return True

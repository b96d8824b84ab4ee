"""Record, restore, compare and pass on what user code stores in attributes of modules.

A capture runs ``forward`` on tensors without values. Attributes that it sets are restored, so that
no such tensor remains.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import operator
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from .replaced_tensors import TENSOR_HOLDERS
from .trace import without_data

_ABSENT = object()
OF_MODULES = frozenset(vars(nn.Module()))  # attributes that torch gives every module
_PLAIN = (bool, int, float, str)
_ATOMS = {*_PLAIN, type(None), torch.dtype}
_SETTINGS = (types.SimpleNamespace, argparse.Namespace)


class ModuleAttribute(NamedTuple):
    """An attribute of a module in the model."""

    path: str  # path of the module
    name: str


class PythonState:
    """The present attributes of modules, and the contents of containers in them."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self._roots = tuple(roots)
        self._saved: dict[int, tuple[Any, Any]] = {}  # by id: an object and its contents
        self.tensors: dict[int, torch.Tensor] = {}  # tensors in attributes, by id
        self.generators: list[torch.Generator] = []  # generators in attributes
        modules = {id(each): each for root in self._roots for each in root.modules()}
        for module in modules.values():
            self._save(vars(module))

    def _save(self, value: Any) -> None:
        if type(value) in _ATOMS:
            return
        if isinstance(value, torch.Tensor):
            self.tensors[id(value)] = value
            return
        if isinstance(value, torch.Generator):
            self.generators.append(value)
            return
        value = _container(value)
        if value is None or id(value) in self._saved:
            return
        contents = dict(dict.items(value)) if isinstance(value, dict) else list(value)
        self._saved[id(value)] = value, contents
        for item in contents.values() if isinstance(contents, dict) else contents:
            self._save(item)

    def _copy(self) -> PythonState:
        result = PythonState(())
        result._roots, result._saved = self._roots, dict(self._saved)
        result.tensors, result.generators = self.tensors, self.generators
        return result

    def restore(self) -> None:
        for value, contents in self._saved.values():
            _fill(value, contents)

    def now(self) -> PythonState:
        """Return the present state of the same modules."""
        return PythonState(self._roots)

    def lost_values(self, later: PythonState) -> bool:
        """Return whether attributes in a later state contain a capture's tensors without values."""
        new = later.tensors.keys() - self.tensors.keys()
        return any(without_data(later.tensors[each]) for each in new)

    def changed(self, later: PythonState) -> list[ModuleAttribute]:
        """Return the attributes of modules that have another value or other contents in a
        later state.
        """
        found = []
        for path, module in self._roots[0].named_modules():
            before, after = self._contents(vars(module)), later._contents(vars(module))
            own = {name: after[name] for name in after if name not in OF_MODULES}
            layers = later._contents(after["_modules"])
            layers_before = self._contents(before.get("_modules", {}))
            found += [
                ModuleAttribute(path, name)
                for name, value in own.items()
                if not self._is_same(before.get(name, _ABSENT), value, later, set())
            ]
            found += [
                ModuleAttribute(path, name)
                for name, layer in layers.items()
                if layers_before.get(name, _ABSENT) is not layer
            ]
        return found

    def by_object(self, places: Iterable[ModuleAttribute]) -> list[list[ModuleAttribute]]:
        """Group attributes of modules. Those that contain the same container are one group."""
        modules = dict(self._roots[0].named_modules())
        groups: dict[object, list[ModuleAttribute]] = {}
        for place in places:
            value = self._contents(vars(modules[place.path])).get(place.name)
            key = place if _container(value) is None else id(value)
            groups.setdefault(key, []).append(place)
        return list(groups.values())

    def _is_same(self, one: Any, other: Any, later: PythonState, seen: set[int]) -> bool:
        if one is not other:
            return type(one) is type(other) and type(one) in _PLAIN and bool(one == other)
        container = _container(one)
        if container is None or id(container) in seen:
            return True
        seen.add(id(container))
        before, after = self._contents(container), later._contents(container)
        if isinstance(before, dict) and list(before) != list(after):
            return False
        before, after = _items(before), _items(after)
        pairs = zip(before, after, strict=False)
        return len(before) == len(after) and all(
            self._is_same(*pair, later, seen) for pair in pairs
        )

    def _contents(self, container: Any) -> Any:
        return self._saved.get(id(container), (None, container))[1]

    def holding(self, predicate: Callable[[torch.Tensor], bool]) -> Iterator[ModuleAttribute]:
        """Yield the attributes that contain tensors of some kind, also in containers."""
        for path, module in self._roots[0].named_modules():
            for name, value in self._contents(vars(module)).items():
                if name not in OF_MODULES and any(map(predicate, self._tensors_in(value, set()))):
                    yield ModuleAttribute(path, name)

    def _tensors_in(self, value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            yield value
        container = _container(value)
        if container is not None and id(container) not in seen:
            seen.add(id(container))
            for item in _items(self._contents(container)):
                yield from self._tensors_in(item, seen)

    def with_tensors(
        self, places: Collection[ModuleAttribute], function: Callable[[torch.Tensor], torch.Tensor]
    ) -> PythonState:
        """Return a state in which a function was applied to the tensors in some attributes."""
        result = self._copy()
        modules = dict(self._roots[0].named_modules())
        for path, name in places:
            own = vars(modules[path])
            contents = result._contents(own)
            changed = result._mapped(contents[name], function)
            result._saved[id(own)] = own, {**contents, name: changed}
        return result

    def _mapped(self, value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            return function(value)
        if type(value) is tuple:
            return tuple(self._mapped(item, function) for item in value)
        container = _container(value)
        saved = None if container is None else self._saved.pop(id(container), None)
        if saved is not None:  # otherwise it is a part of itself
            _, contents = saved
            keys, items = (
                list(contents),
                [self._mapped(each, function) for each in _items(contents)],
            )
            contents = dict(zip(keys, items, strict=True)) if isinstance(contents, dict) else items
            self._saved[id(container)] = container, contents
        return value

    def with_changes(self, places: Collection[ModuleAttribute], later: PythonState) -> PythonState:
        """Return a state in which some attributes are as they are in a later state."""
        result = self._copy()
        modules = dict(self._roots[0].named_modules())
        for path, name in places:
            own = vars(modules[path])
            holder = own["_modules"] if name in later._contents(own["_modules"]) else own
            value = later._contents(holder)[name]
            result._saved[id(holder)] = holder, {**result._contents(holder), name: value}
            result._copy_changed(value, later, set())
        return result

    def _copy_changed(self, value: Any, later: PythonState, seen: set[int]) -> None:
        container = _container(value)
        if container is None or id(container) in seen:
            return
        seen.add(id(container))
        self._saved[id(container)] = container, later._contents(container)
        for item in _items(later._contents(container)):
            self._copy_changed(item, later, seen)

    def without_registered(self) -> PythonState:
        """Return a state that has no weights and buffers, so that restoring it leaves them."""
        result = self._copy()
        for module in {id(each): each for root in self._roots for each in root.modules()}.values():
            for holder in TENSOR_HOLDERS:
                result._saved.pop(id(vars(module)[holder]), None)
        return result

    def copy_to_modules(self) -> None:
        """Copy these attributes to the modules, except for weights and buffers."""
        places = list(self.holding(lambda tensor: tensor.grad_fn is not None))
        self.with_tensors(places, torch.Tensor.detach).without_registered().restore()

    @contextlib.contextmanager
    def once_more(self) -> Iterator[None]:
        """Restore the earlier attributes within the block, and the present ones afterwards."""
        now = self.now()
        self.restore()
        try:
            yield
        finally:
            now.restore()


def _container(value: Any) -> Any:
    """Return the container whose parts are compared, or None for other values."""
    if isinstance(value, (dict, list, set, deque, tuple)):
        return value
    if isinstance(value, nn.Module):
        return None
    is_settings = dataclasses.is_dataclass(value) or isinstance(value, _SETTINGS)
    if is_settings and not isinstance(value, type):
        return getattr(value, "__dict__", None)
    return None


def _items(contents: Any) -> list[Any]:
    return list(contents.values() if isinstance(contents, dict) else contents)


def _fill(value: Any, contents: Any) -> None:
    if isinstance(value, dict):
        _fill_dict(value, contents)
    elif isinstance(value, tuple) or _same_items(value, contents):
        return
    elif isinstance(value, list):
        value[:] = contents
    else:
        value.clear()
        value.update(contents) if isinstance(value, set) else value.extend(contents)


def _same_items(value: Any, contents: list[Any]) -> bool:
    return len(value) == len(contents) and all(map(operator.is_, value, contents))


def _fill_dict(value: dict[Any, Any], contents: dict[Any, Any]) -> None:
    """Call the methods of ``dict`` directly, because some dicts of the model announce
    every access.
    """
    if list(dict.keys(value)) != list(contents):
        dict.clear(value)
        dict.update(value, contents)
        return
    for key, item in contents.items():
        if dict.get(value, key, _ABSENT) is not item:
            dict.__setitem__(value, key, item)

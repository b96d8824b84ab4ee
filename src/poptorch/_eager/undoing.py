"""Letting a model run once more as if it had not: what its code changes is put back.

Put back are tensors of the model (also those in plain attributes), ``.grad``, the attributes of its
layers with the lists, dicts and sets in them, and all random states. Tensors are copied when they
are first written, so that no second copy of the weights is made.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from .._base import private
from .._ir.operators import Operator

_ABSENT = object()
_OF_MODULES = frozenset(vars(nn.Module()))  # torch's own attributes of every module


class Changed(NamedTuple):
    """An attribute that ``forward`` has changed."""

    path: str  # of the module
    name: str
    module: nn.Module


class PythonState:
    """The attributes of modules, and the containers in them, as they are now."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self._roots = tuple(roots)
        self._saved: dict[int, tuple[Any, Any]] = {}  # by identity: an object and its contents
        self.tensors: dict[int, torch.Tensor] = {}  # that they hold, by identity
        self.generators: list[torch.Generator] = []  # that they hold
        modules = {id(each): each for root in self._roots for each in root.modules()}
        for module in modules.values():
            self._save(vars(module))

    def _save(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.tensors[id(value)] = value
            return
        if isinstance(value, torch.Generator):
            self.generators.append(value)
            return
        if id(value) in self._saved or not isinstance(value, (dict, list, set, deque, tuple)):
            return
        contents = dict(dict.items(value)) if isinstance(value, dict) else list(value)
        self._saved[id(value)] = value, contents
        for item in contents.values() if isinstance(contents, dict) else contents:
            self._save(item)

    def restore(self) -> None:
        for value, contents in self._saved.values():
            if isinstance(value, dict):
                _restore_dict(value, contents)
            elif isinstance(value, tuple) or _same_items(value, contents):
                continue
            elif isinstance(value, list):
                value[:] = contents
            else:
                value.clear()
                value.update(contents) if isinstance(value, set) else value.extend(contents)

    def now(self) -> PythonState:
        """Return the state of the same modules at this moment."""
        return PythonState(self._roots)

    def changed(self, later: PythonState) -> list[Changed]:
        """Return which attributes of modules have another value, or other contents, later."""
        found = []
        for root in self._roots[:1]:
            for path, module in root.named_modules():
                before, after = (each._contents(vars(module)) for each in (self, later))
                names = [name for name in after if name not in _OF_MODULES]
                found += [
                    Changed(path, name, module)
                    for name in names
                    if before.get(name, _ABSENT) is not after[name]
                    or not _same(self._contents(after[name]), later._contents(after[name]))
                ]
        return found

    def _contents(self, value: Any) -> Any:
        return self._saved.get(id(value), (None, value))[1]

    @contextlib.contextmanager
    def once_more(self) -> Iterator[None]:
        """Within the block the attributes are as they were; afterwards as they are now."""
        now = self.now()
        self.restore()
        try:
            yield
        finally:
            now.restore()


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and _same_items(list(one.values()), list(other.values()))
    return isinstance(one, list) and isinstance(other, list) and _same_items(one, other)


def _same_items(value: Any, contents: list[Any]) -> bool:
    return len(value) == len(contents) and all(map(_is, value, contents))


def _is(one: Any, other: Any) -> bool:
    return one is other


def _restore_dict(value: dict[Any, Any], contents: dict[Any, Any]) -> None:
    """Through the methods of ``dict``: some of the model's dicts announce every look at them."""
    if list(dict.keys(value)) != list(contents):
        dict.clear(value)
        dict.update(value, contents)
        return
    for key, item in contents.items():
        if dict.get(value, key, _ABSENT) is not item:
            dict.__setitem__(value, key, item)


class Writes:
    """Notices which of some tensors are written, and keeps the values that they had before.

    Buffers are copied at once: some operators, batch norms for one, write without saying so.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor]) -> None:
        self._tensors = [each for each in tensors if not each.is_meta]
        self._aliases = [each.detach() for each in self._tensors]  # keep the memory where it is
        self._places: dict[int, list[int]] = {}
        for at, alias in enumerate(self._aliases):
            self._places.setdefault(_memory(alias), []).append(at)
        self._before: dict[int, torch.Tensor] = {}
        for each in buffers:
            self.about_to_write(each)

    def about_to_write(self, tensor: torch.Tensor) -> None:
        for at in self._places.get(_memory(tensor), ()):
            if at not in self._before:
                self._before[at] = self._aliases[at].clone()

    def written(self, tensor: torch.Tensor) -> bool:
        at = next((at for at, each in enumerate(self._tensors) if each is tensor), None)
        if at is None:
            return False
        before = self._before.get(at)
        changed = before is not None and not torch.equal(before, self._aliases[at])
        return changed or self._was_moved(at)

    def _was_moved(self, at: int) -> bool:
        """Whether somebody assigned to ``.data``: no operator does that."""
        tensor, alias = self._tensors[at], self._aliases[at]
        return _region(tensor) != _region(alias)

    def undo(self) -> None:
        preserve = private.optional("unsafe_preserve_version_counter") or _nothing
        with torch.no_grad(), preserve(tuple(self._tensors)):
            for at, tensor in enumerate(self._tensors):
                if self._was_moved(at):
                    tensor.data = self._aliases[at]
            for at, value in self._before.items():
                if not torch.equal(self._aliases[at], value):
                    self._aliases[at].copy_(value)


@contextlib.contextmanager
def _nothing(_: object) -> Iterator[None]:
    yield


def _memory(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # sparse and other tensors without one storage
        return 0


def _region(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def arguments_written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator is going to write into."""
    if not isinstance(func, Operator) or not func._schema.is_mutable:
        return
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            for each in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(each, torch.Tensor):
                    yield each


@contextlib.contextmanager
def random_states() -> Iterator[None]:
    """Within the block torch's generator starts at a fixed seed; afterwards all are as before."""
    pythons, numpy = random.getstate(), sys.modules.get("numpy")  # which few models use
    numpys = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            yield
    finally:
        random.setstate(pythons)
        if numpy is not None:
            numpy.random.set_state(numpys)


@contextlib.contextmanager
def gradients_of(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Within the block no parameter has a gradient; afterwards each has what it had."""
    before = [(each, each.grad) for each in parameters]
    try:
        for parameter, _ in before:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient

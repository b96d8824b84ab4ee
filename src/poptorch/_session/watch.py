"""Noticing that host code reads a wrapped module, so that trained values are brought down first.

A dict of our own stands in the place of every sub-module's ``_parameters`` and ``_buffers``. It
behaves like the dict it replaces, and copies and pickles as a plain one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

HOLDERS = ("_parameters", "_buffers")


class Watched(dict[str, Any]):
    """A dict that announces every look at its values, and every change of them.

    Attributes:
        listeners: whom it tells: of a module that several models have in common, all of them.
    """

    __slots__ = ("listeners",)

    def __init__(self, entries: dict[str, Any]) -> None:
        super().__init__(entries)
        self.listeners: list[Callable[[], None]] = []

    def _announce(self) -> None:
        for listener in self.listeners:
            listener()

    def __setitem__(self, name: str, value: Any) -> None:
        self._announce()  # trained values are for the tensor that goes
        super().__setitem__(name, value)

    def __getitem__(self, name: str) -> Any:
        self._announce()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._announce()
        return super().get(name, default)

    def items(self) -> Any:
        self._announce()
        return super().items()

    def values(self) -> Any:
        self._announce()
        return super().values()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (list(self.items()),)


def watch(module: nn.Module, announce: Callable[[], None]) -> None:
    """Put watched dicts into a module and all below it."""
    for sub in module.modules():
        for holder in HOLDERS:
            entries = sub.__dict__[holder]
            if not isinstance(entries, Watched):
                sub.__dict__[holder] = entries = Watched(entries)
            entries.listeners.append(announce)


def share(module: nn.Module, twin: nn.Module) -> None:
    """Let a shallow copy of a module have the same tensors from now on, whatever they are then."""
    for holder in HOLDERS:
        twin.__dict__[holder] = module.__dict__[holder]


def unwatch(module: nn.Module, announce: Callable[[], None]) -> None:
    """Put plain dicts back, unless others want to know."""
    for sub in module.modules():
        for holder in HOLDERS:
            entries = sub.__dict__[holder]
            if isinstance(entries, Watched):
                others = [listener for listener in entries.listeners if listener is not announce]
                if others:
                    entries.listeners[:] = others
                else:
                    sub.__dict__[holder] = dict(entries.items())

"""Limit changes to the thread that captures a model, and let one thread capture at a time."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

_T = TypeVar("_T")


class RenewedLock:
    """A lock that is replaced in a forked process, because the thread that holds it does not exist
    there.
    """

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self.now = threading.RLock()


_lock = RenewedLock()


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Keep other threads from capturing or compiling, because torch's tracer does not support
    several threads.
    """
    with _lock.now:
        yield


@contextlib.contextmanager
def holding(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """Within the block, a variable has a value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


_METHODS = (
    "__contains__", "__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__len__",
    "__ne__", "__or__", "__repr__", "__reversed__", "__ror__", "__setitem__", "clear", "copy",
    "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values",
)  # fmt: skip


class PerThread(dict[str, Any]):
    """A dict with different contents for the thread that makes it and for all other threads."""

    __slots__ = ("_mine", "_others", "_thread")
    __hash__ = None

    def __init__(self, others: dict[str, Any], mine: dict[str, Any]) -> None:
        super().__init__(others)  # for C code that bypasses the methods
        self._others, self._mine, self._thread = others, mine, threading.get_ident()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (list(self.items()),)  # copies and pickles are plain dicts


def _delegating(name: str) -> Callable[..., Any]:
    method: Callable[..., Any] = getattr(dict, name)

    def delegate(self: PerThread, *args: Any, **named: Any) -> Any:
        is_own_thread = threading.get_ident() == self._thread
        return getattr(self._mine if is_own_thread else self._others, name)(*args, **named)

    delegate.__name__, delegate.__doc__ = name, method.__doc__
    return delegate


for _name in _METHODS:
    setattr(PerThread, _name, _delegating(_name))


def by_thread(mine: Callable[..., Any], others: Callable[..., Any]) -> Callable[..., Any]:
    thread = threading.get_ident()

    def chosen(*args: Any, **named: Any) -> Any:
        return (mine if threading.get_ident() == thread else others)(*args, **named)

    functools.update_wrapper(chosen, others)
    return chosen


class OfThread:
    """A value of an attribute that only this thread sees. Other threads see the usual value."""

    def __init__(self, mine: Any, others: Any) -> None:
        self._mine, self._others, self._thread = mine, others, threading.get_ident()

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self._mine if threading.get_ident() == self._thread else self._others

    def __bool__(self) -> bool:
        return bool(self.__get__(None))


def only_in_this_thread(hook: Callable[..., None]) -> Callable[..., None]:
    """Make a hook do nothing in other threads, because torch's global module hooks run in
    all of them.
    """
    return by_thread(hook, lambda *_: None)

"""Share one lock between all models that have host tensors in common, if one of them trains.

A call of one model reads what another has trained. Sets of models are joined (union-find) when a
model is wrapped that shares tensors with both, and stay joined. Taking the lock needs no look-up in
a registry.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from .._base import processes
from .._base.thread_safety import RenewedLock

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_changing = RenewedLock()


class Lock:
    """A re-entrant lock. In a forked process it is free, because the thread that held it does not
    exist there.
    """

    def __init__(self) -> None:
        self._above: Lock | None = None  # the set that this one was joined to
        self._held: Any = threading.RLock()
        self._forks = processes.forks

    def run(self, function: Callable[[T], R], argument: T) -> R:
        """Call a function while no other thread is in a model of the set, in fewer steps than
        within a block.
        """
        while True:
            is_root = self._above is None and self._forks == processes.forks
            root = self if is_root else self._root()
            with root._held:
                if root._above is None:  # the set was not joined to another one in the meantime
                    return function(argument)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Hold the lock within a block."""
        while True:
            root = self._root()
            with root._held:
                if root._above is None:
                    yield
                    return

    def join(self, other: Lock) -> None:
        """Share one lock from now on. Wait until no thread is in a model of the set that
        is given up.
        """
        while (goes := self._root()) is not (stays := other._root()):
            if goes._held._is_owned():  # a thread inside a model keeps its lock
                goes, stays = stays, goes
            with goes._held, _changing.now:
                if goes._above is stays._above is None:
                    goes._above = stays

    def _root(self) -> Lock:
        root = self
        while root._above is not None:
            root = root._above
        if root._forks != processes.forks:
            root._renew()
        return root

    def _renew(self) -> None:
        with _changing.now:
            if self._forks != processes.forks:
                if not self._held._is_owned():
                    self._held = threading.RLock()
                self._forks = processes.forks  # last, because others read it without the lock


class _HasLock(Protocol):
    lock: Lock


S = TypeVar("S", bound=_HasLock)


def locked(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a method hold the lock, so that a thread sees the state between two calls."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock():
            return method(self, *args, **kwargs)

    return call

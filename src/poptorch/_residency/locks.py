"""One lock for all models that have host tensors in common, where one of them trains.

A call of one reads what another has trained. Sets of models are joined (union-find) when one is
wrapped that has tensors of both, and stay joined; whoever takes the lock looks at no registry.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from .._base import processes
from .._base.threads import RenewedLock

P = ParamSpec("P")
R = TypeVar("R")

_changing = RenewedLock()


class Lock:
    """Re-entrant. In a forked process it is free, whoever held it: that thread is not there."""

    def __init__(self) -> None:
        self._above: Lock | None = None  # the set that this one has become a part of
        self._held: Any = threading.RLock()
        self._forks = processes.forks

    def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function while no other thread is in a model of the set."""
        while True:
            root = self._root()
            with root._held:
                if root._above is None:  # nobody joined the set to another one meanwhile
                    return function(*args, **kwargs)

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
        """Have one lock from now on; waits until nobody is in a model of the set that goes."""
        while (goes := self._root()) is not (stays := other._root()):
            if goes._held._is_owned():  # a thread that is in a model keeps its lock
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
                self._forks = processes.forks  # last: others look at it without the lock


class _HasLock(Protocol):
    lock: Lock


S = TypeVar("S", bound=_HasLock)


def locked(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Let a method hold the lock: what a thread sees is the state between two calls."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.lock.run(method, self, *args, **kwargs)

    return call

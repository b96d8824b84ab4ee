"""Models whose host tensors are common: who they are, and one order in which they are locked.

Each call looks here, so that validating after training needs no copy by hand, and so that of two
training models with common weights, as of a GAN, each goes on from what the other has trained.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from .._base.threads import RenewedLock

_numbers = itertools.count()
_members: weakref.WeakSet[Sharing] = weakref.WeakSet()
_generation = 0  # changes whenever models come: keeps look-ups cheap
_registry = RenewedLock()

Lock = contextlib.AbstractContextManager[object]


class Sharing:
    """A model that other models may share host tensors with, which are given by identity.

    ``trains``: its device may have newer values of them than the host at times.
    """

    def __init__(self, hosts: Iterable[int], trains: bool) -> None:
        global _generation
        self.hosts, self.trains = frozenset(hosts), trains
        self.is_trainer = False  # a model that was let go of is none any more
        self._number = next(_numbers)
        self._own_lock: Any = threading.RLock()
        self._seen_generation = -1
        self._locks = [self._own_lock]
        self.is_related = False  # as of the last lock()
        self.others: weakref.WeakSet[Sharing] = weakref.WeakSet()  # as of the last lock()
        with _registry.now:
            _members.add(self)
            _generation += 1

    def lock(self) -> Lock:
        """Return the lock of this model and of those that it exchanges weights with.

        It is re-entrant. Two threads never wait for one another: locks are taken in the order in
        which the models were made, and a thread that holds this one takes no more.
        """
        if self._seen_generation != _generation:
            if self._own_lock._is_owned():
                return self._own_lock  # type: ignore[no-any-return]
            with _registry.now:
                self._relate()
        return _all(self._locks) if self.is_related else self._own_lock

    def _relate(self) -> None:
        generation = _generation
        rest = set(_members) - {self}
        group: list[Sharing] = [self]
        for member in group:  # which grows: relatives of relatives are locked, too
            near = {other for other in rest if member._exchanges_with(other)}
            group += near
            rest -= near
        self.others = weakref.WeakSet(each for each in group[1:] if self._exchanges_with(each))
        self._locks = [m._own_lock for m in sorted(group, key=lambda member: member._number)]
        self.is_related = len(group) > 1
        self._seen_generation = generation  # last: others look at it without the registry

    def _exchanges_with(self, other: Sharing) -> bool:
        return (self.trains or other.trains) and not self.hosts.isdisjoint(other.hosts)


@contextlib.contextmanager
def _all(locks: Iterable[Lock]) -> Iterator[None]:
    with contextlib.ExitStack() as taken:
        for lock in locks:
            taken.enter_context(lock)
        yield


def _renew() -> None:
    """A forked process has one thread: locks that others held would never be free."""
    for member in _members:
        member._own_lock = threading.RLock()
        member._seen_generation = -1


os.register_at_fork(after_in_child=_renew)

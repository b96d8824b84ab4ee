"""Which training session holds newer values of which host tensors.

Sessions look here at every call, so that validating after training needs no copy by hand, whichever
wrapper was made first (PopTorch user guide, "Features"), and so that of two training models with
common weights, as of a GAN, each goes on from what the other has trained.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol


class Trainer(Protocol):
    """One whose device has newer weights than the host from time to time."""

    version: int

    def bring_host_up_to_date(self) -> bool:
        """Download if the device is newer; return whether it was."""
        ...


class Follower(Protocol):
    """One that wants to know the last version of a trainer that goes away."""

    hosts: tuple[int, ...]

    def last_version(self, version: int) -> None:
        """The host now holds this version, and no trainer will say so."""
        ...


_trainers: dict[int, list[weakref.ref[Trainer]]] = {}
_followers: weakref.WeakSet[Follower] = weakref.WeakSet()
_generation = 0


def register(trainer: Trainer, tensors: Iterable[int]) -> None:
    """Let a trainer be found from the identities of the host tensors it trains."""
    global _generation
    _generation += 1
    reference = weakref.ref(trainer)
    for tensor in tensors:
        _trainers.setdefault(tensor, []).append(reference)


def forget(trainer: Trainer, tensors: Iterable[int]) -> None:
    """Remove what ``register`` added and tell those who shared the tensors the last version."""
    global _generation
    _generation += 1
    for tensor in tensors:
        others = [other for other in _trainers.pop(tensor, ()) if other() not in (trainer, None)]
        if others:
            _trainers[tensor] = others
    ours = set(tensors)
    for follower in list(_followers):
        if id(follower) != id(trainer) and not ours.isdisjoint(follower.hosts):
            follower.last_version(trainer.version)


def follow(follower: Follower) -> None:
    """Tell it when a trainer of its tensors goes away. It is held weakly."""
    _followers.add(follower)


def generation() -> int:
    """A number that changes whenever trainers come or go: to keep look-ups cheap."""
    return _generation


def trainers_of(tensors: Iterable[int]) -> list[Trainer]:
    """Return the living trainers of any of these host tensors, each once."""
    trainers: dict[int, Trainer] = {}
    for tensor in tensors:
        for reference in _trainers.get(tensor, ()):
            trainer = reference()
            if trainer is not None:
                trainers[id(trainer)] = trainer
    return list(trainers.values())

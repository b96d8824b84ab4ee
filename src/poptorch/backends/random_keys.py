"""Advance a model's random stream while it runs: one key for each device iteration of each call.

A key is drawn from ``State.rng``, which the draw advances. The seeds of all steps and replicas of
an iteration are derived from its key (``_ops.random_streams``). ``_session/random.py`` seeds
``State.rng`` and lets users save and restore it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from .._base.thread_safety import RenewedLock
from .._ir.micro_batches import Loops
from .._ir.program import State
from .._ops import random_streams

_drawing = RenewedLock()


@contextlib.contextmanager
def device_generator() -> Iterator[None]:
    """Use torch's default generator in the block, which all threads share, and restore it
    afterwards.
    """
    with _drawing.now:
        host = torch.get_rng_state()
        try:
            yield
        finally:
            torch.set_rng_state(host)


class RandomKeys:
    """The random keys of a call: one for each iteration, so that iterations draw what separate
    calls would.
    """

    def __init__(self, state: State, loops: Loops) -> None:
        self._state, self._loops = state, loops
        self._keys: list[int] = []

    def seed(self, step: int, replica: int, part: str = "") -> int:
        iteration = self._loops.iteration(step)
        while len(self._keys) <= iteration:
            assert self._state.rng is not None, "the device's generator was never seeded"
            key, self._state.rng = random_streams.next_key(self._state.rng)
            self._keys.append(key)
        within = step - self._loops.step(iteration, 0)
        return random_streams.seed(self._keys[iteration], within, replica, part)

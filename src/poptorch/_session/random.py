"""Seed a model's random stream, and convert its state to ``rng_state``, which users save.

While the program runs, ``backends/random_keys.py`` advances the stream.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

import torch

from .. import _job
from .._base import log
from .._base.errors import InvalidValue
from .._ir import slots
from .._ir.program import State


def first_state(seed: int) -> torch.Tensor:
    """Return the initial state of torch's generator on a device with this seed.

    It differs from the host's state for the same seed. Otherwise the noise in a model would be
    correlated with its data.
    """
    text = f"poptorch device {seed}".encode()
    mixed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
    return torch.Generator().manual_seed(mixed).get_state()


class Randomness:
    """Seeds a device's generator and converts its state. A seed of None is non-deterministic.

    With ``together``, all processes use the seed of process 0. Replicas draw according to their
    index among all processes, and random rounding in updates must be the same in all of them.
    """

    def __init__(self, seed: int | None, together: bool = False) -> None:
        self._chosen = seed is not None
        self._seed = int.from_bytes(os.urandom(4), "little") if seed is None else seed
        if together:
            self._seed = _job.current().numbers(self._seed, "the random seed")[0]
            if seed is not None and seed != self._seed:
                log.python.warning(
                    f"randomSeed({seed}) has no effect on the model, because process 0 of the "
                    "job has another seed, which all processes use"
                )
        self._saved = first_state(self._seed)
        self.has_run = False

    def start(self, state: State, restored: bool) -> None:
        """Set the generator of a device to a new sequence, or continue a sequence.

        With ``restored``, random rounding also continues where it stopped.
        """
        state.rng = self._saved.clone()
        rounding = slots.ROUNDING.key
        if rounding in state.tensors and not restored:
            state.tensors[rounding].fill_(self._seed)  # equal in all processes, as weights are

    def leave(self, state: State) -> None:
        assert state.rng is not None
        self._saved = state.rng.clone()

    def get(self, state: State | None) -> list[int] | None:
        """Return ``[seed, state...]``; ``[seed]`` before the first run, or None without a seed."""
        if not self.has_run:
            return [self._seed] if self._chosen else None
        current = state.rng if state is not None else self._saved
        assert current is not None
        return [self._seed, *current.view(torch.int64).tolist()]

    def set(self, value: Sequence[int] | None, state: State | None) -> None:
        """Continue from a value that ``get`` returned."""
        if value is None:
            return
        numbers = list(value)
        lengths = (1, 1 + len(self._saved) // 8)
        if len(numbers) not in lengths or not all(isinstance(n, int) for n in numbers):
            raise _no_state(f"{len(numbers)} values; a state has {lengths[0]} or {lengths[1]}")
        state_words = torch.tensor(numbers[1:], dtype=torch.int64, device="cpu").view(torch.uint8)
        if len(numbers) > 1:
            try:
                torch.Generator().set_state(state_words)
            except RuntimeError as error:
                raise _no_state(str(error)) from error
        self._seed, self._chosen = numbers[0], True
        self.has_run = len(numbers) > 1
        self._saved = state_words if self.has_run else first_state(self._seed)
        if state is not None:
            state.rng = self._saved.clone()


def _no_state(got: str) -> InvalidValue:
    return InvalidValue(
        "This is not a state of the device's random generator",
        got=got,
        fix="assign a value that rng_state returned earlier",
    )

"""Detect whether somebody has seeded torch on the host, even with the same seed again, which leaves
no other trace.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from . import private
from .thread_safety import holding

_HOST = torch.default_generator
_listening = contextlib.ExitStack()  # for the lifetime of the process
_times: dict[int, int] = {}  # for each seed, the number of calls of torch.manual_seed
_ours: set[int] = set()  # seeds whose last call was ours
_seeding: ContextVar[bool] = ContextVar("poptorch_seeding", default=False)


@functools.cache
def listen() -> None:
    """Start counting calls of ``torch.manual_seed``. Without the private name nothing is
    counted.
    """
    _listening.enter_context(private.replacing({"manual_seed_impl": _counted}))


def _counted(usual: Callable[..., Any], seed: Any) -> Any:
    generator = usual(seed)
    if generator is _HOST:  # a capture has another generator
        number = generator.initial_seed()
        if _seeding.get():
            _ours.add(number)
        else:
            _times[number] = _times.get(number, 0) + 1
            _ours.discard(number)
    return generator


def seed_host(seed: int) -> None:
    """Seed torch for an option. Compiled programs do not warn about it."""
    with holding(_seeding, True):
        torch.manual_seed(seed)


def last() -> tuple[int, int]:
    """Return the host's seed, and how many times ``torch.manual_seed`` has set it."""
    seed = _HOST.initial_seed()
    return seed, _times.get(seed, 0)


def is_ours(seed: int) -> bool:
    """Return whether ``seed_host`` was the last to set this seed, since ``listen``."""
    return seed in _ours

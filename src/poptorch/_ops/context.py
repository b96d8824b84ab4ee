"""What operators need to know while a model is being captured: whether it is, and who listens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Protocol

import torch


class Listener(Protocol):
    """What a capture wants to hear from operators called inside ``forward``."""

    def mark_loss(self, loss: torch.Tensor, name: str) -> None:
        """A value that training may start its gradients from."""


_listener: ContextVar[Listener | None] = ContextVar("poptorch_capture", default=None)


def listener() -> Listener | None:
    """The capture in progress, or None outside one."""
    return _listener.get()


@contextlib.contextmanager
def listening(capture: Listener) -> Iterator[None]:
    """Make a capture the one in progress."""
    token = _listener.set(capture)
    try:
        yield
    finally:
        _listener.reset(token)

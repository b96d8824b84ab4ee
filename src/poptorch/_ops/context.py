"""What operators need to know while a model is being captured: whether it is, and who listens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

import torch


class Listener(Protocol):
    """What a capture wants to hear from operators called inside ``forward``."""

    @property
    def training(self) -> bool:
        """Whether the captured program computes gradients."""
        ...

    def mark_loss(self, loss: torch.Tensor, name: str) -> None:
        """A value that training may start its gradients from."""

    def number(self) -> int:
        """Return 0, 1, 2, ...: every capture of the same program counts alike."""
        ...

    def group(
        self, options: Mapping[str, tuple[Any, ...]], where: str | None
    ) -> contextlib.AbstractContextManager[None]:
        """Within the block convolutions belong to one group.

        Args:
            options: per name one value, or one per convolution.
            where: the user's line.
        """
        ...


_listener: ContextVar[Listener | None] = ContextVar("poptorch_capture", default=None)


def listener() -> Listener | None:
    """The capture in progress, or None outside one."""
    return _listener.get()


@contextlib.contextmanager
def listening(capture: Listener | None) -> Iterator[None]:
    """Make a capture the one in progress; None hides the one that is."""
    token = _listener.set(capture)
    try:
        yield
    finally:
        _listener.reset(token)

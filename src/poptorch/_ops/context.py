"""What operators need to know while a model is being captured: whether it is, and who listens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx


@dataclass(frozen=True, eq=False)
class Replicas:
    """The data-parallel copies of a model."""

    count: int = 1
    lane: torch.Tensor | None = None
    apart: str = ""
    processes: int = 1

    @property
    def total(self) -> int:
        """How many there are in all processes."""
        return self.count * self.processes


class Listener(Protocol):
    """What a capture wants to hear from operators called inside ``forward``."""

    @property
    def training(self) -> bool:
        """Whether the captured program computes gradients."""
        ...

    def together(self) -> Replicas:
        """Say that replicas exchange something, so that they must run side by side; return them."""
        ...

    def mark_loss(self, loss: torch.Tensor, name: str) -> None:
        """A value that training may start its gradients from."""

    def number(self) -> int:
        """Return 0, 1, 2, ...: every capture of the same program counts alike."""
        ...

    def identify(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor in the captured program; None if it is not part of it."""
        ...

    def group(
        self, options: Mapping[str, tuple[Any, ...]], where: str | None
    ) -> contextlib.AbstractContextManager[None]:
        """Within the block convolutions belong to one group."""
        ...

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Within the block code runs for real, as if no model were being captured."""
        ...

    def body(
        self, function: Callable[..., Any], inputs: Sequence[torch.Tensor]
    ) -> tuple[fx.GraphModule, list[torch.Tensor]]:
        """Capture a part that the program runs any number of times, or perhaps not at all."""
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

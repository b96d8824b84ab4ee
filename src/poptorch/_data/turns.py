"""Iterations that share one source: worker processes can serve only one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .._base.errors import Error
from .consumer import Consumer


class WorkersTurn:
    """One iteration by the persistent workers of torch's loader.

    Attributes:
        is_over: whether it has ended, so that the workers may begin another one.
    """

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self.is_over = False

    def end(self) -> None:
        """Take nothing more from the workers."""
        self._batches = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except BaseException:
            self.is_over = True
            raise


class ConsumersTurn:
    """One iteration of a loading process.

    Args:
        owner: the loader, which must not go, and end the process, before its iterations.
        consumer: what reads from the process; an iteration was just begun there.
    """

    def __init__(self, owner: object, consumer: Consumer) -> None:
        self._owner = owner
        self._consumer = consumer
        self._number = consumer.turn

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._consumer.turn != self._number:
            raise Error(
                "A newer iterator over the same asynchronous loader has replaced this one",
                fix="finish one loop before the next one begins, or use DataLoaderMode.Sync, or"
                " two loaders",
            )
        return self._consumer.next()

"""Keep a tensor and a part of it equal if the position of the part is the value of a tensor.

In eager PyTorch, ``x[i]`` is a view: ``x[i].mul_(2)`` writes to ``x``, and later writes to ``x``
are seen through it. If the position is known only when the program runs, the part has its own
memory. Every write to one of the two is therefore repeated in the other one. Repeated writes that
nobody reads are removed from the graph later.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from .._base.errors import Error
from .._ir.operators import arguments_written
from .._ops.context import outermost


class _Writes:
    """Counts the writes to each storage. Torch's version counters do not count writes through
    ``.data``, and tensors that were made in inference mode have no counters.
    """

    def __init__(self) -> None:
        self._counts = Counter[int]()
        self.total = 0

    def of(self, tensor: torch.Tensor) -> int:
        return self._counts[_storage(tensor)]

    def to(self, tensor: torch.Tensor) -> None:
        self._counts[_storage(tensor)] += 1
        self.total += 1

    def heard(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for each in arguments_written(func, args, kwargs):
            self.to(each)


def _storage(tensor: torch.Tensor) -> int:
    identity: int = outermost(tensor).untyped_storage()._cdata
    return identity


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


class _Part:
    """A copy of some places of a tensor along one dimension."""

    def __init__(self, base: torch.Tensor, dim: int, places: torch.Tensor, writes: _Writes) -> None:
        self.base, self._dim, self._places, self._writes = base, dim, places, writes
        self.part = base.index_select(dim, places)
        self._seen = self._counts()
        self._outdated: bool | None = None  # whether gradients were on when the base was written

    def settle(self) -> None:
        """Repeat a write to the part in its base. Remember a write to the base."""
        to_base, to_part = (n > seen for n, seen in zip(self._counts(), self._seen, strict=True))
        if to_base and to_part:
            raise Error(
                "One operator writes to a tensor and to a part of it",
                got="the part begins at a position that is known only when the program runs",
                fix=(
                    "use two operators: one that writes to the tensor, then one for its part",
                    (
                        "or let the operator return new tensors, and write them one after the "
                        "other: tensor.copy_(a), then part.copy_(b)"
                    ),
                ),
            )
        if to_part:
            # A clone, because autograd keeps the source, and the part may be written again.
            self.base.index_copy_(self._dim, self._places, self.part.clone())
        elif to_base:
            self._outdated = torch.is_grad_enabled()
            self._writes.to(self.part)  # parts of this part are outdated, too
        self._seen = self._counts()

    def update(self) -> None:
        """Give the part the values of its base, if it has others."""
        if self._outdated is None:
            return
        with torch.set_grad_enabled(self._outdated):
            self.part.copy_(self.base.index_select(self._dim, self._places))
        self._outdated, self._seen = None, self._counts()

    def _counts(self) -> tuple[int, int]:
        return self._writes.of(self.base), self._writes.of(self.part)


class MovingViews:
    """All such parts of one capture, in the order in which they were made."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._writes = _Writes()
        self._settled = 0  # number of writes
        self._is_busy = False
        self._latest: tuple[Any, ...] = ()

    def part(self, base: torch.Tensor, dim: int, places: torch.Tensor) -> torch.Tensor:
        """Return the places of a tensor along a dimension."""
        self._parts.append(_Part(base, dim, places, self._writes))
        return self._parts[-1].part

    def heard(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what an operator writes."""
        if self._parts:
            self._writes.heard(func, args, kwargs)

    def before(self, *values: Any) -> None:
        """Update the parts that are about to be read, after writes to their tensors."""
        if not self._settled or self._is_busy:
            return
        with self._busy():
            read = {*map(_storage, _tensors(values))}
            needed = list[_Part]()
            for each in reversed(self._parts):
                if _storage(each.part) in read:
                    read.add(_storage(each.base))
                    needed.append(each)
            for each in reversed(needed):
                each.update()

    def after(self) -> None:
        """Make parts and their tensors equal again, after a function that may have written."""
        if self._settled == self._writes.total or self._is_busy:
            return
        with self._busy():
            while self._settled < self._writes.total:
                self._settled = self._writes.total
                for part in self._parts:
                    part.settle()

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        """Within the block, ignore calls of functions, because this code itself makes them."""
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    # The statement ``tensor[index] += 1`` writes to the part, and then assigns it.

    def note(self, tensor: torch.Tensor, index: Any, result: torch.Tensor) -> None:
        """Record that the expression ``tensor[index]`` has a result."""
        self._latest = tensor, index, self._key(index), result

    def is_written(self, tensor: torch.Tensor, index: Any, value: Any) -> bool:
        """Return whether the assignment ``tensor[index] = value`` changes nothing."""
        if not self._latest:
            return False
        of, _, key, part = self._latest
        return of is tensor and part is value and key == self._key(index)

    def _key(self, index: Any) -> Any:
        """Return a key that stays the same as long as nothing writes to the tensors of an index."""
        if isinstance(index, torch.Tensor):
            return id(index), self._writes.of(index)
        if isinstance(index, slice):
            return self._key((index.start, index.stop, index.step))
        return tuple(map(self._key, index)) if isinstance(index, tuple) else index

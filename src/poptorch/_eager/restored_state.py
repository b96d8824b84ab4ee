"""Run a model again without a lasting effect: restore what its code changes.

This covers tensors of the model (also those in plain attributes), ``.grad`` and all random states;
``_capture.PythonState`` covers attributes. Tensors are copied when they are first written, so that
there is no second copy of the weights.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator, Sequence

import torch

from .._base import private


class NoticedWrites:
    """Notices which of some tensors are written, and keeps their old values.

    Buffers are copied immediately, because some operators, such as batch norms, write to them
    without declaring it.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor]) -> None:
        self._tensors = [each for each in tensors if not each.is_meta]
        self._aliases = [each.detach() for each in self._tensors]  # keep the memory alive
        self._places: dict[int, list[int]] = {}
        for at, alias in enumerate(self._aliases):
            self._places.setdefault(_memory(alias), []).append(at)
        self._before: dict[int, torch.Tensor] = {}
        for each in buffers:
            self.about_to_write(each)

    def about_to_write(self, tensor: torch.Tensor) -> None:
        for at in self._places.get(_memory(tensor), ()):
            if at not in self._before:
                self._before[at] = self._aliases[at].clone()

    def written(self, tensor: torch.Tensor) -> bool:
        at = next((at for at, each in enumerate(self._tensors) if each is tensor), None)
        if at is None:
            return False
        before = self._before.get(at)
        changed = before is not None and not torch.equal(before, self._aliases[at])
        return changed or self._was_moved(at)

    def _was_moved(self, at: int) -> bool:
        """Return whether user code assigned to ``.data``, which operators do not do."""
        tensor, alias = self._tensors[at], self._aliases[at]
        return _region(tensor) != _region(alias)

    def undo(self) -> None:
        with torch.no_grad(), private.keeping_versions(self._tensors):
            for at, tensor in enumerate(self._tensors):
                if self._was_moved(at):
                    tensor.data = self._aliases[at]
            for at, value in self._before.items():
                if not torch.equal(self._aliases[at], value):
                    self._aliases[at].copy_(value)


@contextlib.contextmanager
def having(values: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Within the block, tensors have other values."""
    before = [(tensor, tensor.detach().clone()) for tensor, _ in values]
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad(), private.keeping_versions([tensor for tensor, _ in values]):
        for tensor, value in values:
            tensor.copy_(value)


def _memory(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # sparse and other tensors without a single storage
        return 0


def _region(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


@contextlib.contextmanager
def random_states() -> Iterator[None]:
    """Within the block, torch's generator starts from a fixed seed. Afterwards all generators are
    as before.
    """
    pythons, numpy = random.getstate(), sys.modules.get("numpy")  # few models use it
    numpys = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            yield
    finally:
        random.setstate(pythons)
        if numpy is not None:
            numpy.random.set_state(numpys)


@contextlib.contextmanager
def gradients_of(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Within the block, no parameter has a gradient. Afterwards each has its earlier gradient."""
    before = [(each, each.grad) for each in parameters]
    try:
        for parameter, _ in before:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient

"""Weights and buffers that are changed on the host: the device has others until they are copied."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping

import torch

from .._base import log

_IN_TURN = 4  # tensors that one call looks at: what loads or makes weights changes all of them
_SAMPLE = 8  # values of a tensor, spread over it, that show what is written through ``.data``
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_version_of = operator.attrgetter("_version")
OnDevice = Callable[[str], torch.Tensor | None]


class HostEdits:
    """Remembers which values of the host's tensors the device has; warns once of others."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._said = False
        self._turns = itertools.count()
        self.settle({})

    def settle(self, tensors: Mapping[str, torch.Tensor], changing: Iterable[str] = ()) -> None:
        """Host and device have the same values of these now.

        Args:
            tensors: the host's weights and buffers, by path.
            changing: buffers that the program changes: those of the host may be others.
        """
        for path, tensor in tensors.items():
            known = self._known.get(path)
            if known is not None and known.still(tensor):
                known.remember()
            elif not tensor.is_inference():
                self._known[path] = _Known(tensor)
        for path in changing:
            self._known.pop(path, None)
        every = [*self._known.values()]
        starts = range(0, max(len(every), 1), _IN_TURN)
        groups = [every[start : start + _IN_TURN] for start in starts]
        self._groups = [([k.tensor for k in g], sum(k.version for k in g)) for g in groups]
        self._samples = [*filter(_Known.has_sample, every)] or [_NOTHING]

    def say(self, on_device: OnDevice) -> None:
        """Warn, once, if some were changed; for every call, of which each looks at a few.

        Args:
            on_device: returns the device's value of a tensor, None if it has it in parts.
        """
        if self._said:
            return
        turn = next(self._turns)
        tensors, versions = self._groups[turn % len(self._groups)]
        hidden = self._samples[turn % len(self._samples)].was_written_unseen()
        if not hidden and sum(map(_version_of, tensors)) == versions:
            return
        written = {path: known for path, known in self._known.items() if known.was_written()}
        if not self._warn(written, on_device):  # they were put back
            self.settle({path: known.tensor for path, known in written.items()})

    def say_lost(self, on_device: OnDevice) -> None:
        """Warn, once, of what was written through ``.data`` and is about to be overwritten.

        Args:
            on_device: as for ``say``.
        """
        if not self._said:
            known = self._known.items()
            self._warn({path: k for path, k in known if k.was_written_unseen()}, on_device)

    def _warn(self, written: Mapping[str, _Known], on_device: OnDevice) -> bool:
        others = [path for path, k in written.items() if _differ(k.tensor, on_device(path))]
        if not others:
            return False
        self._said = True
        log.python.warning(
            "Weights or buffers were changed on the host (%s), and the device goes on with its "
            "own, which the host gets when it reads them next. Call copyWeightsToDevice() on the "
            "executor after such changes, or load_state_dict() on the executor, which does so",
            ", ".join(others[:5]) + (", ..." if len(others) > 5 else ""),
        )
        return True


class _Known:
    """A tensor of the host, and what of it shows that it was written.

    Torch counts what writes into a tensor, but not through its ``.data``: a few values show that.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._sample = _sample(tensor.detach())
        self._address = tensor.data_ptr() if self.has_sample() else 0
        self.remember()

    def still(self, tensor: torch.Tensor) -> bool:
        """Tell whether this is of a tensor, where it lies now."""
        same = tensor is self.tensor
        return same and (not self.has_sample() or tensor.data_ptr() == self._address)

    def remember(self) -> None:
        """The tensor is as it should be."""
        self.version = _version_of(self.tensor)
        self._values = self._sample.tolist()

    def has_sample(self) -> bool:
        """Whether it has values that can be looked at."""
        return self._sample.numel() > 0

    def was_written(self) -> bool:
        """Tell whether it was written since then."""
        return _version_of(self.tensor) != self.version or self.was_written_unseen()

    def was_written_unseen(self) -> bool:
        """Tell whether it was written since then in a way that torch does not count."""
        if not self._values:
            return False
        in_place = self.tensor.data_ptr() == self._address  # else the sample may have no memory
        if in_place and self._sample.tolist() == self._values:
            return False
        return bool(_version_of(self.tensor) == self.version)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a few elements, as a view; of tensors of unusual kinds of none."""
    count = tensor.numel()
    sizes: Iterable[tuple[int, int]] = zip(tensor.shape, tensor.stride(), strict=True)
    is_dense = sum((size - 1) * stride for size, stride in sizes) == count - 1
    bits = _BITS.get(tensor.element_size())
    if not count or not is_dense or bits is None or tensor.device.type != "cpu":
        return torch.empty(0)
    memory = tensor.untyped_storage().nbytes()
    if memory < (tensor.storage_offset() + count) * tensor.element_size():
        return torch.empty(0)
    step = max(1, count // _SAMPLE)
    return tensor.as_strided((min(count, _SAMPLE),), (step,)).view(bits)


_NOTHING = _Known(torch.empty(0))


def _differ(host: torch.Tensor, device: torch.Tensor | None) -> bool:
    if device is None or device.is_meta or device.shape != host.shape or not host.data_ptr():
        return False
    return not torch.equal(host.detach().to(device.dtype), device)

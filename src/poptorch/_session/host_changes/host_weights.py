"""Check whether the user's weights and buffers have changed since the device copied them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..._capture import TENSOR_HOLDERS
from ..._residency import DeviceCopies
from .change_check import ChangeCheck

_WEIGHTS = (
    "call copyWeightsToDevice() on the wrapped model after you change weights, or use "
    "load_state_dict() of the wrapped model, which also copies them"
)

_holders = operator.itemgetter(*TENSOR_HOLDERS)


def weights_check(device: DeviceCopies, module: nn.Module) -> ChangeCheck:
    """Return the check of host weights and buffers that have copies on a device.

    Torch counts writes to a tensor, but not writes through its ``.data``.
    """
    owns: list[dict[str, Any]] = []  # the attributes of modules whose entries are in dicts
    # tensors with a copy on the device: path, owner, name, id
    places: list[tuple[str, Any, str, int]] = []

    def read() -> tuple[bool, list[int]]:
        holders = itertools.chain.from_iterable(map(_holders, owns))
        entries = itertools.chain.from_iterable(map(dict.values, holders))
        return device.is_untouched(), list(map(id, entries))

    def keep(_: object) -> tuple[bool, list[int]]:
        copies = device.by_host()
        owns[:] = [
            own
            for own in map(vars, module.modules())
            if all(isinstance(each, dict) for each in _holders(own))
        ]
        places[:] = [
            (f"{prefix}.{name}" if prefix else name, owner, name, id(tensor))
            for prefix, owner in module.named_modules()
            for holder in TENSOR_HOLDERS
            for name, tensor in _entries(owner, holder).items()
            if id(tensor) in copies
        ]
        device.settle()
        return read()

    def changes(_: object) -> Iterator[str]:
        copies, seen = device.by_host(), set()
        for path, owner, name, known in places:
            tensor = _entries(owner, "_parameters").get(name, _entries(owner, "_buffers").get(name))
            if tensor is None:
                yield f"'{path}' was removed, but the device continues to use it"
                continue
            own = copies.get(known) if id(tensor) == known else None
            if own is None or (known not in seen and own.differs_from(tensor)):
                yield f"'{path}' on the host, but the device continues to use its own values"
            seen.add(known)

    return ChangeCheck(read, changes, _WEIGHTS, keep)


def _entries(owner: nn.Module, holder: str) -> dict[str, Any]:
    """Return the entries of a module without triggering notifications. TorchScript modules do not
    use dicts.
    """
    entries = owner.__dict__[holder]
    return dict(dict.items(entries)) if isinstance(entries, dict) else {}

"""State: the device's own copy of all that lives from call to call. The only mutable value."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .slot import Slot


@dataclass(eq=False)
class State:
    """The tensors on the device.

    Attributes:
        tensors: by slot key, in the slot's ``device_shape``. They keep their identity: they are
            only written in place, so executables may bind to them once.
        rng: the state of the device's random generator, or None before it is seeded.
        updates: optimizer updates done so far.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    rng: torch.Tensor | None = None
    updates: int = 0

    def write(self, key: str, value: torch.Tensor) -> None:
        """Copy a value into the tensor of that key, in place, to every replica."""
        self.tensors[key].copy_(value.detach())

    def read(self, slot: Slot, replica: int = 0) -> torch.Tensor:
        """Return the tensor of a slot; of one replica where each has its own."""
        value = self.tensors[slot.key]
        return value[replica] if slot.replicas > 1 else value

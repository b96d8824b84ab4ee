"""State: the device's own copy of all that lives from call to call. The only mutable value."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class State:
    """The tensors on the device.

    Attributes:
        tensors: by slot key. A buffer that every replica evolves by itself has a leading replica
            dimension and its key in ``per_replica``. Tensors keep their identity: they are only
            written in place, so executables may bind to them once.
        per_replica: keys of state with a leading replica dimension.
        rng: the state of the device's random generator, or None before it is seeded.
        updates: optimizer updates done so far.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    per_replica: frozenset[str] = frozenset()
    rng: torch.Tensor | None = None
    updates: int = 0

    def write(self, key: str, value: torch.Tensor) -> None:
        """Copy a value into the tensor of that key, in place, to every replica."""
        self.tensors[key].copy_(value.detach())

    def read(self, key: str, replica: int = 0) -> torch.Tensor:
        """Return the tensor of that key; of one replica where each has its own."""
        value = self.tensors[key]
        return value[replica] if key in self.per_replica else value

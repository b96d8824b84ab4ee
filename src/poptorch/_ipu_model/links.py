"""Seconds of what travels outside a chip: between chips, to the host, to streaming memory.

Chips of a pod are joined by IPU-Links; pods by the gateways of their machines. Replicas add up
gradients in a ring inside a pod, and then between pods, each chip with its part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .._systems import ChipKind
from .constants import Constants

POD = 64
"""Chips that IPU-Links join at most."""


@dataclass(frozen=True)
class Fabric:
    """What a program's chips are joined by.

    Attributes:
        kind: of the chips.
        per_replica: chips of one replica.
        replicas: how many there are.
        constants: of the model.
    """

    kind: ChipKind
    per_replica: int
    replicas: int
    constants: Constants

    @property
    def link(self) -> float:
        """Bytes per second between two chips of a pod."""
        return self.constants.link_bytes * self.constants.link_efficiency

    @property
    def _inside(self) -> int:
        """Replicas of one pod."""
        return max(1, min(self.replicas, POD // self.per_replica))

    def sent(self, size: float) -> float:
        """Seconds for bytes from one chip of a replica to another."""
        return size / self.link

    def all_reduce(self, size: float) -> float:
        """Seconds to add up bytes that every replica has a value of."""
        return 2 * self.all_gather(size)

    def all_gather(self, size: float) -> float:
        """Seconds to bring together bytes of which every replica has a part, or to spread them."""
        inside, pods = self._inside, math.ceil(self.replicas / self._inside)
        gateway = self.constants.gateway_bytes * self.constants.link_efficiency
        seconds = _ring(size, inside, self.link, self.constants)
        return seconds + _ring(size / inside, pods, gateway, self.constants)

    def to_host(self, size: float) -> float:
        """Seconds for bytes from one chip of every replica to the host."""
        c = self.constants
        return size / min(c.host_bytes, c.network_bytes / self._neighbours)

    def from_host(self, size: float, meanwhile: float) -> float:
        """Seconds that a chip waits for bytes from the host.

        They are fetched into the machine's memory before they are needed, and read from there.

        Args:
            size: bytes.
            meanwhile: seconds in which they can be fetched.
        """
        late = size / (self.constants.network_bytes / self._neighbours) - meanwhile
        return max(self.streamed(size), late)

    @property
    def _neighbours(self) -> int:
        """Chips of a machine that the host feeds at the same time: one of every replica."""
        return min(max(1, self.kind.per_board // self.per_replica), self.replicas)

    def streamed(self, size: float) -> float:
        """Seconds for bytes between a chip and its streaming memory."""
        return size / self.constants.streaming_bytes


def _ring(size: float, members: int, bandwidth: float, c: Constants) -> float:
    if members == 1 or not size:
        return 0.0
    return (members - 1) * (size / members / bandwidth + c.collective_step)

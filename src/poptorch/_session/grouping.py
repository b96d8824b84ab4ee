"""Parameters with one value per group of replicas (PopTorch user guide, "Parallel execution")."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .._base.errors import Error, InvalidValue
from ..enums import CommGroupType, VariableRetrievalMode


@dataclass(frozen=True)
class Grouping:
    """How the replicas share the values of one parameter.

    Attributes:
        replicas: how many there are.
        of_replica: the group of each.
        retrieval: whether reading back gives a value per group or per replica.
    """

    replicas: int
    of_replica: tuple[int, ...]
    retrieval: VariableRetrievalMode

    @property
    def groups(self) -> int:
        """How many values the device holds: the leading dimension of its tensor."""
        return max(self.of_replica) + 1

    def from_host(self, host: torch.Tensor) -> torch.Tensor:
        """Return one value per group; after reading all replicas back the host has more."""
        if host.shape[0] == self.groups:
            return host.detach()
        first = [self.of_replica.index(group) for group in range(self.groups)]
        return host.detach()[first]

    def to_host(self, device: torch.Tensor, host: torch.Tensor) -> None:
        """Write to the host's tensor, which with ``AllReplicas`` changes its shape."""
        if self.retrieval == VariableRetrievalMode.AllReplicas:
            value = device[list(self.of_replica)]
            if host.shape != value.shape:
                host.data = value.to(host.dtype)
                return
            host.copy_(value)
        else:
            host.copy_(device)


@dataclass(frozen=True)
class Request:
    """What the user asked for with ``replicaGrouping``; resolved when the replicas are known."""

    kind: CommGroupType
    size: int
    retrieval: VariableRetrievalMode

    def resolve(self, path: str, host: torch.Tensor, replicas: int) -> Grouping | None:
        """Return the grouping, or None when all replicas share one value.

        Raises:
            Error: a scalar, a group size that does not divide the replicas, or a host tensor
                whose leading dimension is not the number of groups.
        """
        if self.kind == CommGroupType.All:
            return None
        size = 1 if self.kind == CommGroupType.NoGrouping else self.size
        if size < 1 or replicas % size:
            raise InvalidValue(
                f"The group size of parameter '{path}' must divide the replication factor",
                got=f"groups of {size} for {replicas} replicas",
            )
        groups = replicas // size
        orthogonal = self.kind == CommGroupType.Orthogonal
        of_replica = tuple(r % groups if orthogonal else r // size for r in range(replicas))
        if host.dim() == 0:
            raise Error(
                "Scalars cannot be passed as per-replica weights", got=f"parameter '{path}'"
            )
        grouping = Grouping(replicas, of_replica, self.retrieval)
        if host.shape[0] not in (groups, replicas):
            raise Error(
                f"Parameter '{path}' needs a leading dimension with one value per group",
                got=f"shape {tuple(host.shape)} for {groups} groups of {size} replicas",
                fix=f"give it the shape ({groups}, ...)",
            )
        return grouping

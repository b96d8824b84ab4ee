"""Read a module's parameters and buffers at one moment, and how groups of replicas share them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import nn

from ... import _capture
from ..._base.errors import Error, InvalidValue
from ..._residency import unwatched
from ...enums import CommGroupType, VariableRetrievalMode
from ...optim.freeze_optimizer import address

ShapeAndType = tuple[Sequence[int] | None, torch.dtype | None]


@dataclass(frozen=True)
class Grouping:
    """How replicas share the values of one parameter. ``of_replica`` contains the group of each
    replica.
    """

    of_replica: tuple[int, ...]
    retrieval: VariableRetrievalMode

    @property
    def groups(self) -> int:
        return max(self.of_replica) + 1

    def from_host(self, host: torch.Tensor) -> torch.Tensor:
        """Return one value per group. After reading back all replicas, the host has more."""
        if host.shape[0] == self.groups:
            return host.detach()
        first = [self.of_replica.index(group) for group in range(self.groups)]
        return host.detach()[first]

    def to_host(self, device: torch.Tensor, host: torch.Tensor) -> None:
        """Write to the host's tensor. With ``AllReplicas`` this changes its shape."""
        if self.retrieval != VariableRetrievalMode.AllReplicas:
            host.copy_(device)
            return
        value = device[list(self.of_replica)]
        if host.shape == value.shape:
            host.copy_(value)
        else:
            host.data = value.to(host.dtype)


@dataclass(frozen=True)
class GroupingRequest:
    """The arguments of ``replicaGrouping``. They are resolved when the number of replicas
    is known.
    """

    kind: CommGroupType
    size: int
    retrieval: VariableRetrievalMode

    def resolve(self, path: str, host: torch.Tensor, replicas: int) -> Grouping | None:
        """Return the grouping, or None if all replicas share one value."""
        if self.kind == CommGroupType.All:
            return None
        size = 1 if self.kind == CommGroupType.NoGrouping else self.size
        if size < 1 or replicas % size:
            raise InvalidValue(
                f"The group size of parameter '{path}' must divide the replication factor",
                got=f"groups of {size} for {replicas} replicas",
                fix=f"choose a group size that divides {replicas}",
            )
        groups = replicas // size
        orthogonal = self.kind == CommGroupType.Orthogonal
        of_replica = tuple(r % groups if orthogonal else r // size for r in range(replicas))
        if host.dim() == 0:
            raise Error(
                "Scalars cannot be passed as per-replica weights",
                got=f"parameter '{path}'",
                fix=f"use a parameter of shape ({groups},): one value for each group of replicas",
            )
        if host.shape[0] not in (groups, replicas):
            raise Error(
                f"Parameter '{path}' needs a leading dimension with one entry per group of "
                "replicas",
                got=f"shape {tuple(host.shape)} for {groups} groups of {size} replicas",
                fix=f"use the shape ({groups}, ...)",
            )
        return Grouping(of_replica, self.retrieval)


@dataclass(frozen=True, eq=False)
class ModelTensors:
    """The tensors of the traced model by path, and those with one value per group of replicas."""

    module: nn.Module
    tensors: Mapping[str, _capture.ModelTensor]
    groups: Mapping[str, Grouping]

    @property
    def paths(self) -> dict[int, str]:
        return paths_of(self.tensors)

    def adopt(self) -> None:
        """Use the tensors that the user has assigned in place of others."""
        for path, tied in _capture.tensors_of(self.module, values=False).items():
            own = self.tensors.get(path)
            if own is not None and own.tensor.shape == tied.tensor.shape:
                own.tensor = tied.tensor

    def has_tensors_of(self, other: ModelTensors) -> bool:
        """Return whether both contain the same tensors in the same places."""
        return self.tensors.keys() == other.tensors.keys() and all(
            tied.tensor is other.tensors[path].tensor for path, tied in self.tensors.items()
        )


def paths_of(tensors: Mapping[str, _capture.ModelTensor]) -> dict[int, str]:
    """Return the paths of the parameters among tensors, by identity and by address."""
    own = {path: tied.tensor for path, tied in tensors.items() if tied.is_parameter}
    addresses = unwatched(lambda: [*map(address, own.values())])
    by_address = dict(zip(addresses, own, strict=True))
    return by_address | {id(tensor): path for path, tensor in own.items()}


def check_saved(
    saved_tensors: Mapping[str, ShapeAndType], current_tensors: Mapping[str, ShapeAndType]
) -> None:
    """Compare the tensors in a file with those to be loaded. Types may be unknown."""
    for name in sorted({*saved_tensors, *current_tensors}):
        saved, own = saved_tensors.get(name, (None, None)), current_tensors.get(name, (None, None))
        shapes = [None if shape is None else tuple(shape) for shape, _ in (saved, own)]
        if shapes[0] != shapes[1]:
            refuse_saved(f"{name}: {shapes[0]} in the file, {shapes[1]} in the model")
        if saved[1] and own[1] and not torch.can_cast(saved[1], own[1]):
            types = f"{saved[1]} in the file, {own[1]}, which cannot hold its values, in the model"
            refuse_saved(f"{name}: {types}")


def refuse_saved(got: str, cause: Exception | None = None) -> NoReturn:
    raise Error(
        "Invalid file: it was saved from another model",
        got=got,
        fix="create a model with the same parameters as the one that was saved",
    ) from cause

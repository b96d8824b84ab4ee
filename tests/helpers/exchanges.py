"""Operators by which replicas exchange tensors, and what they do in plain torch.

The functions for eager PyTorch take a list with the tensor of each replica and return such a list.
"""

from collections.abc import Callable
from typing import Any

import torch

from helpers.known_operators import Function, op

GROUPING = "__collectiveReplicaGrouping"
REPLICAS = 4

Tensors = list[torch.Tensor]
Eager = Callable[[Tensors], Tensors]


def gather(a: torch.Tensor) -> torch.Tensor:
    """Return the tensors of all replicas, stacked."""
    return op("ReplicatedAllGather", a, out=torch.zeros(REPLICAS, *a.shape, dtype=a.dtype))


def reduce(**attributes: Any) -> Function:
    """Return the sum over replicas, or over groups that the attributes describe."""
    return lambda a: op("ReplicatedAllReduceTP", a, out=a, op="sum", **attributes)


def to_all(a: torch.Tensor) -> torch.Tensor:
    """Send part i of the tensor to replica i."""
    return op("ReplicatedAllToAll", a, out=a)


def eager_gather(tensors: Tensors) -> Tensors:
    """Each replica differentiates its own result for its own tensor."""
    parts = range(len(tensors))
    return [
        torch.stack([tensors[j] if i == j else tensors[j].detach() for j in parts]) for i in parts
    ]


def eager_reduce(*groups: list[int]) -> Eager:
    """Sum within each group; a replica differentiates the sum for its own tensor only."""

    def function(tensors: Tensors) -> Tensors:
        results = []
        for i, own in enumerate(tensors):
            (group,) = (g for g in groups if i in g)
            results.append(own + sum(tensors[j].detach() for j in group if j != i))
        return results

    return function


def eager_to_all(tensors: Tensors) -> Tensors:
    """Replica i gets part i of every tensor."""
    size = len(tensors[0]) // len(tensors)
    return [torch.cat([t[i * size : (i + 1) * size] for t in tensors]) for i in range(len(tensors))]


# By name: the exchange, and what it is in eager PyTorch.
EXCHANGES: dict[str, tuple[Function, Eager]] = {
    "gather": (gather, eager_gather),
    "reduce": (reduce(), eager_reduce([0, 1, 2, 3])),
    "neighbours": (reduce(**{GROUPING: [2, 1, 4]}, backwards=False), eager_reduce([0, 1], [2, 3])),
    "strided": (reduce(**{GROUPING: [2, 2, 4]}), eager_reduce([0, 2], [1, 3])),
    "to all": (to_all, eager_to_all),
}

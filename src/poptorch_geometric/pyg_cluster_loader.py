"""Load clusters of one large graph. Source: PopTorch user guide, "PopTorch ops"."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.utils.data
import torch_geometric.loader
from torch import Tensor

from poptorch.poptorch_core import AssertionFailure

from . import _graphs
from .collate import FixedSizeCollater
from .fixed_size_options import FixedSizeOptions
from .pyg_dataloader import OverSizeStrategy, PlainLoader, refuse

__all__ = ["ClusterData", "FixedSizeClusterLoader"]


ROUNDS = 20
SLACK = 1.1  # the largest part relative to the average


class FixedSizeClusterLoader(PlainLoader):
    """Merge clusters of a graph, with the edges between them, and pad to one size.

    Merged clusters are one graph: ``batch`` is 0 for its nodes and 1 for padding.

    Arguments and errors are those of ``poptorch_geometric.cluster_loader.FixedSizeClusterLoader``,
    without ``options``. ``kwargs`` are other arguments of torch's loader.
    """

    def __init__(
        self,
        cluster_data: Any,
        fixed_size_options: FixedSizeOptions,
        batch_size: int = 1,
        over_size_strategy: OverSizeStrategy = OverSizeStrategy.TrimNodesAndEdges,
        add_pad_masks: bool = True,
        **kwargs: Any,
    ) -> None:
        refuse("FixedSizeClusterLoader", kwargs,
               "collate_fn", "batch_sampler", "shuffle", "exclude_keys")  # fmt: skip
        check_two_graphs("FixedSizeClusterLoader", fixed_size_options)
        self.cluster_data = cluster_data
        self.fixed_size_options = fixed_size_options
        fixed = self._fixed(fixed_size_options, add_pad_masks, over_size_strategy)
        clusters = torch_geometric.loader.ClusterLoader(cluster_data)
        merge = functools.partial(_merged, clusters.collate_fn, fixed)
        places: Any = range(len(cluster_data))
        super().__init__(
            dataset=places,
            batch_size=batch_size,
            collate_fn=self._combined(merge, batch_size),
            **kwargs,
        )


def _merged(merge: Any, fixed: FixedSizeCollater, clusters: list[int]) -> Any:
    return fixed([merge(clusters)])


def check_two_graphs(loader: str, sizes: FixedSizeOptions) -> None:
    if sizes.num_graphs != 2:
        raise AssertionFailure(
            f"{loader} needs FixedSizeOptions with num_graphs=2",
            got=f"num_graphs={sizes.num_graphs}",
            fix=(
                "pass FixedSizeOptions(..., num_graphs=2): the batch consists of one loaded graph "
                "and one padding graph"
            ),
        )


class ClusterData(torch_geometric.loader.ClusterData):  # type: ignore[misc]
    """torch_geometric's ``ClusterData``, which uses ``parts`` if METIS is not available."""

    def _metis(self, edge_index: Tensor, num_nodes: int) -> Tensor:
        try:
            cluster: Tensor = super()._metis(edge_index, num_nodes)
            return cluster
        # neither pyg-lib nor torch-sparse is installed, as the documentation allows
        except ImportError:
            return parts(edge_index, num_nodes, self.num_parts)


def parts(edge_index: Tensor, num_nodes: int, count: int) -> Tensor:
    """Return the part of each node, without METIS.

    It divides the nodes, in breadth-first order, into equal parts. Then it moves a few nodes at a
    time to the parts of their neighbours. The objective is that of Karypis and Kumar, "A fast and
    high quality multilevel scheme for partitioning irregular graphs" (1998).
    """
    both = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    order = _breadth_first(both, num_nodes)
    part = torch.empty(num_nodes, dtype=torch.int64)
    part[order] = torch.arange(num_nodes) * count // max(num_nodes, 1)
    most = max(-(-num_nodes // count), int(num_nodes / count * SLACK))
    for _ in range(ROUNDS):
        if not _move(both, part, count, most):
            break
    return part


def _breadth_first(edges: Tensor, num_nodes: int) -> Tensor:
    """Return nodes in the order of a breadth-first search from an outermost node."""
    degree = torch.bincount(edges[0], minlength=num_nodes)
    targets = edges[1, edges[0].argsort()]
    starts = degree.cumsum(0) - degree

    def neighbours(nodes: Tensor) -> Tensor:
        return targets[_graphs.ranges(starts[nodes], degree[nodes])[0]]

    met = torch.zeros(num_nodes, dtype=torch.bool)
    order = []
    for seed in degree.argsort().tolist():
        if not met[seed]:
            outermost = int(_fronts(neighbours, seed, met.clone())[-1][0])
            order += _fronts(neighbours, outermost, met)
    return torch.cat(order) if order else torch.empty(0, dtype=torch.int64)


def _fronts(neighbours: Callable[[Tensor], Tensor], seed: int, met: Tensor) -> list[Tensor]:
    """Yield the nodes at each distance from a node, and add them to ``met``."""
    fronts, front = [], torch.tensor([seed])
    while len(front):
        met[front] = True
        fronts.append(front)
        near = neighbours(front)
        front = torch.unique(near[~met[near]])
    return fronts


def _move(edges: Tensor, part: Tensor, count: int, most: int) -> bool:
    """Move nodes to the part of most of their neighbours, in place. Return whether one was
    moved.
    """
    pairs, weights = torch.unique(edges[0] * count + part[edges[1]], return_counts=True)
    node, target = pairs // count, pairs % count
    own = torch.zeros(len(part), dtype=torch.int64)
    at_home = target == part[node]
    own[node[at_home]] = weights[at_home]
    gain = weights - own[node]
    better = (gain > 0) & ~at_home
    sizes = torch.bincount(part, minlength=count)
    moved: set[int] = set()
    order = gain[better].argsort(descending=True)
    for name, to in zip(node[better][order].tolist(), target[better][order].tolist(), strict=True):
        home = int(part[name])
        if name in moved or sizes[to] >= most or sizes[home] <= 1:
            continue
        part[name] = to
        sizes[to] += 1
        sizes[home] -= 1
        moved.add(name)
        if len(moved) * 8 > len(part):
            break
    return bool(moved)

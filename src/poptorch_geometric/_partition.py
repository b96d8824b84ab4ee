"""Parts of a large graph, where no package with METIS is installed.

Source: Karypis and Kumar, "A fast and high quality multilevel scheme for partitioning irregular
graphs" (1998), for the aim: parts of like size with few edges between them. Here nodes are laid out
breadth first, cut into equal parts, and then moved, a few at a time, to where their neighbours are.
"""

from __future__ import annotations

import torch
import torch_geometric.loader

ROUNDS = 20
SLACK = 1.1  # the largest part, over the average


class ClusterData(torch_geometric.loader.ClusterData):  # type: ignore[misc]
    """torch_geometric's ``ClusterData``, which takes parts of our own where METIS is missing."""

    def _metis(self, edge_index: torch.Tensor, num_nodes: int) -> torch.Tensor:
        try:
            cluster: torch.Tensor = super()._metis(edge_index, num_nodes)
            return cluster
        except ImportError:  # documented: neither pyg-lib nor torch-sparse
            return parts(edge_index, num_nodes, self.num_parts)


def parts(edge_index: torch.Tensor, num_nodes: int, count: int) -> torch.Tensor:
    """Return the part, from 0, of each node.

    Args:
        edge_index: [2, edges]; the direction does not matter.
        num_nodes: how many nodes there are.
        count: how many parts; none is larger than a tenth above the average.
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


def _breadth_first(edges: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """Nodes in the order in which a search from an outermost node meets them."""
    degree = torch.bincount(edges[0], minlength=num_nodes)
    by_source = edges[:, edges[0].argsort()]
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    met = torch.zeros(num_nodes, dtype=torch.bool)
    order = []
    for seed in degree.argsort().tolist():
        if not met[seed]:
            reached = _fronts(by_source, starts, degree, seed, met.clone())
            outermost = int(reached[-1][0])
            order += _fronts(by_source, starts, degree, outermost, met)
    return torch.cat(order) if order else torch.empty(0, dtype=torch.int64)


def _fronts(
    by_source: torch.Tensor,
    starts: torch.Tensor,
    degree: torch.Tensor,
    seed: int,
    met: torch.Tensor,
) -> list[torch.Tensor]:
    """Nodes at each distance from one of them; ``met`` is filled in."""
    fronts, front = [], torch.tensor([seed])
    while len(front):
        met[front] = True
        fronts.append(front)
        lengths = degree[front]
        first = torch.repeat_interleave(starts[front] - (lengths.cumsum(0) - lengths), lengths)
        neighbours = by_source[1, first + torch.arange(len(first))]
        front = torch.unique(neighbours[~met[neighbours]])
    return fronts


def _move(edges: torch.Tensor, part: torch.Tensor, count: int, most: int) -> bool:
    """Move nodes to the part of most of their neighbours, in place; tell whether one moved."""
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

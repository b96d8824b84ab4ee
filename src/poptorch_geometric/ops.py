"""Provide operators and layers with fixed shapes, for eager use and inside wrapped models.

Shapes never depend on values. Searches return the requested number of neighbours, with -1 for
missing ones. Layers have the arguments, weights and results of torch_geometric's. Source: PopTorch
user guide, "PopTorch ops".
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch_geometric.typing import OptPairTensor

from poptorch.poptorch_core import AssertionFailure

from . import _static

__all__ = [
    "Aggregation", "ClusterGCNConv", "HeteroLinear", "InstanceNorm", "MFConv", "knn",
    "knn_graph", "knn_interpolate", "radius", "radius_graph",
]  # fmt: skip

FLOWS = ("source_to_target", "target_to_source")


def knn(
    x: torch.Tensor,
    y: torch.Tensor,
    k: int,
    batch_x: torch.Tensor | None = None,
    batch_y: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Return for each point of ``y`` the nearest points of ``x``, of the same example.

    Args:
        x, y: [N, F] and [M, F], or [N] and [M] for points on a line.
        k: how many neighbours.
        batch_x, batch_y: [N] and [M], the example of each point; by default there is one.
        args: ``cosine``, for angles instead of distances; others have no effect on results.

    Returns:
        int64 [2, M * k]: numbers of ``y`` (0, 0, ..., 1, 1, ...) and of ``x``, nearest first; -1 in
        both where an example has fewer points.

    Raises:
        AssertionError: shapes do not match.
    """
    cosine = bool(args[0] if args else kwargs.get("cosine", False))
    return _nearest(_distances(x, y, batch_x, batch_y, cosine), k)


def knn_graph(
    x: torch.Tensor,
    k: int,
    batch: torch.Tensor | None = None,
    loop: bool = False,
    flow: str = "source_to_target",
    cosine: bool = False,
    num_workers: int = 1,
    batch_size: int | None = None,
) -> torch.Tensor:
    """Return edges from each point's nearest points to it, of the same example.

    Args:
        x: [N, F].
        k: how many neighbours.
        batch: [N], the example of each point.
        loop: whether a point is its own neighbour.
        flow: "source_to_target", or "target_to_source" for edges in the opposite direction.
        cosine: by angle rather than by distance.
        num_workers, batch_size: no effect on results.

    Returns:
        int64 [2, N * k]; -1 in both rows where an example has too few points.

    Raises:
        AssertionError: shapes do not match, or there is no such ``flow``.
    """
    distances = _distances(x, x, batch, batch, cosine)
    return _edges(_nearest(_without_self(distances, loop), k), flow)


def radius(
    x: torch.Tensor,
    y: torch.Tensor,
    r: float,
    batch_x: torch.Tensor | None = None,
    batch_y: torch.Tensor | None = None,
    max_num_neighbors: int = 32,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Return for each point of ``y`` the points of ``x`` within a distance, of the same example.

    Args:
        x, y: [N, F] and [M, F], or [N] and [M] for points on a line.
        r: the distance.
        batch_x, batch_y: the example of each point; by default there is one.
        max_num_neighbors: return at most this number of points, the nearest ones.
        args: no effect on results.

    Returns:
        int64 [2, M * min(N, max_num_neighbors)]: numbers of ``y`` and of ``x``, nearest first; -1
        in both where there are fewer.

    Raises:
        AssertionError: shapes do not match.
    """
    distances = _distances(x, y, batch_x, batch_y)
    return _within(distances, r, min(len(x), max_num_neighbors))


def radius_graph(
    x: torch.Tensor,
    r: float,
    batch: torch.Tensor | None = None,
    loop: bool = False,
    max_num_neighbors: int = 32,
    flow: str = "source_to_target",
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Return edges between points within a distance, of the same example.

    Args:
        x: [N, F].
        r: the distance.
        batch: [N], the example of each point.
        loop: whether a point is its own neighbour.
        max_num_neighbors: return at most this number of points for each point, the nearest ones.
        flow: as for ``knn_graph``.
        args: no effect on results.

    Returns:
        int64 [2, N * min(N, max_num_neighbors)]; -1 in both rows where there are fewer.
    """
    distances = _without_self(_distances(x, x, batch, batch), loop)
    return _edges(_within(distances, r, min(len(x), max_num_neighbors)), flow)


def knn_interpolate(
    x: torch.Tensor,
    pos_x: torch.Tensor,
    pos_y: torch.Tensor,
    batch_x: torch.Tensor | None = None,
    batch_y: torch.Tensor | None = None,
    k: int = 3,
    num_workers: int = 1,
) -> torch.Tensor:
    """Interpolate features at other points: weigh the nearest by 1 / distance ** 2.

    Args:
        x: [N, F], features of the points ``pos_x``.
        pos_x, pos_y: [N, d] and [M, d]; no gradient reaches them.
        batch_x, batch_y: the example of each point; by default there is one.
        k: how many neighbours to use.
        num_workers: no effect on results.

    Returns:
        [M, F]; 0 where an example has no point.
    """
    near = knn(pos_x, pos_y, k, batch_x, batch_y)[1]
    is_present = near >= 0
    sources = near.clamp(min=0)
    positions_x, positions_y = _points(pos_x, batch_x).detach(), _points(pos_y, batch_y).detach()
    differences = positions_x[sources] - positions_y.repeat_interleave(k, 0)
    weights = is_present / differences.square().sum(-1).clamp(min=1e-16)
    weights = weights.view(-1, k, 1)
    total = (x[sources].view(-1, k, x.shape[-1]) * weights).sum(1)
    return total / weights.sum(1).clamp(min=torch.finfo(weights.dtype).tiny)


def _points(x: torch.Tensor, batch: torch.Tensor | None) -> torch.Tensor:
    x = x.view(-1, 1) if x.dim() == 1 else x
    if batch is not None and len(batch) != len(x):
        raise AssertionFailure(
            "Every point needs the index of its example in the batch",
            got=f"{len(x)} points, but {len(batch)} indices",
            fix="pass one index for each point, for example the batch of a collated Data object",
        )
    return x.detach() if x.is_floating_point() else x.float()


def _distances(
    x: torch.Tensor,
    y: torch.Tensor,
    batch_x: torch.Tensor | None,
    batch_y: torch.Tensor | None,
    cosine: bool = False,
) -> torch.Tensor:
    """Return distances of shape [M, N], which are infinite between examples."""
    x, y = _points(x, batch_x), _points(y, batch_y)
    if x.dim() != 2 or y.dim() != 2 or x.shape[1] != y.shape[1]:
        raise AssertionFailure(
            "All points must have the same number of coordinates",
            got=f"shapes {tuple(x.shape)} and {tuple(y.shape)}",
            fix="pass two tensors of shape (points, coordinates)",
        )
    if cosine:
        x, y = (torch.nn.functional.normalize(points, dim=1) for points in (x, y))
    distances = (y[:, None] - x[None]).square().sum(-1)
    if batch_x is not None or batch_y is not None:
        first = y.new_zeros(len(y)) if batch_y is None else batch_y
        second = x.new_zeros(len(x)) if batch_x is None else batch_x
        distances = distances.masked_fill(first[:, None] != second[None], torch.inf)
    return distances


def _without_self(distances: torch.Tensor, loop: bool) -> torch.Tensor:
    if loop:
        return distances
    same = torch.eye(len(distances), dtype=torch.bool, device=distances.device)
    return distances.masked_fill(same, torch.inf)


def _within(distances: torch.Tensor, r: float, most: int) -> torch.Tensor:
    return _nearest(distances.masked_fill(distances > r * r, torch.inf), most)


def _nearest(distances: torch.Tensor, k: int) -> torch.Tensor:
    """Return [2, M * k]: rows and their nearest columns, -1 for missing ones."""
    rows, columns = distances.shape
    least, near = distances.topk(min(k, columns), largest=False)
    near = near.masked_fill(torch.isinf(least), -1)
    if k > columns:
        near = torch.cat([near, near.new_full((rows, k - columns), -1)], dim=1)
    centre = torch.arange(rows, device=near.device)[:, None].expand(rows, k)
    _static.mark_absent()
    return torch.stack([torch.where(near < 0, -1, centre).flatten(), near.flatten()])


def _edges(pairs: torch.Tensor, flow: str) -> torch.Tensor:
    if flow not in FLOWS:
        raise AssertionFailure(
            "Unknown value of flow",
            got=f"flow={flow!r}",
            fix=f"pass {' or '.join(f'flow={each!r}' for each in FLOWS)}",
        )
    return pairs.flip(0) if flow == "source_to_target" else pairs


class Aggregation(pyg.aggr.Aggregation):  # type: ignore[misc]
    """The base class of aggregations. It does not check whether numbers are sorted."""

    def assert_sorted_index(self, index: torch.Tensor | None) -> None:
        """Do nothing, because a check would make the program depend on the numbers."""


class InstanceNorm(pyg.InstanceNorm):  # type: ignore[misc]
    """Normalises each example; running statistics are written in place."""

    def forward(
        self, x: torch.Tensor, batch: torch.Tensor | None = None, batch_size: int | None = None
    ) -> torch.Tensor:
        """Normalise.

        Args:
            x: [nodes, channels].
            batch: [nodes], the example of each node.
            batch_size: the number of examples, which a wrapped model needs.
        """
        if batch is None:
            batch, batch_size = torch.zeros(len(x), dtype=torch.int64, device=x.device), 1
        if batch_size is None:
            batch_size = int(batch.max()) + 1
        groups = _static.valid_indices(batch)
        if self.training or not self.track_running_stats:
            count = _static.degree(batch, batch_size, x.dtype).clamp(min=1).view(-1, 1)
            mean = _static.scatter(x, batch, 0, batch_size) / count
            centred = x - mean.index_select(0, groups)
            squares = _static.scatter(centred * centred, batch, 0, batch_size)
            var = squares / count
            if self.track_running_stats:
                with torch.no_grad():
                    unbiased = squares / (count - 1).clamp(min=1)
                    self.running_mean.lerp_(mean.mean(0), self.momentum)
                    self.running_var.lerp_(unbiased.mean(0), self.momentum)
        else:
            mean = self.running_mean.view(1, -1).expand(batch_size, -1)
            var = self.running_var.view(1, -1).expand(batch_size, -1)
            centred = x - mean.index_select(0, groups)
        out: torch.Tensor = centred / (var + self.eps).sqrt().index_select(0, groups)
        if self.weight is not None and self.bias is not None:
            out = out * self.weight.view(1, -1) + self.bias.view(1, -1)
        return out


class HeteroLinear(pyg.HeteroLinear):  # type: ignore[misc]
    """Multiplies each row by the matrix of its type, without sorting."""

    def forward(self, x: torch.Tensor, type_vec: torch.Tensor) -> torch.Tensor:
        """Multiply.

        Args:
            x: [rows, channels].
            type_vec: [rows], the type of each row.
        """
        chosen = torch.nn.functional.one_hot(type_vec.long(), self.num_types).to(x.dtype)
        out: torch.Tensor = torch.einsum(
            "nt,nto->no", chosen, torch.einsum("nc,tco->nto", x, self.weight)
        )
        return out if self.bias is None else out + self.bias[type_vec]


class ClusterGCNConv(pyg.ClusterGCNConv):  # type: ignore[misc]
    """Adds the diagonal's share to the weight of each self-loop."""

    propagate_type = {"x": torch.Tensor, "edge_weight": torch.Tensor}

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        """Convolve.

        Args:
            x: [nodes, channels].
            edge_index: [2, edges].
        """
        nodes = x.shape[self.node_dim]
        if self.add_self_loops:
            edge_index, _ = _static.add_remaining_self_loops(edge_index, None, 1.0, nodes)
        if self.add_self_loops and not _static.may_be_absent():
            # in eager mode, lists may become shorter
            edge_index = edge_index[:, (edge_index >= 0).all(0)]
        row, col = edge_index
        inverse = 1.0 / _static.degree(col, nodes, x.dtype).clamp(min=1.0)
        weight = inverse[col] + torch.where(row == col, self.diag_lambda * inverse[col], 0.0)
        out = self.propagate(edge_index, x=x, edge_weight=weight)
        total: torch.Tensor = self.lin_out(out) + self.lin_root(x)
        return total


class MFConv(pyg.MFConv):  # type: ignore[misc]
    """Multiplies each node by the matrices of its degree, chosen by masks."""

    propagate_type = {"x": OptPairTensor}

    def forward(self, x: Any, edge_index: torch.Tensor, size: Any = None) -> torch.Tensor:
        """Convolve.

        Args:
            x: [nodes, channels], or of sources and targets.
            edge_index: [2, edges].
            size: numbers of sources and targets, if they cannot be read from ``x``.
        """
        x = (x, x) if isinstance(x, torch.Tensor) else x
        end = 1 if self.flow == "source_to_target" else 0
        nodes = x[0].shape[self.node_dim]
        if size is not None:
            nodes = size[1]
        if x[1] is not None:
            nodes = x[1].shape[self.node_dim]
        degree = _static.degree(edge_index[end], nodes, torch.int64).clamp(max=self.max_degree)
        received = self.propagate(edge_index, x=x, size=size)
        parts: list[torch.Tensor] = []
        for number, (left, right) in enumerate(zip(self.lins_l, self.lins_r, strict=True)):
            out = left(received)
            if x[1] is not None:
                out = out + right(x[1])
            parts.append(out * (degree == number).view(-1, 1))
        return functools.reduce(torch.add, parts)

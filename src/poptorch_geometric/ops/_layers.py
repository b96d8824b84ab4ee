"""Layers of torch_geometric that would look at values, without doing so.

Each derives from torch_geometric's own, has its arguments and weights, and gives its results.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn as pyg
from torch_geometric.typing import OptPairTensor
from torch_geometric.utils import get_laplacian

from .. import _absent, _static


class Aggregation(pyg.aggr.Aggregation):  # type: ignore[misc]
    """The base class of aggregations, which takes sorted numbers at their word."""

    def assert_sorted_index(self, index: torch.Tensor | None) -> None:
        """Do nothing: to look at the numbers would make the program depend on them."""


class InstanceNorm(pyg.InstanceNorm):  # type: ignore[misc]
    """Normalises each example; running statistics are written in place."""

    def forward(
        self,
        x: torch.Tensor,
        batch: torch.Tensor | None = None,
        batch_size: int | None = None,
    ) -> torch.Tensor:
        """Normalise.

        Args:
            x: [nodes, channels].
            batch: [nodes], the example of each node.
            batch_size: how many there are; needed inside a wrapped model.
        """
        return instance_norm(self, x, batch, batch_size)


def instance_norm(
    module: Any,
    x: torch.Tensor,
    batch: torch.Tensor | None = None,
    batch_size: int | None = None,
) -> torch.Tensor:
    """Normalise as ``InstanceNorm`` does."""
    if batch is None:
        batch, batch_size = torch.zeros(len(x), dtype=torch.int64, device=x.device), 1
    if batch_size is None:
        batch_size = int(batch.max()) + 1
    groups = _absent.somewhere(batch)
    if module.training or not module.track_running_stats:
        count = _absent.degree(batch, batch_size, x.dtype).clamp(min=1).view(-1, 1)
        mean = _absent.scatter(x, batch, 0, batch_size) / count
        centred = x - mean.index_select(0, groups)
        squares = _absent.scatter(centred * centred, batch, 0, batch_size)
        var = squares / count
        if module.track_running_stats:
            with torch.no_grad():
                unbiased = squares / (count - 1).clamp(min=1)
                module.running_mean.lerp_(mean.mean(0), module.momentum)
                module.running_var.lerp_(unbiased.mean(0), module.momentum)
    else:
        mean = module.running_mean.view(1, -1).expand(batch_size, -1)
        var = module.running_var.view(1, -1).expand(batch_size, -1)
        centred = x - mean.index_select(0, groups)
    out = centred / (var + module.eps).sqrt().index_select(0, groups)
    if module.weight is not None and module.bias is not None:
        out = out * module.weight.view(1, -1) + module.bias.view(1, -1)
    normal: torch.Tensor = out
    return normal


class HeteroLinear(pyg.HeteroLinear):  # type: ignore[misc]
    """Multiplies each row by the matrix of its type, without sorting."""

    def forward(self, x: torch.Tensor, type_vec: torch.Tensor) -> torch.Tensor:
        """Multiply.

        Args:
            x: [rows, channels].
            type_vec: [rows], the type of each.
        """
        return hetero_linear(self, x, type_vec)


def hetero_linear(module: Any, x: torch.Tensor, type_vec: torch.Tensor) -> torch.Tensor:
    """Multiply as ``HeteroLinear`` does."""
    chosen = torch.nn.functional.one_hot(type_vec.long(), module.num_types).to(x.dtype)
    out = torch.einsum("nt,nto->no", chosen, torch.einsum("nc,tco->nto", x, module.weight))
    biased: torch.Tensor = out if module.bias is None else out + module.bias[type_vec]
    return biased


class ClusterGCNConv(pyg.ClusterGCNConv):  # type: ignore[misc]
    """Adds to the weight of each self-loop its share of the diagonal."""

    propagate_type = {"x": torch.Tensor, "edge_weight": torch.Tensor}

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        """Convolve.

        Args:
            x: [nodes, channels].
            edge_index: [2, edges].
        """
        return cluster_gcn(self, x, edge_index)


def cluster_gcn(module: Any, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
    """Convolve as ``ClusterGCNConv`` does."""
    nodes = x.shape[module.node_dim]
    if module.add_self_loops:
        edge_index, _ = _static.add_remaining_self_loops(edge_index, None, 1.0, nodes)
    if module.add_self_loops and not _absent.possible():
        edge_index = edge_index[:, (edge_index >= 0).all(0)]  # eagerly, where lists may shrink
    row, col = edge_index
    inverse = 1.0 / _absent.degree(col, nodes, x.dtype).clamp(min=1.0)
    weight = inverse[col] + torch.where(row == col, module.diag_lambda * inverse[col], 0.0)
    out = module.propagate(edge_index, x=x, edge_weight=weight)
    total: torch.Tensor = module.lin_out(out) + module.lin_root(x)
    return total


class MFConv(pyg.MFConv):  # type: ignore[misc]
    """Multiplies each node by the matrices of its degree, chosen by masks."""

    propagate_type = {"x": OptPairTensor}

    def forward(self, x: Any, edge_index: torch.Tensor, size: Any = None) -> torch.Tensor:
        """Convolve.

        Args:
            x: [nodes, channels], or of sources and targets.
            edge_index: [2, edges].
            size: numbers of sources and targets, where ``x`` does not tell.
        """
        return mf(self, x, edge_index, size)


def mf(module: Any, x: Any, edge_index: torch.Tensor, size: Any = None) -> torch.Tensor:
    """Convolve as ``MFConv`` does."""
    x = (x, x) if isinstance(x, torch.Tensor) else x
    end = 1 if module.flow == "source_to_target" else 0
    nodes = x[0].shape[module.node_dim]
    if size is not None:
        nodes = size[1]
    if x[1] is not None:
        nodes = x[1].shape[module.node_dim]
    degree = _absent.degree(edge_index[end], nodes, torch.int64).clamp(max=module.max_degree)
    received = module.propagate(edge_index, x=x, size=size)
    total = None
    for number, (left, right) in enumerate(zip(module.lins_l, module.lins_r, strict=True)):
        out = left(received)
        if x[1] is not None:
            out = out + right(x[1])
        part = out * (degree == number).view(-1, 1)
        total = part if total is None else total + part
    assert isinstance(total, torch.Tensor)
    return total


def film(module: Any, x: Any, edge_index: torch.Tensor, edge_type: Any = None) -> torch.Tensor:
    """Convolve as ``FiLMConv`` does, with all edges for every relation."""
    x = (x, x) if isinstance(x, torch.Tensor) else x
    beta, gamma = module.film_skip(x[1]).split(module.out_channels, dim=-1)
    out = gamma * module.lin_skip(x[1]) + beta
    out = out if module.act is None else module.act(out)
    for number, (linear, film_of) in enumerate(zip(module.lins, module.films, strict=True)):
        edges = edge_index
        if module.num_relations > 1:
            edges = _absent.leave_out(edge_index, edge_type == number)
        beta, gamma = film_of(x[1]).split(module.out_channels, dim=-1)
        out = out + module.propagate(edges, x=linear(x[0]), beta=beta, gamma=gamma)
    total: torch.Tensor = out
    return total


def chebyshev_norm(
    module: Any,
    edge_index: torch.Tensor,
    num_nodes: int | None,
    edge_weight: torch.Tensor | None,
    normalization: str | None,
    lambda_max: Any = None,
    dtype: torch.dtype | None = None,
    batch: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scaled Laplacian as ``ChebConv`` does."""
    edge_index, weight = get_laplacian(edge_index, edge_weight, normalization, dtype, num_nodes)
    if lambda_max is None:
        there = edge_index[0] >= 0
        lambda_max = 2.0 * torch.where(there, weight, -torch.inf).max()
    if batch is not None and isinstance(lambda_max, torch.Tensor) and lambda_max.numel() > 1:
        lambda_max = lambda_max[batch[edge_index[0]]]
    scaled = 2.0 * weight / lambda_max
    scaled = scaled.masked_fill(scaled == torch.inf, 0)
    return edge_index, scaled - (edge_index[0] == edge_index[1]).to(scaled.dtype)


def hetero_batch_norm(module: Any, x: torch.Tensor, type_vec: torch.Tensor) -> torch.Tensor:
    """Normalise as ``HeteroBatchNorm`` does; what is remembered of absent types stays."""
    types = module.num_types
    if not module.training and module.track_running_stats:
        mean, var = module.running_mean, module.running_var
    else:
        with torch.no_grad():
            mean, var = module.mean_var(x, type_vec, dim_size=types)
    if module.training and module.track_running_stats:
        factor = module.momentum
        with torch.no_grad():
            if factor is None:
                module.num_batches_tracked.add_(1)
                factor = 1.0 / module.num_batches_tracked
            here = _absent.degree(type_vec, types, x.dtype).clamp(max=1).view(-1, 1)
            module.running_mean.add_(here * factor * (mean - module.running_mean))
            module.running_var.add_(here * factor * (var - module.running_var))
    out: torch.Tensor = (x - mean[type_vec]) / var.clamp(module.eps).sqrt()[type_vec]
    if module.affine:
        out = out * module.weight[type_vec] + module.bias[type_vec]
    return out


def mask_label(module: Any, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Add labels as ``MaskLabel`` does, where a mask says."""
    known = mask.view(-1, 1) * module.emb(torch.where(mask, y, 0))
    return torch.cat([x, known], dim=-1) if module.method == "concat" else x + known

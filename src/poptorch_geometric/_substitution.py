"""Replace functions of torch_geometric by functions with fixed shapes while a model is captured."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch_geometric.backend
import torch_geometric.nn
import torch_geometric.nn.conv.rgcn_conv
import torch_geometric.nn.pool.connect.filter_edges
import torch_geometric.nn.pool.select.topk
from torch import Tensor
from torch_geometric.experimental import set_experimental_mode
from torch_geometric.utils import get_laplacian

from poptorch._base.thread_safety import OfThread, by_thread, holding

from . import _static, ops


def _film(module: Any, x: Any, edge_index: Tensor, edge_type: Any = None) -> Tensor:
    # All edges for every relation.
    x = (x, x) if isinstance(x, Tensor) else x
    beta, gamma = module.film_skip(x[1]).split(module.out_channels, dim=-1)
    out: Tensor = gamma * module.lin_skip(x[1]) + beta
    out = out if module.act is None else module.act(out)
    for number, (linear, film_of) in enumerate(zip(module.lins, module.films, strict=True)):
        edges = edge_index
        if module.num_relations > 1:
            edges = _static.leave_out(edge_index, edge_type == number)
        beta, gamma = film_of(x[1]).split(module.out_channels, dim=-1)
        out = out + module.propagate(edges, x=linear(x[0]), beta=beta, gamma=gamma)
    return out


def _chebyshev_norm(
    module: Any,
    edge_index: Tensor,
    num_nodes: int | None,
    edge_weight: Tensor | None,
    normalization: str | None,
    lambda_max: Any = None,
    dtype: torch.dtype | None = None,
    batch: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    edge_index, weight = get_laplacian(edge_index, edge_weight, normalization, dtype, num_nodes)
    if lambda_max is None:
        is_present = edge_index[0] >= 0
        lambda_max = 2.0 * torch.where(is_present, weight, -torch.inf).max()
    if batch is not None and isinstance(lambda_max, Tensor) and lambda_max.numel() > 1:
        lambda_max = lambda_max[batch[edge_index[0]]]
    scaled = 2.0 * weight / lambda_max
    scaled = scaled.masked_fill(scaled == torch.inf, 0)
    return edge_index, scaled - (edge_index[0] == edge_index[1]).to(scaled.dtype)


def _hetero_batch_norm(module: Any, x: Tensor, type_vec: Tensor) -> Tensor:
    # What was stored for absent types stays.
    types = module.num_types
    if not module.training and module.track_running_stats:
        mean, var = module.running_mean, module.running_var
    else:
        with torch.no_grad():
            mean, var = module.mean_var(x, type_vec, dim_size=types)
            if module.track_running_stats:
                factor = module.momentum
                if factor is None:
                    module.num_batches_tracked.add_(1)
                    factor = 1.0 / module.num_batches_tracked
                has_nodes = _static.degree(type_vec, types, x.dtype).clamp(max=1).view(-1, 1)
                module.running_mean.add_(has_nodes * factor * (mean - module.running_mean))
                module.running_var.add_(has_nodes * factor * (var - module.running_var))
    out: Tensor = (x - mean[type_vec]) / var.clamp(module.eps).sqrt()[type_vec]
    if module.affine:
        out = out * module.weight[type_vec] + module.bias[type_vec]
    return out


def _mask_label(module: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    known = mask.view(-1, 1) * module.emb(torch.where(mask, y, 0))
    return torch.cat([x, known], dim=-1) if module.method == "concat" else x + known


# Functions by the module of torch_geometric that defines those with the same names.
FUNCTIONS: Mapping[str, tuple[Callable[..., Any], ...]] = {
    "utils": (
        _static.scatter,
        _static.degree,
        _static.softmax,
        _static.remove_self_loops,
        _static.segregate_self_loops,
        _static.add_remaining_self_loops,
        _static.get_self_loop_attr,
        _static.dropout_edge,
    ),
    "nn.conv.rgcn_conv": (_static.masked_edge_index,),
    "nn.pool.select.topk": (_static.topk,),
    "nn.pool.connect.filter_edges": (_static.filter_adj,),
    "nn.pool": (
        ops.knn, ops.knn_graph, ops.radius, ops.radius_graph,
    ),
    "nn.unpool": (ops.knn_interpolate,),
}  # fmt: skip


METHODS: tuple[tuple[Any, str, Any], ...] = (
    # otherwise the sizes of segments would decide
    (torch_geometric.backend, "use_segment_matmul", False),
    (torch_geometric.nn.ChebConv, "__norm__", _chebyshev_norm),
    (torch_geometric.nn.MessagePassing, "_index_select", _static.index_select),
    (torch_geometric.nn.aggr.Aggregation, "assert_sorted_index",
     ops.Aggregation.assert_sorted_index),
    (torch_geometric.nn.InstanceNorm, "forward", ops.InstanceNorm.forward),
    (torch_geometric.nn.HeteroBatchNorm, "forward", _hetero_batch_norm),
    (torch_geometric.nn.MaskLabel, "forward", _mask_label),
    (torch_geometric.nn.HeteroLinear, "forward", ops.HeteroLinear.forward),
    (torch_geometric.nn.ClusterGCNConv, "forward", ops.ClusterGCNConv.forward),
    (torch_geometric.nn.MFConv, "forward", ops.MFConv.forward),
    (torch_geometric.nn.FiLMConv, "forward", _film),
    (torch_geometric.nn.pool.select.SelectTopK, "forward", _static.select_top_k),
    (torch_geometric.nn.pool.connect.Connect, "get_pooled_batch",
     staticmethod(_static.get_pooled_batch)),
)  # fmt: skip


@contextlib.contextmanager
def substituted() -> Iterator[None]:
    """Replace the functions within the block, for this thread only."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(holding(_static.absent, False))
        mode: Any = OfThread(True, False)
        stack.enter_context(set_experimental_mode(mode, "disable_dynamic_shapes"))
        for owner, name, replacement in (*_places(len(sys.modules)), *METHODS):
            usual = vars(owner)[name]
            stack.callback(setattr, owner, name, usual)
            setattr(owner, name, _in_this_thread(replacement, usual))
        yield


def _in_this_thread(replacement: Any, usual: Any) -> Any:
    if isinstance(replacement, staticmethod):
        return staticmethod(by_thread(replacement.__func__, usual.__func__))
    return by_thread(replacement, usual) if callable(replacement) else replacement


@functools.lru_cache(maxsize=1)
def _places(modules: int) -> tuple[tuple[Any, str, Any], ...]:
    """Find all names in torch_geometric's modules that refer to one of the functions."""
    substitutes: dict[Any, Any] = {}
    for path, replacements in FUNCTIONS.items():
        module = importlib.import_module(f"torch_geometric.{path}")
        substitutes |= {getattr(module, each.__name__): each for each in replacements}
    places = []
    for path, owner in list(sys.modules.items()):
        if path.partition(".")[0] == "torch_geometric":
            for attribute, value in list(vars(owner).items()):
                is_hashable = type(value).__hash__ is not None
                if callable(value) and is_hashable and value in substitutes:
                    places.append((owner, attribute, substitutes[value]))
    return tuple(places)

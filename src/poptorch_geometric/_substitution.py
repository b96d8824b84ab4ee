"""Functions of torch_geometric that give way to those of fixed shapes while a model is captured.

Source: PopTorch user guide, "PopTorch ops".
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch_geometric.backend
import torch_geometric.nn
import torch_geometric.nn.conv.rgcn_conv
import torch_geometric.nn.pool.connect.filter_edges
import torch_geometric.nn.pool.select.topk
import torch_geometric.utils
from torch_geometric.experimental import set_experimental_mode

from poptorch._capture import OverwriteContextManager

from . import _absent, _static
from .common import call_once
from .ops import _layers, _neighbours

# Functions by where torch_geometric has those of the same names, wherever else it imports them.
FUNCTIONS: Mapping[str, tuple[Callable[..., Any], ...]] = {
    "utils": (
        _absent.scatter,
        _absent.degree,
        _absent.softmax_for(torch_geometric.utils.softmax),
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
        _neighbours.knn, _neighbours.knn_graph, _neighbours.radius, _neighbours.radius_graph,
    ),
    "nn.unpool": (_neighbours.knn_interpolate,),
}  # fmt: skip


def _no_check(module: Any, index: Any) -> None:
    """Callers promise sorted numbers."""


# Methods of classes, and a setting.
METHODS: tuple[tuple[Any, str, Any], ...] = (
    (torch_geometric.backend, "use_segment_matmul", False),  # or sizes of segments decide
    (torch_geometric.nn.ChebConv, "__norm__", _layers.chebyshev_norm),
    (torch_geometric.nn.MessagePassing, "_index_select", _absent.index_select),
    (torch_geometric.nn.aggr.Aggregation, "assert_sorted_index", _no_check),
    (torch_geometric.nn.InstanceNorm, "forward", _layers.instance_norm),
    (torch_geometric.nn.HeteroBatchNorm, "forward", _layers.hetero_batch_norm),
    (torch_geometric.nn.MaskLabel, "forward", _layers.mask_label),
    (torch_geometric.nn.HeteroLinear, "forward", _layers.hetero_linear),
    (torch_geometric.nn.ClusterGCNConv, "forward", _layers.cluster_gcn),
    (torch_geometric.nn.MFConv, "forward", _layers.mf),
    (torch_geometric.nn.FiLMConv, "forward", _layers.film),
    (torch_geometric.nn.pool.select.SelectTopK, "forward", _static.select_top_k),
    (torch_geometric.nn.pool.connect.Connect, "get_pooled_batch",
     staticmethod(_static.get_pooled_batch)),
)  # fmt: skip


@contextlib.contextmanager
def substituted() -> Iterator[None]:
    """Within the block torch_geometric computes in fixed shapes, or says what it would need."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_absent.watching())
        stack.enter_context(set_experimental_mode(True, "disable_dynamic_shapes"))
        for owner, name, replacement in (*_places(len(sys.modules)), *METHODS):
            stack.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, replacement)
        yield


@functools.lru_cache(maxsize=1)
def _places(modules: int) -> tuple[tuple[Any, str, Any], ...]:
    """Every name in torch_geometric that is one of the functions.

    Args:
        modules: how many are imported; where it is another number they are searched anew.
    """
    wanted: dict[Any, Any] = {}
    for path, replacements in FUNCTIONS.items():
        module = importlib.import_module(f"torch_geometric.{path}")
        wanted |= {getattr(module, each.__name__): each for each in replacements}
    places = []
    for path, owner in list(sys.modules.items()):
        if path.partition(".")[0] == "torch_geometric":
            for attribute, value in list(vars(owner).items()):
                if callable(value) and _hashable(value) and value in wanted:
                    places.append((owner, attribute, wanted[value]))
    return tuple(places)


def _hashable(value: Any) -> bool:
    return type(value).__hash__ is not None


@call_once
def register() -> None:
    """Have the functions swapped whenever a model is captured."""
    OverwriteContextManager.registerSubsitutionManager(substituted)

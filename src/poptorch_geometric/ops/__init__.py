"""Operators and layers of fixed shapes, for eager use and inside wrapped models.

Source: PopTorch user guide, "PopTorch ops".
"""

from ._layers import Aggregation, ClusterGCNConv, HeteroLinear, InstanceNorm, MFConv
from ._neighbours import knn, knn_graph, knn_interpolate, radius, radius_graph

__all__ = [
    "Aggregation",
    "ClusterGCNConv",
    "HeteroLinear",
    "InstanceNorm",
    "MFConv",
    "knn",
    "knn_graph",
    "knn_interpolate",
    "radius",
    "radius_graph",
]

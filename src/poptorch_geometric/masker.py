"""Hide entries of nodes, edges and graphs from layers."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any

import torch

Entries = torch.Tensor | tuple[torch.Tensor, ...]
Mask = torch.Tensor
Layer = Callable[..., Any]
DecoratedLayer = Callable[..., Any]


class Masker(abc.ABC):
    """Hide entries; each method takes a tensor, or a tuple of tensors, and returns the same."""

    @abc.abstractmethod
    def node_masker(self, entries: Entries, mask: Mask | None = None) -> Entries:
        """Hide nodes. ``mask``: [nodes], True for those that stay; None if the masker knows."""

    @abc.abstractmethod
    def edge_masker(self, entries: Entries, mask: Mask | None = None) -> Entries:
        """Hide edges. ``mask``: [edges], True for those that stay; None if the masker knows."""

    @abc.abstractmethod
    def graph_masker(self, entries: Entries, mask: Mask | None = None) -> Entries:
        """Hide graphs. ``mask``: [graphs], True for those that stay; None if the masker knows."""


class NoMasker(Masker):
    """Hide nothing: return the given object."""

    def node_masker(self, entries: Entries, mask: Mask | None = None) -> Entries:
        """Return the entries."""
        return entries

    edge_masker = graph_masker = node_masker


class LayerMasker(abc.ABC):
    """Wrap a layer: it takes ``mask=`` and sees only the entries that a masker does not hide.

    Args:
        masker: hides the entries.
    """

    def __init__(self, masker: Masker) -> None:
        self.masker = masker

    @abc.abstractmethod
    def node_masker(self, layer: Layer) -> DecoratedLayer:
        """Return the layer for entries of nodes, called as ``(*args, mask=None)``."""

    @abc.abstractmethod
    def edge_masker(self, layer: Layer) -> DecoratedLayer:
        """Return the layer for entries of edges, called as ``(*args, mask=None)``."""

    @abc.abstractmethod
    def graph_masker(self, layer: Layer) -> DecoratedLayer:
        """Return the layer for entries of graphs, called as ``(*args, mask=None)``."""


class PreLayerMasker(LayerMasker):
    """Masks the arguments before the layer is called."""

    def node_masker(self, layer: Layer) -> DecoratedLayer:
        """Return the layer with masked arguments."""
        return _before(layer, self.masker.node_masker)

    def edge_masker(self, layer: Layer) -> DecoratedLayer:
        """Return the layer with masked arguments."""
        return _before(layer, self.masker.edge_masker)

    def graph_masker(self, layer: Layer) -> DecoratedLayer:
        """Return the layer with masked arguments."""
        return _before(layer, self.masker.graph_masker)


def _before(layer: Layer, hide: Callable[..., Any]) -> DecoratedLayer:
    @functools.wraps(layer, updated=())  # copies only the name of a module, not its attributes
    def masked(*args: Any, mask: Mask | None = None) -> Any:
        return layer(*hide(args, mask))

    return masked

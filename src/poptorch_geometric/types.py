"""Support graphs as arguments and results of wrapped models."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.data import BaseData

from poptorch.argparsers import ICustomArgParser, registerCustomArgParser
from poptorch.poptorch_core import InvalidValue

from . import _graphs
from .common import DataBatch, HeteroDataBatch, SeedBatch


class PyGArgsParser(ICustomArgParser):
    """Read the tensors of a graph or a batch of graphs, and replace them.

    The tensors of ``Data`` are sorted by name. Those of ``HeteroData`` come in the order of
    insertion: the graph's own, then those of nodes, then those of edges.
    """

    def yieldTensors(self, struct: Any) -> Iterator[torch.Tensor]:
        """Yield the tensors.

        Raises:
            ValueError: the data has another class, such as ``TemporalData``.
        """
        for store, name in _places(struct):
            yield store[name]

    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[torch.Tensor]) -> Any:
        """Return a graph of the same class with everything except the tensors of the original."""
        result = copy.copy(original_structure)
        for store, name in _places(result):
            store[name] = next(tensor_iterator)
        return result

    def join(self, batches: Sequence[Any], joined: Any) -> Any:
        """Complete a joined batch: concatenate the lists that contain no tensors.

        Args:
            batches: the micro-batches.
            joined: what ``reconstruct`` made from the last micro-batch and the joined tensors.
        """
        for key, store in _graphs.stores(joined).items():
            for name, value in list(store.items()):
                if isinstance(value, list):
                    items = [item for each in batches for item in _graphs.stores(each)[key][name]]
                    _graphs.set_attribute(joined, key, name, items)
        return joined


def _places(struct: Any) -> list[tuple[Any, str]]:
    if not isinstance(struct, (Data, HeteroData)):
        raise InvalidValue(
            "Unsupported data type",
            got=f"{type(struct).__module__}.{type(struct).__qualname__}",
            fix="pass the tensors, or a torch_geometric.data.Data that contains them",
        )
    places = [
        (store, name)
        for store in _graphs.stores(struct).values()
        for name, value in store.items()
        if isinstance(value, torch.Tensor)
    ]
    return places if isinstance(struct, HeteroData) else sorted(places, key=lambda place: place[1])


def registerCustomArgParsers() -> None:
    """Allow wrapped models and loaders to take graphs and batches of graphs."""
    parser = PyGArgsParser()
    # In this order, because unpickling the first one creates the classes of batches.
    for kind in (BaseData, DataBatch, HeteroDataBatch, SeedBatch):
        registerCustomArgParser(kind, parser)

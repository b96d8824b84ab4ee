"""Graphs as arguments and results of wrapped models."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch_geometric.data import Batch, Data

from poptorch.argparsers import ICustomArgParser, registerCustomArgParser


class PyGArgsParser(ICustomArgParser):
    """Takes the tensors out of a graph or a batch of graphs, and puts others in."""

    @staticmethod
    def _keys(data: Any) -> list[str]:
        return sorted(key for key, value in data.to_dict().items() if torch.is_tensor(value))

    def yieldTensors(self, struct: Any) -> Iterator[torch.Tensor]:
        """Yield the tensors in the order of their names."""
        for key in self._keys(struct):
            yield struct[key]

    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[torch.Tensor]) -> Any:
        """Return a graph of the same class; everything but tensors comes from the original."""
        result = copy.copy(original_structure)
        for key in self._keys(original_structure):
            result[key] = next(tensor_iterator)
        return result


def registerCustomArgParsers() -> None:
    """Let wrapped models and loaders take ``Data`` and ``Batch``."""
    parser = PyGArgsParser()
    for kind in (Data, Batch, type(Batch(_base_cls=Data))):
        registerCustomArgParser(kind, parser)

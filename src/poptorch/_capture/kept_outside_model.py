"""Give values to tensors that user code keeps outside of the model.

A capture runs ``forward`` on tensors without values. Attributes of the model are restored
afterwards, but a cache that belongs to a function (``functools.lru_cache``) or to a Python module
keeps such tensors, and eager code and later captures would get them from there. Those that depend
on constants only, such as masks and positions, get their values.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

from .._base import private
from .._base.errors import Error
from .._ir.operators import draws
from .recorded import constant_value, recorded
from .trace import untraced, without_data


class TensorsKeptOutside:
    """The tensors that user code got during a capture, and the values of those that may outlive
    it.
    """

    def __init__(self) -> None:
        self._results: list[weakref.ref[torch.Tensor]] = []
        self._known: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []

    def note_result(self, result: Any) -> None:
        """Note what a torch function returned to user code."""
        for each in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(each, torch.Tensor):
                self._results.append(weakref.ref(each))

    def find_values(self, failed: bool) -> None:
        """Compute the values of constants that are still in use, while their graph is recorded.

        ``failed``: the capture did not reach its end, perhaps because of the last operator.
        """
        tensors = {id(each): each for ref in self._results if (each := ref()) is not None}
        self._results.clear()
        nodes = {at: recorded(tensor) for at, tensor in tensors.items() if without_data(tensor)}
        graph = next((node.graph for node in nodes.values() if node is not None), None)
        if graph is None:
            return
        last = next(reversed(graph.nodes))
        if failed and "val" not in last.meta:
            graph.erase_node(last)
        varying = set[Any]()
        for node in graph.nodes:
            depends = node.op == "placeholder" or not varying.isdisjoint(node.all_input_nodes)
            if depends or draws(node):
                varying.add(node)
        for at, node in nodes.items():
            if node is None or node in varying or tensors[at].requires_grad:
                continue
            value = constant_value(tensors[at])
            if value is not None:
                with untraced():
                    self._known.append((weakref.ref(tensors[at]), value.detach().clone()))

    def give_values(self) -> None:
        """Give constants that outlived the capture their values."""
        known, self._known = self._known, []
        if all(ref() is None for ref, _ in known):
            return
        gc.collect()  # they may be garbage, and the tracer's weak references are
        kept = [(tensor, value) for ref, value in known if (tensor := ref()) is not None]
        known.clear()
        with untraced():
            for tensor, value in kept:
                _swap(tensor, value)


def _swap(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Make a tensor the one with values, as ``torch.utils.swap_tensors`` does. The graph and weak
    dictionaries still refer to the one without values, which that function refuses.
    """
    if (swap := private.optional("swap_tensor_impl")) is None:
        raise Error(
            "forward keeps a tensor outside of the model",
            got=f"a tensor of shape {tuple(tensor.shape)} that was computed while forward was "
            "captured, when tensors have no values, for example in a cache of a function",
            fix=(
                "compute it in __init__ and register it: self.register_buffer('name', tensor)",
                "or call the model once in eager PyTorch before you wrap it",
            ),
        )
    kinds, attributes = (type(tensor), type(value)), (vars(tensor), vars(value))
    tensor.__class__, value.__class__ = reversed(kinds)
    tensor.__dict__, value.__dict__ = reversed(attributes)
    swap(tensor, value)

"""Derive the value of each node of a graph from its inputs, without computing numbers.

Layers that repeat compute with operands of the same shapes. An operator therefore runs once for all
operands that are alike, and nodes share values: a value consists only of shape, strides and type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .operators import Operator


def propagate_values(module: fx.GraphModule, inputs: Sequence[torch.Tensor], mode: Any) -> None:
    """Store the value of each node under ``val`` in its meta.

    Args:
        inputs: tensors without values, of the mode.
        mode: a ``FakeTensorMode``.
    """
    if not all(map(_is_pure, module.graph.nodes)):
        from torch.fx.passes.fake_tensor_prop import FakeTensorProp

        FakeTensorProp(module, mode).propagate_dont_convert_inputs(*inputs)
        return
    known = _Propagated()
    given = iter(inputs)
    with mode:
        for node in module.graph.nodes:
            if node.op == "placeholder":
                node.meta["val"] = known.alike(next(given))
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), _value)
                node.meta["val"] = known.result(node.target, args, kwargs)


def _is_pure(node: fx.Node) -> bool:
    """Return whether the value of a node depends on its operands, and changes nothing of them."""
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    return not isinstance(node.target, Operator) or torch.Tag.inplace_view not in node.target.tags


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


class _Propagated:
    """Results by operator and operands, and one value for all tensors that are alike."""

    def __init__(self) -> None:
        self._results: dict[Any, Any] = {}
        self._tensors: dict[Any, torch.Tensor] = {}

    def result(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        key = target, _key(args), _key([*kwargs.items()])
        if key not in self._results:
            self._results[key] = self.alike(target(*args, **kwargs))
        return self._results[key]

    def alike(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(self.alike, value))
        if not isinstance(value, torch.Tensor):
            return value
        place = _key([*value.shape, *value.stride(), value.storage_offset()])
        key = value.dim(), place, value.dtype, value.device, value.is_conj(), value.is_neg()
        return self._tensors.setdefault(key, value)


def _key(value: Any) -> Any:
    """Return what two operands have in common if they are alike."""
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    if isinstance(value, torch.Tensor):
        return id(value)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return type(value), value.node.expr
    return type(value), value

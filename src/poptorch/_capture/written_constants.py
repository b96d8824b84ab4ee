"""Find tensors that ``forward`` changes in place although they are constants of the program.

Such a tensor is neither a parameter nor a buffer, for example a counter in a plain attribute or
in a global variable. The program uses its first value in every run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._base import private
from .._ir.operators import arguments_written, storage_root, written_by
from .recorded import recorded, varies
from .trace import untraced, without_data


@dataclass(frozen=True, eq=False)
class WrittenConstant:
    """A constant that ``forward`` changes in place."""

    tensor: torch.Tensor
    varies: bool  # the new values depend on what changes between runs
    moves: bool  # it is written at places that depend on what changes between runs


def written_constants(graph: fx.Graph, fixed: Collection[fx.Node]) -> Iterator[WrittenConstant]:
    """Yield the constants to which a recorded graph writes.

    ``fixed``: the inputs of the graph that do not change between runs.
    """
    writes: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        for root in map(storage_root, written_by(node)):
            if root.op == "get_attr":
                writes.setdefault(str(root.target), []).append(node)
    constant = {*fixed}
    for name, nodes in writes.items():
        places = (each for node in nodes for each in node.all_input_nodes if _chooses(each))
        yield WrittenConstant(
            getattr(graph.owning_module, name),
            any(varies(node, constant) for node in nodes),
            any(varies(each, constant) for each in places),
        )


def _chooses(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())


class ValuesOfConstants:
    """Keeps the values of constants during a capture.

    Torch's tracer computes ``self.count += 1`` immediately if ``self.count`` is a tensor with
    values. The program would then start from the new value.
    """

    def __init__(self) -> None:
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of the tensor

    def about_to_run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for tensor in arguments_written(func, args, kwargs):
            if without_data(tensor):
                continue
            whole = tensor if tensor._base is None else tensor._base
            if id(whole) not in self._before and recorded(whole) is None:
                with untraced():
                    self._before[id(whole)] = whole, whole.detach().clone()

    def restore(self) -> None:
        before, self._before = list(self._before.values()), {}
        with untraced(), torch.no_grad(), private.keeping_versions([each for each, _ in before]):
            for tensor, value in before:
                tensor.copy_(value)

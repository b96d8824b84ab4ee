"""Handle what ``forward`` leaves in the model: tensors in attributes, and layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import fx

from .._base import source
from .._base.errors import Error
from .forward import Request
from .python_state import ModuleAttribute, PythonState
from .recorded import recorded, varies
from .replaced_tensors import tensors_of

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def kept_of_changes(
    request: Request, after: Mapping[str, torch.Tensor]
) -> Iterator[ModuleAttribute]:
    """Yield attributes whose values depend on the batch, on state that changes, or on draws.

    ``after``: parameters and buffers by path, after forward and backward.
    """
    constant: set[fx.Node] = set()  # the nodes that are known to be constant
    for path in {slot.path for slot in request.state} - request.trained:
        node = recorded(after[path])
        while node is not None and node.target in _SAME:
            node = node.all_input_nodes[0]
        if node is not None and node.op == "placeholder":
            constant.add(node)

    def changes(tensor: torch.Tensor) -> bool:
        node = recorded(tensor)
        return node is not None and varies(node, constant)

    return PythonState([request.module]).holding(changes)


def refuse_new_layers(request: Request) -> None:
    """Refuse new layers. Layers may only be replaced by others with the same weights, because the
    state of a program is fixed.
    """
    known = {id(tied.tensor) for tied in request.tensors.values()}
    for name, tied in tensors_of(request.module, values=False).items():
        if id(tied.tensor) not in known:
            layer = name.rpartition(".")[0]
            raise Error(
                "forward creates a layer that the model did not have",
                got=f"'{layer}', with '{name}' of shape {tuple(tied.tensor.shape)}: a program's "
                "state is fixed when it is compiled",
                where=source.definition_line(type(request.users).forward),
                fix=(
                    "call the module once without poptorch before you wrap it",
                    "or make the layer in __init__",
                ),
            )

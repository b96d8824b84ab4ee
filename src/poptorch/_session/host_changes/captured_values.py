"""Check whether values that the capture of ``forward`` used are still the same: the seed, the
default type, and tensors that decided branches and shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import fx

from ..._base import seeding
from ..._capture import Decision, ModelTensor
from ..._ir.graph import Graph
from .change_check import DESTROY, ChangeCheck


def seed_checks(graphs: Iterable[Graph], chosen: int | None) -> list[ChangeCheck]:
    """Return the check of the host's seed, if a graph of the program draws random numbers.

    ``chosen``: the seed that the options set.
    """
    if not any(graph.random for graph in graphs):
        return []

    seeding.listen()

    def changes(_: object) -> Iterator[str]:
        seed = torch.initial_seed()
        if not seeding.is_ours(seed):
            yield f"torch.manual_seed({seed})"

    remedy = "assign [seed] to rng_state of the wrapped model"
    if chosen is None:
        remedy += ", or call options.randomSeed(seed) before you wrap the model"
    else:
        remedy += f"; until then, the program draws from the seed of options.randomSeed({chosen})"
    return [ChangeCheck(seeding.last, changes, remedy)]


def default_type_checks(graph: Graph, constants: Iterable[torch.Tensor]) -> list[ChangeCheck]:
    """Return the check of ``torch.get_default_dtype()``, if the graph of a micro-batch or its
    constants depend on it.
    """
    uses = any(each.dtype == torch.get_default_dtype() for each in constants)
    if not uses and not any(map(_has_default_type, graph.module.graph.nodes)):
        return []

    def changes(before: torch.dtype) -> Iterator[str]:
        yield f"torch.set_default_dtype({torch.get_default_dtype()}), which was {before}"

    return [ChangeCheck(torch.get_default_dtype, changes, DESTROY)]


def _has_default_type(node: fx.Node) -> bool:
    """Return whether the type of a result is torch's default, as that of ``torch.ones(3)``."""
    if node.op != "call_function" or not _is_floating(node):
        return False
    if node.target is not torch.ops.aten.scalar_tensor.default and node.kwargs.get("dtype"):
        return False
    return not any(map(_is_floating, node.all_input_nodes))


def _is_floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    tensors = value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(each, torch.Tensor) and each.dtype.is_floating_point for each in tensors)


def decision_check(decided: Sequence[Decision], tensors: Mapping[str, ModelTensor]) -> ChangeCheck:
    """Return the check of buffers and frozen weights whose values decided branches or
    shapes in forward.

    The values are compared, because torch does not count writes through ``.data`` or NumPy.
    """
    places = [tensors[each.path].places[0] for each in decided]

    def now() -> list[torch.Tensor | None]:
        return [dict.get(owner.__dict__[holder], name) for owner, holder, name in places]

    def before(_: object) -> list[torch.Tensor]:
        return [each.value for each in decided]

    def changes(_: object) -> Iterator[str]:
        for decision, tensor in zip(decided, now(), strict=True):
            if tensor is None or not _are_equal(tensor, decision.value):
                use = "which decide a shape" if decision.shapes else "on which forward branches"
                yield f"the values of '{decision.path}', {use} at {decision.line}"

    def compare(tensors: list[torch.Tensor], values: list[torch.Tensor]) -> bool:
        return all(map(_are_equal, tensors, values))

    remedy = f"{DESTROY}; to decide when the program runs, use torch.where or poptorch.cond"
    return ChangeCheck(now, changes, remedy, before, compare)


def _are_equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if tensor.dtype != other.dtype or tensor.shape != other.shape:
        return False
    if torch.equal(tensor, other):
        return True
    return torch.allclose(tensor, other, 0.0, 0.0, equal_nan=True)

"""One micro-batch of the user's module as a Graph: forward, loss, backward, buffer updates.

Source: spec/executor.md sections 3 to 5.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from .._base import trees
from .._ir.graph import Graph
from .._ir.slot import Kind, Slot
from .._ops.context import listening
from . import trace
from .failures import explained
from .losses import LossFinder
from .names import Names
from .swap import Tied, swapped

Call = Callable[[Sequence[torch.Tensor]], Any]
REPLICA = Slot(Kind.COUNTER, "replica", (), torch.float32)
_NARROW = {torch.float64: torch.float32, torch.int64: torch.int32}


@dataclass(frozen=True, eq=False)
class Micro:
    """What a capture found.

    Attributes:
        graph: ``param.* buffer.* constant.* batch.*`` (and ``hyper.loss_scaling``) to
            ``loss.* output.*``, ``gradient.*``, and new values of what forward changed in place.
        constants: tensors that the module holds outside parameters and buffers, by slot key.
        outputs: the structure that forward returned, tensors cut out.
        host_outputs: returned tensors that forward did not compute, by their place among all.
        names: of the tensors that can be anchored.
    """

    graph: Graph
    constants: Mapping[str, torch.Tensor]
    outputs: trees.Structure
    host_outputs: Mapping[int, torch.Tensor]
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Request:
    """What is to be captured.

    Attributes:
        module: the user's module; unchanged afterwards.
        call: runs forward on the tensors of ``batch``, putting them back into the arguments.
        tensors: the module's parameters and buffers by path.
        state: their slots, in the same order.
        batch: slots of the flat tensor arguments of one micro-batch.
        trained: paths of the parameters that get a gradient; empty in inference.
        training: whether a loss is looked for.
        loss_scaling: the factors on the gradient's seed: numbers, or slots of inputs.
        narrow_64bit: whether 64-bit results become 32-bit ones.
        anchors: (short name, tensor name) of tensors that come back beside the outputs; names that
            no tensor of the forward and backward pass has are left to later stages.
        module_scopes: whether tensors are named after the path of the module that made them.
        grouped: by path, the group of each replica, for parameters whose leading dimension holds
            one value per group; forward sees the value of its replica's group.
    """

    module: nn.Module
    call: Call
    tensors: Mapping[str, Tied]
    state: tuple[Slot, ...]
    batch: tuple[Slot, ...]
    trained: frozenset[str] = frozenset()
    training: bool = False
    loss_scaling: tuple[float | Slot, ...] = ()
    narrow_64bit: bool = True
    anchors: tuple[tuple[str, str], ...] = ()
    module_scopes: bool = True
    grouped: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[Slot, ...]:
        """Every input slot of the traced function."""
        scaling = tuple(factor for factor in self.loss_scaling if isinstance(factor, Slot))
        replica = (REPLICA,) if self.grouped else ()
        return (*self.state, *self.batch, *scaling, *replica)


def narrowed(dtype: torch.dtype) -> torch.dtype:
    """The 32-bit type that a 64-bit type becomes at the border; others stay."""
    return _NARROW.get(dtype, dtype)


class _Recording:
    """Runs forward and backward once, remembering what the flat results mean."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.slots: list[Slot] = []
        self.structure: trees.Structure | None = None
        self.hosts: dict[int, torch.Tensor] = {}
        self.names: Names

    def __call__(self, flat: list[torch.Tensor]) -> list[torch.Tensor]:
        request = self.request
        values = dict(zip((slot.key for slot in request.inputs), flat, strict=True))
        leaves = {slot.path: self._leaf(slot, values[slot.key]) for slot in request.state}
        batch = [values[slot.key] for slot in request.batch]
        finder = LossFinder()
        names = Names(request.module, request.module_scopes)
        grad = torch.enable_grad() if request.training else torch.no_grad()
        with (
            grad,
            swapped(request.tensors, self._seen(leaves, values)) as reassigned,
            listening(finder),
            explained(request.module),
            finder if request.training else contextlib.nullcontext(),
            names.listening(),
        ):
            returned = request.call(batch)
        loss = finder.final_loss(request.module) if request.training else None
        results = self._outputs(returned, loss)
        if loss is not None:
            names.add("loss", loss)
            results += self._gradients(loss, leaves, values, names)
        names.add_inputs(batch)
        names.add_state(leaves)
        self.names = names
        results += self._anchors(names)
        leaves |= reassigned
        self.slots += [*request.state, *request.batch]
        results += [leaves[slot.path].detach() for slot in request.state]
        return results + batch

    def _leaf(self, slot: Slot, value: torch.Tensor) -> torch.Tensor:
        if slot.kind is Kind.PARAM and slot.path in self.request.trained:
            return value.detach().requires_grad_()
        return value.detach()

    def _seen(
        self, leaves: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """What forward sees of the state: of a grouped parameter the value of one group."""
        seen = dict(leaves)
        for path, of_replica in self.request.grouped.items():
            replica = values[REPLICA.key].to(torch.int64).reshape(1)
            table = torch.tensor(of_replica, dtype=torch.int64)
            group = table.index_select(0, replica)
            with torch.enable_grad():
                seen[path] = leaves[path].index_select(0, group).squeeze(0)
        return seen

    def _outputs(self, returned: Any, loss: torch.Tensor | None) -> list[torch.Tensor]:
        tensors, self.structure = trees.flatten(returned, "output")
        results = []
        for index, tensor in enumerate(tensors):
            if not trace.is_traced(tensor):
                self._keep_on_host(index, tensor)
                continue
            result = tensor.detach()
            if self.request.narrow_64bit and result.dtype in _NARROW:
                result = result.to(_NARROW[result.dtype])
            kind = Kind.LOSS if tensor is loss else Kind.OUTPUT
            self.slots.append(Slot.like(kind, str(index), result))
            results.append(result)
        return results

    def _keep_on_host(self, index: int, tensor: torch.Tensor) -> None:
        assert self.structure is not None
        warnings.warn(
            f"Output expected to be on the IPU: {self.structure.paths[index]} was not computed by "
            "the model and is returned as it is",
            stacklevel=2,
        )
        self.hosts[index] = tensor.detach()

    @property
    def _automatic_scaling(self) -> bool:
        scaling = self.request.loss_scaling
        return any(isinstance(s, Slot) and s.kind is Kind.OPTSTATE for s in scaling)

    def _anchors(self, names: Names) -> list[torch.Tensor]:
        results = []
        for short, long in self.request.anchors:
            tensor = names.find(long)
            if tensor is not None:
                result = tensor.detach()
                self.slots.append(Slot.like(Kind.ANCHOR, short, result))
                results.append(result)
        return results

    def _gradients(
        self,
        loss: torch.Tensor,
        leaves: Mapping[str, torch.Tensor],
        values: Mapping[str, torch.Tensor],
        names: Names,
    ) -> list[torch.Tensor]:
        trained = [path for path in leaves if leaves[path].requires_grad]
        if not trained or not loss.requires_grad:
            return []
        trace.backward_keeps_origin(loss)
        seed = torch.ones_like(loss)
        for scaling in self.request.loss_scaling:
            factor = values[scaling.key].to(loss.dtype) if isinstance(scaling, Slot) else scaling
            if not isinstance(factor, float) or factor != 1.0:
                seed = seed * factor
        if self._automatic_scaling:
            names.add("finalLossScale", seed.reshape(-1)[0])
        grads = torch.autograd.grad(
            loss, [leaves[path] for path in trained], grad_outputs=seed, allow_unused=True
        )
        found = [(path, g) for path, g in zip(trained, grads, strict=True) if g is not None]
        self.slots += [Slot.like(Kind.GRADIENT, path, g) for path, g in found]
        for path, gradient in found:
            names.add(f"Gradient___{path}", gradient)
        return [g for _, g in found]


def capture(request: Request) -> Micro:
    """Trace one micro-batch of a module.

    Raises:
        Error: no loss or several, a reassigned buffer, or something that cannot be captured.
    """
    mode = trace.fake_mode()
    recording = _Recording(request)
    inputs = [trace.fake_tensor(mode, slot.shape, slot.dtype) for slot in request.inputs]
    module, constants = trace.trace(recording, inputs)
    constant_slots = tuple(
        Slot.like(Kind.CONSTANT, str(index), value) for index, value in enumerate(constants)
    )
    graph = Graph("micro", module, (*request.inputs, *constant_slots), tuple(recording.slots))
    assert recording.structure is not None
    return Micro(
        _without_unchanged(graph),
        {slot.key: value for slot, value in zip(constant_slots, constants, strict=True)},
        recording.structure,
        recording.hosts,
        recording.names.all,
    )


def _without_unchanged(graph: Graph) -> Graph:
    """Drop the returned inputs that forward did not change, and inputs that nothing reads."""
    placeholders = dict(zip((s.key for s in graph.inputs), graph.placeholders, strict=True))
    kept = [
        (slot, node)
        for slot, node in zip(graph.outputs, graph.returned, strict=True)
        if placeholders.get(slot.key) is not node
    ]
    fxgraph = graph.module.graph
    output = next(node for node in fxgraph.nodes if node.op == "output")
    output.args = (tuple(node for _, node in kept),)
    fxgraph.eliminate_dead_code()
    inputs = []
    for slot, node in zip(graph.inputs, graph.placeholders, strict=True):
        if node.users or slot.kind is Kind.BATCH:
            inputs.append(slot)
        else:
            fxgraph.erase_node(node)
    fxgraph.lint()
    return Graph(
        graph.name, fx.GraphModule(graph.module, fxgraph), tuple(inputs), tuple(s for s, _ in kept)
    )

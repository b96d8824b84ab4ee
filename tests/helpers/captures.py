"""Capturing a small model as a session does and placing it as a compilation does, for tests."""

from typing import Any

import torch
from torch import fx, nn

import poptorch
from poptorch import _capture, _place
from poptorch._capture import Micro, Request
from poptorch._ir import slots
from poptorch._ir.block_labels import StagePass, label_of, pass_of
from poptorch._ir.plan import Layout
from poptorch._ir.slots import Kind
from poptorch._place.place import find_homes
from poptorch.options.freeze_options import freeze


def request_of(
    module: nn.Module, *inputs: torch.Tensor, training: bool = False, replicas: int = 1
) -> Request:
    tensors = _capture.tensors_of(module)
    state = tuple(
        (slots.param if t.is_parameter else slots.buffer)(path, t.tensor.shape, t.tensor.dtype)
        for path, t in tensors.items()
    )
    batch = tuple(slots.batch_input(i, tuple(x.shape), x.dtype) for i, x in enumerate(inputs))
    trained = frozenset(slot.path for slot in state if slot.kind is Kind.PARAM and training)
    given = (lambda tensors: module(*tensors)), tensors, state, batch, trained, training
    return Request(module, module, *given, replicas=replicas)


def capture(
    module: nn.Module, *inputs: torch.Tensor, training: bool = False, replicas: int = 1
) -> Micro:
    return _capture.capture(request_of(module, *inputs, training=training, replicas=replicas))


def labels(micro: Micro) -> list[tuple[str, str | None, bool]]:
    """Return (operator, id of its block, backward) of every node."""
    found = []
    for node in micro.graph.operators:
        label = label_of(node)
        known = label.visit is not None and label.visit >= 0
        block = micro.visits[label.visit].block if known else None
        found.append((node.target.__name__.split(".")[0], block, label.backward))
    return found


X = torch.randn(2, 4)


class Chain(nn.Module):
    """Linear layers, each in the block that its place in ``steps`` says: (id, device) or None."""

    def __init__(self, *steps: tuple[str | None, int | None] | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in steps)
        self.steps = steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, step in zip(self.layers, self.steps, strict=True):
            if step is not None:
                poptorch.Block.start(*step)
            x = layer(x).relu()
        return poptorch.identity_loss(x, "mean")


def options(
    strategy: Any = None,
    *,
    accumulation: int = 99,
    iterations: int = 99,
    training: bool = True,
) -> poptorch.Options:
    """Return options with enough micro-batches for any pipeline of the tests."""
    opts = poptorch.Options().showCompilationProgressBar(False).deviceIterations(iterations)
    if training:
        opts.Training.gradientAccumulation(accumulation)
    if strategy is not None:
        opts.setExecutionStrategy(strategy)
    return opts.autoRoundNumIPUs(True)


def place(
    model: nn.Module, *inputs: torch.Tensor, opts: poptorch.Options, training: bool = True
) -> Layout:
    micro, spec = capture(model, *inputs, training=training), freeze(opts, training)
    layout = _place.place(micro.graph, micro.visits, spec)
    _place.log_layout(layout, spec)
    return layout


def chain(
    *steps: Any,
    strategy: Any = None,
    training: bool = True,
    **counts: int,
) -> Layout:
    opts = options(strategy, training=training, **counts)
    return place(Chain(*steps), X, opts=opts, training=training)


def passes(layout: Layout) -> dict[fx.Node, StagePass]:
    """Return where every operator of a placed graph runs."""
    nodes = layout.graph.module.graph.nodes
    return {node: pass_of(node) for node in nodes if node.op == "call_function"}


def homes(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Return the chips of all state of a placed graph, by slot key."""
    return find_homes(layout.graph, layout.stages)


def stages(layout: Layout) -> list[tuple[int, tuple[str, ...]]]:
    """Return (device, blocks) of every stage."""
    return [(stage.chip, stage.blocks) for stage in layout.stages]

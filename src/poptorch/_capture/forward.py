"""Running the user's forward once on traced tensors: what goes in and what is seen of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .._base import trees
from .._ir.slot import Slot
from .._ops.context import listening
from .failures import explained
from .listening import Capturing
from .substitutes import unvalidated_distributions
from .swap import Tied, swapped
from .values import answering

Call = Callable[[Sequence[torch.Tensor]], Any]


@dataclass(frozen=True)
class Lanes:
    """Micro-batches that run side by side, as one vectorised axis.

    Attributes:
        steps: accumulation steps (in inference, iterations) that are lanes.
        replicas: replicas that are lanes; the faster of the two axes.
    """

    steps: int
    replicas: int = 1

    @property
    def count(self) -> int:
        """Lanes in all."""
        return self.steps * self.replicas


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
        loss_scaling: the factor on the gradient's seed: a number, or the slot of an input.
        narrow_64bit: whether 64-bit results become 32-bit ones.
        examples: makes the tensors of the first micro-batch, for a forward that branches on them.
        lanes: how many micro-batches run side by side; their slots then have a leading lane
            dimension, and each ``gradient.*`` is the sum over the lanes. None for one micro-batch.
    """

    module: nn.Module
    call: Call
    tensors: Mapping[str, Tied]
    state: tuple[Slot, ...]
    batch: tuple[Slot, ...]
    trained: frozenset[str] = frozenset()
    training: bool = False
    loss_scaling: float | Slot = 1.0
    narrow_64bit: bool = True
    examples: Callable[[], list[torch.Tensor]] | None = None
    lanes: Lanes | None = None

    @property
    def inputs(self) -> tuple[Slot, ...]:
        """Every input slot of the traced function."""
        scaling = (self.loss_scaling,) if isinstance(self.loss_scaling, Slot) else ()
        return (*self.state, *self.batch, *scaling)


@dataclass(eq=False)
class Forward:
    """One run of forward.

    Attributes:
        tensors: the tensors that it returned.
        structure: what they were cut out of.
        loss: the final loss, in training.
        leaves: parameters and buffers by path, as they are afterwards.
    """

    tensors: list[torch.Tensor]
    structure: trees.Structure
    loss: torch.Tensor | None
    leaves: dict[str, torch.Tensor]


def run_forward(
    request: Request,
    batch: Sequence[torch.Tensor],
    leaves: Mapping[str, torch.Tensor],
    capturing: Capturing,
) -> Forward:
    """Run the user's forward with traced tensors in place, listening to what it calls."""
    finder = capturing.losses
    with (
        swapped(request.tensors, leaves) as reassigned,
        listening(capturing),
        explained(request.module),
        answering(capturing.values),
        finder if request.training else contextlib.nullcontext(),
        unvalidated_distributions(),
    ):
        returned = request.call(batch)
    tensors, structure = trees.flatten(returned, "output")
    loss = finder.final_loss(request.module) if request.training else None
    return Forward(tensors, structure, loss, {**leaves, **reassigned})

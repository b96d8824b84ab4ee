"""Running the user's forward once on traced tensors: what goes in and what is seen of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .._base import trees
from .._base.errors import Error
from .._ir import slots
from .._ir.loops import Lanes
from .._ir.slots import Slot
from .._ir.spec import Precision
from .._ops import annotate
from .._ops.autocast import autocasting
from .._ops.context import listening
from .capture_context import CaptureContext
from .casting import Casting, recurrent_inputs
from .failures import explained
from .held import Held
from .names import Names
from .norms import cumulative_averages
from .overwrite import OverwriteContextManager
from .seen_through import seen_through
from .substitutes import unvalidated_distributions
from .swap import Tied, swapped
from .trace import is_traced
from .value_reads import answering

Call = Callable[[Sequence[torch.Tensor]], Any]


@dataclass(frozen=True, eq=False)
class Request:
    """What is to be captured."""

    module: nn.Module
    call: Call
    tensors: Mapping[str, Tied]
    state: tuple[Slot, ...]
    batch: tuple[Slot, ...]
    trained: frozenset[str] = frozenset()
    training: bool = False
    loss_scaling: tuple[float | Slot, ...] = ()
    precision: Precision = field(default_factory=Precision)
    examples: Callable[[], list[torch.Tensor]] | None = None
    replicas: int = 1
    processes: int = 1
    apart: str = "a single micro-batch is looked at"
    lanes: Lanes | None = None
    anchors: tuple[tuple[str, str], ...] = ()
    module_scopes: bool = True
    grouped: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    arguments: Mapping[str, trees.Structure] = field(default_factory=dict)
    priced: bool = False
    recompute: bool = False
    users: nn.Module | None = None

    @property
    def inputs(self) -> tuple[Slot, ...]:
        """Every input slot of the traced function."""
        scaling = tuple(factor for factor in self.loss_scaling if isinstance(factor, Slot))
        replica = (slots.REPLICA,) if self.grouped else ()
        return (*self.state, *self.batch, *scaling, *replica)


@dataclass(eq=False)
class Forward:
    """One run of forward."""

    tensors: list[torch.Tensor]
    structure: trees.Structure
    loss: torch.Tensor | None
    leaves: dict[str, torch.Tensor]
    names: Names
    hosts: dict[int, torch.Tensor]


def refuse_holders(structure: trees.Structure, title: str) -> None:
    """Raise an Error if what counts as a constant has tensors inside: they would stay for good."""
    for path, value in structure.constants:
        if trees.holds_tensors(value):
            kind = type(value).__qualname__
            raise Error(
                title,
                got=f"{path}, a {kind}",
                fix=(
                    f"say where they are: poptorch.registerCustomArgParser({kind}, parser)",
                    "use tuples, lists, dicts or dataclasses, or pass the tensors themselves",
                ),
            )


@contextlib.contextmanager
def _user_code(
    request: Request, context: CaptureContext, leaves: Mapping[str, torch.Tensor]
) -> Iterator[dict[str, torch.Tensor]]:
    """Within the block user code computes as programs do, and so does what it runs again later."""
    with (
        swapped(request.tensors, leaves, request.users) as reassigned,
        answering(context.reads),
        autocasting(request.precision.autocast, request.precision.autocast_policy),
        Casting(request.precision, request.lanes is not None),
        Held(request.tensors, leaves),
        unvalidated_distributions(),
        seen_through(lambda: _user_code(request, context, {**leaves, **reassigned})),
        cumulative_averages(request.module),
        recurrent_inputs(request.module),
    ):
        yield reassigned


def run_forward(
    request: Request,
    context: CaptureContext,
    batch: Sequence[torch.Tensor],
    leaves: Mapping[str, torch.Tensor],
) -> Forward:
    """Run the user's forward with traced tensors in place, listening to its operators."""
    finder = context.losses
    names = Names(request.module, request.module_scopes)
    with (
        _user_code(request, context, leaves) as reassigned,
        listening(context),
        explained(request.module),
        finder if request.training else contextlib.nullcontext(),
        OverwriteContextManager.active(),
        annotate.in_forward(),
        names.listening(),
    ):
        returned = request.call(batch)
    tensors, structure = trees.flatten(returned, "output")
    refuse_holders(structure, "forward returns an object whose tensors cannot be seen")
    loss = finder.final_loss(request.module, tensors) if request.training else None
    hosts = {at: tensor for at, tensor in enumerate(tensors) if not is_traced(tensor)}
    return Forward(tensors, structure, loss, {**leaves, **reassigned}, names, hosts)

"""Run the user's forward once on traced tensors: prepare its inputs, and record what it does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from .._base import nested_values
from .._base.errors import Error
from .._base.thread_safety import holding
from .._ir import slots
from .._ir.slots import Slot
from .._ir.spec import Precision
from .._ops import annotate
from .._ops.autocast import around_user_code
from .._ops.context import autocast_settings, listening
from . import inner_gradients, torchscript
from .capture_context import CaptureContext, Overrides
from .failures import explained
from .internal_calls import passing_traced_tensors
from .losses import final_loss
from .metrics import intercepted, refused
from .recorded import recorded, shape_values
from .replaced_tensors import DictsOfThread, ModelTensor, replaced

ForwardCall = Callable[[Sequence[torch.Tensor]], Any]
Manager = Callable[[], contextlib.AbstractContextManager[object]]
GRADIENT = "Gradient___"


@dataclass(frozen=True, eq=False)
class Request:
    """What is to be captured. The module is unchanged afterwards."""

    module: nn.Module
    users: nn.Module  # the module with the same dicts of tensors, or ``module`` itself
    call: (
        ForwardCall  # runs forward on the tensors of ``batch``, which it inserts into the arguments
    )
    tensors: Mapping[str, ModelTensor]  # parameters and buffers by path
    state: tuple[Slot, ...]  # their slots, in the same order
    batch: tuple[Slot, ...]  # the slots of the tensor arguments
    trained: frozenset[str] = frozenset()  # paths of the parameters that get a gradient
    training: bool = False  # whether there must be a loss
    differentiates: bool = False  # an inference model whose forward computes gradients
    loss_scaling: tuple[float | Slot, ...] = ()  # factors for the initial gradient
    precision: Precision = field(default_factory=Precision)
    examples: Callable[[], list[torch.Tensor]] | None = None  # returns the first micro-batch
    # Returns the given number of micro-batches at the beginning of the call, as the user passed
    # them.
    sample: Callable[[int], list[list[torch.Tensor]]] | None = None
    replicas: int = 1  # each has its own copy of the tensors that forward changes
    processes: int = 1  # each runs ``replicas`` replicas
    # (short name, tensor name); names of other tensors than those of forward or backward are
    # ignored
    anchors: tuple[tuple[str, str], ...] = ()
    # whether names of tensors contain the path of the module that made them
    module_scopes: bool = True
    # For each path, the group of each replica, which selects a value in the parameter's first
    # dimension.
    grouped: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    arguments: Mapping[str, nested_values.Structure] = field(default_factory=dict)
    priced: bool = False  # the graph is only for an estimate
    casts: torch.dtype | None = None  # the type of an autocast around the call
    sized: tuple[bool, ...] = ()  # calls to replace, to compare with a capture with symbols

    @property
    def inputs(self) -> tuple[Slot, ...]:
        scaling = tuple(factor for factor in self.loss_scaling if isinstance(factor, Slot))
        replica = (slots.REPLICA,) if self.grouped else ()
        return (*self.state, *self.batch, *scaling, *replica)

    @property
    def inputs_text(self) -> str:
        paths = [path for structure in self.arguments.values() for path in structure.paths]
        types = [slots.type_text(slot.dtype, slot.replica_shape) for slot in self.batch]
        return ", ".join(map(" ".join, zip(paths, types, strict=False)))


@dataclass(eq=False)
class ForwardResult:
    tensors: list[torch.Tensor]  # the tensors that it returned
    structure: nested_values.Structure  # the structure that contained them
    loss: torch.Tensor | None
    leaves: Callable[[], dict[str, torch.Tensor]]  # present parameters and buffers, by path
    # The context for user code in the backward pass: hooks, and the methods of autograd Functions.
    in_backward: Callable[[], contextlib.AbstractContextManager[object]]
    names: TensorNames
    hosts: dict[int, torch.Tensor]  # returned tensors that it did not compute, by index


class TensorNames:
    def __init__(self, module: nn.Module, scopes: bool) -> None:
        self._paths = {sub: path for path, sub in module.named_modules()} if scopes else {}
        self.tensors: dict[str, torch.Tensor] = {}
        self._first: dict[str, str] = {}  # for each path of a module, the name of its first result

    def add(self, name: str, tensor: torch.Tensor) -> None:
        free, number = name, 0
        while free in self.tensors:
            number += 1
            free = f"{name}/{number}"
        self.tensors[free] = tensor

    def find(self, name: str) -> torch.Tensor | None:
        """Return the tensor with a name. The path of a module means its first result."""
        plain = name.removesuffix(":0")
        of_module = self._first.get(plain.replace("/", "."), "")
        return self.tensors.get(plain if plain in self.tensors else of_module)

    def heard(self, module: nn.Module, output: Any, scope: str) -> None:
        path = self._paths.get(module, "")
        kind = type(module).__name__.removeprefix("Poptorch")
        scoped = "/".join(filter(None, (scope, path.replace(".", "/"), kind)))
        if path:
            self._first.setdefault(path.replace("/", "."), scoped)
        for tensor in nested_values.flatten(output)[0]:
            self.add(scoped, tensor)


class OverwriteContextManager:
    """The registered managers, available as ``poptorch._OverwriteContextManager``."""

    _managers: ClassVar[list[Manager]] = []

    @classmethod
    def registerSubsitutionManager(cls, manager: Manager) -> None:  # noqa: N802 (PopTorch's spelling)
        """Enter ``manager()`` around every future capture. Registering it again has no effect."""
        if manager not in cls._managers:
            cls._managers.append(manager)

    @classmethod
    @contextlib.contextmanager
    def active(cls) -> Iterator[None]:
        nested_values.import_adapters()
        with contextlib.ExitStack() as stack:
            for manager in list(cls._managers):
                stack.enter_context(manager())
            yield


def refuse_holders(constants: Sequence[tuple[str, Any]], title: str) -> None:
    """Raise an Error if a constant argument contains tensors, because they would stay
    constant, too.
    """
    for path, value in constants:
        if nested_values.holds_tensors(value):
            kind = type(value).__qualname__
            raise Error(
                title,
                got=f"{path}, a {kind}",
                fix=(
                    (
                        "register a parser that finds the tensors: "
                        f"poptorch.registerCustomArgParser({kind}, parser)"
                    ),
                    "or use tuples, lists, dicts or dataclasses, or pass the tensors themselves",
                ),
            )


@contextlib.contextmanager
def _user_code(request: Request, context: CaptureContext, own: DictsOfThread) -> Iterator[None]:
    """The context for user code, also when it runs again later."""

    def user_context() -> contextlib.AbstractContextManager[object]:
        return _user_code(request, context, own)

    precision = request.precision
    overrides = Overrides(context, precision, request.priced)
    with (
        replaced(request.module, own, user_context),
        passing_traced_tensors(context.held, overrides.on),
        context.reads.by_torch(context.caught),
        holding(shape_values, context.reads.for_shape),
        torchscript.followed(context.reads, context.held),
        inner_gradients.followed(context),
        holding(autocast_settings, (precision.autocast, precision.autocast_policy)),
        overrides,
    ):
        yield


def run_forward(
    request: Request,
    context: CaptureContext,
    batch: Sequence[torch.Tensor],
    leaves: Mapping[str, torch.Tensor],
) -> ForwardResult:
    names, held = TensorNames(request.module, request.module_scopes), context.held
    own = DictsOfThread(request.module, request.users, request.tensors)
    for path, tied in request.tensors.items():
        held.add(tied.tensor, leaves[path])

    kinds = {path: (leaf.dtype, leaf.shape) for path, leaf in leaves.items()}

    def heard(module: nn.Module, output: Any, scope: str) -> None:
        names.heard(module, held.traced(nested_values.flatten(output)[0]), scope)

    with (
        _user_code(request, context, own),
        # Only here, because casts are recorded and later changes of the graph must not cast again.
        # Checkpoints store the autocast that is active when they are called.
        around_user_code(request.casts),
        listening(context),
        explained(request.module, request.inputs_text),
        OverwriteContextManager.active(),
        intercepted(refused),
        annotate.in_forward(heard),
    ):
        returned = request.call(batch)
        context.reads.raise_caught()

    def now() -> dict[str, torch.Tensor]:
        assigned = own.reassigned(leaves).items()
        return {**leaves, **{path: held.traced(tensor) for path, tensor in assigned}}

    @contextlib.contextmanager
    def in_backward() -> Iterator[None]:
        with _user_code(request, context, own), listening(context), around_user_code(None):
            yield

    _check_kinds(context, leaves, kinds)
    now()  # refuses what a program cannot follow, before the result is used
    tensors, structure = nested_values.flatten(returned, "output")
    tensors = held.traced(tensors)
    context.views.before(tensors)
    refuse_holders(structure.constants, ("forward returns an object whose tensors cannot be found"))
    loss = None
    if request.training:
        loss = final_loss(context, request.module, tensors, structure)
    hosts = {at: tensor for at, tensor in enumerate(tensors) if recorded(tensor) is None}
    return ForwardResult(tensors, structure, loss, now, in_backward, names, hosts)


def _check_kinds(
    context: CaptureContext,
    leaves: Mapping[str, torch.Tensor],
    before: Mapping[str, tuple[torch.dtype, torch.Size]],
) -> None:
    for path, leaf in leaves.items():
        now = leaf.dtype, leaf.shape
        if now != before[path]:
            was, became = (slots.type_text(*kind) for kind in (before[path], now))
            raise Error(
                "forward changes the shape or type of a weight or buffer",
                got=(
                    f"'{path}' was {was} and is now {became}; in a program, the shape and "
                    "type of a weight or buffer are fixed"
                ),
                where=context.assigned.get(id(leaf)),
                fix=(
                    "assign the original values again before forward returns",
                    (
                        "or convert the tensor where you use it: weight.half() instead of "
                        "weight.data = ..."
                    ),
                ),
            )

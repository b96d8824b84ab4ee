"""What there is while a model is compiled, and at no other time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from .. import _compile
from .._base.errors import Error
from .._ir.slot import Kind
from .arguments import CompiledInputs
from .counters import Stamped, Stamps
from .model import Task
from .modes import Mode
from .outputs import Outputs
from .random import Randomness
from .unfollowed import ModelChanges

CLOCKS = {1: 1.6e9, 2: 1.33e9, 21: 1.85e9}  # cycles per second of the chips' generations


@dataclass(frozen=True, eq=False)
class Compilation(Task):
    """The result of compiling a model for one kind of arguments.

    Attributes:
        compiled: the program and what runs it.
        outputs: what ``forward`` returned.
    """

    compiled: _compile.Compiled
    outputs: Outputs

    def checked_state(self, state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return state that no host tensor mirrors, which comes from a file.

        Raises:
            Error: it is not the state of this program.
        """
        slots = self.compiled.plan.program.visible_slots()
        for key, value in state.items():
            shape = slots[key].device_shape if key in slots else None
            if shape != value.shape:
                raise Error(
                    "Invalid file: it was saved from another model",
                    got=f"{key}: {tuple(value.shape)} in the file, {shape} in the model",
                )
        return state

    def tensor_names(self) -> list[str]:
        """Return the names of the program's tensors, those that can be anchored first."""
        names = list(self.compiled.names)
        if self.optim is not None:
            slots = self.compiled.plan.program.state_slots().values()
            names += [f"UpdatedVar___{slot.path}" for slot in slots if slot.kind is Kind.PARAM]
        return names

    def arguments(self) -> CompiledInputs:
        """Return the arguments that were compiled for."""
        given = iter(self.inputs.bound.tensors)
        return CompiledInputs(
            tuple(
                structure.unflatten([next(given) for _ in structure.paths])
                for _, structure in self.inputs.bound.parts
            )
        )


@dataclass(frozen=True, eq=False)
class LastCall:
    """What is kept of the last call.

    Attributes:
        stamps: its four moments.
        anchors: values of the anchored tensors by short name.
    """

    stamps: Stamped
    anchors: Mapping[str, torch.Tensor]


@dataclass(eq=False)
class Live:
    """A compiled model, with a device or without.

    Attributes:
        now: the compilation that calls use: the one for the mode.
        mode: which modules train and which evaluate.
        by_mode: the compilation for each mode that there has been.
        random: the device's random sequence.
        changes: notices what the program does not follow.
        kept: while there is no device: the state that no host tensor mirrors, by key; None
            before there was a device.
        last: the last call, None before it.
    """

    now: Compilation
    mode: Mode
    random: Randomness
    changes: ModelChanges
    kept: Mapping[str, torch.Tensor] | None = None
    last: LastCall | None = None
    by_mode: dict[Mode, Compilation] = field(default_factory=dict)
    changed_inputs: list[int] = field(init=False)
    """Positions of the inputs that forward changes in place."""
    synthetic: list[torch.Tensor] | None = field(init=False)
    """What stands for every batch with synthetic data."""

    def __post_init__(self) -> None:
        self.use(self.now, self.mode)

    def use(self, compilation: Compilation, mode: Mode) -> None:
        """Let calls use a compilation from now on."""
        self.now, self.mode = compilation, mode
        self.by_mode[mode] = compilation
        self.changed_inputs = compilation.compiled.changed_inputs()
        made_up = compilation.spec.target.synthetic_data
        self.synthetic = compilation.inputs.synthetic() if made_up else None

    def counters(self) -> Stamps | None:
        """Return the time stamps of the last call in PopTorch's form, None before any call.

        With synthetic data nothing travels: tensors have no stamps then.
        """
        if self.last is None:
            return None
        loops, emit = self.now.spec.loops, self.now.compiled.plan.program.emit
        slots = [slot for slot in emit.slots if slot.kind is not Kind.ANCHOR]
        results, times = [emit.count(slot.key, loops) for slot in slots], loops.micro_batches
        if self.synthetic is not None:
            results, times = [0] * len(results), 0
        return self.last.stamps.counters(len(self.now.inputs.bound.paths), results, times)

    def cycles(self) -> int | None:
        """Return an estimate of the last call's cycles, None before any call."""
        if self.last is None:
            return None
        _, taken, ready, _ = self.last.stamps.moments
        clock = CLOCKS[self.now.spec.target.generation or 2]
        return max(1, round((ready - taken) * clock))

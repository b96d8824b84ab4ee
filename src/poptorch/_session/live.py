"""What there is while a model is compiled, and at no other time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .. import _compile
from .._base import log
from .._base.errors import Error
from .._ir.slots import NORM, Kind
from .._ir.spec import Spec
from .arguments import CompiledInputs
from .counters import Stamped, Stamps
from .device import Device
from .elsewhere import Elsewhere
from .indices import Indices
from .model import Model, Task
from .modes import Mode
from .outputs import Outputs
from .random import Randomness
from .shards import Shards
from .unfollowed import ModelChanges

LIMIT = "Options.programs"


@dataclass(frozen=True, eq=False)
class Compilation(Task):
    """The result of compiling a model for one kind of arguments.

    Attributes:
        compiled: the program and what runs it.
        outputs: what ``forward`` returned.
        indices: what its inputs must lie in.
    """

    compiled: _compile.Compiled
    outputs: Outputs
    indices: Indices

    def __post_init__(self) -> None:
        self.attributes.settle(self.compiled.constants.values())

    def checked_state(self, state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return state that no host tensor mirrors, which comes from a file.

        Raises:
            Error: it is not the state of this program.
        """
        slots = self.compiled.plan.program.visible_slots()
        for key, value in state.items():
            known = key in slots and slots[key].kind in (Kind.OPTSTATE, Kind.RNG)
            shape = slots[key].device_shape if known else None
            if shape != value.shape:
                raise Error(
                    "Invalid file: it was saved from another model",
                    got=f"{key}: {tuple(value.shape)} in the file, {shape} in the model",
                )
            if not torch.can_cast(value.dtype, slots[key].dtype):
                raise Error(
                    "Invalid file: it was saved from another model",
                    got=f"{key}: {value.dtype} in the file, {slots[key].dtype} in the model",
                )
        return state

    def takes(self, model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Tell whether this is compiled for the arguments of a call."""
        given = self.inputs.quick(args, kwargs)
        if given is not None:
            return self.inputs.fit(given)
        return self.inputs.accept(model.signature.bind(args, kwargs, like=self.inputs.bound))

    def tensor_names(self) -> list[str]:
        """Return the names of the program's tensors, those that can be anchored first."""
        names = list(self.compiled.names)
        if self.optim is not None:
            slots = self.compiled.plan.program.visible_slots().values()
            names += [f"UpdatedVar___{slot.path}" for slot in slots if slot.kind is Kind.PARAM]
            names += [NORM] if self.optim.clips else []
        return names

    def anchors(self, results: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the anchored ones of a call's results by short name."""
        if not self.spec.anchors:
            return {}
        names = (short for short, *_ in self.spec.anchors)
        return dict(zip(names, results[self.outputs.count :], strict=True))

    def arguments(self) -> CompiledInputs:
        """Return the arguments that were compiled for."""
        given = iter(self.inputs.bound.tensors)
        return CompiledInputs(
            tuple(
                structure.unflatten([next(given) for _ in structure.paths])
                for _, structure in self.inputs.bound.parts
            )
        )


class LastCall(NamedTuple):
    """What is kept of the last call.

    Attributes:
        stamps: its four moments.
        anchors: values of the anchored tensors by short name.
    """

    stamps: Stamped
    anchors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Restored:
    """State from a file that the next compilation continues with.

    Attributes:
        device: what no host tensor mirrors, by key.
        random: the random state, None for a new sequence.
    """

    device: Mapping[str, torch.Tensor]
    random: list[int] | None


@dataclass(eq=False)
class Variant:
    """The model compiled for one mode and one kind of arguments.

    Attributes:
        mode: which modules train and which evaluate.
        compilation: the result.
        device: its state, while attached and once it was used; shares weights with the others'.
    """

    mode: Mode
    compilation: Compilation
    device: Device | None = None

    def go_on_from(self, other: Device) -> Device:
        """Return its device, with what another one has."""
        if self.device is None:
            self.device = Device(self.compilation.compiled, self.compilation.reading, other)
        else:
            self.device.take_over(other)
        return self.device


@dataclass(eq=False)
class Live:
    """A compiled model, with a device or without.

    Attributes:
        now: the compilation that calls use: the current variant's.
        mode: which modules train and which evaluate in it.
        spec: the settings that every variant is compiled with.
        variants: what the model is compiled for, the current one last.
        random: the device's random sequence.
        changes: notices what the program does not follow.
        kept: while there is no device: the state that no host tensor mirrors, by key; None
            before there was a device.
        last: the last call, None before it.
        agreed: whether all processes of the job have begun with the same weights.
    """

    now: Compilation
    mode: Mode
    random: Randomness
    changes: ModelChanges
    kept: Mapping[str, torch.Tensor] | None = None
    last: LastCall | None = None
    agreed: bool = False
    variants: list[Variant] = field(default_factory=list)
    spec: Spec = field(init=False)
    changed_inputs: list[int] = field(init=False)
    """Positions of the inputs that forward changes in place."""
    synthetic: list[torch.Tensor] | None = field(init=False)
    """What stands for every batch with synthetic data."""

    def __post_init__(self) -> None:
        self.spec = self.now.spec
        self.use(Variant(self.mode, self.now))

    def whole(self, kept: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return state that was kept of the device, put together if the processes have parts."""
        plan = self.now.compiled.plan
        shards, elsewhere = Shards(plan.program, self.spec.target.process_id), Elsewhere(plan)
        own = {key: value for key, value in kept.items() if key not in shards.flat}
        return {**own, **shards.whole(kept), **elsewhere.whole(kept)} if kept else own

    @property
    def has_agreed(self) -> bool:
        """Whether this process has the weights and state of all that it trains with."""
        return self.agreed or not self.spec.runs_together

    def begin_alike(self, device: Device) -> bool:
        """Once, let processes that train together begin with the same weights on their devices.

        Returns:
            Whether the device may have other weights now than the host.

        Raises:
            Error: they are not the same, and are not to be handed round.
        """
        if self.has_agreed:
            return False
        device.agree(self.spec.runtime.broadcast_weights)
        self.agreed = True
        return True

    def use(self, variant: Variant) -> None:
        """Let calls use a variant from now on; forget those that are too many for its mode."""
        others = [other for other in self.variants if other is not variant]
        alike = [other for other in others if other.mode == variant.mode]
        surplus = alike[: max(0, len(alike) + 1 - self.spec.runtime.programs)]
        for other in surplus:
            log.python.info("%s: forgets the program for %s", LIMIT, other.compilation.inputs)
        self.variants = [other for other in others if other not in surplus] + [variant]
        compilation = variant.compilation
        self.now, self.mode = compilation, variant.mode
        self.changed_inputs = compilation.compiled.changed_inputs()
        made_up = compilation.spec.target.synthetic_data
        self.synthetic = compilation.inputs.synthetic() if made_up else None

    @property
    def several(self) -> bool:
        """Whether there may be programs for several kinds of inputs."""
        return self.spec.runtime.programs > 1

    def find(
        self, mode: Mode, model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Variant | None:
        """Return what is compiled for a mode and the arguments of a call; latest first."""
        for variant in reversed(self.variants):
            if variant.mode == mode and variant.compilation.takes(model, args, kwargs):
                return variant
        return None

    def replace(self, compilation: Compilation) -> None:
        """Use another form of the current compilation."""
        self.variants[-1].compilation = self.now = compilation

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

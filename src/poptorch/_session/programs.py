"""The programs that a model was compiled to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from .. import _compile
from .._base import log
from .._base.errors import Error
from .._ir.plan import Plan
from .._ir.slots import NORM, Kind
from .guards import Guard
from .inputs import CompiledInputs, Indices
from .model import Model, Situation, Task
from .outputs import Outputs
from .store import StateStore


class Variant:
    """The model compiled for one mode and one kind of arguments."""

    def __init__(
        self, task: Task, mode: Situation, compiled: _compile.Compiled, guards: list[Guard]
    ) -> None:
        self.task, self.mode, self.compiled, self.guards = task, mode, compiled, guards
        self.spec, self.inputs, self.reading = task.spec, task.inputs, task.reading
        narrow, paths = self.spec.precision.narrow_64bit, self.inputs.bound.paths
        self.store: StateStore | None = None  # from the first use; shares weights with others'
        self.outputs = Outputs(compiled.micro.outputs, compiled.micro.host_outputs, narrow)
        emitted = enumerate(compiled.plan.program.emit.slots)  # in the order of the results
        self.loss_at = next((at for at, slot in emitted if slot.kind is Kind.LOSS), None)
        self.indices = Indices(compiled.ranges(), compiled.preconditions, paths)
        self.changed_inputs = compiled.changed_inputs()  # positions; forward writes into them
        self.synthetic = self.inputs.synthetic() if self.spec.target.synthetic_data else None

    def takes(self, model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        given = self.inputs.quick(args, kwargs)
        if given is not None:
            return self.inputs.fit(given)
        return self.inputs.accept(model.signature.bind(args, kwargs, like=self.inputs.bound))

    def tensor_names(self) -> list[str]:
        """Return the names of the program's tensors, those that can be anchored first."""
        names = list(self.compiled.micro.names)
        if self.task.optim is not None:
            visible = self.compiled.plan.program.visible_slots().values()
            names += [f"UpdatedVar___{slot.path}" for slot in visible if slot.kind is Kind.PARAM]
            names += [NORM] if self.task.optim.clips else []
        return names

    def anchors(self, results: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the anchored ones of a call's results by short name."""
        if not self.spec.anchors:
            return {}
        names = (short for short, *_ in self.spec.anchors)
        return dict(zip(names, results[self.outputs.count :], strict=True))

    def arguments(self) -> CompiledInputs:
        bound = self.inputs.bound
        given = iter(bound.tensors)
        return CompiledInputs(
            tuple(s.unflatten([next(given) for _ in s.paths]) for _, s in bound.parts)
        )

    def plan(self) -> Plan:
        """Return the compiled plan, cut into stages; the cutting is done when first asked for.

        Replicas that exchange tensors run side by side, which stages do not.
        """
        compiled = self.compiled
        side_by_side = compiled.micro.exchanging and compiled.plan.program.lanes is not None
        if compiled.plan.staged is None and not side_by_side:
            plan = _compile.with_stages(
                compiled.plan, compiled.micro, self.task.request, self.task.optim
            )
            compiled = dataclasses.replace(compiled, plan=plan)
        tier = compiled.executable.report().tier
        if compiled.plan.tier != tier:
            plan = dataclasses.replace(compiled.plan, tier=tier)
            compiled = dataclasses.replace(compiled, plan=plan)
        self.compiled = compiled
        return compiled.plan


class Programs:
    """A program for each mode and kind of arguments, the present one last."""

    def __init__(self, model: Model) -> None:
        self.all: list[Variant] = []
        self._model, self._told = model, False

    @property
    def now(self) -> Variant:
        """The program that calls use."""
        programs = self.all  # which another thread may replace
        if not programs:
            raise Error(
                "The model has not been compiled or has been destroyed",
                fix="call the model, or its compile() method, with example inputs first",
            )
        return programs[-1]

    def find(
        self, mode: Situation, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Variant | None:
        of_mode = (each for each in reversed(self.all) if each.mode == mode)
        return next((each for each in of_mode if each.takes(self._model, args, kwargs)), None)

    def use(self, variant: Variant) -> None:
        """Go on with a program; the oldest one of its mode goes if there are too many."""
        others = [other for other in self.all if other is not variant]
        alike = [other for other in others if other.mode == variant.mode]
        for other in alike[: max(0, len(alike) + 1 - variant.spec.runtime.programs)]:
            self._tell_dropped(other)
            others.remove(other)
        self.all = [*others, variant]

    def _tell_dropped(self, variant: Variant) -> None:
        said, self._told = self._told, True
        count = variant.spec.runtime.programs
        (log.python.info if said else log.python.warning)(
            "Options.programs(%d) is full: the program for %s goes, and such a call will compile "
            "again. options.programs(%d) keeps one more; poptorch.PadToSizes makes fewer shapes",
            count, variant.inputs, count + 1,
        )  # fmt: skip

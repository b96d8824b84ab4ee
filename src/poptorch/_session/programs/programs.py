"""Keep the programs that were compiled from a model: finds the one for a call, and decides how many
are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ... import _compile
from ..._base import log
from ..._base.errors import Error
from ..._ir.plan import RESULTS, Plan
from ..._ir.slots import ACCUMULATED, NORM, Kind
from ...enums import OutputMode
from ..calls import Arguments, Emitted, Indices, Outputs, Share, why_fixed
from ..host_changes import ChangeCheck
from .model import CallMode, Task

_SHARES = 4
"""The number of programs for shares of shorter batches. An epoch ends with one such batch, which
has one or two shares.
"""


class Specialization:
    """The model, compiled for one mode and one kind of arguments."""

    def __init__(
        self,
        task: Task,
        mode: CallMode,
        compiled: _compile.CompiledModel,
        change_checks: list[ChangeCheck],
    ) -> None:
        self.task, self.mode, self.compiled = task, mode, compiled
        self.change_checks = change_checks
        self.spec, self.inputs, self.reading = task.spec, task.inputs, task.reading
        self.share = task.share
        narrow, paths = self.spec.precision.narrow_64bit, self.inputs.bound.paths
        self.inputs.conditions = compiled.conditions
        self.outputs = Outputs(compiled.micro.outputs, compiled.micro.host_outputs, narrow)
        emitted = enumerate(compiled.plan.program.emit.slots)  # in the order of the results
        self.loss_at = next((at for at, slot in emitted if slot.kind is Kind.LOSS), None)
        self.indices = Indices(compiled.ranges(), compiled.preconditions, paths)
        # indices of inputs that forward changes in place
        self.changed_inputs = compiled.changed_inputs()
        self.changed_buffers = compiled.changed_buffers()
        # If there may be several programs, the reason why this one serves inputs of only one size.
        self.reason = why_fixed(self.spec) if self.spec.runtime.programs > 1 else None
        self.has_anchors = bool(self.spec.anchors)
        self.is_reported = self.spec.runtime.is_reported
        self.synthetic = self.inputs.synthetic() if self.spec.target.synthetic_data else None

    def tensor_names(self) -> list[str]:
        """Return the names of the program's tensors, starting with those that can be anchored."""
        names = list(self.compiled.micro.names)
        if self.task.optim is not None:
            visible = self.compiled.plan.program.visible_slots().values()
            weights = [slot.path for slot in visible if slot.kind is Kind.PARAM]
            trained = {path for group in self.task.optim.groups for path in group.params}
            names += [f"UpdatedVar___{path}" for path in weights]
            names += [f"{ACCUMULATED}{path}" for path in weights if path in trained]
            names += [NORM]
        return names

    def emitted(self) -> list[Emitted]:
        """Return what is known about each result of a call."""
        emit, loops = self.compiled.plan.program.emit, self.spec.loops
        found = []
        for slot in emit.slots:
            mode, period = emit.mode_of(slot.key)
            of_forward = slot.kind in RESULTS
            steps = {
                OutputMode.Final: 1,
                OutputMode.Sum: 1,
                OutputMode.EveryN: loops.iterations // max(1, period),
                OutputMode.All: loops.iterations,
            }[mode]
            if of_forward and mode in (OutputMode.All, OutputMode.EveryN):
                steps *= loops.accumulation
            values = steps * loops.replicas if of_forward else steps
            found.append(Emitted(mode, slot.replica_shape, values > 1))
        return found

    def anchors(self, results: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the anchored results of a call, by short name."""
        names = (short for short, *_ in self.spec.anchors)
        return dict(zip(names, results[self.outputs.count :], strict=True))

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments for which the program was compiled, including defaults."""
        bound = self.inputs.bound
        given = iter(bound.tensors)
        return tuple(s.unflatten([next(given) for _ in s.paths]) for _, s in bound.parts)

    def replaces(self, other: Specialization) -> bool:
        """Return whether this program serves the sizes that another one was used with last."""
        is_whole = self.share is None and other.share is None
        return is_whole and self.mode == other.mode and self.inputs.covers(other.inputs)

    def plan(self) -> Plan:
        """Return the compiled plan, divided into stages when this is first called.

        Replicas that exchange tensors run side by side and have no stages.
        """
        compiled, plan = self.compiled, self.compiled.plan
        side_by_side = compiled.micro.exchanging and plan.program.lanes is not None
        if plan.staged is None and not side_by_side:
            request = dataclasses.replace(self.task.request, batch=self.inputs.slots())
            plan = _compile.with_stages(plan, compiled.micro, request, self.task.optim)
        report = compiled.executable.report()
        now: dict[str, Any] = {
            "tier": report.tier,
            "prepared": report.prepared,
            "libraries": report.libraries,
        }
        if any(getattr(plan, name) != value for name, value in now.items()):
            plan = dataclasses.replace(plan, **now)
        numbers = self.task.optim.numbers_read if self.task.optim is not None else ""
        plan = dataclasses.replace(plan, sizes=self._sizes_text(), numbers=numbers)
        self.compiled = dataclasses.replace(compiled, plan=plan)
        return plan

    def _sizes_text(self) -> str:
        if self.inputs.symbols:
            conditions = str(self.inputs.conditions)
            return f"for all sizes of {self.inputs}{conditions and f', if {conditions}'}"
        return f"for one size, because {self.reason}" if self.reason else ""


class Programs:
    """The programs for each mode and kind of arguments. The present one is last."""

    def __init__(self) -> None:
        self.all: list[Specialization] = []
        self._has_warned = False

    @property
    def now(self) -> Specialization:
        """Return the program that calls use."""
        programs = self.all  # another thread may replace the list
        _refuse_none(programs)
        return programs[-1]

    def require_one(self) -> None:
        """Raise an error if the model has not been compiled."""
        _refuse_none(self.all)

    def find(
        self, mode: CallMode, arguments: Arguments, share: Share | None
    ) -> Specialization | None:
        alike = (each for each in reversed(self.all) if each.mode == mode and each.share == share)
        return next((each for each in alike if each.inputs.takes(arguments)), None)

    def differing_in_sizes(self, mode: CallMode, arguments: Arguments) -> Specialization | None:
        """Return the latest program for inputs like those of a call but for their sizes."""
        of_mode = (e for e in reversed(self.all) if e.mode == mode and e.share is None)
        return next((e for e in of_mode if e.inputs.differs_in_sizes(arguments)), None)

    def use(self, variant: Specialization, count: int) -> None:
        """Make a program the present one, and remove the oldest one of its mode if there are more
        than ``count``.

        Also remove all programs that were compiled when the model had other tensors.
        """
        others = [other for other in self.all if other is not variant
                  and other.reading.has_tensors_of(variant.reading)
                  and not other.inputs.is_retired]  # fmt: skip
        if variant.inputs.symbols:  # else results would depend on which size came first
            others = [other for other in others if not variant.replaces(other)]
        alike = [
            other
            for other in others
            if other.mode == variant.mode and (other.share is None) == (variant.share is None)
        ]
        if variant.share is not None:
            for other in alike[: max(0, len(alike) + 1 - _SHARES)]:
                others.remove(other)
            alike = []
        for other in alike[: max(0, len(alike) + 1 - count)]:
            (log.python.info if self._has_warned else log.python.warning)(
                f"All {count} programs of Options.programs({count}) are in use. The program for "
                f"{other.inputs} is dropped, and a call with such inputs will compile again. To "
                f"keep one more program, use options.programs({count + 1}); to get fewer shapes, "
                f"use poptorch.PadToSizes{_because(variant.reason)}"
            )
            self._has_warned = True
            others.remove(other)
        self.all = [*others, variant]


def _refuse_none(programs: Sequence[Specialization]) -> None:
    if not programs:
        raise Error(
            "The model has not been compiled or has been destroyed",
            fix="call the model, or its compile() method, with example inputs first",
        )


def _because(reason: str | None) -> str:
    return "" if reason is None else f". Each size needs its own program, because {reason}"

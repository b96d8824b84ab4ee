"""Turn an optimizer's own ``step`` into a pure function between slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .._base.errors import Error
from .._ir import slots
from .._ir.graph import SlotFunction
from .._ir.slots import Slot
from .._ir.spec import OptimSpec
from .._ir.traced_step import KeptValue, TracedStep, flat, leaves_of, of_group
from .absent_gradients import check_unchanged, check_unread
from .clipping import Anchor, clipped
from .per_group import compute_dtype
from .python_functions import numbers_functions
from .raising_operators import harmless_unless
from .step_values import unobserved
from .traced_step_run import StepRun, StepTensors
from .value_branches import COMMON, Choices, StepResults
from .value_origins import HYPER, NUMBER, WEIGHT, ValueSource


def lower_own(
    spec: OptimSpec, params: Sequence[Slot], anchors: Sequence[Anchor], stochastic_rounding: bool
) -> SlotFunction:
    """Return the step as a pure function between slots. The arguments are those of ``lower``."""
    traced = spec.traced
    assert traced is not None
    assert traced.kept is not None, "discover() comes first"
    trained = {path for group in spec.groups for path in group.params}
    weights = [slot for slot in params if slot.path in trained]
    if stochastic_rounding and any(slot.dtype.itemsize == 2 for slot in weights):
        raise Error(
            "Stochastic rounding is not available for this optimizer",
            got=f"{spec.algorithm}, whose step is traced, and float16 weights",
            fix="use SGD, Adam, AdamW, RMSprop or LAMB of poptorch.optim",
        )
    paths = {slot.path for slot in weights}
    kept = [each for each in traced.kept if each.owner in paths or each.owner not in trained]
    state = list(dict.fromkeys(each.slot for each in kept))
    if traced.differs_at_first:
        state.insert(0, slots.STEPPED)
    hypers = [
        slots.traced_hyper(name, at, _hyper_dtype(traced, at, name))
        for at, group in enumerate(spec.groups)
        for name in group.variables
    ]
    gradients = {slot.path: slots.gradient(slot, compute_dtype(slot.dtype)) for slot in weights}
    anchors = anchors if weights else ()
    outputs = (*state, *weights)
    inputs = (*outputs, *gradients.values(), *hypers)
    initial = {each.slot.key: each.initial for each in kept if each.initial}

    def update(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        keys = {path: slot.key for path, slot in gradients.items()}
        measured, tensors = clipped(spec, keys, tensors, anchors)
        with numbers_functions(), torch.no_grad():
            update = _Update(traced, weights, kept, gradients, hypers, tensors)
            return {**measured, **update.results()}

    return SlotFunction(
        "update", update, inputs, (*outputs, *(each.slot for each in anchors)), initial
    )


def _hyper_dtype(traced: TracedStep, at: int, name: str) -> torch.dtype:
    return next(leaf.dtype for leaf in leaves_of(traced.groups[at].values) if leaf.name == name)


class _Update:
    def __init__(
        self,
        traced: TracedStep,
        weights: Sequence[Slot],
        kept: Sequence[KeptValue],
        gradients: Mapping[str, Slot],
        hypers: Sequence[Slot],
        tensors: Mapping[str, Tensor],
    ) -> None:
        self.traced, self.tensors = traced, tensors
        self.weights, self.kept, self.gradients, self.hypers = weights, kept, gradients, hypers
        self.choices = Choices()
        self.mode = self.choices.mode
        self.origins = self.mode.origins
        self.mode.within = lambda values: harmless_unless(self.choices.taken(values))

    def results(self) -> dict[str, Tensor]:
        with self.mode:
            if self.traced.differs_at_first:
                before = self.origins.enter(
                    self.tensors[slots.STEPPED.key], "stepped", (NUMBER, "stepped")
                )
                stepped = before > 0
                with self.choices.given(stepped, True):
                    found = self.choices.results(lambda: self._run(False))
                with self.choices.given(stepped, False):
                    first = self.choices.results(lambda: self._run(True))
                found = self.choices.either(stepped, found, first)
                found[slots.STEPPED.key] = torch.ones_like(before)
            else:
                found = self.choices.results(lambda: self._run(False))
            check_unread(self.origins, found)
        return found

    def _run(self, first: bool) -> StepResults:
        run = StepRun(self.traced, self._inputs(first), first)
        run.step()
        check_unchanged(self.origins, run.absent)
        results: StepResults = {COMMON: {}}
        for slot in self.weights:
            results[slot.path] = {slot.key: run.traced_params[slot.path].detach()}
        by_place = {each.place: each.slot for each in self.kept}
        for owner, values in (*run.states(), *run.owned()):
            for name, value in flat(dict(values)).items():
                kept = by_place.get((owner, name))
                into = results[kept.weight or COMMON] if kept is not None else {}
                if kept is not None and kept.key not in into:
                    as_tensor = torch.as_tensor(value, dtype=kept.dtype)
                    as_tensor = as_tensor.detach() if as_tensor.requires_grad else as_tensor
                    into[kept.key] = _shaped(as_tensor, kept.shape)
        return results

    def _inputs(self, first: bool) -> StepTensors:
        inputs, enter = StepTensors(origins=self.origins, hosts=self.mode.hosts), self.origins.enter
        for slot in self.weights:
            path, key = slot.path, self.gradients[slot.path].key
            with unobserved():
                weight = self.tensors[slot.key].clone()
                gradient = self.tensors[key].to(slot.dtype, copy=True)
            inputs.weights[path] = enter(weight, "weight", (WEIGHT, path))
            inputs.gradients[path] = enter(gradient, "gradient", (WEIGHT, path))
        for each in self.kept:
            if first and each.made:
                continue
            slot = each.slot
            source = (WEIGHT, slot.weight) if slot.weight else (NUMBER, slot.key)
            name = slot.name if slot.weight else slot.key
            value = _copy_of(self.tensors[slot.key], each.leaf.shape)
            inputs.kept[each.place] = self._entered(value, name, source, each.leaf.number)
        for slot in self.hypers:
            leaves = leaves_of(self.traced.groups[slot.index].values)
            leaf = next(each for each in leaves if each.name == slot.name)
            value = _copy_of(self.tensors[slot.key], leaf.shape)
            place = of_group(slot.index), slot.name
            source = HYPER, slot.key
            inputs.hypers[place] = self._entered(value, slot.key, source, leaf.number)
        inputs.share_memory(self.traced.first_views if first else self.traced.views)
        return inputs

    def _entered(self, value: Tensor, name: str, source: ValueSource, number: str) -> Tensor:
        if number:
            return self.origins.enter_number(value, name, source, number)
        return self.origins.enter(value, name, source)


def _copy_of(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a copy, which the step may write to."""
    with unobserved():
        return _shaped(tensor.clone(), shape)


def _shaped(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    return value if value.shape == shape else value.reshape(shape)

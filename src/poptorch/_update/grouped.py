"""What an update works on: the trained weights in their groups, with gradients and moments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from .._ir import slots
from .._ir.optim_spec import OptimGroup, OptimSpec
from .._ir.slot import Slot
from .algorithm import Algorithm, Moment, Scalar, Scalars, Tensors, is_constant, materialised
from .algorithm import of_name as algorithm_of

Step = tuple[torch.Tensor, torch.Tensor, Tensors, Scalars]
"""Weight, gradient, moments and values, as ``Algorithm.step`` takes them."""


@dataclass(frozen=True)
class Weight:
    """A weight, or what stands for several or for a part of one.

    Attributes:
        slot: its parameter.
        gradient: the slot of its gradient.
        moments: what the optimizer keeps for it.
    """

    slot: Slot
    gradient: Slot
    moments: tuple[tuple[Moment, Slot], ...]

    @property
    def compute_dtype(self) -> torch.dtype:
        """Arithmetic inside one update is float32, whatever the storage (or float64 for such)."""
        return torch.promote_types(self.slot.dtype, torch.float32)


@dataclass(frozen=True)
class Group:
    """A parameter group, ready to be computed with.

    Attributes:
        algorithm: the formulas.
        group: its settings.
        constants: hyper-parameters that are compiled in.
        variables: those that are inputs.
        weights: the trained ones among its parameters.
        counts: whether it needs the number of updates.
    """

    algorithm: Algorithm
    group: OptimGroup
    constants: Scalars
    variables: tuple[Slot, ...]
    weights: tuple[Weight, ...]
    counts: bool

    def steps(
        self, spec: OptimSpec, clip: Scalar, tensors: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[Weight, Step]]:
        """Yield what the algorithm's step takes of each weight.

        Args:
            spec: the optimizer.
            clip: scales all gradients.
            tensors: by key; ``optstate.step`` is the number of updates before this one.
        """
        if not self.weights:
            return
        hyper: dict[str, Scalar] = dict(self.constants)
        hyper |= {slot.name: tensors[slot.key] for slot in self.variables}
        count = tensors[slots.STEP.key] + 1 if self.counts else None
        values = materialised(self.algorithm.prepare(spec, self.group, hyper, count))
        factor = -clip if self.group.setting("maximize") else clip
        for weight in self.weights:
            dtype = weight.compute_dtype
            gradient = tensors[weight.gradient.key].to(dtype)
            if not is_constant(factor, 1):
                gradient = gradient * factor
            state = {m.name: tensors[slot.key].to(dtype) for m, slot in weight.moments}
            yield weight, (tensors[weight.slot.key].to(dtype), gradient, state, values)


def groups_of(
    spec: OptimSpec, params: Sequence[Slot], gradient_dtype: torch.dtype | None
) -> list[Group]:
    """Return the groups of an optimizer, with those of their weights that have a gradient.

    Args:
        spec: the optimizer.
        params: the parameters that have a gradient.
        gradient_dtype: element type of ``gradient.*``; None for that of each parameter.
    """
    by_path = {param.path: param for param in params}
    return [_group(spec, i, g, by_path, gradient_dtype) for i, g in enumerate(spec.groups)]


def _group(
    spec: OptimSpec,
    index: int,
    group: OptimGroup,
    params: Mapping[str, Slot],
    gradient_dtype: torch.dtype | None,
) -> Group:
    algorithm = algorithm_of(spec.algorithm)
    weights = []
    for param in (params[path] for path in group.params if path in params):
        moments = tuple(
            (m, slots.moment(m.name, param, m.dtype))
            for m in algorithm.moments(spec, group, param.dtype)
        )
        weights.append(Weight(param, slots.gradient(param, gradient_dtype), moments))
    constants = {**_numbers(spec.settings), **_numbers(group.settings)}
    variables = [slots.hyper(name) for name in spec.variables]
    variables += [slots.hyper(name, index) for name in group.variables]
    counts = bool(weights) and algorithm.counts(spec, group)
    return Group(algorithm, group, constants, tuple(variables), tuple(weights), counts)


def _numbers(settings: tuple[tuple[str, object], ...]) -> dict[str, float]:
    return {name: value for name, value in settings if isinstance(value, int | float)}

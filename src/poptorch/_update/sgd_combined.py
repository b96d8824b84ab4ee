"""SGD whose velocity also sums the gradients: one tensor per weight.

Between updates the velocity already holds the momentum and decay part of the next update, computed
with the hyper-parameters of the last one: this is why a change acts one step late on that part.
"""

from __future__ import annotations

import torch

from .._ir.optim_spec import OptimGroup, OptimSpec
from .algorithm import (
    Algorithm,
    Moment,
    Scalar,
    Scalars,
    Tensors,
    constant,
    is_constant,
    plus_scaled,
)
from .sgd import looked_ahead, undamped


def _moments(spec: OptimSpec, group: OptimGroup, dtype: torch.dtype) -> tuple[Moment, ...]:
    return (Moment("combined", dtype),)


def _counts(spec: OptimSpec, group: OptimGroup) -> bool:
    return constant(group, "dampening") != 0 or constant(group, "weight_decay") != 0


def _prepare(
    spec: OptimSpec, group: OptimGroup, hyper: Scalars, count: torch.Tensor | None
) -> dict[str, Scalar]:
    scaling, decay = hyper["velocity_scaling"], hyper["weight_decay"]
    prepared = {name: hyper[name] for name in ("momentum", "nesterov", "weight_decay")}
    prepared["scaling"] = scaling
    prepared["share"] = undamped(hyper, count) * scaling
    prepared["decay"] = (1 - hyper["dampening"]) * scaling * decay
    prepared["descent"] = -(hyper["lr"] / scaling)
    if count is not None:
        # Nothing has put the first update's decay into the velocity yet.
        prepared["first_decay"] = torch.where(count == 1, prepared["share"] * decay, 0.0)
    return prepared


def _step(
    weight: torch.Tensor, gradient: torch.Tensor, moments: Tensors, values: Scalars
) -> tuple[torch.Tensor, Tensors]:
    velocity = plus_scaled(moments["combined"], gradient, values["share"])
    if "first_decay" in values:
        velocity = plus_scaled(velocity, weight, values["first_decay"])
    if not is_constant(values["nesterov"], 0):
        gradient = plus_scaled(gradient, weight, values["weight_decay"]) * values["scaling"]
    direction = looked_ahead(gradient, velocity, values)
    weight = plus_scaled(weight, direction, values["descent"])
    velocity = velocity * values["momentum"]
    if not is_constant(values["decay"], 0):
        velocity = plus_scaled(velocity, weight, values["decay"])
    return weight, {"combined": velocity}


ALGORITHM = Algorithm(_moments, _counts, _prepare, _step)

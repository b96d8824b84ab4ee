"""RMSprop, plain or centred, in torch's variant or TensorFlow's."""

from __future__ import annotations

import torch

from .._ir.optim_spec import OptimGroup, OptimSpec
from .algorithm import (
    Algorithm,
    Moment,
    Scalar,
    Scalars,
    Tensors,
    blend,
    complement,
    constant,
    plus_scaled,
    storage_dtype,
    with_decay,
)


def _moments(spec: OptimSpec, group: OptimGroup, dtype: torch.dtype) -> tuple[Moment, ...]:
    first = storage_dtype(spec, "first_order_momentum_accum_type")
    second = storage_dtype(spec, "second_order_momentum_accum_type")
    moments = [Moment("square", second, 1.0 if spec.setting("use_tf_variant") else 0.0)]
    if spec.setting("centered"):
        moments.append(Moment("mean", first))
    if constant(group, "momentum") != 0:
        moments.append(Moment("momentum", first))
    return tuple(moments)


def _prepare(
    spec: OptimSpec, group: OptimGroup, hyper: Scalars, count: torch.Tensor | None
) -> dict[str, Scalar]:
    names = ("eps", "weight_decay", "momentum")
    prepared = {name: hyper[name] for name in names}
    prepared["share"] = complement(hyper, "alpha")
    prepared["tf"] = float(bool(spec.setting("use_tf_variant")))
    # TensorFlow's variant has the learning rate inside the momentum buffer.
    inside = bool(prepared["tf"]) and constant(group, "momentum") != 0
    prepared["entry"] = hyper["lr"] if inside else 1.0
    prepared["descent"] = -1.0 if inside else -hyper["lr"]
    return prepared


def _step(
    weight: torch.Tensor, gradient: torch.Tensor, moments: Tensors, values: Scalars
) -> tuple[torch.Tensor, Tensors]:
    gradient = with_decay(gradient, weight, values)
    moments = dict(moments)
    moments["square"] = blend(moments["square"], gradient * gradient, values["share"])
    variance = moments["square"]
    if "mean" in moments:
        moments["mean"] = blend(moments["mean"], gradient, values["share"])
        variance = variance - moments["mean"] * moments["mean"]
    if values["tf"]:
        root = torch.sqrt(variance + values["eps"])
    else:
        root = torch.sqrt(variance) + values["eps"]
    direction = gradient / root
    if "momentum" in moments:
        kept = moments["momentum"] * values["momentum"]
        direction = moments["momentum"] = plus_scaled(kept, direction, values["entry"])
    return plus_scaled(weight, direction, values["descent"]), moments


ALGORITHM = Algorithm(_moments, lambda spec, group: False, _prepare, _step)

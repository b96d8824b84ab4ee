"""The formulas of optimizers, written once for every backend (PopTorch user guide, "Optimizers").

Hyper-parameters are Python numbers (constants, compiled in) or 0-d tensors (variables, inputs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .._ir import slots
from .._ir.spec import Setting

Scalar = float | Tensor
Scalars = Mapping[str, Scalar]
Prepared = dict[str, Scalar]
Tensors = dict[str, Tensor]
Stepped = tuple[Tensor, Tensors]
Settings = Mapping[str, Setting]  # what is compiled in, of the optimizer and one of its groups
SQUARES = 2  # sums of squares that ``Algorithm.squares`` returns


@dataclass(frozen=True)
class Moment:
    """One state tensor per weight, of its shape: ``optstate.<name>.<weight>``."""

    name: str
    dtype: torch.dtype | None  # between updates; None for the weight's
    initial: float = 0.0


@dataclass(frozen=True)
class Algorithm:
    """One update algorithm; settings are those of a group."""

    moments: Callable[[Settings], tuple[Moment, ...]]
    counts: Callable[[Settings], bool]  # whether it needs the number of this update, from 1
    prepare: Callable[[Settings, Scalars, Tensor | None], Prepared]  # once per group
    step: Callable[[Tensor, Tensor, Tensors, Scalars], Stepped]  # weight, descaled gradient, ...
    squares: Callable[[Tensor, Tensor, Tensors, Scalars], list[Tensor]] | None = None
    """The SQUARES sums of squares of norms of whole weights. Where others have parts of a weight
    ``step`` reads the whole sums as the values ``square_0`` and ``square_1``."""


def storage_dtype(settings: Settings, name: str) -> torch.dtype:
    dtype = getattr(torch, str(settings[name]))
    assert isinstance(dtype, torch.dtype)
    return dtype


def compute_dtype(stored: torch.dtype) -> torch.dtype:
    """Arithmetic inside one update is float32, whatever the storage (or float64 for such)."""
    return torch.promote_types(stored, torch.float32)


def kept_dtype(tensor: torch.dtype, named: torch.dtype) -> torch.dtype:
    """Return the type of state for a weight or a gradient, where an optimizer names a type.

    An optimizer names types of single precision. Double precision and imaginary parts stay.
    """
    stays = tensor is torch.float64 or tensor.is_complex
    return torch.promote_types(tensor, named) if stays else named


def as_real(tensor: Tensor) -> Tensor:
    """Return complex numbers as pairs of real ones: that is what every optimizer updates."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def is_constant(value: Scalar, number: float) -> bool:
    return not isinstance(value, Tensor) and value == number


def scaled(tensor: Tensor, factor: Scalar) -> Tensor:
    return tensor if is_constant(factor, 1) else tensor * factor


def plus_scaled(base: Tensor, other: Tensor, factor: Scalar) -> Tensor:
    if isinstance(factor, Tensor):
        return torch.addcmul(base, other, factor)
    return torch.add(base, other, alpha=factor)


def materialised(values: dict[str, Scalar]) -> Prepared:
    """Have compilers compute scalars once: ``as_strided`` is only ever applied to a buffer.

    Inductor inlines other 0-d arithmetic into every loop: Adam becomes 2.5 times slower.
    """
    return {
        name: value.as_strided((), ()) if isinstance(value, Tensor) else value
        for name, value in values.items()
    }


def _complement(hyper: Scalars, name: str) -> Scalar:
    """Return ``1 - decay``, which is what float32 inputs carry of a decay rate near 1."""
    variable = slots.hyper(name).name
    return hyper[variable] if variable in hyper else 1 - hyper[name]


def _correction(hyper: Scalars, name: str, count: Tensor) -> Tensor:
    """Return ``1 - decay ** count`` without the cancellation that it has in float32."""
    rest = _complement(hyper, name)
    if isinstance(rest, Tensor):
        log: Scalar = torch.log1p(-rest)
    else:
        log = math.log1p(-rest) if rest < 1 else -math.inf
    return -torch.expm1(count * log)


def _with_decay(gradient: Tensor, weight: Tensor, values: Scalars) -> Tensor:
    decay = values["weight_decay"]
    return gradient if is_constant(decay, 0) else plus_scaled(gradient, weight, decay)


def _blend(old: Tensor, new: Tensor, share: Scalar) -> Tensor:
    if isinstance(share, Tensor):
        return torch.addcmul(old, new - old, share)
    return torch.lerp(old, new, share)


# SGD: as in torch, and unlike the original, the first gradient enters the velocity undamped.


def _sgd_moments(settings: Settings) -> tuple[Moment, ...]:
    if settings.get("momentum") == 0:
        return ()
    return (Moment("velocity", storage_dtype(settings, "velocity_accum_type")),)


def _sgd_counts(settings: Settings) -> bool:
    return settings.get("momentum") != 0 and settings.get("dampening") != 0


def _undamped(hyper: Scalars, count: Tensor | None) -> Scalar:
    """Return the share of a gradient that enters the velocity: all of the first one."""
    rest = 1 - hyper["dampening"]
    return rest if count is None else torch.where(count == 1, 1.0, rest)


def _sgd_prepare(settings: Settings, hyper: Scalars, count: Tensor | None) -> Prepared:
    prepared = {name: hyper[name] for name in ("weight_decay", "momentum", "nesterov")}
    share = _undamped(hyper, count)
    if settings.get("momentum") == 0:
        prepared["descent"] = -(hyper["lr"] * share)
        return prepared
    # A half velocity is held multiplied by the loss scale, as the gradients are that feed it.
    in_half = storage_dtype(settings, "velocity_accum_type") == torch.float16
    prepared["scaling"] = hyper["loss_scaling"] if in_half else 1.0
    prepared["share"] = share * prepared["scaling"]
    prepared["descent"] = -(hyper["lr"] / prepared["scaling"])
    return prepared


def _sgd_step(weight: Tensor, gradient: Tensor, moments: Tensors, values: Scalars) -> Stepped:
    gradient = _with_decay(gradient, weight, values)
    if "velocity" not in moments:
        return plus_scaled(weight, gradient, values["descent"]), {}
    velocity = moments["velocity"] * values["momentum"]
    velocity = plus_scaled(velocity, gradient, values["share"])
    direction = _looked_ahead(scaled(gradient, values["scaling"]), velocity, values)
    return plus_scaled(weight, direction, values["descent"]), {"velocity": velocity}


def _looked_ahead(gradient: Tensor, velocity: Tensor, values: Scalars) -> Tensor:
    nesterov = values["nesterov"]
    if is_constant(nesterov, 0):
        return velocity
    ahead = plus_scaled(gradient, velocity, values["momentum"])
    return torch.where(nesterov > 0, ahead, velocity) if isinstance(nesterov, Tensor) else ahead


# SGD whose velocity also sums the gradients, one tensor per weight. Between updates it already
# holds the momentum and decay part of the next update, computed with the hyper-parameters of the
# last one: this is why a change acts one step late on that part.


def _combined_prepare(settings: Settings, hyper: Scalars, count: Tensor | None) -> Prepared:
    scaling, decay = hyper["velocity_scaling"], hyper["weight_decay"]
    prepared = {name: hyper[name] for name in ("momentum", "nesterov", "weight_decay")}
    prepared["scaling"] = scaling
    prepared["share"] = _undamped(hyper, count) * scaling
    prepared["decay"] = (1 - hyper["dampening"]) * scaling * decay
    prepared["descent"] = -(hyper["lr"] / scaling)
    if count is not None:
        # Nothing has put the first update's decay into the velocity yet.
        prepared["first_decay"] = torch.where(count == 1, prepared["share"] * decay, 0.0)
    return prepared


def _combined_step(weight: Tensor, gradient: Tensor, moments: Tensors, values: Scalars) -> Stepped:
    velocity = plus_scaled(moments["combined"], gradient, values["share"])
    if "first_decay" in values:
        velocity = plus_scaled(velocity, weight, values["first_decay"])
    if not is_constant(values["nesterov"], 0):
        gradient = plus_scaled(gradient, weight, values["weight_decay"]) * values["scaling"]
    direction = _looked_ahead(gradient, velocity, values)
    weight = plus_scaled(weight, direction, values["descent"])
    velocity = velocity * values["momentum"]
    if not is_constant(values["decay"], 0):
        velocity = plus_scaled(velocity, weight, values["decay"])
    return weight, {"combined": velocity}


# Adam, its weight decay in the gradient; AdamW, whose decay is not.


def _adam_moments(settings: Settings) -> tuple[Moment, ...]:
    return (
        Moment("first", storage_dtype(settings, "first_order_momentum_accum_type")),
        Moment("second", storage_dtype(settings, "second_order_momentum_accum_type")),
    )


def _corrects(settings: Settings) -> bool:
    return bool(settings["bias_correction"])


def _adam_prepare(settings: Settings, hyper: Scalars, count: Tensor | None) -> Prepared:
    prepared: dict[str, Scalar] = {name: hyper[name] for name in ("eps", "weight_decay")}
    prepared["first_share"] = _complement(hyper, "beta1")
    prepared["second_share"] = _complement(hyper, "beta2")
    prepared["first_factor"] = prepared["root_factor"] = 1.0
    if count is not None:
        prepared["first_factor"] = 1 / _correction(hyper, "beta1", count)
        prepared["root_factor"] = torch.rsqrt(_correction(hyper, "beta2", count))
    prepared["descent"] = -(hyper["lr"] * prepared["first_factor"])
    prepared["shrink"] = 1 - hyper["lr"] * hyper["weight_decay"]
    return prepared


def _advanced(gradient: Tensor, moments: Tensors, values: Scalars) -> tuple[Tensors, Tensor]:
    first = _blend(moments["first"], gradient, values["first_share"])
    second = _blend(moments["second"], gradient * gradient, values["second_share"])
    root = scaled(torch.sqrt(second), values["root_factor"])
    return {"first": first, "second": second}, root + values["eps"]


def _adam_step(weight: Tensor, gradient: Tensor, moments: Tensors, values: Scalars) -> Stepped:
    gradient = _with_decay(gradient, weight, values)
    moments, root = _advanced(gradient, moments, values)
    return plus_scaled(weight, moments["first"] / root, values["descent"]), moments


def _adamw_step(weight: Tensor, gradient: Tensor, moments: Tensors, values: Scalars) -> Stepped:
    moments, root = _advanced(gradient, moments, values)
    if not is_constant(values["weight_decay"], 0):
        weight = weight * values["shrink"]
    return plus_scaled(weight, moments["first"] / root, values["descent"]), moments


# LAMB: AdamW's direction, as long per tensor as the weight allows.


def _lamb_prepare(settings: Settings, hyper: Scalars, count: Tensor | None) -> Prepared:
    prepared = _adam_prepare(settings, hyper, count)
    return prepared | {"descent": -hyper["lr"], "max_weight_norm": hyper["max_weight_norm"]}


def _lamb_step(weight: Tensor, gradient: Tensor, moments: Tensors, values: Scalars) -> Stepped:
    moments, direction = _lamb_direction(weight, gradient, moments, values)
    if "square_0" in values:  # of the whole weight, of which this is a part
        norms = [torch.sqrt(torch.as_tensor(values[f"square_{i}"])) for i in range(SQUARES)]
    else:
        norms = [torch.linalg.vector_norm(each) for each in (weight, direction)]
    (long, short), limit = norms, values["max_weight_norm"]
    long = torch.minimum(long, limit) if isinstance(limit, Tensor) else long.clamp(max=limit)
    trust = torch.where((long > 0) & (short > 0), long / short, 1.0)
    factor = (values["descent"] * trust).as_strided((), ())  # as in ``materialised``
    return torch.addcmul(weight, direction, factor), moments


def _lamb_squares(
    weight: Tensor, gradient: Tensor, moments: Tensors, values: Scalars
) -> list[Tensor]:
    moments, direction = _lamb_direction(weight, gradient, moments, values)
    # Behind the last element of a weight there is padding: with an eps of 0, it is 0 / 0.
    nothing = (moments["first"] == 0) & (moments["second"] == 0) & (weight == 0)
    direction = torch.where(nothing, 0.0, direction)
    return [(each * each).sum() for each in (weight, direction)]


def _lamb_direction(
    weight: Tensor, gradient: Tensor, moments: Tensors, values: Scalars
) -> tuple[Tensors, Tensor]:
    moments, root = _advanced(gradient, moments, values)
    direction = scaled(moments["first"] / root, values["first_factor"])
    if not is_constant(values["weight_decay"], 0):
        direction = plus_scaled(direction, weight, values["weight_decay"])
    return moments, direction


# RMSprop, plain or centred, in torch's variant or TensorFlow's.


def _rmsprop_moments(settings: Settings) -> tuple[Moment, ...]:
    first = storage_dtype(settings, "first_order_momentum_accum_type")
    second = storage_dtype(settings, "second_order_momentum_accum_type")
    moments = [Moment("square", second, 1.0 if settings["use_tf_variant"] else 0.0)]
    if settings["centered"]:
        moments.append(Moment("mean", first))
    if settings.get("momentum") != 0:
        moments.append(Moment("momentum", first))
    return tuple(moments)


def _rmsprop_prepare(settings: Settings, hyper: Scalars, count: Tensor | None) -> Prepared:
    prepared = {name: hyper[name] for name in ("eps", "weight_decay", "momentum")}
    prepared["share"] = _complement(hyper, "alpha")
    prepared["tf"] = float(bool(settings["use_tf_variant"]))
    # TensorFlow's variant has the learning rate inside the momentum buffer.
    inside = bool(prepared["tf"]) and settings.get("momentum") != 0
    prepared["entry"] = hyper["lr"] if inside else 1.0
    prepared["descent"] = -1.0 if inside else -hyper["lr"]
    return prepared


def _rmsprop_step(weight: Tensor, gradient: Tensor, moments: Tensors, values: Scalars) -> Stepped:
    gradient = _with_decay(gradient, weight, values)
    moments = dict(moments)
    moments["square"] = _blend(moments["square"], gradient * gradient, values["share"])
    variance = moments["square"]
    if "mean" in moments:
        moments["mean"] = _blend(moments["mean"], gradient, values["share"])
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


ALGORITHMS = {
    "sgd": Algorithm(_sgd_moments, _sgd_counts, _sgd_prepare, _sgd_step),
    "sgd_combined": Algorithm(
        lambda settings: (Moment("combined", None),),
        lambda settings: settings.get("dampening") != 0 or settings.get("weight_decay") != 0,
        _combined_prepare,
        _combined_step,
    ),
    "adam": Algorithm(_adam_moments, _corrects, _adam_prepare, _adam_step),
    "adamw": Algorithm(_adam_moments, _corrects, _adam_prepare, _adamw_step),
    "lamb": Algorithm(_adam_moments, _corrects, _lamb_prepare, _lamb_step, _lamb_squares),
    "rmsprop": Algorithm(_rmsprop_moments, lambda _: False, _rmsprop_prepare, _rmsprop_step),
}
"""By the name that an OptimSpec has."""

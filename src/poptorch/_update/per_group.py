"""Define our algorithms (``ALGORITHMS``): the state for each weight, and what an update computes
once per group before the steps of the weights.

The steps are operators, whose formulas are in ``_ops/optimizer_formulas.py`` (PopTorch user guide,
"Optimizers"). Hyper-parameters are Python numbers, which are compiled in, or 0-d tensors, which are
inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .._ir import slots
from .._ir.spec import Setting
from .._ops import optimizer_formulas as steps
from .._ops.optimizer_formulas import MomentTensors, Scalar, Scalars, Step, is_constant

Prepared = dict[str, Scalar]
Settings = Mapping[str, Setting]  # compiled-in settings of the optimizer and one of its groups


@dataclass(frozen=True)
class Moment:
    """A state tensor for each weight, with its shape: ``optstate.<name>.<weight>``."""

    name: str
    dtype: torch.dtype | None  # type between updates; None for the type of the weight
    initial: float = 0.0


@dataclass(frozen=True)
class Algorithm:
    """An update algorithm. The settings are those of one group."""

    moments: Callable[[Settings], tuple[Moment, ...]]
    # whether it needs the number of this update, which starts at 1
    counts: Callable[[Settings], bool]
    prepare: Callable[[Settings, Scalars, Tensor | None], Prepared]  # called once per group
    step: Step
    squares: Callable[[Tensor, Tensor, MomentTensors, Scalars], list[Tensor]] | None = None
    """The number of sums of squares for norms of whole weights. If other processes have parts of a
    weight, ``step`` reads the sums over all processes as the values ``square_0`` and ``square_1``.
    """


def storage_dtype(settings: Settings, name: str) -> torch.dtype:
    dtype = getattr(torch, str(settings[name]))
    assert isinstance(dtype, torch.dtype)
    return dtype


def compute_dtype(stored: torch.dtype) -> torch.dtype:
    """Return the type in which an update computes: float32, or float64 for weights of that type."""
    return torch.promote_types(stored, torch.float32)


def kept_dtype(tensor: torch.dtype, named: torch.dtype) -> torch.dtype:
    """Return the type of state for a weight or a gradient if an optimizer names a type.

    Optimizers name types of single precision. Double precision and complex types stay.
    """
    stays = tensor is torch.float64 or tensor.is_complex
    return torch.promote_types(tensor, named) if stays else named


def as_real(tensor: Tensor) -> Tensor:
    """Return complex numbers as pairs of real numbers, because all optimizers update those."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def materialised(values: dict[str, Scalar]) -> Prepared:
    """Make compilers compute scalars once, because ``as_strided`` needs a buffer.

    Inductor inlines other 0-d arithmetic into every loop, which makes Adam 2.5 times slower.
    """
    return {
        name: value.as_strided((), ()) if isinstance(value, Tensor) else value
        for name, value in values.items()
    }


def _complement(hyper: Scalars, name: str) -> Scalar:
    """Return ``1 - decay``, which float32 inputs carry for decay rates near 1."""
    variable = slots.hyper(name).name
    return hyper[variable] if variable in hyper else 1 - hyper[name]


def _correction(hyper: Scalars, name: str, count: Tensor) -> Tensor:
    """Return ``1 - decay ** count`` without cancellation in float32."""
    rest = _complement(hyper, name)
    if isinstance(rest, Tensor):
        log: Scalar = torch.log1p(-rest)
    else:
        log = math.log1p(-rest) if rest < 1 else -math.inf
    return -torch.expm1(count * log)


# SGD, with one velocity per weight, or with a combined tensor that also sums the gradients.


def _sgd_moments(settings: Settings) -> tuple[Moment, ...]:
    if settings.get("momentum") == 0:
        return ()
    return (Moment("velocity", storage_dtype(settings, "velocity_accum_type")),)


def _sgd_counts(settings: Settings) -> bool:
    return settings.get("momentum") != 0 and settings.get("dampening") != 0


def _undamped(hyper: Scalars, count: Tensor | None) -> Scalar:
    """Return the factor of the gradient that is added to the velocity; 1 for the first gradient."""
    rest = 1 - hyper["dampening"]
    return rest if count is None else torch.where(count == 1, 1.0, rest)


def _sgd_prepare(settings: Settings, hyper: Scalars, count: Tensor | None) -> Prepared:
    prepared = {name: hyper[name] for name in ("weight_decay", "momentum", "nesterov")}
    share = _undamped(hyper, count)
    if settings.get("momentum") == 0:
        prepared["descent"] = -(hyper["lr"] * share)
        return prepared
    # A velocity of half type is stored multiplied by the loss scale, as the gradients are.
    in_half = storage_dtype(settings, "velocity_accum_type") == torch.float16
    prepared["scaling"] = hyper["loss_scaling"] if in_half else 1.0
    prepared["share"] = share * prepared["scaling"]
    prepared["descent"] = -(hyper["lr"] / prepared["scaling"])
    return prepared


def _combined_prepare(settings: Settings, hyper: Scalars, count: Tensor | None) -> Prepared:
    scaling, decay = hyper["velocity_scaling"], hyper["weight_decay"]
    prepared = {name: hyper[name] for name in ("momentum", "nesterov", "weight_decay")}
    prepared["scaling"] = scaling
    prepared["share"] = _undamped(hyper, count) * scaling
    prepared["decay"] = (1 - hyper["dampening"]) * scaling * decay
    prepared["descent"] = -(hyper["lr"] / scaling)
    if count is not None:
        # The velocity does not contain the weight decay of the first update yet.
        prepared["first_decay"] = torch.where(count == 1, prepared["share"] * decay, 0.0)
    return prepared


# Adam, whose weight decay is part of the gradient; AdamW, which shrinks the weight; LAMB.


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
    return prepared


def _adamw_prepare(settings: Settings, hyper: Scalars, count: Tensor | None) -> Prepared:
    prepared = _adam_prepare(settings, hyper, count)
    decay = prepared.pop("weight_decay")
    if not is_constant(decay, 0):
        prepared["shrink"] = 1 - hyper["lr"] * decay
    return prepared


def _lamb_prepare(settings: Settings, hyper: Scalars, count: Tensor | None) -> Prepared:
    prepared = _adam_prepare(settings, hyper, count)
    return prepared | {"descent": -hyper["lr"], "max_weight_norm": hyper["max_weight_norm"]}


# RMSprop.


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
    # In TensorFlow's variant, the learning rate is inside the momentum buffer.
    inside = bool(prepared["tf"]) and settings.get("momentum") != 0
    prepared["entry"] = hyper["lr"] if inside else 1.0
    prepared["descent"] = -1.0 if inside else -hyper["lr"]
    return prepared


ALGORITHMS = {
    "sgd": Algorithm(_sgd_moments, _sgd_counts, _sgd_prepare, steps.SGD),
    "sgd_combined": Algorithm(
        lambda settings: (Moment("combined", None),),
        lambda settings: settings.get("dampening") != 0 or settings.get("weight_decay") != 0,
        _combined_prepare,
        steps.SGD_COMBINED,
    ),
    "adam": Algorithm(_adam_moments, _corrects, _adam_prepare, steps.ADAM),
    "adamw": Algorithm(_adam_moments, _corrects, _adamw_prepare, steps.ADAM),
    "lamb": Algorithm(_adam_moments, _corrects, _lamb_prepare, steps.LAMB, steps.lamb_squares),
    "rmsprop": Algorithm(_rmsprop_moments, lambda _: False, _rmsprop_prepare, steps.RMSPROP),
}
"""By the name in an OptimSpec."""

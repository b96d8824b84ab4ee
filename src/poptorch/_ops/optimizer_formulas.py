"""Define the steps of our optimizers as operators: ``poptorch::adam_step`` updates one weight with
Adam.

Each formula is only defined here. An update contains one call per weight. A backend may run that
call with a kernel of torch, or write it out in torch's operators (``written_out.py``). Gradients
are clipped, have no loss scaling, and have the sign for descending. Numbers are Python numbers if
they are compiled in, and 0-d tensors if they are inputs of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .library import define

Scalar = float | Tensor
Scalars = Mapping[str, Scalar]
MomentTensors = dict[str, Tensor]
Stepped = tuple[Tensor, MomentTensors]  # the new weight, and its new moments by name
StepFormula = Callable[[Tensor, Tensor, MomentTensors, Scalars], Stepped]

_SCHEMA = (
    "(Tensor weight, Tensor gradient, Tensor[] moments, Tensor[] variables, float[] constants, "
    "str[] names) -> Tensor[]"
)


@dataclass(frozen=True)
class Operands:
    """The operands of a step: tensors, or the nodes that represent them in a graph."""

    weight: Any
    gradient: Any
    moments: dict[str, Any]
    numbers: dict[str, Any]


class Step:
    """A formula as an operator, whose results are the new weight and its new moments.

    ``reads`` names the numbers that the formula reads. ``usual`` contains default values of numbers
    that may be missing.
    """

    def __init__(
        self, name: str, formula: StepFormula, reads: Collection[str], **usual: float
    ) -> None:
        self._formula, self._reads, self._usual = formula, (*reads, *usual), usual
        self.operator = define(name, _SCHEMA, self.written_out, self.written_out)

    def __call__(
        self, weight: Tensor, gradient: Tensor, moments: MomentTensors, values: Scalars
    ) -> Stepped:
        """Make a step with one call of the operator."""
        read = {name: values[name] for name in self._reads if name in values}
        variables = {name: value for name, value in read.items() if isinstance(value, Tensor)}
        constants = {name: float(read[name]) for name in read if name not in variables}
        new_weight, *new_moments = self.operator(
            weight,
            gradient,
            [*moments.values()],
            [*variables.values()],
            [*constants.values()],
            [*moments, *variables, *constants],
        )
        return new_weight, dict(zip(moments, new_moments, strict=True))

    def written_out(self, *args: Any) -> list[Tensor]:
        """Compute the operator's results from its arguments with torch's operators."""
        given = self.operands(args)
        weight, moments = self._formula(given.weight, given.gradient, given.moments, given.numbers)
        return [weight, *(moments[name] for name in given.moments)]

    def operands(self, args: Sequence[Any]) -> Operands:
        weight, gradient, moments, variables, constants, names = args
        count = len(moments)
        by_name = dict(zip(names[:count], moments, strict=True))
        numbers = dict(zip(names[count:], (*variables, *constants), strict=True))
        return Operands(weight, gradient, by_name, {**self._usual, **numbers})


def is_constant(value: Any, number: float) -> bool:
    return not isinstance(value, Tensor | fx.Node) and bool(value == number)


def scaled(tensor: Tensor, factor: Scalar) -> Tensor:
    return tensor if is_constant(factor, 1) else tensor * factor


def plus_scaled(base: Tensor, other: Tensor, factor: Scalar) -> Tensor:
    if isinstance(factor, Tensor):
        return torch.addcmul(base, other, factor)
    return torch.add(base, other, alpha=factor)


def with_decay(gradient: Tensor, weight: Tensor, decay: Scalar) -> Tensor:
    return gradient if is_constant(decay, 0) else plus_scaled(gradient, weight, decay)


def _blend(old: Tensor, new: Tensor, share: Scalar) -> Tensor:
    if isinstance(share, Tensor):
        # old + (new - old) * share would cancel: with a share of 1, a small new value after a large
        # one would be 0.
        return torch.addcmul(old * (1 - share), new, share)
    return torch.lerp(old, new, share)


# SGD. As in torch, and unlike the original algorithm, the first gradient is not dampened.


def _sgd(weight: Tensor, gradient: Tensor, moments: MomentTensors, values: Scalars) -> Stepped:
    gradient = with_decay(gradient, weight, values["weight_decay"])
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


SGD = Step(
    "sgd_step",
    _sgd,
    ("weight_decay", "descent"),
    momentum=0.0,
    nesterov=0.0,
    share=1.0,
    scaling=1.0,
)


# SGD with a velocity that also sums the gradients, in one tensor per weight. Between updates, the
# tensor already contains the momentum and decay terms of the next update, computed with the
# hyper-parameters of the last one. Changes therefore affect these terms one step later.


def _combined(weight: Tensor, gradient: Tensor, moments: MomentTensors, values: Scalars) -> Stepped:
    velocity = plus_scaled(moments["combined"], gradient, values["share"])
    velocity = with_decay(velocity, weight, values["first_decay"])
    if not is_constant(values["nesterov"], 0):
        gradient = plus_scaled(gradient, weight, values["weight_decay"]) * values["scaling"]
    direction = _looked_ahead(gradient, velocity, values)
    weight = plus_scaled(weight, direction, values["descent"])
    velocity = with_decay(velocity * values["momentum"], weight, values["decay"])
    return weight, {"combined": velocity}


SGD_COMBINED = Step(
    "sgd_combined_step",
    _combined,
    ("momentum", "nesterov", "weight_decay", "scaling", "share", "decay", "descent"),
    first_decay=0.0,
)


# Adam, whose weight decay is part of the gradient, and AdamW, which shrinks the weight instead.


def _adam(weight: Tensor, gradient: Tensor, moments: MomentTensors, values: Scalars) -> Stepped:
    gradient = with_decay(gradient, weight, values["weight_decay"])
    moments, root = _advanced(gradient, moments, values)
    weight = scaled(weight, values["shrink"])
    return plus_scaled(weight, moments["first"] / root, values["descent"]), moments


def _advanced(
    gradient: Tensor, moments: MomentTensors, values: Scalars
) -> tuple[MomentTensors, Tensor]:
    first = _blend(moments["first"], gradient, values["first_share"])
    second = _blend(moments["second"], gradient * gradient, values["second_share"])
    root = scaled(torch.sqrt(second), values["root_factor"])
    return {"first": first, "second": second}, root + values["eps"]


_OF_ADAM = ("first_share", "second_share", "root_factor", "eps")
ADAM = Step("adam_step", _adam, (*_OF_ADAM, "descent"), weight_decay=0.0, shrink=1.0)


# LAMB: the direction of AdamW, scaled per tensor by the norm of the weight.

SQUARES = 2  # number of sums of squares from ``lamb_squares``
_OF_WHOLE = tuple(f"square_{at}" for at in range(SQUARES))  # the same sums over whole weights


def _lamb(weight: Tensor, gradient: Tensor, moments: MomentTensors, values: Scalars) -> Stepped:
    moments, direction = _lamb_direction(weight, gradient, moments, values)
    if _OF_WHOLE[0] in values:
        norms = [torch.sqrt(torch.as_tensor(values[name])) for name in _OF_WHOLE]
    else:
        norms = [torch.linalg.vector_norm(each) for each in (weight, direction)]
    (long, short), limit = norms, values["max_weight_norm"]
    long = torch.minimum(long, limit) if isinstance(limit, Tensor) else long.clamp(max=limit)
    trust = torch.where((long > 0) & (short > 0), long / short, 1.0)
    # in memory, so that compilers compute it once
    factor = (values["descent"] * trust).as_strided((), ())
    return torch.addcmul(weight, direction, factor), moments


def lamb_squares(
    weight: Tensor, gradient: Tensor, moments: MomentTensors, values: Scalars
) -> list[Tensor]:
    """Return the sums of squares of a part of a weight, and of its direction."""
    moments, direction = _lamb_direction(weight, gradient, moments, values)
    # A weight is padded at its end. With an eps of 0, the padding would give 0 / 0.
    nothing = (moments["first"] == 0) & (moments["second"] == 0) & (weight == 0)
    direction = torch.where(nothing, 0.0, direction)
    return [(each * each).sum() for each in (weight, direction)]


def _lamb_direction(
    weight: Tensor, gradient: Tensor, moments: MomentTensors, values: Scalars
) -> tuple[MomentTensors, Tensor]:
    moments, root = _advanced(gradient, moments, values)
    direction = scaled(moments["first"] / root, values["first_factor"])
    return moments, with_decay(direction, weight, values["weight_decay"])


LAMB = Step(
    "lamb_step",
    _lamb,
    (
        *_OF_ADAM,
        "first_factor",
        "weight_decay",
        "descent",
        "max_weight_norm",
        "square_0",
        "square_1",
    ),
)


# RMSprop, plain or centred, in torch's variant or TensorFlow's.


def _rmsprop(weight: Tensor, gradient: Tensor, moments: MomentTensors, values: Scalars) -> Stepped:
    gradient = with_decay(gradient, weight, values["weight_decay"])
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


RMSPROP = Step(
    "rmsprop_step",
    _rmsprop,
    ("share", "eps", "weight_decay", "tf", "descent"),
    momentum=0.0,
    entry=1.0,
)

BY_OPERATOR: dict[Any, Step] = {
    step.operator: step for step in (SGD, SGD_COMBINED, ADAM, LAMB, RMSPROP)
}

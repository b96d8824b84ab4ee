"""Define RMSprop, in torch's variant or TensorFlow's (PopTorch user guide, "Optimizers")."""

from __future__ import annotations

import torch

from .arguments import checked
from .kind import MOMENT_TYPES, OptimizerKind, shown_directly
from .optimizer import Optimizer, Params


class RMSprop(Optimizer, torch.optim.RMSprop):
    """RMSprop with accumulator types and loss scaling.

    Values that you pass may change after compilation. Values that you leave None are constants of
    the program.

    Args:
        params, lr, alpha, eps, weight_decay, momentum, maximize: as in torch.optim.RMSprop.
        centered: as in torch.optim.RMSprop; the same in every parameter group.
        foreach, differentiable: only ``step()`` on the host uses them.
        loss_scaling: factor of the loss's gradient; the update divides by it.
        accum_type: dtype of the gradient accumulator, float32 or float16.
        first_order_momentum_accum_type: dtype of the gradients' mean and of the momentum.
        second_order_momentum_accum_type: dtype of the mean of the squared gradients.
        use_tf_variant: compute as TensorFlow does. Epsilon is inside the root, the mean of squares
            starts at one, and the learning rate is inside the momentum.

    Raises:
        AssertionError: an accumulator type is neither float32 nor float16.
    """

    _own = {"loss_scaling": 1.0, **MOMENT_TYPES, "use_tf_variant": False}

    @checked("foreach", "maximize", "differentiable")
    def __init__(
        self,
        params: Params,
        lr: float | None = None,
        alpha: float | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        momentum: float | None = None,
        centered: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        use_tf_variant: bool | None = None,
    ) -> None:
        self._construct(locals())


_SHOWN = (
    shown_directly("learningRate", "lr"),
    shown_directly("weightDecay", "weight_decay"),
    shown_directly("adaptiveAlpha", "alpha"),
    shown_directly("adaptiveEps", "eps"),
    shown_directly("adaptiveMomentum", "momentum"),
)
RMSPROP = OptimizerKind(
    "rmsprop",
    (torch.optim.RMSprop, RMSprop),
    ("lr", "alpha", "eps", "weight_decay", "momentum"),
    {**MOMENT_TYPES, "use_tf_variant": False},
    {"Accl1": "square", "Accl2": "mean", "Accl3": "momentum"},
    lambda constants: _SHOWN,
    agreed=("centered",),
)

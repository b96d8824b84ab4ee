"""Define Adam with L2 decay and AdamW with decoupled decay (PopTorch user guide, "Optimizers").

The formula is in ``_ops/optimizer_formulas.py``.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .._base.keywords import also_called
from .arguments import checked
from .kind import CLIPPING, DECOUPLED, MOMENT_TYPES, OptimizerKind, agreed, shown_directly
from .optimizer import Optimizer, Params


class Adam(Optimizer, torch.optim.Adam):
    """Adam with accumulator types and loss scaling.

    Values that you pass may change after compilation. Values that you leave None are constants of
    the program.

    Args:
        params, lr, betas, eps, weight_decay, maximize: as in torch.optim.Adam.
        amsgrad: must be False for training.
        foreach, capturable, differentiable, fused: only ``step()`` on the host uses them.
        loss_scaling: factor of the loss's gradient; the update divides by it.
        accum_type: dtype of the gradient accumulator, float32 or float16.
        first_order_momentum_accum_type, second_order_momentum_accum_type: dtypes of the moments
            between updates, float32 or float16.
        max_grad_norm: clip the gradients to this global norm. The default, infinity, does not clip.

    Raises:
        AssertionError: an accumulator type is neither float32 nor float16, or ``betas`` is not a
            pair.
    """

    _own = {"loss_scaling": 1.0, **MOMENT_TYPES, **CLIPPING}

    @checked("foreach", "maximize", "capturable", "differentiable", "fused")
    def __init__(
        self,
        params: Params,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        self._construct(locals())


class AdamW(Optimizer, torch.optim.AdamW):
    """AdamW with accumulator types and loss scaling. Arguments and errors are those of ``Adam``.

    Args:
        params, lr, betas, eps, weight_decay, maximize: as in torch.optim.AdamW.
        bias_correction: correct the moments for their start at zero. (PopTorch always did.)
    """

    _own = {**Adam._own, "bias_correction": True}

    @also_called(accumType="accum_type", biasCorrection="bias_correction")
    @checked("maximize", "foreach", "capturable", "differentiable", "fused")
    def __init__(
        self,
        params: Params,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        bias_correction: bool | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        self._construct(locals())


MOMENTS = {"Accl1": "first", "Accl2": "second"}
SHOWN = (
    shown_directly("learningRate", "lr"),
    shown_directly("weightDecay", "weight_decay"),
    shown_directly("adamBeta1", "beta1"),
    shown_directly("adamBeta2", "beta2"),
    shown_directly("adamEps", "eps"),
)
ADAMW = OptimizerKind(
    "adamw",
    (torch.optim.AdamW, AdamW),
    ("lr", "betas", "eps", "weight_decay"),
    {**MOMENT_TYPES, **CLIPPING, "bias_correction": True},
    MOMENTS,
    lambda constants: SHOWN,
)
ADAM = replace(
    ADAMW,
    algorithm="adam",
    classes=(torch.optim.Adam, Adam),
    variant=lambda optimizer: ADAMW if agreed(optimizer, DECOUPLED) else None,
)

"""Adam with L2 decay, AdamW with decoupled decay (PopTorch user guide, "Optimizers")."""

from __future__ import annotations

import torch

from .arguments import checked
from .kind import CLIPPING, MOMENT_TYPES, Kind
from .optimizer import Optimizer, Params

_TORCH_DEFAULTS = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
    "foreach": None,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}
_DEFAULTS = {
    "loss_scaling": 1.0,
    **MOMENT_TYPES,
    **CLIPPING,
}


class Adam(Optimizer, torch.optim.Adam):
    """Adam with accumulator types and loss scaling.

    Arguments left None take the default and are compiled in as constants; those passed may change
    after compilation.

    Args:
        params, lr, betas, eps, weight_decay, maximize: as in torch.optim.Adam.
        amsgrad: only False can be trained with.
        foreach, capturable, differentiable, fused: accepted; only native steps use them.
        loss_scaling: factor of the loss's gradient, divided out before the update.
        accum_type: dtype of the gradient accumulator, float32 or float16.
        first_order_momentum_accum_type, second_order_momentum_accum_type: dtypes of the moments
            between updates, float32 or float16.
        max_grad_norm: clip the gradients to this global norm; infinity (the default) does not.

    Raises:
        AssertionError: an accumulator type is neither float32 nor float16, or betas are no pair.
    """

    _child_only = [*MOMENT_TYPES, *CLIPPING]
    _group_vars = ["lr", "betas", "eps", "weight_decay", "amsgrad"]

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
        self._construct(torch.optim.Adam.__init__, locals(), _TORCH_DEFAULTS, _DEFAULTS)


class AdamW(Optimizer, torch.optim.AdamW):
    """AdamW with accumulator types and loss scaling: arguments and errors as for ``Adam``.

    Args:
        params, lr, betas, eps, weight_decay, maximize: as in torch.optim.AdamW.
        bias_correction: whether the moments are corrected for their start at zero; honoured, while
            the original always corrected.
    """

    _child_only = ["bias_correction", *MOMENT_TYPES, *CLIPPING]
    _group_vars = ["lr", "betas", "weight_decay", "eps", "amsgrad"]

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
        native = {**_TORCH_DEFAULTS, "weight_decay": 1e-2}
        own = {**_DEFAULTS, "bias_correction": True}
        self._construct(torch.optim.AdamW.__init__, locals(), native, own)


_HYPERS = ("lr", "betas", "eps", "weight_decay")
_STRUCTURE = {**MOMENT_TYPES, **CLIPPING, "bias_correction": True}
ADAM = Kind(
    "adam",
    (torch.optim.Adam, Adam),
    _HYPERS,
    _STRUCTURE,
)
ADAMW = Kind(
    "adamw",
    (torch.optim.AdamW, AdamW),
    _HYPERS,
    _STRUCTURE,
)

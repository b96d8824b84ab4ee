"""Define LAMB: layer-wise adaptive moments for large batches (PopTorch user guide,
"Optimizers").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .adam import MOMENTS, SHOWN
from .arguments import checked
from .kind import MOMENT_TYPES, OptimizerKind, shown_directly
from .optimizer import Optimizer, Params

_STRUCTURE: dict[str, Any] = {**MOMENT_TYPES, "bias_correction": True}
_DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 1e-2,
    "max_weight_norm": 65500.0,
}


class LAMB(Optimizer, torch.optim.Optimizer):
    """LAMB with accumulator types and loss scaling.

    Values that you pass may change after compilation. Values that you leave None are constants of
    the program.

    Args:
        params: tensors, or dictionaries of parameter groups.
        lr: learning rate; default 1e-3.
        betas: decay rates of the moments; default (0.9, 0.999).
        eps: added to the root of the second moment; default 1e-8.
        weight_decay: decoupled decay; default 1e-2.
        bias_correction: correct the moments for their start at zero; default True.
        loss_scaling: factor of the loss's gradient; the update divides by it. Default 1.
        max_weight_norm: upper limit of the weight's norm in the trust ratio; default 65500.
        accum_type: dtype of the gradient accumulator, float32 or float16.
        first_order_momentum_accum_type, second_order_momentum_accum_type: dtypes of the moments
            between updates, float32 or float16.

    Raises:
        AssertionError: an accumulator type is neither float32 nor float16, or betas is not a pair.
    """

    bias_correction: bool
    max_weight_norm: float

    _own = {"loss_scaling": 1.0, "max_weight_norm": _DEFAULTS["max_weight_norm"], **_STRUCTURE}

    @checked()
    def __init__(
        self,
        params: Params,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        bias_correction: bool | None = None,
        loss_scaling: float | None = None,
        max_weight_norm: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
    ) -> None:
        self._construct(locals())

    def _initialise(self, params: Params, given: Mapping[str, Any]) -> None:
        defaults = {name: given.get(name, value) for name, value in _DEFAULTS.items()}
        torch.optim.Optimizer.__init__(self, params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a ``grad``, on the host.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            The closure's loss, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(group, parameter)
        return loss

    def _step_one(self, group: dict[str, Any], parameter: Any) -> None:
        state, gradient = self.state[parameter], parameter.grad
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        first = state["exp_avg"].lerp_(gradient, 1 - group["betas"][0])
        second = state["exp_avg_sq"].lerp_(gradient * gradient, 1 - group["betas"][1])
        if self.bias_correction:
            first = first / (1 - group["betas"][0] ** state["step"])
            second = second / (1 - group["betas"][1] ** state["step"])
        direction = first / (second.sqrt() + group["eps"]) + group["weight_decay"] * parameter
        long, short = parameter.norm().clamp(max=group["max_weight_norm"]), direction.norm()
        trust = float(long / short) if long > 0 and short > 0 else 1.0
        parameter.sub_(direction, alpha=group["lr"] * trust)


LAMB_KIND = OptimizerKind(
    "lamb",
    (LAMB,),
    ("lr", "betas", "eps", "weight_decay", "max_weight_norm"),
    _STRUCTURE,
    MOMENTS,
    lambda constants: (*SHOWN, shown_directly("maxWeightNorm", "max_weight_norm")),
)

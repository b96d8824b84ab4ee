"""Define stochastic gradient descent (PopTorch user guide, "Optimizers")."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._base import log
from .arguments import checked
from .kind import CLIPPING, OptimizerKind, Shown, shown_directly
from .optimizer import Optimizer, Params


class SGD(Optimizer, torch.optim.SGD):
    """SGD with optional momentum, Nesterov momentum and accumulator types.

    Values that you pass may change after compilation. Values that you leave None are constants of
    the program.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.optim.SGD.
            As there, the first gradient is not dampened.
        foreach, differentiable: only ``step()`` on the host uses them.
        loss_scaling: factor of the loss's gradient; the update divides by it.
        velocity_scaling: factor of the combined tensor, for ``use_combined_accum`` only.
        use_combined_accum: keep accumulated gradient and velocity in one tensor per weight.
        accum_type: dtype of the gradient accumulator, float32 or float16.
        velocity_accum_type: dtype of the velocity between updates, float32 or float16.
        max_grad_norm: clip the gradients to this global norm. The default, infinity, does not clip.

    Raises:
        AssertionError: an accumulator type is neither float32 nor float16.
        ValueError: ``nesterov`` is used without momentum, or with dampening.
    """

    _own = {
        "loss_scaling": 1.0,
        "velocity_scaling": 1.0,
        "use_combined_accum": False,
        "accum_type": torch.float32,
        "velocity_accum_type": torch.float32,
        **CLIPPING,
    }

    @checked("maximize", "foreach", "differentiable")
    def __init__(
        self,
        params: Params,
        lr: float,
        momentum: float | None = None,
        dampening: float | None = None,
        weight_decay: float | None = None,
        nesterov: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        velocity_scaling: float | None = None,
        use_combined_accum: bool | None = None,
        accum_type: torch.dtype | None = None,
        velocity_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        self._construct(locals())

    def _store_attributes(self, own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        if own["use_combined_accum"]:
            self.defaults["velocity_scaling"] = own["velocity_scaling"]
            for group in self.param_groups:
                group.setdefault("velocity_scaling", own["velocity_scaling"])
        elif "velocity_scaling" in given:
            log.python.warning(
                "The value of velocity_scaling is ignored, because use_combined_accum is "
                "False. A float32 velocity needs no scaling, and a float16 velocity is "
                "scaled by loss_scaling"
            )
        super()._store_attributes(own, given)


_SHOWN_WITHOUT_MOMENTUM = (
    Shown(
        "scaledLearningRate0", "lr", lambda h: h["lr"] * (1 - h["dampening"]) / h["loss_scaling"]
    ),
    Shown(
        "weightDecayScaleFactor0",
        "weight_decay",
        lambda h: 1 - h["lr"] * (1 - h["dampening"]) * h["weight_decay"],
    ),
)


def _shown(number: int, scaling: str) -> tuple[Shown, ...]:
    return (
        Shown(f"scaledLearningRate{number}", "lr", lambda h: h["lr"] / h[scaling]),
        shown_directly(f"scaledMomentum{number}", "momentum"),
        Shown(
            f"dampeningScaleFactor{number}",
            "dampening",
            lambda h: (1 - h["dampening"]) * h[scaling] / h["loss_scaling"],
        ),
        Shown(
            f"scaledWeightDecay{number}",
            "weight_decay",
            lambda h: (1 - h["dampening"]) * h[scaling] * h["weight_decay"],
        ),
    )


_HYPERS = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
COMBINED_SGD = OptimizerKind(
    "sgd_combined",
    (),
    (*_HYPERS, "velocity_scaling"),
    CLIPPING,
    {"Accl": "combined"},
    lambda constants: _shown(1, "velocity_scaling"),
)
SGD_KIND = OptimizerKind(
    "sgd",
    (torch.optim.SGD, SGD),
    _HYPERS,
    {"accum_type": torch.float32, "velocity_accum_type": torch.float32, **CLIPPING},
    {"Accl1": "velocity"},
    lambda constants: (
        _SHOWN_WITHOUT_MOMENTUM if constants.get("momentum") == 0 else _shown(2, "loss_scaling")
    ),
    variant=lambda optimizer: (
        COMBINED_SGD if getattr(optimizer, "use_combined_accum", False) else None
    ),
)

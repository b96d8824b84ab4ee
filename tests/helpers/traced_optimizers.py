"""Optimizers as users write them, each with code that is no simple formula."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Lion(torch.optim.Optimizer):
    """Signs of a blend of momentum and gradient; keeps the momentum."""

    def __init__(
        self,
        params: list[dict[str, float | list[torch.Tensor]]],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                update = state["exp_avg"] * beta1 + p.grad * (1 - beta1)
                p.add_(update.sign_(), alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1 - beta2)


class LARS(torch.optim.Optimizer):
    """A rate for each weight, by norms that an ``if`` looks at; the first step makes the buffer."""

    def __init__(
        self,
        params: list[dict[str, float | list[torch.Tensor]] | torch.Tensor],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        eta: float = 0.001,
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eta": eta},
        )

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                d = p.grad.data
                weight_norm, norm = torch.norm(p.data), torch.norm(d)
                rate = 1.0
                if p.ndim > 1 and weight_norm > 0 and norm > 0:
                    rate = group["eta"] * weight_norm / (norm + group["weight_decay"] * weight_norm)
                d = d.add(p.data, alpha=group["weight_decay"])
                state = self.state[p]
                if "momentum_buffer" not in state:
                    buffer = state["momentum_buffer"] = torch.clone(d).mul_(rate).detach()
                else:
                    buffer = state["momentum_buffer"]
                    buffer.mul_(group["momentum"]).add_(d * rate)
                p.data.add_(buffer, alpha=-group["lr"])


class ScheduledAdam(torch.optim.Optimizer):
    """Adam in Python's numbers, with a schedule of its own that also scales the decay."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        decay: float = 0.01,
        warmup: int = 5,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "decay": decay, "warmup": warmup}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["first"] = torch.zeros_like(p)
                    state["second"] = torch.zeros_like(p)
                state["step"] += 1
                step = state["step"]
                if step <= group["warmup"]:
                    share = step / group["warmup"]
                else:
                    done = min(1.0, (step - group["warmup"]) / 20)
                    share = 0.5 * (1 + math.cos(math.pi * done))
                state["first"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                state["second"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                root = (state["second"].sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
                p.mul_(1 - share * group["decay"])
                rate = group["lr"] * share / (1 - beta1**step)
                p.addcdiv_(state["first"], root, value=-rate)


class Lookahead(torch.optim.SGD):
    """A subclass with a step of its own, that counts in an attribute of the object."""

    def __init__(
        self,
        params: list[dict[str, float | list[torch.Tensor]]],
        lr: float = 0.01,
        every: int = 4,
        **settings: Any,
    ) -> None:
        super().__init__(params, lr=lr, **settings)
        self.every, self.count = every, 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        super().step(closure)
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "slow" not in state:
                    state["slow"] = p.detach().clone()
                if self.count % self.every == 0:
                    state["slow"].lerp_(p, 0.5)
                    p.copy_(state["slow"])


class CountingGroups(torch.optim.Optimizer):
    """The count is in the groups, which get it at the first step; rates are changed in place."""

    def __init__(
        self, params: list[dict[str, float | list[torch.Tensor]]], lr: float = 1e-3
    ) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            if "step" in group:
                group["step"] += 1
            else:
                group["step"] = 1
            lr = group["lr"]
            lr /= group["step"]
            for p in group["params"]:
                p.sub_(p.grad, alpha=lr)


class OneNorm(torch.optim.Optimizer):
    """All gradients are divided by one norm, by functions for lists."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        weights = [p for group in self.param_groups for p in group["params"]]
        total = torch.sqrt(sum(p.grad.pow(2).sum() for p in weights))
        directions = [p.grad / (total + 1e-6) for p in weights]
        torch._foreach_add_(weights, directions, alpha=-self.param_groups[0]["lr"])


class Nested(torch.optim.Optimizer):
    """Keeps lists, dicts and a matrix that is neither zeros nor ones."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["history"] = [torch.zeros_like(p) for _ in range(2)]
                    state["more"] = {"count": 0, "basis": torch.eye(p.shape[0])}
                blend, total = state["history"]
                blend.mul_(0.5).add_(p.grad)
                total.add_(blend.abs())
                more = state["more"]
                more["count"] += 1
                more["basis"].mul_(0.9)
                direction = more["basis"] @ (blend / (total + 1)).reshape(p.shape[0], -1)
                p.sub_(direction.reshape(p.shape), alpha=group["lr"] / more["count"] ** 0.5)


class Deep(nn.Module):
    """A classifier with many layers of one shape, as bundles and repeated weights need."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.last(x), labels)

"""Reference implementations of the optimizers in float64, as the documents state the formulas.

Each function takes the weights, their gradients, the state (a dict per weight, empty at first) and
the number of the update from 1, and returns new weights. Nothing here is shared with the library.
"""

import math
from typing import Any

import torch


def sgd(
    weights: dict[str, torch.Tensor],
    gradients: dict[str, torch.Tensor],
    state: dict[str, Any],
    t: int,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> dict[str, torch.Tensor]:
    result = {}
    for name, w in weights.items():
        g = gradients[name] + weight_decay * w
        if momentum == 0:
            result[name] = w - lr * g
            continue
        s = state.setdefault(name, {})
        s["v"] = g if t == 1 else momentum * s["v"] + (1 - dampening) * g
        result[name] = w - lr * (g + momentum * s["v"] if nesterov else s["v"])
    return result


def _adam_like(
    w: torch.Tensor,
    g: torch.Tensor,
    s: dict[str, torch.Tensor],
    t: int,
    betas: tuple[float, float],
    eps: float,
    corrected: bool,
) -> torch.Tensor:
    s["m"] = betas[0] * s.get("m", 0.0) + (1 - betas[0]) * g
    s["v"] = betas[1] * s.get("v", 0.0) + (1 - betas[1]) * g**2
    m, v = s["m"], s["v"]
    if corrected:
        m, v = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
    return m / (v.sqrt() + eps)


def adam(
    weights: dict[str, torch.Tensor],
    gradients: dict[str, torch.Tensor],
    state: dict[str, Any],
    t: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Any:
    result = {}
    for name, w in weights.items():
        g = gradients[name] + weight_decay * w
        result[name] = w - lr * _adam_like(w, g, state.setdefault(name, {}), t, betas, eps, True)
    return result


def adamw(
    weights: dict[str, torch.Tensor],
    gradients: dict[str, torch.Tensor],
    state: dict[str, Any],
    t: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    bias_correction: bool = True,
) -> Any:
    result = {}
    for name, w in weights.items():
        s = state.setdefault(name, {})
        x = _adam_like(w, gradients[name], s, t, betas, eps, bias_correction)
        result[name] = w - lr * (x + weight_decay * w)
    return result


def lamb(
    weights: dict[str, torch.Tensor],
    gradients: dict[str, torch.Tensor],
    state: dict[str, dict[str, torch.Tensor]],
    t: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    bias_correction: bool = True,
    max_weight_norm: float = 65500.0,
) -> dict[str, torch.Tensor]:
    result = {}
    for name, w in weights.items():
        s = state.setdefault(name, {})
        x = _adam_like(w, gradients[name], s, t, betas, eps, bias_correction) + weight_decay * w
        r1, r2 = min(float(w.norm()), max_weight_norm), float(x.norm())
        result[name] = w - lr * (r1 / r2 if r1 and r2 else 1.0) * x
    return result


def rmsprop(
    weights: dict[str, torch.Tensor],
    gradients: dict[str, torch.Tensor],
    state: dict[str, Any],
    t: int,
    lr: float = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
    use_tf_variant: bool = False,
) -> Any:
    result = {}
    for name, w in weights.items():
        s = state.setdefault(name, {"v1": torch.full_like(w, float(use_tf_variant))})
        g = gradients[name] + weight_decay * w
        s["v1"] = alpha * s["v1"] + (1 - alpha) * g**2
        spread = s["v1"]
        if centered:
            s["v2"] = alpha * s.get("v2", 0.0) + (1 - alpha) * g
            spread = spread - s["v2"] ** 2
        x = g / ((spread + eps).sqrt() if use_tf_variant else spread.sqrt() + eps)
        if momentum:
            s["v3"] = momentum * s.get("v3", 0.0) + (lr * x if use_tf_variant else x)
            result[name] = w - (s["v3"] if use_tf_variant else lr * s["v3"])
        else:
            result[name] = w - lr * x
    return result


def clipped(gradients: dict[str, torch.Tensor], limit: float) -> Any:
    norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
    return {name: g * limit / max(limit, norm) for name, g in gradients.items()}

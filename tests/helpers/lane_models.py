"""Models of two layers, some of which keep or read state in ways that lanes have to follow.

A function of a model gets the model and what its linear layer returned.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

import poptorch
from harden import parts
from helpers.wrapping import Having

WIDTH = 6


def norm(**settings: Any) -> nn.BatchNorm1d:
    """Return a batch norm as wide as the models."""
    return nn.BatchNorm1d(WIDTH, **settings)


class Renorm(nn.BatchNorm1d):
    """S. Ioffe, "Batch Renormalization": what was seen so far corrects this batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, std = x.mean(0), x.var(0, unbiased=False).add(self.eps).sqrt()
        before = self.running_var.add(self.eps).sqrt()
        r = (std / before).detach().clamp(0.5, 2)
        d = ((mean - self.running_mean) / before).detach().clamp(-1, 1)
        out = (x - mean) / std * r + d
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(std.square(), self.momentum)
        return out * self.weight + self.bias


def normalised(m: Having, x: torch.Tensor) -> torch.Tensor:
    """Call the norm."""
    return m.norm(x)


def normalised_in_two_parts(m: Having, x: torch.Tensor) -> torch.Tensor:
    """Call the norm twice."""
    return torch.cat([m.norm(part) for part in x.chunk(2)])


def forward_of_norm(m: Having, x: torch.Tensor) -> torch.Tensor:
    """Call the norm's ``forward`` itself."""
    return m.norm.forward(x)


def mean_read_after(m: Having, x: torch.Tensor) -> torch.Tensor:
    """Read what the norm keeps after it has been called."""
    return m.norm(x) * m.norm.running_mean.clone()


def mean_read_before(m: Having, x: torch.Tensor) -> torch.Tensor:
    """Read what the norm keeps before it is called."""
    return m.norm(x + m.norm.running_mean.clone())


def normalised_tanh(m: Having, x: torch.Tensor) -> torch.Tensor:
    """Call a layer that is used as ``norm`` on bounded values."""
    return m.norm(x.tanh())


def counted(m: Having, x: torch.Tensor) -> torch.Tensor:
    """Multiply by the number of calls."""
    m.count += 1
    return x * m.count


def averaged(m: Having, x: torch.Tensor) -> torch.Tensor:
    """Keep the mean of all batches."""
    m.count += 1
    m.mean += (x.detach().mean(0) - m.mean) / m.count
    return x


def in_a_row(m: Having, x: torch.Tensor) -> torch.Tensor:
    """Keep a moving average, and a moving sum of it."""
    m.mean.lerp_(x.detach().mean(0), 0.5)
    m.slow.mul_(0.75).add_(m.mean)
    return x * m.slow.clone()


def held(m: Having, x: torch.Tensor) -> torch.Tensor:
    """Read the mean of the previous batch."""
    out = x + m.mean.clone()
    m.mean.copy_(x.detach().mean(0))
    return out


def squashed(m: Having, x: torch.Tensor) -> torch.Tensor:
    """Keep a value that is no linear function of the previous one."""
    m.mean.copy_(torch.tanh(m.mean + x.detach().mean(0)))
    return x


def crossed(m: Having, x: torch.Tensor) -> torch.Tensor:
    """Keep two values, each of which depends on the other's previous one."""
    before = m.mean.clone()
    m.mean.add_(m.slow * 0.1)
    m.slow.add_(before)
    return x * m.slow.clone()


def hooked(m: Having, x: torch.Tensor) -> torch.Tensor:
    """Hooks of all kinds change gradients, and Python sees what eager PyTorch shows."""
    assert m.layer.weight.requires_grad
    assert x.requires_grad == torch.is_grad_enabled()
    y = m.norm(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return y.sin()


def with_hooks() -> nn.LayerNorm:
    """Return a layer with hooks of its module and its weights."""
    layer = nn.LayerNorm(WIDTH)
    layer.register_full_backward_hook(lambda m, given, made: (given[0] * 0.5,))
    layer.register_full_backward_pre_hook(lambda m, made: (made[0].flip(0) * 3,))
    layer.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    layer.register_forward_hook(lambda m, args, out: out + args[0])
    layer.weight.register_hook(lambda gradient: gradient.flip(0))
    layer.weight.register_hook(lambda gradient: None)
    layer.bias.register_hook(lambda gradient: gradient.clamp_(-0.05, 0.05) + 1)
    return layer


def rebound(m: Having, x: torch.Tensor) -> torch.Tensor:
    """Put new tensors in the place of buffers."""
    m.count = m.count + 1
    m.mean = m.mean * 0.5 + x.detach().mean(0)
    return x - m.mean


def replaced(m: Having, x: torch.Tensor) -> torch.Tensor:
    """Put another layer in the place of the first."""
    if not isinstance(m.norm, nn.Tanh):
        m.norm = nn.Tanh()
    return m.norm(x)


def looked_up(m: Having, x: torch.Tensor) -> torch.Tensor:
    """Look rows of a weight up, with sparse gradients."""
    rows = (x.detach().abs() * 2).long() % WIDTH
    bags = nn.functional.embedding_bag(rows, m.layer.weight, mode="mean", sparse=True)
    return x + bags + nn.functional.embedding(rows[:, 0], m.layer.weight, sparse=True)


def placed(m: Having, x: torch.Tensor) -> torch.Tensor:
    """Name devices, as programs for an IPU do."""
    device, other = ("ipu", "ipu:0") if poptorch.isRunningOnIpu() else ("cpu", "cpu")
    with torch.device(device):
        x = x.to(device) * (torch.arange(WIDTH) < 4)
    made = torch.ones(WIDTH, device=device) + x.new_zeros(WIDTH, device=torch.device(other))
    made = made.to(torch.device(other), torch.float32)
    made = made + torch.zeros_like(x, device=torch.device(other))
    mask = torch.zeros(x.shape[0], WIDTH, device=device)
    mask[:, 1] = 1
    picked = x[:, mask[0].nonzero().squeeze(1)] * x[mask.nonzero(as_tuple=True)][:, None]
    return x * made.to(x.device) + picked


def of_several_results(m: Having, x: torch.Tensor) -> torch.Tensor:
    """Call an operator with two results."""
    return x + sum(x.detach().frexp())


def by_a_number_with_swapped_dimensions(m: Having, x: torch.Tensor) -> torch.Tensor:
    """Swap the dimensions of a tensor that has none."""
    return x * x.sum().transpose(0, -1)


def solved(m: Having, x: torch.Tensor) -> torch.Tensor:
    """Solve linear equations."""
    return torch.linalg.solve(x.T @ x + torch.eye(WIDTH), x.T).T


class Case(NamedTuple):
    """The code after the linear layer, a function that makes the other layer, and why there are no
    lanes.
    """

    function: Callable[[Having, torch.Tensor], torch.Tensor]
    make_layer: Callable[[], nn.Module] | None = None  # without it there are two buffers
    no_lanes_because: str = ""


CASES = {
    "once": Case(normalised, norm),
    "two parts": Case(normalised_in_two_parts, norm),
    "called directly": Case(forward_of_norm, norm),
    "other momentum": Case(parts.other_momentum, norm),
    "momentum 0": Case(normalised, lambda: norm(momentum=0.0)),
    "momentum 1": Case(normalised, lambda: norm(momentum=1.0)),
    "all batches": Case(normalised, lambda: norm(momentum=None)),
    "eval inside": Case(parts.evaluated, norm),
    "untracked inside": Case(parts.untracked, norm),
    "untracked, all batches": Case(parts.untracked, lambda: norm(momentum=None, affine=False)),
    "read in the loss": Case(mean_read_after, norm),
    "renorm": Case(normalised, lambda: Renorm(WIDTH)),
    "read before": Case(mean_read_before, norm, "running_mean"),
    "counted": Case(counted),
    "averaged": Case(averaged),
    "smoothed": Case(parts.smoothed),
    "in a row": Case(in_a_row),
    "held": Case(held),
    "squashed": Case(squashed, None, "aten.tanh.default: buffer mean is no longer a multiple"),
    "crossed": Case(crossed, None, "depends on its previous value"),
    "hooked": Case(hooked, with_hooks),
    "in one memory": Case(normalised_tanh, lambda: nn.Linear(WIDTH, WIDTH)),
    "in eval mode": Case(normalised, norm),
    "rebound": Case(rebound),
    "replaced": Case(replaced),
    "looked up": Case(looked_up, None, "aten._embedding_bag.default"),
    "placed": Case(placed),
    "several results": Case(of_several_results),
    "turned number": Case(by_a_number_with_swapped_dimensions),
    "solved": Case(solved),
}


def model_of(name: str) -> Having:
    """Return the model of a case, always with the same weights."""
    torch.manual_seed(0)
    function, make_layer, _ = CASES[name]

    def forward(m: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = function(m, m.layer(x))
        return out, poptorch.identity_loss(out.square(), "mean") if m.training else out.mean()

    layer = make_layer() if make_layer else None
    model = Having(forward, layer=nn.Linear(WIDTH, WIDTH), norm=layer)
    for buffer in ("mean", "slow") if make_layer is None else ():
        model.register_buffer(buffer, torch.rand(WIDTH))
    model.register_buffer("count", torch.zeros((), dtype=torch.int64))
    model.share = 0.4  # of the other momentum
    if name == "in one memory":
        model.norm.weight.data = model.layer.weight.data
    return model

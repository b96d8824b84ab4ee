"""A grammar of layers that keep, tie, hook or overwrite something, (rows, 4) -> (rows, 4)."""

import functools
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from helpers.wrapping import Having

WIDTH, TOKENS, EPS = 4, 7, 0.05  # of norms: what divides by nothing shows rounding only
Draw = random.Random


def linear(draw: Draw) -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.8)
    if draw.random() < 0.2:
        layer.weight.requires_grad_(False)
    return layer


def batch_norm(draw: Draw) -> nn.BatchNorm1d:
    momentum = draw.choice([0.1, 0.4, 0.0, 1.0, None])
    norm = nn.BatchNorm1d(WIDTH, EPS, momentum, draw.random() < 0.8, draw.random() < 0.8)
    if draw.random() < 0.2:
        norm.eval()
    if norm.affine and draw.random() < 0.2:
        norm.bias.requires_grad_(False)
    return norm


def other_norm(draw: Draw) -> nn.Module:
    return draw.choice(
        [
            lambda: nn.GroupNorm(draw.choice([1, 2, 4]), WIDTH, EPS),
            lambda: nn.LayerNorm(WIDTH, EPS, bias=draw.random() < 0.5),
            lambda: nn.RMSNorm(WIDTH, EPS),
            lambda: Having(
                lambda m, x: m.norm(x.unflatten(1, (2, 2))).flatten(1),
                norm=nn.InstanceNorm1d(2, EPS, 0.3, draw.random() < 0.5, draw.random() < 0.5),
            ),
        ]
    )()


def other_momentum(m: Any, x: torch.Tensor) -> torch.Tensor:
    statistics = m.norm.running_mean, m.norm.running_var
    return F.batch_norm(x, *statistics, m.norm.weight, m.norm.bias, True, m.share, EPS)


def evaluated(m: Any, x: torch.Tensor) -> torch.Tensor:
    first, mode = m.norm(x), m.norm.training
    second = m.norm.eval()(first)
    m.norm.train(mode)
    return second


def untracked(m: Any, x: torch.Tensor) -> torch.Tensor:
    first, tracks = m.norm(x), m.norm.track_running_stats
    m.norm.track_running_stats = False
    second = m.norm(first * 2)
    m.norm.track_running_stats = tracks
    return second


NESTED = [
    lambda m, x: torch.cat([m.norm(part) for part in x.chunk(2)]),
    lambda m, x: m.norm(m.norm(x) + x),
    lambda m, x: m.norm.forward(x),
    evaluated,
    untracked,
]
READING = [  # what the norm keeps
    other_momentum,
    lambda m, x: m.norm(x) + m.norm.running_mean.clone(),
    lambda m, x: m.norm(x * m.norm.running_var.clone()),
    lambda m, x: m.norm(x) / (1 + m.norm.num_batches_tracked),
]


def nested_norm(draw: Draw) -> nn.Module:
    if draw.random() < 0.6:
        return Having(draw.choice(NESTED), norm=batch_norm(draw))
    norm = nn.BatchNorm1d(WIDTH, EPS, draw.choice([0.1, None]))
    return Having(draw.choice(READING), norm=norm, share=draw.choice([0.3, 0.0, 1.0]))


def smoothed(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.mean.mul_(m.share).add_(x.detach().mean(0), alpha=1 - m.share)
    return x - m.mean.clone()


def updates_mean(m: Any, x: torch.Tensor) -> torch.Tensor:
    out = x + 0.1 * m.mean.clone()
    with torch.no_grad():
        m.mean.lerp_(x.mean(0), m.share)
    return out


def counted(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.count += 1
    m.mean += (x.detach().mean(0) - m.mean) / m.count
    return torch.where(m.count > 2, x * 0.5, x + m.mean.clone())


def largest(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.mean.copy_(torch.maximum(m.mean, x.detach().amax(0)))
    return x / (1 + m.mean.abs())


def queued(m: Any, x: torch.Tensor) -> torch.Tensor:
    out = x + m.queue.clone().mean(0)
    m.queue.index_copy_(0, m.count.remainder(3).reshape(1), x.detach().mean(0, keepdim=True))
    m.count += 1
    return out


def shifted(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.queue.copy_(torch.cat([x.detach()[:1], m.queue[:-1]]))
    return x * m.queue.clone().sum(0).sigmoid()


def updates_target_network(m: Any, x: torch.Tensor) -> torch.Tensor:
    """A target network that follows a layer."""
    with torch.no_grad():
        m.slow.mul_(m.share).add_(m.layer.weight, alpha=1 - m.share)
    return m.layer(x) + 0.1 * F.linear(x, m.slow.clone())


def buffers(draw: Draw) -> nn.Module:
    return Having(
        draw.choice(
            [smoothed, updates_mean, counted, largest, queued, shifted, updates_target_network]
        ),
        share=draw.choice([0.9, 0.5]),
        count=torch.tensor(0),
        mean=torch.rand(WIDTH),
        queue=torch.rand(3, WIDTH),
        slow=torch.rand(WIDTH, WIDTH),
        layer=nn.Linear(WIDTH, WIDTH),
    )


def parametrized(draw: Draw) -> nn.Module:
    make = draw.choice([parametrizations.spectral_norm, parametrizations.weight_norm])
    return make(nn.Linear(WIDTH, WIDTH))


def hooked(draw: Draw) -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH) if draw.random() < 0.6 else nn.BatchNorm1d(WIDTH, EPS)
    for hook in draw.sample(HOOKS, draw.choice([1, 2])):
        hook(layer)
    return layer


double = functools.partial(torch.mul, other=2)
HOOKS = [
    lambda layer: layer.register_forward_hook(lambda m, args, out: out * 0.5),
    lambda layer: layer.register_forward_pre_hook(lambda m, args: (args[0].tanh(),)),
    lambda layer: layer.register_full_backward_hook(lambda m, given, made: (given[0] * 0.5,)),
    lambda layer: layer.register_full_backward_pre_hook(lambda m, made: (made[0].flip(0) * 2,)),
    lambda layer: layer.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01)),
    lambda layer: layer.bias.register_hook(lambda gradient: gradient.flip(0)),
    lambda layer: layer.register_forward_hook(lambda m, a, out: out.register_hook(double) and None),
]


def tied(draw: Draw) -> nn.Module:
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    way = draw.randrange(4)
    if way == 0:
        second.weight = first.weight
    elif way == 1:
        second = first
    elif way == 2:
        return Having(lambda m, x: F.linear(m.first(x), m.first.weight.t()), first=first)
    else:
        second.weight.data = first.weight.data
    return Having(lambda m, x: m.second(m.first(x).tanh()), first=first, second=second)


def scattered(m: Any, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    out[:, m.places] = x * m.scale
    out[1:, 0] += x[:-1, 1]
    return out


IN_PLACE = [
    lambda m, x: (x * m.scale).relu_().add_(x),
    lambda m, x: (x * m.scale).masked_fill_(x > 0.5, 0.25),
    lambda m, x: torch.stack([*map(torch.Tensor.sin_, (x * m.scale).unbind(1))], 1),
    lambda m, x: (x * m.scale).index_add_(0, m.places, x),
    lambda m, x: F.dropout(F.relu(x * m.scale, inplace=True), 0.0, inplace=True) + x,
    lambda m, x: x.clone().t().mul_(2).t() * m.scale,
    lambda m, x: torch.baddbmm(x[None], x[None], m.scale.diag()[None])[0].clamp_(-2, 2),
    scattered,
]


def in_place(draw: Draw) -> nn.Module:
    state = {"scale": nn.Parameter(torch.rand(WIDTH)), "places": torch.randperm(WIDTH)}
    return Having(draw.choice(IN_PLACE), **state)


def cast(draw: Draw) -> nn.Module:
    def forward(m: Having, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            out = m.layer(x)
        return out.to(x.dtype)

    return Having(forward, layer=nn.Linear(WIDTH, WIDTH))


class Words(nn.Module):
    def __init__(self, draw: Draw) -> None:
        super().__init__()
        settings = draw.choice(
            [
                {},
                {"padding_idx": 1},
                {"scale_grad_by_freq": True},
                {"sparse": True},
                {"max_norm": 0.7},
            ]
        )
        bag = draw.random() < 0.3 and "padding_idx" not in settings
        self.table = (nn.EmbeddingBag if bag else nn.Embedding)(TOKENS, WIDTH, **settings)
        if settings.get("sparse") or "max_norm" in settings:
            self.table.weight.data.mul_(0.5)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        found = self.table(tokens)
        return x + (found if found.dim() == 2 else found.mean(1))


def convolution(draw: Draw) -> nn.Module:
    kind = draw.choice([nn.Conv1d, nn.ConvTranspose1d])
    layer = kind(2, 2, 3, padding=1, groups=draw.choice([1, 2]), bias=draw.random() < 0.7)
    norm = nn.BatchNorm1d(2, EPS) if draw.random() < 0.3 else nn.Identity()
    both = {"layer": layer, "norm": norm}
    return Having(lambda m, x: m.norm(m.layer(torch.stack([x, x.flip(0)], 1))).sum(1), **both)


def recurrent(draw: Draw) -> nn.Module:
    kind = draw.choice([nn.LSTM, nn.GRU, nn.RNN])
    layer = kind(2, WIDTH, batch_first=True, bidirectional=draw.random() < 0.3)
    return Having(lambda m, x: m.layer(x.unflatten(1, (2, 2)))[0][:, -1, :WIDTH], layer=layer)


def attention(draw: Draw) -> nn.Module:
    layer = nn.MultiheadAttention(2, 1, dropout=0.0, batch_first=True)

    def forward(m: Having, x: torch.Tensor) -> Any:
        parts = x.unflatten(1, (2, 2))
        return m.layer(parts, parts, parts, need_weights=m.shown)[0].flatten(1)

    return Having(forward, layer=layer, shown=draw.random() < 0.5)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return -gradient * x.cos()


def backward_by_hand(draw: Draw) -> nn.Module:
    function = draw.choice(
        [
            lambda m, x: Reversed.apply(m.layer(x)),
            lambda m, x: checkpoint(lambda y: m.layer(y).tanh(), x, use_reentrant=False),
            lambda m, x: x + (m.layer(x).round() - m.layer(x)).detach() + m.layer(x),
        ]
    )
    return Having(function, layer=nn.Linear(WIDTH, WIDTH))


def dropped(draw: Draw) -> nn.Module:
    return draw.choice([nn.Dropout(0.0), nn.Dropout(0.5).eval(), nn.AlphaDropout(0.0)])


def wrong(draw: Draw) -> nn.Module:
    """A model that eager PyTorch refuses."""
    function = draw.choice(
        [
            lambda m, x: m.scale.mul_(2) * x,
            lambda m, x: (lambda out: out * out.add_(1).exp() * out.mul_(2))((x * m.scale).exp()),
            lambda m, x: m.scale.view(-1).add_(x[0]),
            lambda m, x: F.one_hot((x.argmax(1) + 2).clamp(max=5), 3) @ m.scale[:3, None] * x,
        ]
    )
    return Having(function, scale=nn.Parameter(torch.rand(WIDTH)))


PARTS = {
    each.__name__: each
    for each in (
        linear,
        batch_norm,
        other_norm,
        nested_norm,
        buffers,
        parametrized,
        hooked,
        tied,
        in_place,
        cast,
        Words,
        convolution,
        recurrent,
        attention,
        backward_by_hand,
        dropped,
        wrong,
    )
}
# How often it is drawn, if not once.
SHARES = {
    "wrong": 0.05,
    "cast": 0.4,
    "attention": 0.5,
    "dropped": 0.5,
    "nested_norm": 2,
    "buffers": 2,
}

"""Writes over whole tensors are made pure without a replay, and mean what they mean in torch."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from helpers.closeness import near
from helpers.wrapping import EagerPair, Having, normal
from poptorch._capture import purity


def loss_of(result: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(result, torch.ones_like(result))


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def counting(net: Having, x: torch.Tensor) -> torch.Tensor:
    """Read a buffer before, between and after writes."""
    net.count += 1
    old = net.mean + 0
    net.mean.add_(net.layer(x).detach().mean(0), alpha=0.5)
    between = net.mean * 2
    net.mean += 1
    return loss_of(net.layer(x) + old + between + net.mean + net.count)


def over_results(net: Having, x: torch.Tensor) -> torch.Tensor:
    made = net.layer(x) * 2
    same = made.detach()
    made += 1
    made.relu_()
    return loss_of(F.silu(F.hardtanh(made + same, inplace=True) * 3, inplace=True))


def norms(net: Having, x: torch.Tensor) -> torch.Tensor:
    """Write the statistics of one layer twice, and read them."""
    made = F.relu_(net.plain(net.norm(net.norm(net.layer(x)))))
    return loss_of(net.slow(made.flatten(1)) + net.norm.running_mean)


def through_a_view(net: Having, x: torch.Tensor) -> torch.Tensor:
    """Read by a view what was written after the view was made."""
    view = net.mean.view(2, 2)
    net.mean += 1
    return loss_of(net.layer(x) + view.flatten() + net.mean[:1])


def over_a_turned_view(net: Having, x: torch.Tensor) -> torch.Tensor:
    """Write all of a tensor through a view of it, and read it in both ways."""
    made = net.layer(x) * 2
    turned = made.detach().clone().t()
    twice_turned = turned.t().unsqueeze(0)
    turned.div_(turned.norm()).add_(1)
    turned.t().mul_(2)
    return loss_of(made * twice_turned[0] + turned.t() + turned[:1].t())


def copied_over(net: Having, x: torch.Tensor) -> torch.Tensor:
    """Copy over a tensor of another type, and read and write the source afterwards."""
    source = net.layer(x).detach()
    made = torch.zeros_like(source, dtype=torch.float64)
    row = made[1]
    made.copy_(source)
    source.add_(1).pow_(2)
    net.mean.fill_(3).sub_(source[0])
    return loss_of(net.layer(x) + (made + row).float() + net.mean.view(2, 2).flatten())


def over_a_reshaped_view(net: Having, x: torch.Tensor) -> torch.Tensor:
    square = net.mean.view(2, 2).unsqueeze(0)
    square.add_(1)
    flat = net.mean * 2
    square.mul_(2)
    return loss_of(net.layer(x) + net.mean + flat + square.view(4))


def over_a_part(net: Having, x: torch.Tensor) -> torch.Tensor:
    net.mean[:2] += 1
    net.mean += 1
    return loss_of(net.layer(x) + net.mean)


def of_other_types(net: Having, x: torch.Tensor) -> torch.Tensor:
    net.count += torch.tensor(2, dtype=torch.int16)
    net.turned += 1
    return loss_of(net.layer(x) + net.count + net.turned[0].sum())


def state() -> dict[str, object]:
    return {
        "layer": nn.Linear(4, 4),
        "norm": nn.BatchNorm1d(4),
        "plain": nn.BatchNorm1d(4, affine=False, track_running_stats=False),
        "slow": nn.BatchNorm1d(4, momentum=None),
        "mean": torch.zeros(4),
        "count": torch.zeros((), dtype=torch.int32),
        "turned": torch.zeros(3, 4).t(),
    }


WHOLE = (
    counting,
    over_results,
    norms,
    through_a_view,
    over_a_turned_view,
    copied_over,
    over_a_reshaped_view,
    of_other_types,
)


def replays(monkeypatch: pytest.MonkeyPatch) -> list[Callable]:
    """Return a list that grows with every replay of a recorded graph."""
    seen, usual = [], purity._functionalize
    monkeypatch.setattr(purity, "_functionalize", lambda *a: seen.append(usual) or usual(*a))
    return seen


@pytest.mark.parametrize("function", [*WHOLE, over_a_part])
def test_writes_have_the_same_effect_as_in_torch(function: Callable) -> None:
    torch.manual_seed(0)
    pair = EagerPair(Having(function, **state()), sgd, **near(50, 3))

    pair.step(normal(6, 4), count=3)

    pair.compare()


@pytest.mark.parametrize("function", WHOLE)
def test_graphs_with_writes_over_whole_tensors_are_not_replayed(
    function: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = replays(monkeypatch)
    pair = EagerPair(Having(function, **state()), sgd)

    pair.wrapped.compile(normal(6, 4))

    assert seen == []


def test_graphs_with_writes_over_a_part_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = replays(monkeypatch)
    pair = EagerPair(Having(over_a_part, **state()), sgd)

    pair.wrapped.compile(normal(6, 4))

    assert len(seen) == 1


def test_gradients_that_nobody_asked_for_need_no_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = replays(monkeypatch)
    layer = nn.Conv2d(1, 2, 3)  # its input needs no gradient
    pair = EagerPair(Having(lambda net, x: loss_of(net.layer(x)), layer=layer), sgd)

    pair.wrapped.compile(normal(2, 1, 5, 5))

    assert seen == []

"""SGD against torch's own, through the Piece functions called eagerly."""

import pytest
import torch

import poptorch.optim
from poptorch._ir.slot import Kind, Slot
from poptorch._ir.spec import Reduction
from poptorch._update import Tally, accumulate, finish, lower, scale
from poptorch.enums import MeanReductionStrategy, ReductionType
from poptorch.optim.freeze import freeze


def frozen(optimizer, parameters):
    return freeze(optimizer, {p.data_ptr(): name for name, p in parameters.items()})


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    ],
)
@pytest.mark.parametrize("cls", [torch.optim.SGD, poptorch.optim.SGD])
def test_equals_torch(cls, settings):
    torch.manual_seed(0)
    params = {n: torch.nn.Parameter(torch.randn(s)) for n, s in {"a": (3, 4), "b": (5,)}.items()}
    spec, values = frozen(cls(params.values(), **settings), params)
    slots = [Slot.like(Kind.PARAM, n, p) for n, p in params.items()]
    piece = lower(spec, slots)
    state = {s.key: torch.zeros(s.shape, dtype=s.dtype) for s in piece.inputs}
    state |= {k: torch.tensor(v) for k, v in values.items()}
    state |= {f"param.{n}": p.detach().clone() for n, p in params.items()}
    reference = torch.optim.SGD(params.values(), **settings)
    for _ in range(20):
        for name, p in params.items():
            p.grad = torch.randn_like(p)
            state[f"gradient.{name}"] = p.grad.clone()
        reference.step()
        state |= piece.function(state)
    for name, p in params.items():
        torch.testing.assert_close(state[f"param.{name}"], p.detach())


@pytest.mark.parametrize("strategy", MeanReductionStrategy)
def test_accumulation_is_the_mean(strategy):
    p = torch.nn.Parameter(torch.randn(3))
    spec, _ = frozen(poptorch.optim.SGD([p], 0.1), {"p": p})
    slot, reduction = Slot(Kind.GRADIENT, "p", (3,), torch.float32), Reduction(strategy=strategy)
    tally = Tally(lanes=1, chunks=4)
    add, end = (f(spec, [slot], reduction, tally) for f in (accumulate, finish))
    gradients = torch.randn(4, 3)
    state = {"accum.p": torch.zeros(3)}
    for micro, gradient in enumerate(gradients):
        state |= {"gradient.p": gradient, "counter.micro": torch.tensor(float(micro))}
        state |= add.function(state)
    state |= end.function(state)
    torch.testing.assert_close(state["gradient.p"], gradients.mean(0))
    assert not state["accum.p"].any()


def test_nothing_to_scale():
    p = torch.nn.Parameter(torch.randn(3))
    slot = Slot(Kind.GRADIENT, "p", (3,), torch.float32)
    spec, _ = frozen(torch.optim.SGD([p], 0.1), {"p": p})
    assert scale(spec, [slot], Reduction(), Tally()) is None
    assert scale(spec, [slot], Reduction(type=ReductionType.Sum), Tally(lanes=4)) is None
    spec, values = frozen(poptorch.optim.SGD([p], 0.1, loss_scaling=8.0), {"p": p})
    piece = scale(spec, [slot], Reduction(), Tally(lanes=4))
    got = piece.function({"gradient.p": torch.ones(3), "hyper.loss_scaling": torch.tensor(8.0)})
    assert got["gradient.p"].tolist() == [1 / 32] * 3
    assert values == {"hyper.loss_scaling": 8.0, "hyper.0.lr": 0.1}

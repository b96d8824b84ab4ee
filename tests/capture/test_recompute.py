"""Recomputation: less memory, the same values."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers import placing
from helpers.memory import peak_of_call
from helpers.wrapping import graph_of, options, training

pytestmark = pytest.mark.slow

WIDTH, ROWS = 16, 512
counted: list[int] = []


def count(inputs, attributes):
    counted.append(1)
    return [inputs[0].sin()]


poptorch.register_custom_op(
    "CountedSine", "recompute", 1, count, lambda i, o, g, a: [g[0] * i[0].cos()]
)


class Deep(nn.Module):
    """A tower of layers with a checkpoint behind each if asked for."""

    def __init__(
        self,
        checkpoints: bool,
        dropout: float = 0.0,
        counting: bool = False,
        norm: bool = False,
        layers: int = 3,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.checkpoints, self.dropout, self.counting = checkpoints, dropout, counting
        self.norm = norm

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if self.counting:
                (x,) = poptorch.custom_op([x], "CountedSine", "recompute", 1, [x])
            x = x.exp().sigmoid() * 2 - 1
            x = F.dropout(x, self.dropout, training=self.dropout > 0)
            if self.norm:
                x = F.layer_norm(x, (WIDTH,))
            if self.checkpoints:
                x = poptorch.recomputationCheckpoint(x)
        return poptorch.identity_loss(x.square(), "mean")


def wrapped(model: nn.Module, kind: int, backend: str = "reference", **counts: int):
    opts = options(backend, **counts).randomSeed(1)
    opts._Popart.set("autoRecomputation", kind)
    return training(model, opts)


X = torch.randn(ROWS, WIDTH)


def test_peak_memory_falls_with_checkpoints() -> None:
    torch.manual_seed(0)
    peaks = {
        (checkpoints, kind): peak_of_call(wrapped(Deep(checkpoints, layers=12), kind), X)
        for checkpoints in (False, True)
        for kind in (0, 3)
    }
    assert peaks[True, 0] == peaks[False, 0]  # a checkpoint alone changes nothing
    assert peaks[True, 3] < peaks[True, 0] / 2


def test_one_of_several_results_can_be_a_checkpoint() -> None:
    """As what a norm returns, which is made with its mean and its deviation."""
    with_it, without = (
        peak_of_call(wrapped(Deep(checkpoints, norm=True, layers=12), 3), X)
        for checkpoints in (True, False)
    )
    assert with_it < without / 2


@pytest.mark.parametrize("backend", ["reference", "inductor"])
def test_values_stay_the_same(backend: str) -> None:
    torch.manual_seed(0)
    first = Deep(True, dropout=0.3)
    second = copy.deepcopy(first)
    plain = wrapped(first, 0)
    again = wrapped(second, 1, backend)
    for _ in range(3):
        torch.testing.assert_close(plain(X), again(X), rtol=1e-5, atol=1e-6)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "backend, kind, layers",  # each layer compiled is several libraries of 2 s
    [("reference", 0, 3), ("reference", 3, 3), ("inductor", 3, 2)],
)
def test_forward_work_is_done_again_by_compiled_code_too(
    backend: str, kind: int, layers: int
) -> None:
    model = wrapped(Deep(True, counting=True, layers=layers), kind, backend)
    model.compile(X)
    counted.clear()
    model(X)
    assert len(counted) == (layers if kind == 0 else 2 * layers)


def test_what_a_checkpoint_marks_is_not_computed_again() -> None:
    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            (x,) = poptorch.custom_op([self.layer(x)], "CountedSine", "recompute", 1, [x])
            return poptorch.identity_loss(poptorch.recomputationCheckpoint(x).exp(), "mean")

    model = wrapped(Marked(), 3)
    model.compile(X)
    counted.clear()
    model(X)
    assert len(counted) == 1


def test_random_masks_and_prints_are_not_made_twice(capfd) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            x = poptorch.ipu_print_tensor((x * self.weight).exp(), "x", False)
            return poptorch.identity_loss(F.dropout(x).sin().cos(), "sum")

    model = wrapped(Noisy(), 3)
    model(torch.ones(4))
    assert capfd.readouterr().err.count("x: ") == 1
    draws = [n for n in graph_of(model, "step").nodes if "bernoulli" in str(n.target) or
             "rand" in str(n.target)]  # fmt: skip
    assert len(draws) == 1


def test_side_by_side_micro_batches_recompute_too() -> None:
    torch.manual_seed(0)
    first = Deep(True)
    second = copy.deepcopy(first)
    losses = [wrapped(m, k, accumulation=4)(X) for m, k in ((first, 0), (second, 3))]
    torch.testing.assert_close(*losses)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b)


class Staged(Deep):
    """The tower in blocks on two chips; the last block reads a result of the first."""

    def forward(self, x):
        poptorch.Block.start("A", ipu_id=0)
        first = x = self.layers[0](x).tanh().exp()
        poptorch.Block.start("B", ipu_id=1)
        for layer in self.layers[1:3]:
            x = layer(x).tanh().exp()
        return poptorch.identity_loss((x * first.sigmoid()).sin(), "mean")


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("backend", ["reference", "staged"])
def test_blocks_on_different_chips_compute_their_own_part_again(backend: str, lanes: int) -> None:
    torch.manual_seed(0)
    eager, plans = Staged(False), []
    for kind in (0, 3):
        opts = options(backend, accumulation=3).lanes(lanes)
        opts._Popart.set("autoRecomputation", kind)
        model = copy.deepcopy(eager)
        executor = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))
        executor(X[:510])
        plans.append(executor.plan())
        expected = copy.deepcopy(eager)
        optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
        sum(expected(part) / 3 for part in X[:510].chunk(3)).backward()
        optimizer.step()
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
    homes = placing.homes(plans[1].layout)
    assert (homes["param.layers.0.weight"], homes["param.layers.1.weight"]) == ((0,), (1,))
    kept, less = (kept_bytes(plan) for plan in plans)
    assert less[0] < kept[0]
    assert less[1] < kept[1] / 2


def kept_bytes(plan) -> list[int]:
    """Bytes that wait on every stage's chip for its backward pass."""
    forward = {
        slot.key for p, g in plan.staged.graphs.items() if not p.backward for slot in g.outputs
    }
    return [
        sum(slot.bytes for slot in plan.staged.graphs[p].inputs if slot.key in forward)
        for p in sorted(plan.staged.graphs)
        if p.backward
    ][::-1]

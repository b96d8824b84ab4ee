"""State is updated as early as possible, and never before its old value was read."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.profiler import profile

import poptorch
from helpers.inductor_graphs import Tensors, check, graph
from poptorch.backends.inductor.lowering import fakes, lower
from poptorch.backends.inductor.writes import place_writes

pytestmark = pytest.mark.slow

aten = torch.ops.aten


def mlp(
    w1: torch.Tensor, w2: torch.Tensor, m1: torch.Tensor, m2: torch.Tensor, x: torch.Tensor
) -> tuple[Tensors, Tensors]:
    """A training step with momentum, every update written at the end."""
    leaves = [w.detach().requires_grad_() for w in (w1, w2)]
    loss = F.relu(x @ leaves[0].t()).mm(leaves[1].t()).square().sum()
    g1, g2 = torch.autograd.grad(loss, leaves)
    n1, n2 = m1 * 0.9 + g1, m2 * 0.9 + g2
    return [loss.detach()], [w1 - 0.01 * n1, w2 - 0.01 * n2, n1, n2]


def examples() -> Tensors:
    return [torch.randn(s) * 0.1 for s in [(6, 8), (4, 6), (6, 8), (4, 6), (5, 8)]]


def lowered(step, tensors: Tensors) -> fx.Graph:
    _, inputs = fakes(tensors)
    found = lower(graph(step, tensors), inputs, {}, {}).graph
    place_writes(found)
    return found


def test_a_weight_is_updated_before_the_next_product() -> None:
    nodes = list(lowered(mlp, examples()).nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    writes = {
        node.args[0]: at for at, node in enumerate(nodes) if node.target is aten.copy_.default
    }
    products = [at for at, node in enumerate(nodes) if node.target is aten.mm.default]
    assert len(products) == 5  # the last one is the gradient of the first weight
    w1, w2, m1, m2, _ = inputs
    assert max(writes[w2], writes[m2]) < products[-1] < min(writes[w1], writes[m1])


def test_it_computes_the_same() -> None:
    check(mlp, examples())


def peak(step: Callable[[], object], trace: Path) -> int:
    """Return the most bytes of tensors that a step has at once, beside what it found."""
    step()
    with profile(profile_memory=True) as profiler:
        step()
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    return max(itertools.accumulate(bytes_ for _, bytes_ in changes))


def test_activations_go_when_the_backward_pass_has_used_them(tmp_path: Path) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64, False) for _ in range(8))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out = x
            for layer in self.layers:
                out = layer(out).tanh()
            return out, F.mse_loss(out, x)

    net, x = Net(), torch.randn(512, 64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def eager() -> None:
        optimizer.zero_grad()
        net(x)[1].backward()
        optimizer.step()

    expected = peak(eager, tmp_path / "eager.json")
    options = poptorch.Options().backend("inductor")
    wrapped = poptorch.trainingModel(net, options, optimizer)
    assert peak(lambda: wrapped(x), tmp_path / "ours.json") <= expected


@pytest.mark.parametrize("through_view", [False, True])
def test_old_values_are_read_before(through_view: bool) -> None:
    """The new value is there at once; the old one is read by the last product."""

    def step(w: torch.Tensor, x: torch.Tensor) -> tuple[Tensors, Tensors]:
        old = w.t() if through_view else w
        hidden = x @ x
        for _ in range(3):
            hidden = hidden @ x
        return [hidden @ old], [w * 2.0 + 1.0]

    check(step, [torch.randn(4, 4), torch.randn(4, 4)])
    nodes = list(lowered(step, [torch.randn(4, 4), torch.randn(4, 4)]).nodes)
    targets = [node.target for node in nodes]
    last = max(i for i, target in enumerate(targets) if target is aten.mm.default)
    assert targets.index(aten.copy_.default) > last


@pytest.mark.parametrize("backend", ["reference", "inductor"])
@pytest.mark.parametrize("swapped", [False, True])
def test_values_that_change_places(backend: str, swapped: bool) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("now", torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
            self.register_buffer("before", torch.zeros(2, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            old = self.now.clone()
            self.now.copy_(self.before if swapped else self.now * 2)
            self.before.copy_(old)
            return x @ self.now - self.before

    wrapped = poptorch.inferenceModel(Model(), poptorch.Options().backend(backend))
    eager = Model()
    for _ in range(3):
        x = torch.randn(2, 2)
        torch.testing.assert_close(wrapped(x), eager(x))


def test_graphs_without_products_or_writes() -> None:
    for step in (lambda a: ([a + 1], [a * 2]), lambda a: ([a @ a], []), lambda a: ([], [a + 1])):
        found = lowered(step, [torch.randn(3, 3)])
        before = [node.target for node in found.nodes]
        place_writes(found)
        assert [node.target for node in found.nodes] == before

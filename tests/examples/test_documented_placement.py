"""The examples of PopTorch's guide to parallel execution run as placed and equal eager torch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.wrapped import options
from poptorch import AutoStage, ParallelPhasedExecution, Phase, SerialPhasedExecution, Stage

X, Y = torch.randn(24, 8), torch.randint(0, 4, (24,))
ACCUMULATION = 6


def trained(model: nn.Module, x: torch.Tensor, y: torch.Tensor, strategy=None, count=ACCUMULATION):
    """One update of a model and of its eager twin; return the executor after comparing both."""
    eager = copy.deepcopy(model)
    opts = options(accumulation=count).backend("staged").outputMode(poptorch.OutputMode.All)
    if strategy is not None:
        opts.setExecutionStrategy(strategy)
    executor = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))
    results = executor(x, y)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    parts = [eager(*part) for part in zip(x.chunk(count), y.chunk(count), strict=True)]
    (sum(loss for _, loss in parts) / count).backward()
    optimizer.step()
    torch.testing.assert_close(results[0], torch.cat([out for out, _ in parts]))
    torch.testing.assert_close(results[1], torch.stack([loss for _, loss in parts]))
    for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    return executor


def chips(executor: poptorch.PoplarExecutor) -> list[tuple[int | None, int, tuple[str, ...]]]:
    return [(s.phase, s.chip, s.blocks) for s in executor.plan().layout.stages]


class Encoder(nn.Module):
    """The shape of the guide's example: embeddings, a stack of layers, a classifier, a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Linear(8, 8)
        self.layer = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.classifier = nn.Linear(8, 4)

    def forward(self, x, labels=None):
        x = self.embeddings(x)
        for layer in self.layer:
            x = F.gelu(layer(x))
        x = self.classifier(x)
        return x if labels is None else (x, F.cross_entropy(x, labels))


def test_annotating_existing_layers() -> None:
    model = Encoder()
    poptorch.BeginBlock(model.embeddings, "Embedding", ipu_id=0)
    model.layer[0] = poptorch.BeginBlock(model.layer[0], "first", ipu_id=1)
    model.layer[1] = poptorch.BeginBlock(model.layer[1], "second", ipu_id=2)
    model.classifier = poptorch.BeginBlock(model.classifier, "classifier", ipu_id=3)
    executor = trained(model, X, Y, count=8)
    names = ["Embedding", "first", "second", "classifier"]
    assert chips(executor)[-4:] == [(None, chip, (name,)) for chip, name in enumerate(names)]


class Inline(nn.Module):
    """Blocks inside ``forward``, on the devices that the test gives."""

    def __init__(self, *devices: int) -> None:
        super().__init__()
        self.devices = devices
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in devices)

    def forward(self, x, labels=None):
        for number, (layer, device) in enumerate(zip(self.layers, self.devices, strict=True)):
            poptorch.Block.start(str(number), ipu_id=device)
            x = torch.tanh(layer(x))
        return x if labels is None else (x, F.cross_entropy(x, labels))


def test_the_order_of_writing_and_unused_layers_do_not_matter() -> None:
    """As docs/differences.md has it; the guide makes both a rule."""

    class Unused(Encoder):
        def forward(self, x, labels=None):
            self.dead(x)
            return super().forward(x, labels)

    model = Unused()
    model.dead = poptorch.BeginBlock(nn.Linear(8, 8), "dead", ipu_id=0)
    model.classifier = poptorch.BeginBlock(model.classifier, "late", ipu_id=1)
    poptorch.BeginBlock(model.embeddings, "early", ipu_id=0)
    model.never = poptorch.BeginBlock(nn.Linear(8, 8), "never", ipu_id=3)
    executor = trained(model, X, Y)
    assert [chip for _, chip, _ in chips(executor)] == [0, 1]


def test_stages_on_devices_0_1_0() -> None:
    same, increment = (
        poptorch.PipelinedExecution(auto) for auto in (AutoStage.SameAsIpu, AutoStage.AutoIncrement)
    )
    with pytest.raises(poptorch.Error, match="Stage ids must ascend along the data flow"):
        trained(Inline(0, 1, 0), X, Y, same)
    executor = trained(Inline(0, 1, 0), X, Y, increment)
    assert [chip for _, chip, _ in chips(executor)] == [0, 1, 0]


class Parallel(nn.Module):
    """Two layers side by side in every round."""

    def __init__(self, names: list[tuple[str, str]]) -> None:
        super().__init__()
        self.names = names
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2 * len(names)))

    def forward(self, x, labels=None):
        left = right = x
        layers = iter(self.layers)
        for first, second in self.names:
            with poptorch.Block(first):
                left = torch.tanh(next(layers)(left))
            with poptorch.Block(second):
                right = torch.tanh(next(layers)(right))
        with poptorch.Block(self.names[-1][1]):
            out = left + right
            return out if labels is None else (out, F.cross_entropy(out, labels))


def test_stages_of_a_phase_run_side_by_side_or_one_after_the_other() -> None:
    names = [("A", "B")]
    apart = SerialPhasedExecution(Phase(Stage("A").ipu(0), Stage("B").ipu(1)))
    together = SerialPhasedExecution(Phase(Stage("A", "B")))
    assert chips(trained(Parallel(names), X, Y, apart))[:2] == [(0, 0, ("A",)), (0, 1, ("B",))]
    assert chips(trained(Parallel(names), X, Y, together)) == [(0, 0, ("A", "B"))]


@pytest.mark.parametrize("kind", [SerialPhasedExecution, ParallelPhasedExecution])
def test_phases_that_alternate_between_groups(kind) -> None:
    strategy = kind(
        [
            Phase(Stage("0"), Stage("1")),
            Phase(Stage("2"), Stage("3")),
            Phase(Stage("4"), Stage("5")),
        ]
    )
    strategy.phase(0).ipus(0, 2)
    strategy.phase(1).ipus(1, 3)
    strategy.phase(2).ipus(0, 2)
    executor = trained(Parallel([("0", "1"), ("2", "3"), ("4", "5")]), X, Y, strategy)
    placed = {(phase, chip) for phase, chip, _ in chips(executor)}
    assert placed == {(0, 0), (0, 2), (1, 1), (1, 3), (2, 0), (2, 2)}

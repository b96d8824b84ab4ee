"""Forms of the first release and of phased execution that PopTorch's guide shows, beside torch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.wrapping import options, trains_alike
from poptorch import ParallelPhasedExecution, Phase, SerialPhasedExecution, Stage

X, Y = torch.randn(24, 8), torch.randint(0, 4, (24,))
ALTERNATING = {(0, 0), (0, 2), (1, 1), (1, 3), (2, 0), (2, 2)}
APART = SerialPhasedExecution(Phase(Stage("0").ipu(0), Stage("1").ipu(1)))
TOGETHER = SerialPhasedExecution(Phase(Stage("0", "1")))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_training_model_of_the_first_release(replicas: int, monkeypatch) -> None:
    monkeypatch.setenv("POPTORCH_BACKEND", "reference")
    model = nn.Linear(8, 4)
    eager = copy.deepcopy(model)
    arguments = (4 // replicas, replicas, False, True, nn.CrossEntropyLoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    output, loss = poptorch.trainingModel(model, 2, *arguments, optimizer)(X, Y)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    for x, y in zip(X.chunk(2), Y.chunk(2), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(eager(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    assert output.shape == (3 * replicas, 4)  # the last micro-batch of each replica
    assert loss.numel() == replicas
    wrapped = poptorch.inferenceModel(model, device_iterations=2, replication_factor=2)
    torch.testing.assert_close(wrapped(X), eager(X))


class Parallel(nn.Module):
    """Two layers side by side in every round."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2 * rounds))

    def forward(self, x, labels):
        left = right = x
        for number, layer in enumerate(self.layers):
            with poptorch.Block(str(number)):
                if number % 2:
                    right = torch.tanh(layer(right))
                else:
                    left = torch.tanh(layer(left))
        with poptorch.Block(str(number)):
            out = left + right
            return out, F.cross_entropy(out, labels)


def alternating(kind) -> poptorch.SerialPhasedExecution:
    strategy = kind([Phase(Stage(str(at)), Stage(str(at + 1))) for at in (0, 2, 4)])
    for phase, ipus in enumerate([(0, 2), (1, 3), (0, 2)]):
        strategy.phase(phase).ipus(*ipus)
    return strategy


@pytest.mark.parametrize("rounds, strategy, placed", [
    (1, APART, {(0, 0), (0, 1)}), (1, TOGETHER, {(0, 0)}),
    (3, alternating(SerialPhasedExecution), ALTERNATING),
    (3, alternating(ParallelPhasedExecution), ALTERNATING),
])  # fmt: skip
def test_phases_train_as_placed_and_as_eager_torch_does(rounds: int, strategy, placed) -> None:
    opts = options().backend("staged").setExecutionStrategy(strategy)
    executor = trains_alike(Parallel(rounds), X, Y, opts=opts, accumulation=6, steps=1)
    assert {(stage.phase, stage.chip) for stage in executor.plan().layout.stages} == placed

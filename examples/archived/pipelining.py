"""Show the tutorial about pipelining: the same network sharded, pipelined, and with tensors off the
chip.

python examples/archived/pipelining.py
"""

import copy

import torch
from torch import nn

import poptorch

ACCUMULATION = 8


class Network(nn.Module):
    """Four stages, which are marked where they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Conv2d(4, 8, 3), nn.MaxPool2d(2), nn.ReLU())
        self.layer3, self.layer4 = nn.Linear(32, 16), nn.Linear(16, 10)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, labels=None):
        with poptorch.Block("B1"):
            x = self.layer1(x)
        with poptorch.Block("B2"):
            x = self.layer2(x).flatten(1)
        with poptorch.Block("B3"):
            x = self.layer3(x).relu()
        with poptorch.Block("B4"):
            x = self.layer4(x)
            return x if labels is None else (x, self.loss(x, labels))


def options_for(strategy) -> poptorch.Options:
    """Return the tutorial's settings."""
    stages = [poptorch.Stage(f"B{at + 1}").ipu(at) for at in range(4)]
    options = poptorch.Options().deviceIterations(2)
    options.Training.gradientAccumulation(ACCUMULATION)
    options.setExecutionStrategy(strategy(*stages))
    off_chip = poptorch.TensorLocationSettings().useOnChipStorage(False)
    options.TensorLocations.setActivationLocation(off_chip)
    options.TensorLocations.setWeightLocation(off_chip)
    options.TensorLocations.setAccumulatorLocation(off_chip)
    options.TensorLocations.setOptimizerLocation(off_chip)
    options._Popart.set("autoRecomputation", 3)
    return options


def train(model: nn.Module, options: poptorch.Options, data) -> list[float]:
    loader = poptorch.DataLoader(options, data, batch_size=4)
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.01)
    training_model = poptorch.trainingModel(model, options, optimizer)
    losses = [training_model(*batch)[1].item() for batch in loader]
    training_model.detachFromDevice()
    return losses


def main() -> None:
    poptorch.setLogLevel("ERR")
    torch.manual_seed(0)
    images = torch.rand(512, 1, 14, 14)
    data = torch.utils.data.TensorDataset(images, (images.mean((1, 2, 3)) > 0.5).long())
    model = Network()
    other, plain = copy.deepcopy(model), copy.deepcopy(model)
    pipelined = train(model, options_for(poptorch.PipelinedExecution), data)
    sharded = train(other, options_for(poptorch.ShardedExecution), data)
    assert pipelined == sharded

    own = options_for(poptorch.PipelinedExecution).clone()
    own.Training.gradientAccumulation(1)
    inference_model = poptorch.inferenceModel(model.eval(), own.deviceIterations(4))
    torch.testing.assert_close(inference_model(images[:16]), model(images[:16]).detach())
    with torch.no_grad():
        print(f"loss {plain(*data.tensors)[1]:.4f} before, {model(*data.tensors)[1]:.4f} after")


if __name__ == "__main__":
    main()

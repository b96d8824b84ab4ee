"""Show the simple MNIST application and the basics tutorial: train, evaluate, use the weights in
torch.

python examples/archived/mnist.py
"""

import sys
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

import poptorch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "fashion_mnist"))
from data import SUBSET, load


class Block(nn.Module):
    """A convolution and a pooling layer."""

    def __init__(self, channels: int, filters: int, size: int, pool: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, filters, kernel_size=size)
        self.pool = nn.MaxPool2d(kernel_size=pool)
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.relu(self.pool(self.conv(x)))


class Network(nn.Module):
    """Two blocks, two linear layers and a dropout layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1, self.layer2 = Block(1, 16, 3, 2), Block(16, 32, 3, 2)
        self.layer3, self.layer4 = nn.Linear(800, 64), nn.Linear(64, 10)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        x = self.layer2(self.layer1(x)).flatten(1)
        return self.layer4(self.dropout(self.layer3(x).relu()))


class TrainingModelWithLoss(nn.Module):
    """The network, returning the scores and the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loss = nn.CrossEntropyLoss()

    def forward(self, args, loss_inputs=None):
        output = self.model(args)
        if loss_inputs is None:
            return output
        return output, self.loss(output, loss_inputs)


def main() -> None:
    torch.manual_seed(0)
    data = load(SUBSET)
    training_options = poptorch.Options().deviceIterations(10).randomSeed(0)
    inference_options = poptorch.Options().deviceIterations(5)
    training_data = poptorch.DataLoader(training_options, data.train, batch_size=8, shuffle=True)
    test_data = poptorch.DataLoader(inference_options, data.test, batch_size=20)

    model = TrainingModelWithLoss(Network())
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.05)
    training_model = poptorch.trainingModel(model, training_options, optimizer)
    losses = []
    for images, labels in tqdm(training_data, disable=True):
        _, loss = training_model(images, labels)
        losses.append(loss.item())
    rows = training_model.options.device_iterations * len(losses) * 8
    training_model.detachFromDevice()

    model.eval()
    inference_model = poptorch.inferenceModel(model.model, inference_options)
    right = seen = 0
    for images, labels in test_data:
        scores = inference_model(images)
        right += (scores.argmax(1) == labels).sum().item()
        seen += len(labels)
    inference_model.detachFromDevice()
    # plain PyTorch with the same weights
    torch.testing.assert_close(scores, model.model(images).detach())
    print(f"{rows} images, last loss {losses[-1]:.3f}, {right / seen:.0%} of {seen} are right")
    assert right / seen > 0.5


if __name__ == "__main__":
    main()

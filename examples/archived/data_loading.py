"""Show the tutorial about efficient data loading: larger calls, a loading process, replicas.

python examples/archived/data_loading.py
"""

import time

import torch
from torch import nn

import poptorch

ROWS, BATCH = 1024, 8


class ClassificationModel(nn.Module):
    """A small convolutional network that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 8, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.norm = nn.GroupNorm(2, 8)
        self.fc1, self.fc2 = nn.Linear(200, 32), nn.Linear(32, 10)
        self.loss = nn.NLLLoss()

    def forward(self, x, labels=None):
        x = self.pool(self.conv1(x).relu())
        x = self.norm(self.pool(self.conv2(x)).relu())
        x = self.fc2(self.fc1(x.flatten(1)).relu()).log_softmax(1)
        return x if labels is None else (x, self.loss(x, labels))


def train(options: poptorch.Options, mode: poptorch.DataLoaderMode) -> tuple[float, nn.Module]:
    """Train an epoch; return the rows per second of its calls after the first, and the model."""
    torch.manual_seed(0)
    model = ClassificationModel()
    images = torch.rand(ROWS, 1, 28, 28)
    data = torch.utils.data.TensorDataset(images, (images.mean((1, 2, 3)) * 10).long())
    loader = poptorch.DataLoader(
        options, data, batch_size=BATCH, mode=mode, num_workers=1 if mode.value else 0
    )
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.05)
    training_model = poptorch.trainingModel(model, options, optimizer)
    seen = begin = 0.0
    for x, labels in loader:
        training_model(x, labels)
        seen, begin = (seen + len(x), begin) if begin else (0.0, time.perf_counter())
    speed = seen / (time.perf_counter() - begin)
    loader.terminate()
    training_model.detachFromDevice()
    return speed, model


def main() -> None:
    modes = poptorch.DataLoaderMode
    settings = {
        "one iteration": (poptorch.Options(), modes.Sync),
        "eight iterations": (poptorch.Options().deviceIterations(8), modes.Sync),
        "a loading process": (poptorch.Options().deviceIterations(8), modes.Async),
        "two replicas": (poptorch.Options().deviceIterations(4).replicationFactor(2), modes.Async),
    }
    trained = {}
    for name, (options, mode) in settings.items():
        speed, trained[name] = train(options, mode)
        print(f"{name}: {speed:.0f} rows/s")
    # The batches and their order are those of the first loader, and so the weights are, too.
    expected = trained["one iteration"].state_dict()
    for name in ("eight iterations", "a loading process"):
        torch.testing.assert_close(trained[name].state_dict(), expected)


if __name__ == "__main__":
    main()

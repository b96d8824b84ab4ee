"""Show the feature example of octave convolutions: convolutions side by side, in a MultiConv.

python examples/archived/octave_convolution.py
"""

import copy

import torch
from torch import nn

import poptorch


class OctaveConv(nn.Module):
    """Convolves feature maps of high and of low resolution, and exchanges data between them."""

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        self.high_high, self.high_low = (nn.Conv2d(channels, filters, 3, padding=1) for _ in "12")
        self.low_high, self.low_low = (nn.Conv2d(channels, filters, 3, padding=1) for _ in "12")

    def forward(self, high, low):
        shrunk = nn.functional.avg_pool2d(high, 2)
        if poptorch.isRunningOnIpu():
            with poptorch.MultiConv():
                parts = self._convolved(high, shrunk, low)
        else:
            parts = self._convolved(high, shrunk, low)
        high_high, high_low, low_high, low_low = parts
        return high_high + nn.functional.interpolate(low_high, scale_factor=2.0), high_low + low_low

    def _convolved(self, high, shrunk, low):
        return self.high_high(high), self.high_low(shrunk), self.low_high(low), self.low_low(low)


class Network(nn.Module):
    """Two octave convolutions and a classifier that also returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = OctaveConv(3, 4), OctaveConv(4, 4)
        self.head = nn.Linear(8, 10)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, labels=None):
        maps = self.second(*map(torch.relu, self.first(x, nn.functional.avg_pool2d(x, 2))))
        x = self.head(torch.cat([each.mean((2, 3)) for each in maps], 1))
        return x if labels is None else (x, self.loss(x, labels))


def main() -> None:
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.rand(128, 3, 16, 16), torch.randint(10, (128,)))
    options = poptorch.Options().deviceIterations(2)
    loader = poptorch.DataLoader(options, data, batch_size=16)
    model = Network()
    plain = copy.deepcopy(model)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    training_model = poptorch.trainingModel(model, options, optimizer)
    accessor = poptorch.AsynchronousDataAccessor(loader)
    for batch in accessor:
        _, loss = training_model(*batch)
    accessor.terminate()
    training_model.copyWeightsToHost()

    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for images, labels in torch.utils.data.DataLoader(data, batch_size=16):
        optimizer.zero_grad()
        plain(images, labels)[1].backward()
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    print(f"last loss {loss.item():.4f}, and the weights are those of plain PyTorch")


if __name__ == "__main__":
    main()

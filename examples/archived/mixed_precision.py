"""Show the tutorial about half and mixed precision, with every setting that it names.

python examples/archived/mixed_precision.py
"""

import sys
from pathlib import Path

import torch
from torch import nn

import poptorch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "fashion_mnist"))
from data import SUBSET, load


class CustomModel(nn.Module):
    """Convolutions; the type can change between them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 5, stride=2)
        self.fc1, self.fc2 = nn.Linear(1152, 32), nn.Linear(32, 10)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, labels=None):
        x = self.fc2(self.fc1(self.conv(x).relu().flatten(1)).relu())
        return x if labels is None else (x, self.loss(x.float(), labels))


def train(half_weights: bool, half_data: bool, rounding: bool) -> tuple[list[float], float]:
    """Train an epoch. Return the losses and the accuracy on the test images."""
    torch.manual_seed(0)
    data = load(SUBSET)
    model = CustomModel()
    if half_weights:
        model = model.half()
    options = poptorch.Options().randomSeed(0)
    options.Precision.enableStochasticRounding(rounding)
    options.Precision.setPartialsType(torch.half if half_weights else torch.float)
    kind = torch.half if half_weights else torch.float
    optimizer = poptorch.optim.AdamW(
        model.parameters(), lr=0.002, loss_scaling=1024 if half_weights else 1, accum_type=kind
    )
    training_model = poptorch.trainingModel(model, options, optimizer)
    losses = []
    for images, labels in poptorch.DataLoader(options, data.train, batch_size=20):
        _, loss = training_model(images.half() if half_data else images, labels)
        losses.append(loss.item())
    training_model.detachFromDevice()

    options = poptorch.Options()
    inference_model = poptorch.inferenceModel(model.eval(), options)
    right = seen = 0
    for images, labels in poptorch.DataLoader(options, data.test, batch_size=20):
        scores = inference_model(images.half() if half_data else images)
        right += (scores.argmax(1) == labels).sum().item()
        seen += len(labels)
    return losses, right / seen


def main() -> None:
    expected = {
        "float32": (False, False, False),
        "half data": (False, True, False),
        "half": (True, True, True),
    }
    results = {name: train(*settings) for name, settings in expected.items()}
    for name, (losses, share) in results.items():
        print(f"{name}: loss {losses[0]:.3f} to {losses[-1]:.3f}, {share:.0%} are right")
        assert share > 0.5
        assert abs(losses[0] - results["float32"][0][0]) < 0.01


if __name__ == "__main__":
    main()

"""Train on FashionMNIST in plain PyTorch. poptorch_ipu.py is the same program in PopTorch."""

import argparse
from collections.abc import Iterator

import torch
from torch import nn

from common import TEST_BATCH, Result, dataset, finished, parser
from data import FashionMNIST


class ClassificationModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 5, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(5, 12, 5)
        self.norm = nn.GroupNorm(3, 12)
        self.fc1 = nn.Linear(972, 100)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(100, 10)
        self.log_softmax = nn.LogSoftmax(dim=1)

    def forward(self, x):
        x = self.pool(self.relu(self.conv1(x)))
        x = self.norm(self.relu(self.conv2(x)))
        x = torch.flatten(x, start_dim=1)
        x = self.relu(self.fc1(x))
        return self.log_softmax(self.fc2(x))


def epochs(args: argparse.Namespace, data: FashionMNIST) -> Iterator[Result]:
    """Train as the options say. Yield the result after each epoch, and after evaluation."""
    torch.manual_seed(args.seed)
    order = torch.Generator().manual_seed(args.seed)
    device = torch.device("cpu")

    train_loader = torch.utils.data.DataLoader(
        data.train, batch_size=args.batch_size, shuffle=True, drop_last=True, generator=order
    )
    test_loader = torch.utils.data.DataLoader(data.test, batch_size=TEST_BATCH)

    model = ClassificationModel()
    criterion = nn.NLLLoss()
    model.train()
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)

    result = Result("native PyTorch")
    for _ in range(args.epochs):
        for images, labels in result.epoch(train_loader, args.passes):
            images = images.to(device)
            labels = labels.to(device)
            optimizer.zero_grad()
            output = model(images)
            loss = criterion(output, labels)
            loss.backward()
            optimizer.step()
            result.step(loss)
        yield result

    model.eval()
    correct = total = 0
    with torch.no_grad():
        for images, labels in test_loader:
            output = model(images.to(device))
            correct += (output.argmax(dim=1) == labels.to(device)).sum().item()
            total += len(labels)
    yield result.finish(correct, total)


if __name__ == "__main__":
    arguments = parser(__doc__).parse_args()
    finished(epochs(arguments, dataset(arguments)))

"""Train on FashionMNIST in PopTorch. native.py is the same program in plain PyTorch."""

import argparse
from collections.abc import Iterator

import torch
from torch import nn

import poptorch
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


class ModelWithLoss(nn.Module):
    def __init__(self, model, criterion):
        super().__init__()
        self.model = model
        self.criterion = criterion

    def forward(self, x, labels=None):
        output = self.model(x)
        if labels is not None:
            return output, self.criterion(output, labels)
        return output


def epochs(args: argparse.Namespace, data: FashionMNIST) -> Iterator[Result]:
    """Train as the options say. Yield the result after each epoch, and after evaluation."""
    torch.manual_seed(args.seed)
    order = torch.Generator().manual_seed(args.seed)
    options = poptorch.Options()

    train_loader = poptorch.DataLoader(
        options, data.train, batch_size=args.batch_size, shuffle=True, generator=order
    )
    test_loader = poptorch.DataLoader(options, data.test, batch_size=TEST_BATCH)

    model = ModelWithLoss(ClassificationModel(), nn.NLLLoss())
    model.train()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    training_model = poptorch.trainingModel(model, options, optimizer)
    # Optional. Otherwise the interpreter runs the first calls while the model is compiled.
    images = torch.zeros(args.batch_size, 1, 28, 28)
    training_model.compile(images, torch.zeros(args.batch_size, dtype=torch.int64))

    result = Result("poptorch")
    for _ in range(args.epochs):
        for images, labels in result.epoch(train_loader, args.passes):
            output, loss = training_model(images, labels)
            result.step(loss)
        yield result

    model.eval()
    inference_model = poptorch.inferenceModel(model, options)
    correct = total = 0
    for images, labels in test_loader:
        output = inference_model(images)
        correct += (output.argmax(dim=1) == labels).sum().item()
        total += len(labels)
    result.tier = training_model.plan().tier
    compiling = training_model.compilationTime() + inference_model.compilationTime()
    yield result.finish(correct, total, compiling.total_seconds())


if __name__ == "__main__":
    arguments = parser(__doc__).parse_args()
    finished(epochs(arguments, dataset(arguments)))

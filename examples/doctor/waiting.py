"""Show a training program with a slow data set.

``poptorch doctor examples/doctor/waiting.py`` says how much this limits the run.
"""

import time

import torch

import poptorch


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        time.sleep(0.002)  # for example reading from a disk and decoding
        return torch.randn(8), index % 2


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)
        self.loss = torch.nn.CrossEntropyLoss()

    def forward(self, x, labels):
        return self.loss(self.layer(x), labels)


if __name__ == "__main__":
    options = poptorch.Options().backend("reference")
    model = Classifier()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    trainer = poptorch.trainingModel(model, options, optimizer)
    for x, labels in poptorch.DataLoader(options, Slow(), batch_size=16):
        trainer(x, labels)

"""Show the tutorial about observing tensors: printed ones, anchored ones, gradients by name.

python examples/archived/observing.py
"""

import copy

import torch
from torch import nn

import poptorch


class Model(nn.Module):
    """Two layers. The result of the first one is printed when it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 4), nn.Linear(4, 2)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, labels):
        x = self.fc1(x).relu()
        if poptorch.isRunningOnIpu():
            x = poptorch.ipu_print_tensor(x, "hidden")
        x = self.fc2(x)
        return x, self.loss(x, labels)


def main() -> None:
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    options = poptorch.Options()
    options.Training.gradientAccumulation(2)
    options.anchorTensor("grad_bias", "Gradient___fc2.bias")
    options.anchorTensor("all_grads", "Gradient___fc2.bias", output_mode=poptorch.OutputMode.All)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    training_model = poptorch.trainingModel(model, options, optimizer)

    x, labels = torch.randn(8, 6), torch.randint(2, (8,))
    training_model(x, labels)
    names = training_model.getTensorNames()
    print([name for name in names if name.startswith("Gradient___")])
    each = training_model.getAnchoredTensor("all_grads")
    print("gradients of the bias, micro-batch by micro-batch:", each)
    expected = [
        torch.autograd.grad(plain(*rows)[1], plain.fc2.bias)[0]
        for rows in zip(x.chunk(2), labels.chunk(2), strict=True)
    ]
    torch.testing.assert_close(each, torch.cat(expected))
    torch.testing.assert_close(training_model.getAnchoredTensor("grad_bias"), expected[-1])
    assert {"fc1.weight", "Gradient___fc2.bias"} <= set(names)


if __name__ == "__main__":
    main()

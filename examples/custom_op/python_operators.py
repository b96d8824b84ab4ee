"""Write operators in Python, with ``poptorch.register_custom_op`` and with ``torch.library``.

Run it with ``python examples/custom_op/python_operators.py``.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import poptorch


# The short way: two functions of lists of tensors. They may use NumPy or any other library.
def cube_forward(inputs, attributes):
    """Return x to the power of three."""
    return [torch.from_numpy(np.power(inputs[0].numpy(), 3))]


def cube_backward(inputs, outputs, output_gradients, attributes):
    """Return the gradient of each input."""
    return [3 * inputs[0] ** 2 * output_gradients[0]]


poptorch.register_custom_op("Cube", "my.python", 1, cube_forward, cube_backward)


# The way of torch's own libraries. This operator also works outside of poptorch, for example under
# torch.compile and torch.export. poptorch finds it by its domain, in which dots are underscores.
@torch.library.custom_op("my_python::LeakyRelu", mutates_args=())
def leaky_relu(x: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return x if it is positive, and alpha * x otherwise."""
    return torch.where(x > 0, x, alpha * x)


@leaky_relu.register_fake
def _(x, alpha):
    return torch.empty_like(x)


def _save(ctx, inputs, output):
    x, ctx.alpha = inputs
    ctx.save_for_backward(x)


def _gradient(ctx, gradient):
    (x,) = ctx.saved_tensors
    return torch.where(x > 0, gradient, ctx.alpha * gradient), None


leaky_relu.register_autograd(_gradient, setup_context=_save)


class Model(nn.Module):
    """A layer, then both operators."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x, target):
        x = self.layer(x)
        (x,) = poptorch.custom_op(
            [x], "LeakyRelu", "my.python", 1, example_outputs=[x], attributes={"alpha": 0.02}
        )
        (x,) = poptorch.custom_op([x], "Cube", "my.python", 1, example_outputs=[x])
        return x, nn.functional.mse_loss(x, target)


def main() -> None:
    """Train for a few steps and print the losses."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    training = poptorch.trainingModel(model, poptorch.Options(), optimizer)
    x, target = torch.randn(32, 8), torch.randn(32, 4)
    for step in range(5):
        _, loss = training(x, target)
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()

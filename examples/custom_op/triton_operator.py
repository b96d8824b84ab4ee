"""Write an operator in Triton, for GPUs. On other devices, plain torch replaces the kernel.

Run it with ``python examples/custom_op/triton_operator.py``. The kernel needs a GPU and the package
``triton``, which torch's CUDA builds install.
"""

from __future__ import annotations

import torch
from torch import nn

import poptorch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

BLOCK = 1024

if triton is not None:

    @triton.jit
    def cube_kernel(x, out, count, block: tl.constexpr):
        """Cube ``block`` elements."""
        at = tl.program_id(0) * block + tl.arange(0, block)
        inside = at < count
        value = tl.load(x + at, mask=inside)
        tl.store(out + at, value * value * value, mask=inside)

    @triton.jit
    def cube_grad_kernel(x, gradient, out, count, block: tl.constexpr):
        """Multiply ``block`` gradients by ``3 * x * x``."""
        at = tl.program_id(0) * block + tl.arange(0, block)
        inside = at < count
        value = tl.load(x + at, mask=inside)
        incoming = tl.load(gradient + at, mask=inside)
        tl.store(out + at, 3 * value * value * incoming, mask=inside)


def launch(kernel, *tensors: torch.Tensor) -> torch.Tensor:
    """Run a kernel on tensors of the same shape, and return its result."""
    tensors = tuple(tensor.contiguous() for tensor in tensors)
    out = torch.empty_like(tensors[0])
    kernel[(triton.cdiv(out.numel(), BLOCK),)](*tensors, out, out.numel(), block=BLOCK)
    return out


@torch.library.custom_op("my_triton::Cube", mutates_args=(), device_types="cpu")
def cube(x: torch.Tensor) -> torch.Tensor:
    """Return x to the power of three."""
    return x * x * x


@torch.library.custom_op("my_triton::CubeGrad", mutates_args=(), device_types="cpu")
def cube_grad(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of Cube's input."""
    return 3 * x * x * gradient


@cube.register_kernel("cuda")
def cube_on_gpu(x):
    """Launch the kernel."""
    return launch(cube_kernel, x)


@cube_grad.register_kernel("cuda")
def cube_grad_on_gpu(x, gradient):
    """Launch the kernel of the gradient."""
    return launch(cube_grad_kernel, x, gradient)


cube.register_fake(torch.empty_like)
cube_grad.register_fake(lambda x, gradient: torch.empty_like(x))
cube.register_autograd(
    lambda ctx, gradient: torch.ops.my_triton.CubeGrad(*ctx.saved_tensors, gradient),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Model(nn.Module):
    """A layer, then the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x, target):
        x = self.layer(x)
        (x,) = poptorch.custom_op([x], "Cube", "my.triton", 1, example_outputs=[x])
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

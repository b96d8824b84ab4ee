"""Compile operators written in C++, load them, and train with them.

Run it with ``python examples/custom_op/cpp_operators.py``; it needs a C++ compiler.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils import cpp_extension

import poptorch

SOURCE = Path(__file__).with_name("operators.cpp")


def build(folder: str | Path) -> Path:
    """Compile the operators into a shared library and return its path."""
    library = Path(folder) / "libcustom_ops.so"
    command = [os.environ.get("CXX", "g++"), "-O2", "-std=c++17", "-shared", "-fPIC", str(SOURCE)]
    command += ["-o", str(library)]
    command += [f"-I{path}" for path in cpp_extension.include_paths()]
    command += [f"-L{path}" for path in cpp_extension.library_paths()]
    command += ["-ltorch_cpu", "-lc10"]
    subprocess.run(command, check=True)
    return library


class Model(nn.Module):
    """A layer, then both operators."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x, target):
        x = self.layer(x)
        (x,) = poptorch.custom_op(
            [x], "LeakyRelu", "custom.ops", 1, example_outputs=[x], attributes={"alpha": 0.02}
        )
        (x,) = poptorch.custom_op([x], "Cube", "custom.ops", 1, example_outputs=[x])
        return x, nn.functional.mse_loss(x, target)


def main() -> None:
    """Train for a few steps and print the losses."""
    with tempfile.TemporaryDirectory() as folder:
        ctypes.cdll.LoadLibrary(str(build(folder)))
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

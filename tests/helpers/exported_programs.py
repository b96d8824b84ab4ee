"""Programs that tests export, by name, and the models that are not exported."""

from pathlib import Path
from typing import Any

import torch

import poptorch
from helpers.wrapping import Graded, options
from helpers.zoo import ZOO

Program = tuple[torch.nn.Module, poptorch.Options, tuple[torch.Tensor, ...]]
"""A model, its options and its batch."""


class Printing(torch.nn.Module):
    """Prints its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.ipu_print_tensor(x) + 1


class Looped(torch.nn.Module):
    """Has a loop, and a source line that is markup."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.for_loop(3, lambda y: y * 2, [x])[0]  # </pre><script>alert("&")</script>


def deep(opts: poptorch.Options) -> Program:
    """Twenty small weights, which are bundled."""
    layers = (torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(9))
    model = Graded(both=True, layers=torch.nn.Sequential(*layers), last=torch.nn.Linear(4, 2))
    return model, opts, (torch.ones(16, 4), torch.ones(16, 2))


def pipeline() -> Program:
    """Two stages."""
    model = Graded(both=True, first=torch.nn.Linear(4, 4), second=torch.nn.Linear(4, 2))
    poptorch.BeginBlock(model.second, "second", ipu_id=1)
    return model, options(accumulation=8), (torch.ones(16, 4), torch.ones(16, 2))


def of_zoo(name: str) -> Program:
    """A model of the zoo."""
    return ZOO[name].build(), options(accumulation=2), ZOO[name].inputs(8)


PROGRAMS: dict[str, Any] = {
    "lanes": lambda: deep(options(accumulation=4, iterations=2)),
    "loops": lambda: deep(options(accumulation=4, iterations=2).lanes(1)),
    "pipeline": pipeline,
    "inference": lambda: (Looped(), options(iterations=2), (torch.ones(4, 2),)),
    **{
        name: lambda name=name: of_zoo(name)  # type: ignore[misc]
        for name in ("conv_batchnorm", "lstm", "tied")
    },
}


def export_of(name: str, file: Path) -> tuple[poptorch.PoplarExecutor, tuple[torch.Tensor, ...]]:
    """Compile and export a program; return its executor and its batch."""
    model, opts, batch = PROGRAMS[name]()
    if name == "inference":
        executor = poptorch.inferenceModel(model, opts)
    else:
        executor = poptorch.trainingModel(model, opts, torch.optim.AdamW(model.parameters()))
    executor.compile(*batch)
    executor.export(file)
    return executor, batch

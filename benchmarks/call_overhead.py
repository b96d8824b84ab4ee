"""Measure the overhead of a call compared to the compiled function, for inference and training.

There are two models: one with ten input and ten output tensors, and one layer with a loss in
``forward(x, y)``, whose labels are checked in each call. The contestants run the same graph:
through the wrapper, through the executable (the device loop), and by calling the compiled function
itself. The overhead of the wrapper may be at most 100 microseconds.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import poptorch
from harness import alternate, medians, table

LIMIT_US = 100.0
TENSORS = 10


class Adds(nn.Module):
    """A model with ten inputs, ten outputs and one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor * self.weight for tensor in tensors)


class Trains(Adds):
    """The same model with a loss."""

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = super().forward(*tensors)
        return *outputs, poptorch.identity_loss(sum(o.sum() for o in outputs), reduction="sum")


class Labelled(nn.Module):
    """One layer and a loss with labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.layer(x)
        return out, nn.functional.cross_entropy(out, y)


Case = tuple[str, nn.Module, bool, list[torch.Tensor]]


def cases() -> list[Case]:
    """Return the title, the model, whether it is trained, and the inputs of each case."""
    ones = [torch.ones(2, 4) for _ in range(TENSORS)]
    labelled = [torch.ones(4, 4), torch.tensor([0, 1, 2, 0])]
    return [
        ("inference", Adds(), False, ones),
        ("training", Trains(), True, ones),
        ("training, forward(x, y)", Labelled(), True, labelled),
    ]


def compare(case: Case, backend: str, rounds: int) -> float:
    """Print the three times. Return the wrapper's overhead in microseconds."""
    title, module, training, tensors = case
    opts = poptorch.Options().backend(backend).showCompilationProgressBar(False)
    if training:
        wrapped = poptorch.trainingModel(module, opts, torch.optim.SGD(module.parameters(), lr=0.0))
    else:
        wrapped = poptorch.inferenceModel(module, opts)
    wrapped(*tensors)
    session = wrapped._session
    executable, state = session.now.compiled.executable, session.weights.store.state
    (run,) = executable._bind(state).values()
    arguments = list(run._arguments[0])
    for place, source in run._batch:
        arguments[place] = tensors[source]

    def function() -> object:
        with torch.no_grad():
            return run.function(arguments)

    times = alternate(
        {
            "wrapper": lambda: wrapped(*tensors),
            "executable": lambda: executable.run(state, tensors),
            "compiled function": function,
        },
        rounds,
        warmup=50,
    )
    print(table(f"{title}, {backend}", times, "compiled function"))
    middle = medians(times)
    return (middle["wrapper"] - middle["compiled function"]) * 1e6


def main() -> int:
    """Run all cases. The exit status says whether the limit holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--backend", default="reference", help="backend that runs the programs (default: reference)"
    )
    parser.add_argument(
        "--rounds", type=int, default=2000, help="calls of each contestant (default: 2000)"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="with more than one, their number is chosen automatically",
    )
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    status = 0
    for case in cases():
        beyond = compare(case, chosen.backend, chosen.rounds)
        print(f"  beyond the compiled function: {beyond:.1f} us (limit {LIMIT_US:.0f})")
        status |= beyond > LIMIT_US
    return status


if __name__ == "__main__":
    raise SystemExit(main())

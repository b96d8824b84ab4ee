"""One update of 200 weights: the compiled flat form beside torch's fused and foreach forms.

Usage: python benchmarks/fused_update.py [--size 32] [--rounds 30] [--threads 1] [--apart]

Prints one line per optimizer: median milliseconds of each form, measured in turns in one process,
and how long compiling took.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import poptorch
from poptorch._compile.lower import lower as trace
from poptorch._cpu.compiler import compile_graph
from poptorch._ir import slots
from poptorch._ir.slots import Kind
from poptorch._update import flatten, lower
from poptorch.backends.prepare import prepare
from poptorch.optim.freeze import freeze

WEIGHTS = 200
OPTIMIZERS = {
    "SGD": {"lr": 1e-3, "momentum": 0.9},
    "Adam": {"lr": 1e-3},
    "AdamW": {"lr": 1e-3},
    "RMSprop": {"lr": 1e-3},
}


def weights(size: int) -> list[torch.nn.Parameter]:
    """Matrices and vectors in turn, with gradients."""
    torch.manual_seed(0)
    shapes = [(size, size) if i % 2 == 0 else (size,) for i in range(WEIGHTS)]
    found = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for weight in found:
        weight.grad = torch.randn_like(weight)
    return found


def compiled_update(
    name: str, settings: dict[str, float], size: int, apart: bool
) -> tuple[Callable[[], object], float]:
    """Our update of such weights as one compiled graph, and the seconds that compiling took."""
    parameters = weights(size)
    optimizer = getattr(poptorch.optim, name)(parameters, **settings)
    paths = {p.data_ptr(): f"w{i}" for i, p in enumerate(parameters)}
    spec, hypers = freeze(optimizer, paths)
    params = [slots.param(f"w{i}", tuple(p.shape), p.dtype) for i, p in enumerate(parameters)]
    if not apart and name != "LAMB":  # whose norms are of single weights
        spec, bundles = flatten(spec, params)
        params = [bundle.slot for bundle in bundles]
    piece = lower(spec, params)
    graph = trace(piece)
    tensors = {slot.key: torch.randn(slot.shape) for slot in graph.inputs}
    for slot in graph.inputs:
        if slot.kind is Kind.OPTSTATE:
            tensors[slot.key].zero_()
    for key, tensor in tensors.items():
        tensor.fill_(hypers[key]) if key in hypers else None
    arguments = [tensors[slot.key] for slot in graph.inputs]
    start = time.perf_counter()
    function = compile_graph(prepare(graph), graph.zero_inputs()).run
    function(arguments)
    return lambda: function(arguments), time.perf_counter() - start


def in_turns(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each function, called one after the other again and again."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(found) for name, found in times.items()}


def compare(
    name: str, settings: dict[str, float], size: int, rounds: int, apart: bool = False
) -> tuple[dict[str, float], float]:
    """Median milliseconds of ours and of torch's forms, and our compile time in seconds."""
    ours, seconds = compiled_update(name, settings, size, apart)
    functions = {"ours": ours}
    native = getattr(torch.optim, name)
    for form in ("fused", "foreach"):
        if form != "fused" or name != "RMSprop":
            functions[form] = native(weights(size), **settings, **{form: True}).step
    return in_turns(functions, rounds), seconds


def main() -> None:
    """Print the comparison for every optimizer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=int, default=32, help="rows and columns of the matrices")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--apart", action="store_true", help="one tensor per weight")
    parser.add_argument("--only", choices=OPTIMIZERS, help="one optimizer")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name, settings in OPTIMIZERS.items():
        if options.only in (None, name):
            found, seconds = compare(name, settings, options.size, options.rounds, options.apart)
            figures = "  ".join(f"{form} {ms:7.3f} ms" for form, ms in found.items())
            best = min(ms for form, ms in found.items() if form != "ours")
            print(f"{name:8s} {figures}  {best / found['ours']:5.2f}x  compiled in {seconds:.1f} s")


if __name__ == "__main__":
    main()

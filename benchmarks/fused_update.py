"""Compare the compiled update of 200 weights with torch's fused and foreach optimizers.

Usage: python benchmarks/fused_update.py [--size 32] [--rounds 30] [--threads 1] [--apart]

The benchmark prints one line for each optimizer: the median milliseconds of each form, measured
alternately in one process, and the compile time. Our form keeps all weights in one flat tensor;
``--apart`` uses one tensor for each weight.
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
from poptorch.optim.freeze_optimizer import freeze

WEIGHTS = 200
OPTIMIZERS = {
    "SGD": {"lr": 1e-3, "momentum": 0.9},
    "Adam": {"lr": 1e-3},
    "AdamW": {"lr": 1e-3},
    "RMSprop": {"lr": 1e-3},
}


def weights(size: int) -> list[torch.nn.Parameter]:
    """Return matrices and vectors alternately, with gradients."""
    torch.manual_seed(0)
    shapes = [(size, size) if i % 2 == 0 else (size,) for i in range(WEIGHTS)]
    found = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for weight in found:
        weight.grad = torch.randn_like(weight)
    return found


def compiled_update(
    name: str, settings: dict[str, float], size: int, apart: bool
) -> tuple[Callable[[], object], float]:
    """Return our update of such weights as one compiled graph, and the compile time."""
    parameters = weights(size)
    optimizer = getattr(poptorch.optim, name)(parameters, **settings)
    paths = {p.data_ptr(): f"w{i}" for i, p in enumerate(parameters)}
    spec, hypers = freeze(optimizer, paths)
    params = [slots.param(f"w{i}", tuple(p.shape), p.dtype) for i, p in enumerate(parameters)]
    if not apart and name != "LAMB":  # which needs the norm of each single weight
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
    """Return the median milliseconds of each function. The functions are called alternately."""
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
    """Return the median milliseconds of our form and of torch's forms, and our compile seconds."""
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
    parser.add_argument("--rounds", type=int, default=30, help="updates of each form (default: 30)")
    parser.add_argument("--threads", type=int, default=1, help="number of threads (default: 1)")
    parser.add_argument("--apart", action="store_true", help="use one tensor for each weight")
    parser.add_argument("--only", choices=OPTIMIZERS, help="measure only this optimizer")
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

"""Measure the gain of sorted edges: a compiled sum over edges, and whole updates.

Each is measured with three orders of the same edges, alternately, on one thread. The figures are
the smallest processor time of all rounds, in microseconds.

Usage: python benchmarks/graph_order.py [--rounds 150]
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as pyg

import graphs
import poptorch

SIZES = ((4000, 1500, 64), (20000, 4000, 64))  # edges, nodes, features
Calls = dict[str, Callable[[], Any]]


def orders(edge_index: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return three orders of the same edges."""
    return {
        "shuffled": torch.randperm(edge_index.shape[1]),
        "by source": edge_index[0].sort(stable=True).indices,
        "by target": edge_index[1].sort(stable=True).indices,
    }


def sums(edges: int, nodes: int, features: int) -> Calls:
    """Return a compiled sum of the neighbours' features for each order."""
    x, edge_index = torch.randn(nodes, features), torch.randint(nodes, (2, edges))

    @torch.compile(dynamic=False)
    @torch.no_grad()
    def add_up(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(nodes, features).index_add(0, target, x[source])

    pairs = {name: edge_index[:, order] for name, order in orders(edge_index).items()}
    return {name: lambda pair=pair: add_up(pair[0], pair[1]) for name, pair in pairs.items()}


def updates(row: graphs.Row, attributes: tuple[int, ...]) -> Calls:
    """Return a call of a wrapped model for each order.

    Args:
        row: the first argument with two dimensions contains the edges.
        attributes: positions of the arguments that have a row for each edge.
    """
    model = row.model()

    def call(order: torch.Tensor) -> Callable[[], Any]:
        module, arguments = copy.deepcopy(model), list(row.padded)
        arguments[1] = arguments[1][:, order].contiguous()
        for at in attributes:
            arguments[at] = arguments[at][order].contiguous()
        options = poptorch.Options().backend("inductor").showCompilationProgressBar(False)
        optimizer = torch.optim.Adam(module.parameters())
        wrapped = poptorch.trainingModel(module, options, optimizer)
        return lambda: wrapped(*arguments)

    return {name: call(order) for name, order in orders(row.padded[1]).items()}


def compare(title: str, calls: Calls, rounds: int) -> None:
    """Print the smallest time of each order, and its ratio to the first order."""
    for call in calls.values():
        for _ in range(5):
            call()
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.process_time()
            call()
            least[name] = min(least[name], time.process_time() - begin)
    first = next(iter(least.values()))
    told = (f"{name} {took * 1e6:.0f} ({took / first:.2f})" for name, took in least.items())
    print(f"{title:32s}", "   ".join(told), flush=True)


def main() -> None:
    """Measure sums, then updates."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=150, help="runs with each order (default: 150)"
    )
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    for size in SIZES:
        compare("sum, {} edges, {} nodes, {}".format(*size), sums(*size), rounds)
    compare("update, GCN", updates(graphs.nodes(pyg.GCN), ()), rounds)
    compare("update, temporal network", updates(graphs.temporal(), (2,)), rounds)


if __name__ == "__main__":
    main()

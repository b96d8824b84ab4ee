"""Compare graph networks in poptorch with eager torch_geometric and with ``torch.compile``.

Eager torch_geometric gets the graphs without padding. ``torch.compile`` with ``dynamic=False`` and
poptorch get the same padded batches. All contestants alternate in one process, on one thread. The
benchmark measures processor time, which other work on the machine changes little.

Usage: python benchmarks/graphs.py [--only NAME ...] [--rounds 200]
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.utils import stochastic_blockmodel_graph

import poptorch
import poptorch_geometric as pg
from harness import medians
from poptorch_geometric.neighbor_loader import FixedSizeNeighborLoader

SEEDS, MOLECULES, EVENTS, PEOPLE, WIDTH = 64, 32, 200, 1000, 64
FLOORS = {"eager": 1.5, "compile": 1.2}
Arguments = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Row:
    """One row: a function that creates the model, a combined batch, and unpadded micro-batches."""

    model: Callable[[], nn.Module]
    padded: Arguments
    native: list[Arguments]
    accumulation: int = 1


class Nodes(nn.Module):
    """Classifies the seeds, which are the first nodes."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x, edge_index, y):
        out = self.network(x, edge_index)[:SEEDS]
        return out, F.cross_entropy(out, y[:SEEDS])


class Molecules(nn.Module):
    """Predicts one number for each molecule. The last graph may be padding."""

    def __init__(self) -> None:
        super().__init__()
        self.network = pyg.GIN(16, WIDTH, 3, act="relu")
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, edge_index, batch, y):
        graphs = len(y)
        pooled = pyg.global_add_pool(self.network(x, edge_index), batch, graphs)
        out = self.head(pooled)[:MOLECULES, 0]
        return out, F.mse_loss(out, y[:MOLECULES])


class Temporal(nn.Module):
    """Predicts events between people from a memory for each person, which events then change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(PEOPLE, WIDTH))
        self.register_buffer("last", torch.zeros(PEOPLE))
        self.time = nn.Linear(1, WIDTH)
        self.convolution = pyg.TransformerConv(WIDTH, WIDTH // 2, heads=2, edge_dim=WIDTH)
        self.cell = nn.GRUCell(3 * WIDTH, WIDTH)
        self.head = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, people, edge_index, edge_time, source, target, other, time, message):
        memory = self.memory[people]
        ages = self.time((self.last[people][edge_index[0]] - edge_time)[:, None]).cos()
        x = self.convolution(memory, edge_index, ages)
        true = self.head(torch.cat([x[source], x[target]], 1))[:, 0]
        false = self.head(torch.cat([x[source], x[other]], 1))[:, 0]
        logits = torch.cat([true, false])
        labels = torch.cat([torch.ones_like(true), torch.zeros_like(false)])
        with torch.no_grad():
            news = torch.cat([memory[source], memory[target], message], 1)
            self.memory.index_copy_(0, people[source], self.cell(news, memory[source]))
            self.last.index_copy_(0, people[source], time)
        return true, F.binary_cross_entropy_with_logits(logits, labels)


def nodes(kind: Callable[..., nn.Module]) -> Row:
    """Node classification by neighbour sampling, on a graph of eight communities."""
    chances = torch.full((8, 8), 0.001) + 0.02 * torch.eye(8)
    edges = stochastic_blockmodel_graph([600] * 8, chances)
    y = torch.arange(8).repeat_interleave(600)
    data = Data(x=torch.randn(4800, WIDTH) + 0.3 * F.one_hot(y, WIDTH), edge_index=edges, y=y)
    loader = FixedSizeNeighborLoader(
        data, [10, 5], batch_size=SEEDS, input_nodes=torch.randperm(4800)[:640],
    )  # fmt: skip
    native = loader.nativeCollate([*range(SEEDS)])
    batch = loader.fixedSizeCollate(native)
    print(f"  nodes {native.num_nodes} of {batch.num_nodes}, edges {native.num_edges} of "
          f"{batch.num_edges}")  # fmt: skip
    return Row(
        lambda: Nodes(kind(WIDTH, WIDTH, 2, 8)),
        (batch.x, batch.edge_index, batch.y),
        [(native.x, native.edge_index, native.y)],
    )


def molecule() -> Data:
    """Return a made-up molecule: a chain of 9 to 29 atoms with a few rings."""
    atoms = int(torch.randint(9, 30, ()))
    chain = torch.arange(atoms - 1)
    rings = torch.randint(atoms - 5, (2,))
    edges = torch.cat([torch.stack([chain, chain + 1]), torch.stack([rings, rings + 5])], 1)
    kinds = torch.randint(16, (atoms,))
    return Data(x=F.one_hot(kinds, 16).float(), edge_index=torch.cat([edges, edges.flip(0)], 1),
                y=kinds.float().mean().view(1))  # fmt: skip


def molecules() -> Row:
    """Regression on generated molecules, with accumulation."""
    steps = 8
    samples = [molecule() for _ in range(MOLECULES * steps)]
    options = poptorch.Options()
    options.Training.gradientAccumulation(steps)
    packed = [samples[at : at + MOLECULES] for at in range(0, len(samples), MOLECULES)]
    batches = [Batch.from_data_list(part) for part in packed]
    sizes = pg.FixedSizeOptions(
        max(batch.num_nodes for batch in batches) + 1,
        max(batch.num_edges for batch in batches) + 1, MOLECULES + 1,
    )  # fmt: skip
    (batch,) = pg.FixedSizeDataLoader(
        samples, MOLECULES + 1, fixed_size_options=sizes, options=options
    )
    native = [(part.x, part.edge_index, part.batch, part.y) for part in batches]
    return Row(Molecules, (batch.x, batch.edge_index, batch.batch, batch.y), native, steps)


def temporal() -> Row:
    """Link prediction on a stream of events, with a memory of each person."""
    people = torch.randperm(PEOPLE)[: 3 * EVENTS]
    source, target, other = (torch.arange(EVENTS) + at * EVENTS for at in range(3))
    edges = torch.randint(3 * EVENTS, (2, 10 * 3 * EVENTS))
    arguments = (people, edges, torch.rand(edges.shape[1]), source, target, other,
                 torch.rand(EVENTS), torch.randn(EVENTS, WIDTH))  # fmt: skip
    return Row(Temporal, arguments, [arguments])


ROWS: dict[str, Callable[[], Row]] = {
    "GCN, sampled neighbourhoods": lambda: nodes(pyg.GCN),
    "GraphSAGE, sampled neighbourhoods": lambda: nodes(pyg.GraphSAGE),
    "GIN, molecules, 32 x 8": molecules,
    "temporal network with memory": temporal,
}


def plain(net: Any, update: Any, optimizer: Any, pieces: list[Arguments]) -> Callable[[], Any]:
    """Return the eager training loop."""

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        for piece in pieces:
            _, loss = net(*piece)
            (loss / len(pieces)).backward()
        update()
        return loss.detach()

    return step


def contestants(row: Row) -> dict[str, Callable[[], Any]]:
    """Return a call of each contestant."""
    torch.manual_seed(0)
    first = row.model()
    second, third = copy.deepcopy(first), copy.deepcopy(first)
    fused = torch.optim.Adam(first.parameters(), fused=True)
    foreach = torch.optim.Adam(second.parameters(), foreach=True)
    count = row.accumulation
    pieces = [tuple(parts) for parts in zip(*(t.chunk(count) for t in row.padded), strict=True)]
    options = poptorch.Options().backend("inductor").showCompilationProgressBar(False)
    options.Training.gradientAccumulation(count)
    wrapped = poptorch.trainingModel(third, options, torch.optim.Adam(third.parameters()))
    return {
        "eager": plain(first, fused.step, fused, row.native),
        "compile": plain(torch.compile(second, dynamic=False), torch.compile(foreach.step), foreach,
                         pieces),
        "ours": lambda: wrapped(*row.padded),
    }  # fmt: skip


def alternate(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Let every contestant run one call per round. Return processor seconds."""
    for run in steps.values():
        for _ in range(5):
            run()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, run in steps.items():
            begin = time.process_time()
            run()
            times[name].append(time.process_time() - begin)
    return times


def main() -> None:
    """Measure and print all rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=ROWS, metavar="NAME", help="measure only these networks"
    )
    parser.add_argument(
        "--rounds", type=int, default=100, help="steps of each contestant (default: 100)"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in chosen.only or ROWS:
        torch.manual_seed(1)
        middle = medians(alternate(contestants(ROWS[name]()), chosen.rounds))
        ratios = {other: middle[other] / middle["ours"] for other in FLOORS}
        said = "  ".join(
            f"{other} {ratio:.2f}{'' if ratio >= FLOORS[other] else '!'} ({FLOORS[other]})"
            for other, ratio in ratios.items()
        )
        print(f"{name:36s} {middle['ours'] * 1e3:8.2f} ms  {said}", flush=True)


if __name__ == "__main__":
    main()

"""Train a temporal network with a memory of each person: who will talk to whom?

The stream of events is generated. People belong to hidden groups and mostly talk within them, and
each message contains a trace of the sender's group. The memory, a buffer of the model, collects
what people have sent and received. From it, the events of the next moment are predicted. About 84 %
of the predictions can be right: a tenth of the events are between random people, and a quarter of
the pairs without an event are in the same group.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.data import Data

import comparison
import poptorch
import poptorch_geometric as pg
from poptorch_geometric.collate import FixedSizeCollater

EVENTS, GROUPS, WIDTH, RECENT = 50, 4, 32, 5
STRANGERS = 0.1  # share of the events between groups


class Temporal(nn.Module):
    """Predicts events between people from their memories and from whom they met last."""

    def __init__(self, people: int) -> None:
        super().__init__()
        # the last row is for padding
        self.register_buffer("memory", torch.zeros(people + 1, WIDTH))
        self.convolution = pyg.TransformerConv(WIDTH, WIDTH // 2, heads=2, edge_dim=1)
        self.cell = nn.GRUCell(3 * WIDTH, WIDTH)
        self.head = nn.Sequential(nn.Linear(3 * WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, person, edge_index, age, message):
        memory = self.memory[person]
        x = memory + self.convolution(memory, edge_index, age)
        source, target, other = x[: 3 * EVENTS].chunk(3)
        logits = torch.stack([self._score(source, target), self._score(source, other)])
        truth = torch.stack([torch.ones_like(logits[0]), torch.zeros_like(logits[1])])
        both, met = memory[: 2 * EVENTS], memory[: 2 * EVENTS].roll(EVENTS, 0)
        with torch.no_grad():
            news = torch.cat([both, met, message.repeat(2, 1)], 1)
            self.memory.index_copy_(0, person[: 2 * EVENTS], self.cell(news, both))
        return logits, F.binary_cross_entropy_with_logits(logits, truth)

    def _score(self, one, other):
        return self.head(torch.cat([one, other, one * other], 1))[:, 0]


class Stream:
    """Batches of events. In one batch, nobody takes part in two events."""

    def __init__(self, people: int) -> None:
        self.group = torch.arange(people) % GROUPS
        self.traces = torch.randn(GROUPS, WIDTH)
        self.last = torch.full((people, RECENT), -1)  # whom each person met, the latest one last
        self.when = torch.zeros(people, RECENT)
        sizes = pg.FixedSizeOptions(
            3 * EVENTS * (1 + RECENT) + 1, 3 * EVENTS * RECENT + 1, node_pad_value=people
        )
        self.pad = FixedSizeCollater(sizes)

    def batch(self, moment: int) -> tuple[Any, Any]:
        """Return the graph of a moment's events, as it is and padded, and record who met."""
        people = torch.randperm(len(self.group))
        by_group = people[self.group[people].argsort(stable=True)]
        pairs = by_group.view(-1, 2)[torch.randperm(len(people) // 2)]
        source, target = pairs[:EVENTS].T
        strange = torch.rand(EVENTS) < STRANGERS
        target = torch.where(strange, pairs[EVENTS : 2 * EVENTS, 0], target)
        other = pairs[2 * EVENTS : 3 * EVENTS, 0]
        message = self.traces[self.group[source]] + torch.randn(EVENTS, WIDTH)
        graph = self._graph(torch.cat([source, target, other]), moment)
        for one, met in ((source, target), (target, source)):
            self.last[one] = torch.cat([self.last[one, 1:], met[:, None]], 1)
            self.when[one] = torch.cat([self.when[one, 1:], torch.full((EVENTS, 1), moment)], 1)
        padded = self.pad([graph])
        return ([(part.person, part.edge_index, part.age, message)] for part in (graph, padded))

    def _graph(self, seeds: torch.Tensor, moment: int) -> Data:
        """Return the people in the events, followed by those whom they met last, with edges from
        those.
        """
        place, turn = (self.last[seeds] >= 0).nonzero(as_tuple=True)
        met = self.last[seeds[place], turn]
        ages = torch.log1p(moment - self.when[seeds[place], turn])[:, None]
        edges = torch.stack([len(seeds) + torch.arange(len(met)), place])
        nodes = torch.cat([seeds, met])
        return Data(person=nodes, edge_index=edges, age=ages, num_nodes=len(nodes))


def accuracy(run: comparison.Run) -> float:
    """Return the accuracy of the last quarter's predictions, which were made before learning from
    them.
    """
    logits = torch.stack(run.predictions[-len(run.predictions) // 4 :])
    return float(((logits[:, 0] > 0).float() + (logits[:, 1] <= 0).float()).mean() / 2)


def events(people: int, updates: int) -> Iterator[tuple[Any, Any]]:
    """Yield the stream."""
    stream = Stream(people)
    for moment in range(updates):
        yield stream.batch(moment)


def main(arguments: Sequence[str] | None = None) -> tuple[comparison.Run, comparison.Run]:
    """Train both and print their results."""
    args = comparison.parser(__doc__, 400).parse_args(arguments)
    options = comparison.settings(args)
    people = 320 if args.small else 1000
    model = Temporal(people)
    ours = copy.deepcopy(model)
    adam = torch.optim.Adam(model.parameters(), lr=0.003)
    trainer = poptorch.trainingModel(ours, options, torch.optim.Adam(ours.parameters(), lr=0.003))
    runs = comparison.side_by_side(
        events(people, args.updates),
        comparison.plain(model, adam),
        lambda parts: trainer(*parts[0]),
    )
    difference = float((ours.memory[:people] - model.memory[:people]).abs().max())
    print(f"{people} people, {EVENTS} events a batch; memories differ by at most {difference:.1e}")
    comparison.report(runs, "accuracy, last quarter", (accuracy(runs[0]), accuracy(runs[1])))
    if args.plot:
        comparison.picture(args.plot, "Who talks to whom, from a memory of each person", runs)
    return runs


if __name__ == "__main__":
    main()

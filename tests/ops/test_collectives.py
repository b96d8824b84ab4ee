"""What replicas exchange, compared with eager formulas on the tensors of all replicas."""

from __future__ import annotations

import copy

import pytest
import torch

import poptorch
from helpers.wrapping import Scaled, Several, infer, options, runs_compiled, training
from ops.test_known import op

GROUPING = "__collectiveReplicaGrouping"
REPLICAS, ROWS = 4, 8


def batch(steps: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(steps)
    return torch.randn(steps * REPLICAS * ROWS, 3, generator=generator)


def gather(a):
    return op("ReplicatedAllGather", a, out=torch.zeros(REPLICAS, *a.shape, dtype=a.dtype))


def reduce(**attributes):
    return lambda a: op("ReplicatedAllReduceTP", a, out=a, op="sum", **attributes)


def to_all(a):
    return op("ReplicatedAllToAll", a, out=a)


def eager_gather(tensors):
    """Each replica differentiates its own result for its own tensor."""
    parts = range(len(tensors))
    return [torch.stack([tensors[j] if i == j else tensors[j].detach() for j in parts])
            for i in parts]  # fmt: skip


def eager_reduce(groups):
    def function(tensors):
        results = []
        for i, own in enumerate(tensors):
            (group,) = (g for g in groups if i in g)
            results.append(own + sum(tensors[j].detach() for j in group if j != i))
        return results

    return function


def eager_to_all(tensors):
    size = len(tensors[0]) // len(tensors)
    return [torch.cat([t[i * size : (i + 1) * size] for t in tensors]) for i in range(len(tensors))]


ALL = [[0, 1, 2, 3]]
CASES = {
    "gather": (gather, eager_gather),
    "reduce": (reduce(), eager_reduce(ALL)),
    "neighbours": (
        reduce(**{GROUPING: [2, 1, 4]}, backwards=False),
        eager_reduce([[0, 1], [2, 3]]),
    ),
    "strided": (reduce(**{GROUPING: [2, 2, 4]}), eager_reduce([[0, 2], [1, 3]])),
    "to all": (to_all, eager_to_all),
}


@pytest.mark.parametrize("name", CASES)
def test_inference(name: str) -> None:
    known, eager = CASES[name]
    x = batch(steps=3)
    opts = options(replicas=REPLICAS, iterations=3)
    opts.outputMode(poptorch.OutputMode.All)
    found = infer(known, x, opts=opts)
    steps = x.view(3, REPLICAS, ROWS, 3)
    expected = torch.cat([result for step in steps for result in eager(list(step))])
    torch.testing.assert_close(found, expected)


WEIGHT = torch.tensor([0.5, 1.0, 1.5])


def trained(function, x: torch.Tensor, steps: int, lanes: int) -> torch.Tensor:
    model = Scaled(lambda a: function(a).sin(), tuple(WEIGHT.shape))
    model.weight.data.copy_(WEIGHT)
    opts = options(replicas=REPLICAS, accumulation=steps).lanes(lanes)
    training(model, opts, lr=1.0)(x)
    return WEIGHT - model.weight.detach()


def expected_gradient(eager, x: torch.Tensor) -> torch.Tensor:
    copy = WEIGHT.clone().requires_grad_()
    losses = [
        result.sin().square().mean()
        for step in x.view(2, REPLICAS, ROWS, 3)
        for result in eager(list(copy * step))
    ]
    torch.stack(losses).mean().backward()
    return copy.grad


@pytest.mark.parametrize("lanes", [0, 1, REPLICAS])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, lanes: int) -> None:
    known, eager = CASES[name]
    x = batch(steps=2)
    torch.testing.assert_close(trained(known, x, 2, lanes), expected_gradient(eager, x))


@pytest.mark.slow
def test_compiled_they_are_the_same() -> None:
    names, x = ["gather", "strided", "to all"], batch(steps=2)
    functions = [lambda a, known=CASES[name][0]: known(a).sin() for name in names]
    model = Several(functions, [WEIGHT] * len(names))
    opts = options("inductor", replicas=REPLICAS, accumulation=2)
    executor = training(model, opts, lr=1.0)
    executor(*[x] * len(names))
    assert runs_compiled(executor)
    for name, after in zip(names, model.weights, strict=True):
        wanted = expected_gradient(CASES[name][1], x)
        torch.testing.assert_close(WEIGHT - after.detach(), wanted)


def test_a_sum_in_backward_leaves_values_alone() -> None:
    x, function = batch(), reduce(backwards=True)
    torch.testing.assert_close(infer(function, x, opts=options(replicas=REPLICAS)), x)
    copy = WEIGHT.clone().requires_grad_()
    tensors = list(copy * x.view(REPLICAS, ROWS, 3))
    gradients = torch.autograd.grad(
        sum(tensor.sin().square().mean() for tensor in tensors), tensors, retain_graph=True
    )
    total = sum(gradients) / REPLICAS
    torch.autograd.backward(tensors, [total] * REPLICAS)
    torch.testing.assert_close(trained(function, x, 1, 0), copy.grad)


def test_what_is_the_same_on_all_replicas_is_added_up_too() -> None:
    found = infer(lambda a: a + reduce()(torch.ones(3)), batch(), opts=options(replicas=REPLICAS))
    torch.testing.assert_close(found, batch() + REPLICAS)


@pytest.mark.parametrize("name", CASES)
def test_integers_are_exchanged_too(name: str) -> None:
    known, eager = CASES[name]
    x = torch.arange(REPLICAS * ROWS * 2, dtype=torch.int32).view(-1, 2)
    found = infer(known, x, opts=options(replicas=REPLICAS))
    expected = torch.cat(eager(list(x.view(REPLICAS, ROWS, 2))))
    assert found.dtype == torch.int32
    assert torch.equal(found, expected)


def test_gathered_tensors_come_flat_if_the_example_is() -> None:
    flat = infer(
        lambda a: op("ReplicatedAllGather", a, out=torch.zeros(REPLICAS * a.numel())),
        batch(),
        opts=options(replicas=REPLICAS),
    )
    assert torch.equal(flat, batch().flatten().repeat(REPLICAS))


@pytest.mark.parametrize("iterations", [1, 2])
def test_of_one_replica_they_are_the_identity(iterations: int) -> None:
    def function(a):
        gathered = op("ReplicatedAllGather", a, out=a[None])
        return reduce(**{GROUPING: [1, 1, 1]})(to_all(gathered[0]))

    x = batch()
    assert torch.equal(infer(function, x, opts=options(iterations=iterations)), x)
    assert torch.equal(function(x), x)
    weight = torch.tensor([0.5, 1.0, 1.5])
    model = Scaled(function, (3,))
    model.weight.data.copy_(weight)
    training(model, options(), lr=1.0)(x)
    copy = weight.clone().requires_grad_()
    (copy * x).square().mean().backward()
    torch.testing.assert_close(weight - model.weight.detach(), copy.grad)


def test_little_memory_leaves_the_replicas_side_by_side() -> None:
    x = batch()
    opts = options(replicas=REPLICAS).laneMemory(1)
    found = infer(reduce(), x, opts=opts)
    expected = x.view(REPLICAS, ROWS, 3).sum(0).repeat(REPLICAS, 1)
    torch.testing.assert_close(found, expected)


def branching(a):
    return poptorch.cond(a.sum() > 0, lambda b: [reduce()(b)], [a], lambda b: [b], [a])[0]


def vmapped(a):
    return torch.func.vmap(reduce())(a)


@pytest.mark.parametrize(
    ("function", "lanes", "reason"),
    [(branching, 1, "branches"), (branching, 0, "branches"), (vmapped, 0, "each of them")],
)
def test_replicas_apart_cannot_exchange(function, lanes: int, reason: str) -> None:
    with pytest.raises(poptorch.Error, match="needs all replicas side by side") as caught:
        infer(function, batch(), opts=options(replicas=REPLICAS).lanes(lanes))
    assert caught.match(reason)
    assert all(part in str(caught.value) for part in ("Got:", "Where:", "test_known.py", "Fix:"))


def test_pipelines_cannot_exchange_between_replicas() -> None:
    class Model(torch.nn.Module):
        def forward(self, x):
            with poptorch.Block("a", ipu_id=0):
                x = x + 1
            with poptorch.Block("b", ipu_id=1):
                return reduce()(x)

    opts = options("staged", replicas=2, iterations=4)
    with pytest.raises(poptorch.Error, match="needs all replicas side by side"):
        poptorch.inferenceModel(Model(), opts)(batch())


class KnowledgeGraph(torch.nn.Module):
    """Entities in parts, one part a replica; embeddings of tails come from where they are kept.

    As D. Cattaneo et al., "BESS: Balanced entity sampling and sharing", train theirs.
    """

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.entities = torch.nn.Parameter(torch.randn(REPLICAS, 5, 6, generator=generator))
        self.relations = torch.nn.Parameter(torch.randn(3, 6, generator=generator))

    def forward(self, head, relation, tails):
        sent = self.entities[tails.flatten()].reshape(*tails.shape, -1)
        return self.score(self.entities[head], relation, to_all(sent).flatten(0, 1))

    def score(self, heads, relation, tails):
        far = ((heads + self.relations[relation])[:, None] - tails).abs().sum(-1)
        wanted = torch.zeros(len(far), dtype=torch.long)
        return far, torch.nn.functional.cross_entropy(-far, wanted)


def eager_graph(model: KnowledgeGraph, head, relation, tails):
    """Return losses and distances, replica by replica."""
    sent = [model.entities[r][tails[r].flatten()].view(REPLICAS, 2, -1) for r in range(REPLICAS)]
    done = []
    for r in range(REPLICAS):
        received = torch.cat([parts[r] for parts in sent])
        done.append(model.score(model.entities[r][head[r]], relation[r], received))
    return torch.cat([far for far, _ in done]), torch.stack([loss for _, loss in done])


def drawn_triples(steps: int) -> list[torch.Tensor]:
    def draw(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(most, (steps, REPLICAS, *shape), dtype=torch.int32)

    return [draw(5, 7), draw(3, 7), draw(5, REPLICAS, 2)]


@pytest.mark.parametrize("backend", ["reference", "inductor"])
@pytest.mark.parametrize("anchored", [False, True])
def test_weights_per_replica_and_an_exchange(backend: str, anchored: bool) -> None:
    steps, model = 2, KnowledgeGraph()
    native = copy.deepcopy(model)
    opts = options(backend, replicas=REPLICAS, accumulation=steps)
    opts.outputMode(poptorch.OutputMode.All)
    names = {"own": "Gradient___entities", "common": "Gradient___relations", "w": "relations"}
    for short, name in names.items() if anchored else ():
        opts.anchorTensor(short, name)
    executor = training(model, opts, lr=0.1)
    executor.entities.replicaGrouping(
        poptorch.CommGroupType.NoGrouping, 0, poptorch.VariableRetrievalMode.OnePerGroup
    )
    optimizer = torch.optim.SGD(native.parameters(), lr=0.1)
    for _ in range(2):
        triples = drawn_triples(steps)
        before = native.relations.detach().clone()
        far, loss = executor(*(each.flatten(0, 1).flatten(0, 1) for each in triples))
        done = [eager_graph(native, *(each[at] for each in triples)) for at in range(steps)]
        optimizer.zero_grad()
        torch.stack([losses for _, losses in done]).mean().backward()
        torch.testing.assert_close(far, torch.cat([each for each, _ in done]))
        torch.testing.assert_close(loss, torch.cat([losses for _, losses in done]))
        if anchored:
            parts = executor.getAnchoredTensor("own").view(steps, REPLICAS, REPLICAS, 5, 6)
            torch.testing.assert_close(parts.mean((0, 1)), native.entities.grad)
            parts = executor.getAnchoredTensor("common").view(steps * REPLICAS, 3, 6)
            torch.testing.assert_close(parts.mean(0), native.relations.grad)
            copies = executor.getAnchoredTensor("w").view(-1, 3, 6)
            torch.testing.assert_close(copies, before.expand_as(copies))
        optimizer.step()
    assert runs_compiled(executor) == (backend == "inductor")
    for own, theirs in zip(model.parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(own, theirs)


@pytest.mark.parametrize("mode", ["All", "Final", "Sum"])
def test_anchors_are_those_of_replicas_one_after_another(mode: str) -> None:
    def anchored(function) -> dict[str, torch.Tensor]:
        model = Scaled(function, (3,))
        opts = options(replicas=REPLICAS, accumulation=2)
        opts.outputMode(poptorch.OutputMode[mode])
        names = ["input", "loss", "weight", "Gradient___weight", "UpdatedVar___weight"]
        for name in names:
            opts.anchorTensor(name, name)
        executor = training(model, opts)
        executor(batch(steps=2))
        return {name: executor.getAnchoredTensor(name) for name in names}

    apart = anchored(lambda x: x)
    together = anchored(reduce(**{GROUPING: [1, 1, REPLICAS]}))  # groups of one: as it is
    torch.testing.assert_close(together, apart)

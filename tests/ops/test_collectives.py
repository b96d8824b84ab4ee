"""What replicas exchange, compared with eager formulas on the tensors of all replicas."""

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Calling, Having, Scaled, infer, options, training
from ops.test_known import GROUPING, op

REPLICAS, ROWS = 4, 8
WEIGHT = torch.tensor([0.5, 1.0, 1.5])


def batch(steps: int = 1) -> torch.Tensor:
    return torch.randn(steps * REPLICAS * ROWS, 3, generator=torch.Generator().manual_seed(steps))


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


def eager_reduce(*groups):
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


CASES = {
    "gather": (gather, eager_gather),
    "reduce": (reduce(), eager_reduce([0, 1, 2, 3])),
    "neighbours": (reduce(**{GROUPING: [2, 1, 4]}, backwards=False), eager_reduce([0, 1], [2, 3])),
    "strided": (reduce(**{GROUPING: [2, 2, 4]}), eager_reduce([0, 2], [1, 3])),
    "to all": (to_all, eager_to_all),
}


@pytest.mark.parametrize("name", CASES)
def test_inference(name: str) -> None:
    known, eager = CASES[name]
    integers = torch.arange(3 * REPLICAS * ROWS * 3, dtype=torch.int32).view(-1, 3)
    for x in (batch(steps=3), integers):
        opts = options(replicas=REPLICAS, iterations=3)
        steps = x.view(3, REPLICAS, ROWS, 3)
        expected = torch.cat([result for step in steps for result in eager(list(step))])
        model = poptorch.inferenceModel(Calling(known), opts)
        torch.testing.assert_close(model(x), expected)
        assert model.plan().staged is None
        assert f"{3 * REPLICAS} lanes" in str(model.plan())


def trained(function, x: torch.Tensor, opts: poptorch.Options) -> torch.Tensor:
    """Return the gradient of a weight that multiplies the input of a function."""
    model = Scaled(lambda a: function(a).sin(), tuple(WEIGHT.shape))
    model.weight.data.copy_(WEIGHT)
    training(model, opts, lr=1.0)(x)
    return WEIGHT - model.weight.detach()


def expected_gradient(eager, x: torch.Tensor, replicas: int = REPLICAS) -> torch.Tensor:
    copy = WEIGHT.clone().requires_grad_()
    steps = [eager(list(copy * step)) for step in x.view(-1, replicas, ROWS, 3)]
    losses = [result.sin().square().mean() for results in steps for result in results]
    torch.stack(losses).mean().backward()
    return copy.grad


@pytest.mark.parametrize("name, lanes", [*((name, 0) for name in CASES), ("strided", 1)])
def test_gradients(name: str, lanes: int) -> None:
    (known, eager), x = CASES[name], batch(steps=2)
    opts = options(replicas=REPLICAS, accumulation=2).lanes(lanes)
    torch.testing.assert_close(trained(known, x, opts), expected_gradient(eager, x))


def test_a_sum_in_backward_leaves_values_alone() -> None:
    x, function = batch(), reduce(backwards=True)
    torch.testing.assert_close(infer(function, x, opts=options(replicas=REPLICAS)), x)
    copy = WEIGHT.clone().requires_grad_()
    tensors = list(copy * x.view(REPLICAS, ROWS, 3))
    loss = sum(tensor.sin().square().mean() for tensor in tensors)
    gradients = torch.autograd.grad(loss, tensors, retain_graph=True)
    torch.autograd.backward(tensors, [sum(gradients) / REPLICAS] * REPLICAS)
    torch.testing.assert_close(trained(function, x, options(replicas=REPLICAS)), copy.grad)


def test_results_of_other_kinds() -> None:
    def forward(a):
        flat = op("ReplicatedAllGather", a, out=torch.zeros(REPLICAS * a.numel()))
        return a + reduce()(torch.ones(3)), flat  # the first: the same everywhere

    shifted, flat = infer(forward, batch(), opts=options(replicas=REPLICAS).laneMemory(1))
    torch.testing.assert_close(shifted, batch() + REPLICAS)
    assert torch.equal(flat, batch().flatten().repeat(REPLICAS))


def test_of_one_replica_they_are_the_identity() -> None:
    def function(a):
        return reduce(**{GROUPING: [1, 1, 1]})(to_all(op("ReplicatedAllGather", a, out=a[None])[0]))

    x = batch()
    assert torch.equal(infer(function, x, opts=options(iterations=2)), x)
    assert torch.equal(function(x), x)
    wanted = expected_gradient(lambda tensors: tensors, x, replicas=1)
    torch.testing.assert_close(trained(function, x, options(accumulation=4)), wanted)


def pipelined(a):
    with poptorch.Block("a", ipu_id=0):
        a = a + 1
    with poptorch.Block("b", ipu_id=1):
        return reduce()(a)


@pytest.mark.parametrize("function, backend, title, reason", [
    (lambda a: poptorch.cond(a.sum() > 0, lambda b: [reduce()(b)], [a], lambda b: [b], [a])[0],
     "reference", "needs all replicas side by side", "branches"),
    (lambda a: torch.func.vmap(reduce())(a), "reference", "only where each of them is a lane",
     "torch.func"),
    (pipelined, "staged", "needs all replicas side by side", "blocks on chips"),
])  # fmt: skip
def test_replicas_apart_cannot_exchange(function, backend, title: str, reason: str) -> None:
    opts = options(backend, replicas=REPLICAS, iterations=2)
    with pytest.raises(poptorch.Error, match=title) as caught:
        infer(function, batch(), opts=opts)
    assert caught.match(reason)
    assert "test_known.py" in str(caught.value)


def sharded(model, x):
    """As D. Cattaneo et al., "BESS: Balanced entity sampling and sharing", train embeddings."""
    y = to_all(x * model.own) * model.common
    return y, poptorch.identity_loss(y.sin(), "mean")


def test_weights_per_replica_and_an_exchange() -> None:
    initial, x = (torch.rand(REPLICAS, 3), WEIGHT.clone()), batch(steps=2)
    model = Having(sharded, own=nn.Parameter(initial[0]), common=nn.Parameter(initial[1]))
    own, common = leaves = [value.clone().requires_grad_() for value in initial]
    opts = options(replicas=REPLICAS, accumulation=2).outputMode(poptorch.OutputMode.All)
    for short, name in (("own", "Gradient___own"), ("w", "common")):
        opts.anchorTensor(short, name)
    executor, one = training(model, opts), poptorch.VariableRetrievalMode.OnePerGroup
    executor.own.replicaGrouping(poptorch.CommGroupType.NoGrouping, 0, one)
    out, loss = executor(x)
    steps = x.view(2, REPLICAS, ROWS, 3) * own[:, None]
    wanted = [part * common for step in steps for part in eager_to_all(list(step))]
    losses = torch.stack([part.sin().mean() for part in wanted])
    losses.mean().backward()
    torch.testing.assert_close(out, torch.cat(wanted))
    torch.testing.assert_close(loss, losses)
    parts = executor.getAnchoredTensor("own").view(2, REPLICAS, REPLICAS, 3)
    torch.testing.assert_close(parts.mean((0, 1)), own.grad)
    copies = executor.getAnchoredTensor("w").view(-1, 3)
    torch.testing.assert_close(copies, WEIGHT.expand_as(copies))
    for ours, theirs in zip((model.own, model.common), leaves, strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach() - 0.1 * theirs.grad)

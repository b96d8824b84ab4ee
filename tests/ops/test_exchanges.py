"""Operators by which replicas exchange tensors: all-gather, all-reduce and all-to-all."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import poptorch
from helpers.exchanges import (
    EXCHANGES,
    GROUPING,
    REPLICAS,
    Eager,
    eager_to_all,
    reduce,
    to_all,
)
from helpers.known_operators import Function, op
from helpers.wrapping import Calling, Having, Scaled, infer, options, training

ROWS = 8
WEIGHT = torch.tensor([0.5, 1.0, 1.5])


def batch(steps: int = 1) -> torch.Tensor:
    """Return random numbers, 8 rows for each replica and step."""
    return torch.randn(steps * REPLICAS * ROWS, 3, generator=torch.Generator().manual_seed(steps))


def whole_numbers(steps: int) -> torch.Tensor:
    """Return integers, 8 rows for each replica and step."""
    return torch.arange(steps * REPLICAS * ROWS * 3, dtype=torch.int32).view(-1, 3)


def gradient_of_weight(function: Function, x: torch.Tensor, opts: poptorch.Options) -> torch.Tensor:
    """Return the gradient of a weight that multiplies the input of the sine of a function."""
    model = Scaled(lambda a: function(a).sin(), tuple(WEIGHT.shape))
    model.weight.data.copy_(WEIGHT)
    training(model, opts, lr=1.0)(x)
    return WEIGHT - model.weight.detach()


def expected_gradient(eager: Eager, x: torch.Tensor, replicas: int = REPLICAS) -> torch.Tensor:
    """Return what ``gradient_of_weight`` does, computed in eager PyTorch."""
    copy = WEIGHT.clone().requires_grad_()
    steps = [eager(list(copy * step)) for step in x.view(-1, replicas, ROWS, 3)]
    losses = [result.sin().square().mean() for results in steps for result in results]
    torch.stack(losses).mean().backward()
    return copy.grad


@pytest.mark.parametrize("make", [batch, whole_numbers])
@pytest.mark.parametrize("name", EXCHANGES)
def test_replicas_exchange_in_inference(name: str, make: Callable[[int], torch.Tensor]) -> None:
    known, eager = EXCHANGES[name]
    x = make(3)
    model = poptorch.inferenceModel(Calling(known), options(replicas=REPLICAS, iterations=3))

    got = model(x)

    steps = x.view(3, REPLICAS, ROWS, 3)
    expected = torch.cat([result for step in steps for result in eager(list(step))])
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", EXCHANGES)
def test_replicas_that_exchange_run_side_by_side(name: str) -> None:
    known, _ = EXCHANGES[name]
    model = poptorch.inferenceModel(Calling(known), options(replicas=REPLICAS, iterations=3))

    model.compile(batch(steps=3))

    assert model.plan().staged is None
    assert f"{3 * REPLICAS} lanes" in str(model.plan())


@pytest.mark.slow
@pytest.mark.parametrize("name, lanes", [*((name, 0) for name in EXCHANGES), ("strided", 1)])
def test_gradients_flow_through_exchanges(name: str, lanes: int) -> None:
    """Each replica differentiates its own loss for its own tensors; the update is their mean."""
    known, eager = EXCHANGES[name]
    x = batch(steps=2)
    opts = options(replicas=REPLICAS, accumulation=2).lanes(lanes)

    gradient = gradient_of_weight(known, x, opts)

    torch.testing.assert_close(gradient, expected_gradient(eager, x))


def test_a_sum_in_backward_leaves_values_alone() -> None:
    x = batch()

    got = infer(reduce(backwards=True), x, opts=options(replicas=REPLICAS))

    torch.testing.assert_close(got, x)


def test_a_sum_in_backward_sums_gradients_over_replicas() -> None:
    x = batch()

    gradient = gradient_of_weight(reduce(backwards=True), x, options(replicas=REPLICAS))

    copy = WEIGHT.clone().requires_grad_()
    tensors = list(copy * x.view(REPLICAS, ROWS, 3))
    loss = sum(tensor.sin().square().mean() for tensor in tensors)
    gradients = torch.autograd.grad(loss, tensors, retain_graph=True)
    torch.autograd.backward(tensors, [sum(gradients) / REPLICAS] * REPLICAS)
    torch.testing.assert_close(gradient, copy.grad)


def test_a_constant_is_summed_over_replicas() -> None:
    """It is the same everywhere, and so is its sum."""
    shifted = infer(
        lambda a: a + reduce()(torch.ones(3)),
        batch(),
        opts=options(replicas=REPLICAS).laneMemory(1),
    )

    torch.testing.assert_close(shifted, batch() + REPLICAS)


def test_gathered_tensors_may_be_one_flat_tensor() -> None:
    def gathered_flat(a: torch.Tensor) -> torch.Tensor:
        return op("ReplicatedAllGather", a, out=torch.zeros(REPLICAS * a.numel()))

    flat = infer(gathered_flat, batch(), opts=options(replicas=REPLICAS).laneMemory(1))

    assert torch.equal(flat, batch().flatten().repeat(REPLICAS))


def exchanged_with_nobody(a: torch.Tensor) -> torch.Tensor:
    """Gather, send and sum among one replica."""
    (gathered,) = op("ReplicatedAllGather", a, out=a[None])
    return reduce(**{GROUPING: [1, 1, 1]})(to_all(gathered))


def test_with_one_replica_exchanges_are_the_identity() -> None:
    x = batch()

    assert torch.equal(infer(exchanged_with_nobody, x, opts=options(iterations=2)), x)


def test_without_a_wrapper_exchanges_are_the_identity() -> None:
    assert torch.equal(exchanged_with_nobody(batch()), batch())


def test_with_one_replica_gradients_of_exchanges_are_those_of_the_identity() -> None:
    x = batch()

    gradient = gradient_of_weight(exchanged_with_nobody, x, options(accumulation=4))

    torch.testing.assert_close(gradient, expected_gradient(lambda tensors: tensors, x, replicas=1))


def in_a_branch(a: torch.Tensor) -> torch.Tensor:
    """Exchange in one body of a condition on data."""
    return poptorch.cond(a.sum() > 0, lambda b: [reduce()(b)], [a], lambda b: [b], [a])[0]


def in_a_vmap(a: torch.Tensor) -> torch.Tensor:
    """Exchange in a function that is vectorised."""
    return torch.func.vmap(reduce())(a)


def in_a_block(a: torch.Tensor) -> torch.Tensor:
    """Exchange in the second of two stages."""
    with poptorch.Block("a", ipu_id=0):
        a = a + 1
    with poptorch.Block("b", ipu_id=1):
        return reduce()(a)


@pytest.mark.parametrize(
    "function, backend, title, reason",
    [
        (in_a_branch, "reference", "replicas that do not run side by side", "branches"),
        (in_a_vmap, "reference", "only if they all run side by side", "torch.func"),
        (in_a_block, "staged", "replicas that do not run side by side", "blocks on chips"),
    ],
)
def test_replicas_that_do_not_run_side_by_side_cannot_exchange(
    function: Function, backend: str, title: str, reason: str
) -> None:
    opts = options(backend, replicas=REPLICAS, iterations=2)

    with pytest.raises(poptorch.Error, match=title) as refused:
        infer(function, batch(), opts=opts)

    assert refused.match(reason)
    assert "known_operators.py" in str(refused.value)  # where ``op`` calls the operator


class Sharded:
    """A model with a weight per replica and a common weight, trained for one step, and its copy.

    As D. Cattaneo et al., "BESS: Balanced entity sampling and sharing", train embeddings.
    """

    def __init__(self) -> None:
        own, common = torch.rand(REPLICAS, 3), WEIGHT.clone()
        x = batch(steps=2)
        self.model = Having(self.forward, own=nn.Parameter(own), common=nn.Parameter(common))
        self.eager_own, self.eager_common = (v.clone().requires_grad_() for v in (own, common))

        opts = options(replicas=REPLICAS, accumulation=2).outputMode(poptorch.OutputMode.All)
        opts.anchorTensor("own gradient", "Gradient___own")
        opts.anchorTensor("common weight", "common")
        self.executor = training(self.model, opts)
        one_each = poptorch.VariableRetrievalMode.OnePerGroup
        self.executor.own.replicaGrouping(poptorch.CommGroupType.NoGrouping, 0, one_each)
        self.out, self.loss = self.executor(x)

        steps = x.view(2, REPLICAS, ROWS, 3) * self.eager_own[:, None]
        expected_values = [
            p * self.eager_common for step in steps for p in eager_to_all(list(step))
        ]
        self.expected_out = torch.cat(expected_values)
        self.expected_losses = torch.stack([part.sin().mean() for part in expected_values])
        self.expected_losses.mean().backward()

    @staticmethod
    def forward(model: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = to_all(x * model.own) * model.common
        return y, poptorch.identity_loss(y.sin(), "mean")


@pytest.fixture(scope="module")
def sharded() -> Sharded:
    """Return a trained model with a weight per replica, and what eager PyTorch computes."""
    torch.manual_seed(0)
    return Sharded()


def test_weights_per_replica_give_the_outputs_and_losses_of_each_replica(sharded: Sharded) -> None:
    torch.testing.assert_close(sharded.out, sharded.expected_out)
    torch.testing.assert_close(sharded.loss, sharded.expected_losses)


def test_gradients_of_a_weight_per_replica_can_be_anchored(sharded: Sharded) -> None:
    anchored = sharded.executor.getAnchoredTensor("own gradient")

    of_each = anchored.view(2, REPLICAS, REPLICAS, 3)
    torch.testing.assert_close(of_each.mean((0, 1)), sharded.eager_own.grad)


def test_a_common_weight_and_a_weight_per_replica_can_be_anchored(sharded: Sharded) -> None:
    copies = sharded.executor.getAnchoredTensor("common weight").view(-1, 3)

    torch.testing.assert_close(copies, WEIGHT.expand_as(copies))


@pytest.mark.parametrize("name", ["own", "common"])
def test_weights_per_replica_and_common_weights_are_updated(sharded: Sharded, name: str) -> None:
    ours, theirs = getattr(sharded.model, name), getattr(sharded, f"eager_{name}")

    torch.testing.assert_close(ours.detach(), theirs.detach() - 0.1 * theirs.grad)


# Exchanges in loops.

GATHERED = (4, 2, 3)


def gathered(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of the tensors of four replicas."""
    return op("ReplicatedAllGather", x, out=torch.zeros(GATHERED)).sum(0)


def rows_named_outside(model: Having, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Look rows of a table up by indices that the model holds."""

    def body(a: torch.Tensor) -> torch.Tensor:
        return gathered(a) + model.table[model.rows]

    return poptorch.for_loop(2, body, [x])[0]


def columns_named_by_an_input(model: Having, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Look a column of the loop's own value up by an index that each replica gets."""
    return poptorch.for_loop(2, lambda a: gathered(a) + a[:, index[:1]], [x])[0]


def windows_at_the_turn(model: Having, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Slice a table at the number of the turn."""

    def body(a: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        window = poptorch.dynamic_slice(model.table, 0, place, 2, 1)
        return gathered(a) + window, place + 1

    return poptorch.for_loop(2, body, [x, torch.zeros((), dtype=torch.int32)])[0]


@pytest.mark.parametrize(
    "function, step",
    [
        (rows_named_outside, lambda table, turn, a: a.sum(0) + table[[1, 0]]),
        pytest.param(
            columns_named_by_an_input,
            lambda table, turn, a: a.sum(0) + a[:, :, [1]],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            windows_at_the_turn,
            lambda table, turn, a: a.sum(0) + table[turn : turn + 2],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_lookups_next_to_a_collective_in_a_loop_run_side_by_side(
    function: Callable[..., torch.Tensor], step: Callable[..., torch.Tensor]
) -> None:
    torch.manual_seed(0)
    table, x = torch.randn(5, 3), torch.randn(8, 3)
    model = Having(function, table=table, rows=torch.tensor([1, 0]))
    executor = poptorch.inferenceModel(model, options(replicas=4))

    got = executor(x, torch.tensor([1, 0] * 4))

    value = x.reshape(GATHERED)
    for turn in range(2):
        value = step(table, turn, value).expand(GATHERED)
    torch.testing.assert_close(got, value.reshape(8, 3))


def test_all_to_all_is_found_by_its_short_name() -> None:
    executor = poptorch.inferenceModel(
        Calling(lambda x: op("AllToAll", x, out=x)), options(replicas=2)
    )

    assert executor(torch.arange(8.0)).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]

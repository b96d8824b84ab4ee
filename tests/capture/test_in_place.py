"""In-place changes of inputs, views and buffers, and masks, mean in a program what torch does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.closeness import near
from helpers.wrapping import (
    Calling,
    EagerPair,
    Having,
    infer,
    normal,
    options,
    training,
    trains_alike,
)
from poptorch._capture import purity


def nested(x: torch.Tensor, others: Any) -> torch.Tensor:
    x += 1
    others["list"][0].mul_(2)
    others["pair"][1][0] = -x.sum()
    return x * 1


def views(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x[1] += y
    x[1][0].mul_(3)
    x[0][:, 1:][0].zero_()
    x.view(-1)[5] = 7
    x[0:4:2, :, 1::2] += 1
    x.transpose(0, 1)[1, 0].copy_(y[0])
    x[2].chunk(2)[1].add_(1)
    x[3].unsqueeze(0).expand(1, 2, 3)[0, 1].index_fill_(0, torch.tensor([0, 2]), 4.0)
    return x * 1


def other_types(x: torch.Tensor, n: Any) -> Any:
    y = torch.empty_like(x)
    torch.add(x, 1, out=y)
    n += x[0].round().to(n.dtype)
    n.mul_(torch.tensor(2, dtype=torch.int16))
    return y, n * 1


def clone(
    value: Any,
) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, value)


@pytest.mark.slow
@pytest.mark.spec("supported_ops", 1, 2, 3)
@pytest.mark.parametrize(
    "function, inputs",
    [
        (nested, (normal(3, 2), {"list": [normal(3, 2)], "pair": (normal(3, 2), normal(3, 2))})),
        (views, (normal(4, 2, 3), normal(2, 3, seed=1))),
        (other_types, (normal(3, 2), torch.arange(2, dtype=torch.int32))),
    ],
)
def test_changed_inputs_are_seen_by_the_caller_and_by_the_next_call(
    function: Callable[..., Any],
    inputs: Any,
) -> None:
    wrapped = poptorch.inferenceModel(Calling(function), options())
    ours, theirs = clone(inputs), clone(inputs)
    for _ in range(2):
        torch.testing.assert_close(wrapped(*ours), function(*theirs))
        torch.testing.assert_close(ours, theirs)


@pytest.mark.spec("executor", 24)
@pytest.mark.spec("supported_ops", 1)
def test_each_iteration_changes_its_slice_of_an_input() -> None:
    for x in (normal(6, 2), normal(2, 6).t(), normal(6, 2).double()):
        expected = torch.cat([part + part.sum() for part in x.float().split(2)])
        got = infer(lambda x: x.add_(x.sum()) * 1, x, opts=options(iterations=3))
        torch.testing.assert_close((got, x.float()), (expected, expected))


@pytest.mark.spec("supported_ops", 3)
def test_gradients_of_values_written_into_views() -> None:
    def writing(model: Having, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[1][0].mul_(model.weight[0])
        y[0, :, 1:] += model.weight[:, 1:]
        return poptorch.identity_loss(y.square().sum(), "none")

    model = Having(writing, weight=nn.Parameter(normal(2, 3)))
    trains_alike(model, normal(2, 2, 3, seed=1), lr=0.01)


@pytest.mark.spec("supported_ops", 4, 5)
def test_buffers_count_executions_not_calls() -> None:
    def count(model: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        model.count += 1
        model.last.copy_(x[-1])  # is never read
        counting.seen = counting.seen + 1  # as a method does that is kept in an attribute
        return model.count * 1, poptorch.identity_loss(x * model.weight, "sum")

    opts = options(iterations=2, accumulation=3).outputMode(poptorch.OutputMode.All)
    weight = nn.Parameter(torch.tensor(1.0))
    zeros = {name: torch.zeros(()) for name in ("count", "last", "seen")}
    counting = Having(count, weight=weight, **zeros)
    model = training(counting, opts)
    for first in (1, 7):
        out, _ = model(torch.arange(12.0))
        assert out.tolist() == list(range(first, first + 6))
    assert counting.count == 12
    assert counting.last == 11
    assert counting.seen == 12


@pytest.mark.spec("supported_ops", 6)
def test_reassigned_buffers_are_named() -> None:
    def bind(model: Having, x: torch.Tensor) -> torch.Tensor:
        model.state = model.state + torch.ones(2)
        return x + model.state[0]

    def delete(model: Having, x: torch.Tensor) -> torch.Tensor:
        del model.state
        model.state = None
        return x

    for function, done in ((bind, "reassigned within"), (delete, "removed from")):
        with pytest.raises(poptorch.Error, match=f"'state' is {done} the model"):
            poptorch.inferenceModel(Having(function, state=torch.zeros(1)), options())(normal(3, 2))


@pytest.mark.spec("supported_ops", 6)
def test_batch_norms_and_copies_into_buffers_are_fine() -> None:
    def copying(model: Having, x: torch.Tensor) -> torch.Tensor:
        model.state.copy_(model.state + 1)
        model.norm.num_batches_tracked = model.norm.num_batches_tracked + 1
        return model.norm(x) + model.state

    module = Having(copying, state=torch.zeros(1), norm=nn.BatchNorm1d(2))
    model, x = poptorch.inferenceModel(module, options()), normal(3, 2)
    torch.testing.assert_close(model(x), nn.functional.batch_norm(x, None, None, training=True) + 1)
    model.copyWeightsToHost()
    assert module.state == 1
    assert module.norm.num_batches_tracked == 2


@pytest.mark.parametrize(
    "function, is_traced_twice",
    [
        (lambda m, x: nn.functional.dropout(m.layer(x), 0.5).relu(), False),
        (lambda m, x: m.norm(x[:, 1:].t()), False),
        (lambda m, x: m.layer(x).relu_(), False),
        (lambda m, x: (m.layer(x) * 2)[0].add_(1), True),
        (lambda m, x: m.layer(x).half(), True),
    ],
)
def test_only_code_that_writes_to_parts_or_computes_in_half_is_traced_twice(
    function: Callable[..., Any], is_traced_twice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second trace takes two fifths of the time of a capture."""
    traced, usual = [], purity._functionalize
    monkeypatch.setattr(purity, "_functionalize", lambda *a: traced.append(1) or usual(*a))
    layers = {"layer": nn.Linear(3, 3), "norm": nn.LayerNorm(2)}
    poptorch.inferenceModel(Having(function, **layers), options()).compile(normal(2, 3))
    assert bool(traced) is is_traced_twice


X, LABELS = torch.randn(24, 12, 6), torch.randint(-3, 9, (24, 5)).where(torch.arange(5) > 0, 2)


def ctc(model: Having, x: torch.Tensor, labels: torch.Tensor, more: int = 0) -> torch.Tensor:
    """Check labels, whose values are known, and mask steps, as speech models do."""
    assert more or labels.max() < 9
    there, hidden = labels >= 1, x * 2
    hidden[x[..., 0] > 1] = model.masked
    scores = model.layer(hidden).log_softmax(-1).transpose(0, 1)
    steps, lengths = torch.full((len(x),), x.shape[1]), there.sum(-1) + more
    picked = [labels.view(s).masked_select(there.view(s)) for s in (labels.shape, (-1,))]
    return sum(nn.functional.ctc_loss(scores, each, steps, lengths) for each in picked)


@pytest.mark.parametrize("backend", ["reference", pytest.param("inductor", marks=pytest.mark.slow)])
def test_labels_that_a_mask_selects_are_targets_of_a_ctc_loss(backend: str) -> None:
    counts = options(backend, accumulation=3, replicas=2)
    model = Having(ctc, layer=nn.Linear(6, 9), masked=nn.Parameter(torch.randn(6)))
    pair = EagerPair(model, torch.optim.Adam, counts, **near(80, 2))
    pair.wrapped(X, LABELS)
    pair.eager_step(X, LABELS)
    pair.compare()


def test_lengths_of_selected_labels_must_add_up_to_their_number() -> None:
    model = Having(lambda m, *given: ctc(m, *given, 1), layer=nn.Linear(6, 9), masked=torch.ones(6))
    with pytest.raises(poptorch.Error, match="ctc_loss"):
        training(model)(X, LABELS)

"""Replicas in one process: input groups, weights per group, buffers, what they add up to."""

import copy
import pickle
import time

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import PAUSE, Graded, Having, Scaled, inference, options, unchecked
from poptorch import CommGroupType, OutputMode, VariableRetrievalMode

ONE, EVERY = VariableRetrievalMode.OnePerGroup, VariableRetrievalMode.AllReplicas


@pytest.mark.spec("parallel", 35)
@pytest.mark.parametrize(
    ("kind", "groups"), [("Consecutive", [0, 0, 1, 1]), ("Orthogonal", [0, 1, 0, 1])]
)
def test_replicas_of_an_input_group_get_the_same_slice(kind: str, groups: list[int]) -> None:
    opts = options(iterations=2, replicas=4)
    opts.inputReplicaGrouping(2, CommGroupType[kind])
    wrapped = poptorch.inferenceModel(lambda x: x * 2, opts)
    x = torch.arange(4.0)  # 2 iterations x 2 groups
    expected = [2 * (2 * iteration + group) for iteration in range(2) for group in groups]
    assert wrapped(x).tolist() == expected


def grouped(groups: int) -> nn.Module:
    def forward(
        model: Having, x: torch.Tensor, y: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = (x * model.weight).sum(1)
        return out, nn.functional.mse_loss(out, y)

    return Having(forward, weight=nn.Parameter(torch.arange(groups * 3.0).reshape(groups, 3) / 10))


GROUPINGS = [
    (CommGroupType.Consecutive, 2, [0, 0, 1, 1], "reference"),
    (CommGroupType.Orthogonal, 2, [0, 1, 0, 1], "staged"),
    (CommGroupType.NoGrouping, 9, [0, 1, 2, 3], "reference"),
]


@pytest.mark.spec("parallel", 32, 33, 34)
@pytest.mark.spec("programs", 28)
@pytest.mark.parametrize(("kind", "size", "of_replica", "backend"), GROUPINGS)
def test_weights_per_group_train_like_separate_models(
    kind: CommGroupType, size: int, of_replica: list[int], backend: str
) -> None:
    groups = max(of_replica) + 1
    model = grouped(groups)
    eager = copy.deepcopy(model)
    opts = options(accumulation=2, replicas=4).outputMode(OutputMode.All).backend(backend)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training = poptorch.trainingModel(model, opts, optimizer)
    model.weight.own = "kept"
    assert training.weight is model.weight
    assert vars(pickle.loads(pickle.dumps(training.weight))) == {"own": "kept"}
    training.weight.replicaGrouping(kind, size, ONE)
    x, y = torch.randn(16, 3), torch.randn(16)
    native = torch.optim.SGD(eager.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        out, _ = training(x, y)
        native.zero_grad()
        pieces = [(x[2 * i : 2 * i + 2], y[2 * i : 2 * i + 2], of_replica[i % 4]) for i in range(8)]
        outs = [(xs * eager.weight[group]).sum(1) for xs, _, group in pieces]
        losses = [nn.functional.mse_loss(o, p[1]) for o, p in zip(outs, pieces, strict=True)]
        (sum(losses) / 8).backward()  # by the number of all replicas, not of the group's
        native.step()
        torch.testing.assert_close(out, torch.cat(outs))
    torch.testing.assert_close(model.weight, eager.weight)
    assert optimizer.state_dict()["ipu_state"]["Accl1___weight"].shape == (groups, 3)


def test_reading_the_weights_of_all_replicas() -> None:
    model = grouped(2)
    training = poptorch.trainingModel(model, options(replicas=4))
    training.weight.replicaGrouping(CommGroupType.Consecutive, 2, EVERY)
    training(torch.randn(4, 3), torch.randn(4))
    assert model.weight.shape == (4, 3)
    assert torch.equal(model.weight[0], model.weight[1])
    assert not torch.equal(model.weight[1], model.weight[2])
    after = model.weight.detach().clone()
    training.copyWeightsToDevice()  # from four values to two
    training.copyWeightsToHost()
    assert torch.equal(model.weight, after)
    training.detachFromDevice()
    training(torch.randn(4, 3), torch.randn(4))
    assert not torch.equal(model.weight, after)


def test_a_weight_of_a_nested_layer_is_grouped_through_the_executor() -> None:
    inner = grouped(2)
    model = Having(lambda m, x, y: m.layers[0](x, y), layers=nn.ModuleList([inner]))
    wrapped = poptorch.inferenceModel(model, options(replicas=2))

    wrapped.layers[0].weight.replicaGrouping(CommGroupType.NoGrouping, 0, ONE)
    out, _ = wrapped(torch.ones(2, 3), torch.zeros(2))

    torch.testing.assert_close(out, inner.weight.sum(1).detach())


def test_a_weight_of_a_nested_layer_cannot_be_grouped_after_compiling() -> None:
    model = Having(lambda m, x: m.layer(x), layer=nn.Linear(3, 3))
    wrapped = poptorch.inferenceModel(model, options(replicas=2))
    wrapped(torch.ones(2, 3))

    with pytest.raises(RuntimeError, match="before the model is compiled"):
        wrapped.layer.weight.replicaGrouping(CommGroupType.All, 0, ONE)


def test_grouping_in_inference_and_its_mistakes() -> None:
    module = grouped(2)
    wrapped = poptorch.inferenceModel(module, options(replicas=2))
    wrapped.weight.replicaGrouping(CommGroupType.NoGrouping, 0, ONE)
    out, _ = wrapped(torch.ones(2, 3), torch.zeros(2))
    torch.testing.assert_close(out, module.weight.sum(1).detach())
    with pytest.raises(RuntimeError, match="before the model is compiled"):
        wrapped.weight.replicaGrouping(CommGroupType.All, 0, ONE)
    for wrong, groups, args, pattern in (
        (Scaled(lambda x: x), (CommGroupType.NoGrouping, 0), [torch.ones(4)], "Scalars cannot be"),
        (grouped(3), (CommGroupType.Consecutive, 2), [torch.ones(4, 3)], "one entry per group"),
        (grouped(3), (CommGroupType.Consecutive, 3), [torch.ones(4, 3)], "must divide"),
    ):
        executor = poptorch.inferenceModel(wrong, options(replicas=4))
        executor.weight.replicaGrouping(*groups, ONE)
        with pytest.raises(poptorch.Error, match=pattern):
            executor(*args, torch.zeros(4))


def counts() -> nn.Module:
    """A floating buffer that forward changes in place, and a plain tensor that it changes too."""

    def forward(model: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        model.seen += x.sum()
        model.plain += x.sum()
        return model.seen * 1, model.plain * 1

    module = Having(forward, seen=torch.zeros(1))
    module.plain = torch.zeros(1)
    return module


@pytest.mark.spec("executor", 25, 26, 70)
@pytest.mark.spec("programs", 25)
def test_buffers_persist_and_plain_tensors_do_not() -> None:
    module = counts()
    wrapped = poptorch.inferenceModel(module, unchecked(iterations=3))
    for expected in ([1, 2, 3], [4, 5, 6]):
        seen, plain = wrapped(torch.ones(3))
        assert seen.tolist() == expected
        assert plain.tolist() == [1, 1, 1]
    assert module.plain.item() == 0
    assert module.seen.item() == 0
    wrapped.copyWeightsToHost()
    assert module.seen.item() == 6


@pytest.mark.slow
@pytest.mark.spec("executor", 27)
def test_buffers_that_replicas_change_need_broadcast_buffers_off() -> None:
    module = counts()
    with pytest.raises(poptorch.Error, match="does not support broadcasting buffers"):
        poptorch.inferenceModel(module, unchecked(replicas=2))(torch.ones(2))
    wrapped = poptorch.inferenceModel(module, unchecked(replicas=2).broadcastBuffers(False))
    assert wrapped(torch.tensor([1.0, 10.0]))[0].tolist() == [1, 10]
    assert wrapped(torch.tensor([1.0, 10.0]))[0].tolist() == [2, 20]
    wrapped.copyWeightsToHost()
    assert module.seen.item() == 2  # that of the first replica
    grouped = unchecked(replicas=2)
    grouped.inputReplicaGrouping(2)  # all replicas see the same: nothing to broadcast
    assert poptorch.inferenceModel(counts(), grouped)(torch.ones(1))[0].tolist() == [1, 1]
    norm = nn.BatchNorm1d(2)
    training = poptorch.trainingModel(norm, options(replicas=2), loss=nn.MSELoss())
    assert training(torch.randn(8, 2), torch.randn(8, 2))[1].shape == (2,)
    assert norm.running_mean.abs().sum() > 0


def test_updating_named_buffers_only() -> None:
    module = Having(lambda m, x: x * m.scale + m.shift, scale=torch.ones(1), shift=torch.zeros(1))
    wrapped = poptorch.inferenceModel(module, options().updatableNamedBuffers(["scale"]))
    with pytest.raises(poptorch.Error, match="has not been compiled"):
        wrapped.copyNamedBuffersToDevice()
    x = torch.ones(2)
    wrapped(x)
    module.scale.fill_(3)
    module.shift.fill_(5)
    assert wrapped(x).tolist() == [1, 1]
    wrapped.copyNamedBuffersToDevice()
    assert wrapped(x).tolist() == [3, 3]
    plain = inference(module)
    plain(x)
    with pytest.raises(poptorch.Error, match="No named buffers marked as updatable"):
        plain.copyNamedBuffersToDevice()
    with pytest.raises(poptorch.Error, match="that the model does not have"):
        poptorch.inferenceModel(module, options().updatableNamedBuffers(["other"]))(x)


def _normalising() -> tuple[poptorch.PoplarExecutor, nn.BatchNorm1d]:
    """A training model with a batch norm whose statistics belong to each of two replicas."""
    norm = nn.BatchNorm1d(4)
    model = Graded(norm=norm)
    opts = options(replicas=2).broadcastBuffers(False)
    wrapped = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))
    wrapped(torch.randn(8, 4), torch.randn(8, 4))
    return wrapped, norm


def test_buffers_of_replicas_that_keep_their_values_cause_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrapped, norm = _normalising()

    for rows in (8, 4, 8, 4):
        norm.num_batches_tracked.add_(0)
        norm.running_mean.mul_(1)
        time.sleep(PAUSE)
        wrapped(torch.randn(rows, 4), torch.randn(rows, 4))

    assert not [text for text in caplog.messages if "changed on the host" in text]


def test_a_buffer_of_replicas_that_changes_causes_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrapped, norm = _normalising()

    norm.num_batches_tracked.add_(5)
    time.sleep(PAUSE)
    wrapped(torch.randn(8, 4), torch.randn(8, 4))

    (message,) = (text for text in caplog.messages if "changed on the host" in text)
    assert "'norm.num_batches_tracked'" in message

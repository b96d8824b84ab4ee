"""Batches that are shorter than usual, against eager PyTorch on micro-batches of the usual size."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import poptorch
from helpers.closeness import relative
from helpers.wrapping import Having, Regression, compilations, normal, options, unchecked
from poptorch.enums import OutputMode

ROWS = 8  # of a usual micro-batch
X, Y = normal(64, 4), normal(64, 3, seed=1)
Batch = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    """A model whose loss is a mean over the rows of a micro-batch."""

    def __init__(self, normalized: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6) if normalized else nn.Identity()
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        out = self.last(torch.relu(self.norm(self.first(x))))
        return out if y is None else (out, nn.functional.mse_loss(out, y))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(rows: int) -> Batch:
    return X[:rows], Y[:rows]


def micro_batches(rows: int) -> Iterator[Batch]:
    return zip(X[:rows].split(ROWS), Y[:rows].split(ROWS), strict=True)


def eager_call(
    model: nn.Module, optimizer: torch.optim.Optimizer, rows: int, of_update: int
) -> list[float]:
    """Make the updates of one call: each takes the mean of the losses of its micro-batches."""
    losses, pairs = [], list(micro_batches(rows))
    for first in range(0, len(pairs), of_update):
        update = pairs[first : first + of_update]
        optimizer.zero_grad()
        for x, y in update:
            loss = model(x, y)[1]
            (loss / len(update)).backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


CASES = [
    ({}, 3, False),
    ({"accumulation": 2}, 11, True),
    ({"accumulation": 2}, 12, False),  # divides into two micro-batches of 6, which are not meant
    ({"accumulation": 2}, 3, True),
    ({"accumulation": 4}, 27, True),
    ({"accumulation": 4}, 24, True),
    ({"iterations": 3}, 17, False),
    ({"iterations": 2, "accumulation": 2}, 27, True),
    ({"iterations": 2, "accumulation": 2}, 16, False),
    ({"replicas": 2}, 11, False),
    ({"replicas": 2}, 8, False),
    ({"accumulation": 2, "replicas": 2}, 27, False),
    ({"accumulation": 2, "replicas": 2, "iterations": 2}, 45, False),
]


@pytest.mark.slow
@pytest.mark.parametrize("counts, rows, normalized", CASES)
def test_an_epoch_with_a_short_last_batch_trains_like_eager(
    counts: dict[str, int], rows: int, normalized: bool
) -> None:
    model = Net(normalized)
    other = copy.deepcopy(model)
    optimizer, of_update = sgd(other), counts.get("accumulation", 1) * counts.get("replicas", 1)
    whole = ROWS * of_update * counts.get("iterations", 1)
    chosen = options(**counts).outputMode(OutputMode.All)
    training = poptorch.trainingModel(model, chosen, sgd(model))

    losses, expected = [], []
    for size in (whole, rows) * 2:
        losses += training(*batch(size))[1].reshape(-1).tolist()
        expected += eager_call(other, optimizer, size, of_update)

    assert losses == pytest.approx(expected, rel=relative(64, 5))
    torch.testing.assert_close(model.state_dict(), other.state_dict())


@pytest.mark.parametrize("lanes", [1, 2, 0])
def test_however_many_micro_batches_run_side_by_side_the_update_is_eagers(lanes: int) -> None:
    model = Net()
    other = copy.deepcopy(model)
    chosen = options(accumulation=6).lanes(lanes)
    training, optimizer = poptorch.trainingModel(model, chosen, sgd(model)), sgd(other)

    for size in (48, 37):
        training(*batch(size))
        eager_call(other, optimizer, size, of_update=6)

    torch.testing.assert_close(model.state_dict(), other.state_dict())


@pytest.mark.larger("test_an_epoch_with_a_short_last_batch_trains_like_eager")
def test_with_sums_the_update_is_that_of_the_sum_of_the_losses() -> None:
    model = Net()
    other = copy.deepcopy(model)
    chosen = options(accumulation=2)
    chosen.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    training = poptorch.trainingModel(model, chosen, torch.optim.SGD(model.parameters(), lr=0.1))

    for size in (16, 11):
        training(*batch(size))
        other.zero_grad()
        sum(other(x, y)[1] for x, y in micro_batches(size)).backward()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter -= 0.1 * parameter.grad

    torch.testing.assert_close(model.state_dict(), other.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["staged", "inductor"])
def test_a_pipeline_trains_a_batch_that_does_not_fill_it(backend: str) -> None:
    model = Net()
    other = copy.deepcopy(model)
    poptorch.BeginBlock(model.last, "last", ipu_id=1)
    chosen = options(backend, accumulation=4)
    training, optimizer = poptorch.trainingModel(model, chosen, sgd(model)), sgd(other)

    for size in (32, 27, 3):
        training(*batch(size))
        eager_call(other, optimizer, size, of_update=4)

    torch.testing.assert_close(dict(model.state_dict()), dict(other.state_dict()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "counts", [{}, {"iterations": 4}, {"replicas": 2}, {"iterations": 2, "replicas": 2}]
)
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_a_short_last_batch_is_evaluated_like_eager(counts: dict[str, int], rows: int) -> None:
    model = Net(normalized=True).eval()
    wrapper = poptorch.inferenceModel(model, options(**counts))
    whole = ROWS * counts.get("iterations", 1) * counts.get("replicas", 1)

    results = [wrapper(X[:size]) for size in (whole, whole - rows, whole, rows)]

    for result in results:
        torch.testing.assert_close(result, model(X[: len(result)]).detach())
    assert [len(result) for result in results] == [whole, whole - rows, whole, rows]


def test_each_micro_batch_of_a_short_batch_has_its_own_loss_in_inference() -> None:
    model = Net().eval()
    wrapper = poptorch.inferenceModel(model, options(iterations=4))
    wrapper(*batch(32))

    losses = wrapper(*batch(27))[1]

    expected = [model(x, y)[1].item() for x, y in micro_batches(27)]
    assert losses.tolist() == pytest.approx(expected, rel=relative(64, 5))


def losses_of(mode: OutputMode, sizes: Sequence[int], **counts: int) -> dict[int, torch.Tensor]:
    """Return the losses of batches of some sizes, by their rows."""
    torch.manual_seed(0)
    model = Having(lambda m, x, y: m.net(x, y)[1], net=Net())
    training = poptorch.trainingModel(model, options(**counts).outputMode(mode), sgd(model))
    return {rows: training(*batch(rows)) for rows in sizes}


def test_gradients_in_half_of_a_short_batch_are_added_up_in_float() -> None:
    """Of a whole micro-batch and of a shorter one; together they are beyond the range of half."""
    gradient = 40_000.0
    model = Having(
        lambda m, x: poptorch.identity_loss((m.weight * x).float().mean(), "none"),
        weight=nn.Parameter(torch.zeros((), dtype=torch.float16)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    training = poptorch.trainingModel(model, options(accumulation=2), optimizer)
    rows = torch.full((4,), gradient, dtype=torch.float16)
    training(torch.zeros_like(rows))

    training(rows[:3])

    assert float(model.weight.detach()) == pytest.approx(-gradient, rel=2**-11)


@pytest.mark.slow
@pytest.mark.parametrize(
    "replicas, sizes", [(1, (64, 43)), (1, (64, 60, 43, 17, 3)), (2, (64, 60, 43, 17, 3))]
)
def test_output_modes_return_the_last_losses_or_their_sums(
    replicas: int, sizes: tuple[int, ...]
) -> None:
    counts = {"iterations": 2, "accumulation": 4 // replicas, "replicas": replicas}

    every, last, sums = (
        losses_of(mode, sizes, **counts)
        for mode in (OutputMode.All, OutputMode.Final, OutputMode.Sum)
    )

    for rows, losses in every.items():
        assert losses.numel() == -(-rows // ROWS)
        assert last[rows].reshape(-1)[-1] in losses.reshape(-1)[-replicas:]
        torch.testing.assert_close(sums[rows].sum(), losses.sum())


def test_results_of_other_sizes_cannot_be_added_up() -> None:
    model = Net()
    chosen = options(accumulation=2).outputMode(OutputMode.Sum)
    training = poptorch.trainingModel(model, chosen, sgd(model))
    training(*batch(16))

    with pytest.raises(poptorch.Error, match=r"\(8, 3\)(.|\n)*\(3, 3\)"):
        training(*batch(11))
    with pytest.raises(poptorch.Error, match=r"\(8, 3\)(.|\n)*\(3, 3\)"):
        training(*batch(3))


def test_each_replica_keeps_the_statistics_of_its_micro_batches() -> None:
    model = Net(normalized=True)
    replicas = [copy.deepcopy(model) for _ in range(2)]
    chosen = options(accumulation=2, replicas=2)
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    training = poptorch.trainingModel(model, chosen, still)

    for size in (32, 27, 32):
        training(*batch(size))
        for number, (x, _) in enumerate(micro_batches(size)):
            replicas[number % 2](x)

    training.copyWeightsToHost()
    torch.testing.assert_close(model.norm.running_mean, replicas[0].norm.running_mean)
    torch.testing.assert_close(model.norm.running_var, replicas[0].norm.running_var)


def test_micro_batches_of_a_short_batch_draw_their_own_random_numbers() -> None:
    def forward(model: Any, x: torch.Tensor) -> Any:
        out = nn.functional.dropout(model.weight.expand(len(x), 64))
        return out, poptorch.identity_loss(out.sum(), reduction="sum")

    model = Having(forward, weight=nn.Parameter(torch.ones(64)))
    chosen = unchecked(accumulation=3).outputMode(OutputMode.All)
    training = poptorch.trainingModel(model, chosen, torch.optim.SGD(model.parameters(), lr=0.0))
    training(X[:6])

    rows = training(X[:5])[0]

    assert len({tuple(row.tolist()) for row in rows}) == 5


def test_inputs_that_forward_changes_and_buffers_that_it_counts_with_are_right() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.count += 1
        x.mul_(2)
        return poptorch.identity_loss((model.weight * x).mean(), reduction="mean")

    model = Having(forward, weight=nn.Parameter(torch.ones(4)), count=torch.zeros(()))
    training = poptorch.trainingModel(model, unchecked(accumulation=4), sgd(model))
    given = {rows: X[:rows].clone() for rows in (32, 27)}

    for x in given.values():
        training(x)

    assert model.state_dict()["count"] == 8
    for rows, x in given.items():
        assert torch.equal(x, 2 * X[:rows])


def test_a_loader_and_a_model_with_the_same_options_use_all_samples() -> None:
    chosen = options(accumulation=2)
    data = TensorDataset(X[:51], Y[:51])
    loader = poptorch.DataLoader(chosen, data, batch_size=ROWS, drop_last=False)
    model = Net()
    other = copy.deepcopy(model)
    training, optimizer = poptorch.trainingModel(model, chosen, sgd(model)), sgd(other)

    for x, y in loader:
        training(x, y)
    for first in range(0, 51, 16):
        optimizer.zero_grad()
        parts = list(zip(X[first:51][:16].split(8), Y[first:51][:16].split(8), strict=True))
        (sum(other(x, y)[1] for x, y in parts) / len(parts)).backward()
        optimizer.step()

    torch.testing.assert_close(model.state_dict(), other.state_dict())


def refusal(chosen: poptorch.Options, first: Batch, second: tuple[Any, ...]) -> str:
    model = Net()
    training = poptorch.trainingModel(model, chosen, sgd(model))
    training(*first)
    before = copy.deepcopy(model.state_dict())

    with pytest.raises(poptorch.Error) as error:
        training(*second)

    training.copyWeightsToHost()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    training(*first)  # it works as before
    return str(error.value)


@pytest.mark.parametrize(
    "second, message",
    [
        ((X[:16], Y[:11]), "Shape mismatch for y"),
        ((X[:11], Y[:10]), "Shape mismatch for x"),
        ((X[:11, :3], Y[:11]), "Shape mismatch for x"),
        ((X[:11].double(), Y[:11]), "Data type mismatch for x"),
        ((X[:0], Y[:0]), "Zero-sized tensors are unsupported"),
    ],
)
def test_only_fewer_rows_of_all_inputs_make_a_shorter_batch(
    second: tuple[Any, ...], message: str
) -> None:
    assert message in refusal(options(accumulation=2), batch(16), second)


def test_a_short_batch_with_another_optional_input_is_refused_for_its_rows() -> None:
    """It needs its own program, for which it has to divide into micro-batches."""
    chosen = options(accumulation=2).programs(2)

    message = refusal(chosen, batch(16), (X[:11],))

    assert "Invalid batch dimension" in message
    assert "11 rows" in message


def test_a_short_batch_with_another_input_of_the_same_size_is_refused() -> None:
    def forward(m: Having, x: torch.Tensor, y: Any, z: Any) -> Any:
        return poptorch.identity_loss(m.layer(x) - (z if y is None else y), "mean")

    model = Having(forward, layer=nn.Linear(4, 3))
    training = poptorch.trainingModel(model, options(accumulation=2), sgd(model))
    training(*batch(16), None)

    with pytest.raises(poptorch.Error, match=r"Type mismatch for \*args\[1\]"):
        training(X[:11], None, Y[:11])


def test_with_one_program_more_rows_are_refused() -> None:
    chosen = options(accumulation=2).programs(1)

    assert "Shape mismatch for x" in refusal(chosen, batch(16), (X[:20], Y[:20]))


@pytest.mark.parametrize(
    "chosen, message",
    [
        (options(accumulation=2).programs(1), "Shape mismatch"),
        (options(iterations=4).outputMode(OutputMode.EveryN, 4), "EveryN does not allow"),
        (
            options(replicas=4).inputReplicaGrouping(2, poptorch.CommGroupType.Consecutive),
            "share their inputs",
        ),
    ],
)
def test_settings_that_do_not_allow_a_shorter_batch_say_so(
    chosen: poptorch.Options, message: str
) -> None:
    rows = 32 if chosen.device_iterations > 1 else 16

    assert message in refusal(chosen, batch(rows), batch(rows - 5))


def test_the_first_batch_has_to_divide_into_micro_batches() -> None:
    model = Net()
    training = poptorch.trainingModel(model, options(accumulation=2), sgd(model))

    with pytest.raises(AssertionError, match="Invalid batch dimension"):
        training(*batch(11))


def test_with_programs_for_more_sizes_a_batch_that_divides_has_equal_micro_batches() -> None:
    chosen = options(accumulation=2).programs(2).outputMode(OutputMode.All)
    training = poptorch.trainingModel(Net(), chosen)
    training(*batch(16))

    assert training(*batch(6))[1].shape == (2,)
    assert training(*batch(11))[1].shape == (2,)


class PerPosition(nn.Module):
    """Takes rows of any length, and returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x).mean(1)
        return nn.functional.mse_loss(out, torch.zeros_like(out))


def losses_and_weights(
    shapes: list[tuple[int, int]], chosen: poptorch.Options, rows: int = ROWS
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Train with batches of some rows and lengths, and in eager PyTorch with micro-batches."""
    model = PerPosition()
    eager = copy.deepcopy(model)
    optimizer, training = sgd(eager), poptorch.trainingModel(model, chosen, sgd(model))
    found, expected = [], []
    for shape in shapes:
        x = normal(*shape, 4)
        found += training(x).reshape(-1).tolist()
        optimizer.zero_grad()
        parts = x.split(rows)
        for part in parts:
            loss = eager(part)
            (loss / len(parts)).backward()
            expected.append(loss.item())
        optimizer.step()
    return (found, model.state_dict()), (expected, eager.state_dict())


VARYING = {
    "the same length": [(16, 5), (12, 5)],
    "before the lengths vary": [(16, 5), (12, 9), (16, 9)],
    "after the lengths vary": [(16, 5), (16, 9), (12, 5), (12, 9), (16, 7), (12, 7)],
    "the other length first": [(16, 9), (16, 5), (12, 5), (12, 9)],
    "after more rows": [(16, 5), (12, 5), (16, 6), (16, 7), (12, 5)],
    "rows that do not divide": [(16, 5), (13, 5), (16, 9), (13, 9), (5, 7)],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shapes", VARYING.values(), ids=VARYING)
def test_fewer_rows_are_cut_into_usual_micro_batches_whichever_size_came_first(
    shapes: list[tuple[int, int]],
) -> None:
    chosen = options(accumulation=2).outputMode(OutputMode.All)
    (losses, weights), (expected, eager) = losses_and_weights(shapes, chosen)

    assert losses == pytest.approx(expected, rel=relative(64, 5))
    torch.testing.assert_close(weights, eager)


@pytest.mark.larger(
    "test_with_programs_for_more_sizes_a_batch_that_divides_has_equal_micro_batches"
)
def test_with_programs_for_more_sizes_a_batch_of_another_length_is_cut_if_it_does_not_divide() -> (
    None
):
    chosen = options(accumulation=2).programs(3).outputMode(OutputMode.All)
    shapes = [(16, 5), (13, 9), (16, 9), (13, 5)]
    (losses, weights), (expected, eager) = losses_and_weights(shapes, chosen)

    assert losses == pytest.approx(expected, rel=relative(64, 5))
    torch.testing.assert_close(weights, eager)


def test_after_a_second_shorter_size_one_program_serves_all_sizes() -> None:
    model = PerPosition()
    inference = poptorch.inferenceModel(model.layer, options())
    with compilations() as compiled:
        for rows in (16, 5, 5, 7, 11, 3, 9, 2):
            x = normal(rows, 4)
            torch.testing.assert_close(inference(x), model.layer(x).detach())

    assert len(compiled) == 3
    assert inference._session.now.inputs.symbols


@pytest.mark.filterwarnings("ignore")
def test_shorter_batches_without_a_program_for_all_sizes_have_their_own() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * len(str(x.shape[0]))

    inference = poptorch.inferenceModel(Having(lambda _, x: forward(x)), options())
    for rows in (16, 5, 12, 3):
        x = normal(rows, 4)
        torch.testing.assert_close(inference(x), forward(x))


def test_a_model_is_saved_for_whole_batches_after_a_shorter_one(tmp_path: Any) -> None:
    model = Net()
    training = poptorch.trainingModel(model, options(accumulation=2), sgd(model))
    for rows in (16, 11):
        training(*batch(rows))
    training.save(tmp_path / "model.poptorch")
    expected = training(*batch(16))[1]

    loaded = poptorch.load(tmp_path / "model.poptorch")

    assert torch.equal(loaded(*batch(16))[1], expected)


@pytest.mark.parametrize("counts", [{"accumulation": 2}, {"iterations": 2}, {"replicas": 2}])
@pytest.mark.parametrize("rows", [4, 3])
def test_one_loss_of_several_has_the_dimension_of_a_whole_batch(
    counts: dict[str, int], rows: int
) -> None:
    model = Regression()
    opts = options(**counts).outputMode(poptorch.OutputMode.All)
    wrapped = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))

    whole = wrapped(torch.randn(8, 4), torch.randn(8, 2))
    short = wrapped(torch.randn(rows, 4), torch.randn(rows, 2))

    assert whole.shape == (2,)
    assert short.shape == (1,)

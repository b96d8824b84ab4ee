"""Positions that are in tensors, as indices."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import poptorch
from helpers.wrapping import Having, agrees, graph_of, normal, options, trains_alike

ROWS = 4
ARRAY = np.array([0, 2])


class Queue(nn.Module):
    """A layer, and a buffer in which each call writes to the next row."""

    def __init__(self, function: Callable[["Queue", torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("rows", torch.zeros(ROWS, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def largest(x: torch.Tensor) -> torch.Tensor:
    """The number of the largest part of an input; it differs between inputs."""
    return x.abs().sum((1, 2)).argmax()


def write_a_row(model: Queue, x: torch.Tensor) -> torch.Tensor:
    model.rows[model.count % ROWS] = x[0, 0]
    model.count += 1
    return model.rows.clone()


def write_an_element(model: Queue, x: torch.Tensor) -> torch.Tensor:
    model.rows[model.count % ROWS, 2] = x[0, 0, 0]
    model.count += 1
    return model.rows.clone()


def add_to_a_row(model: Queue, x: torch.Tensor) -> torch.Tensor:
    model.rows[model.count % ROWS] += x[0, 0]
    model.count += 1
    return model.rows.clone()


def clear_a_part(model: Queue, x: torch.Tensor) -> torch.Tensor:
    y = model.linear(x) * 1
    y[largest(x)] = 0
    return y


def a_slice_after_the_position(model: Queue, x: torch.Tensor) -> torch.Tensor:
    at = largest(x)
    return model.linear(x)[:, at + 1 : at + 3]


Write = Callable[[torch.Tensor, torch.Tensor], object]
WRITES: dict[str, Write] = {
    "a part is scaled": lambda y, i: y[i].mul_(2),
    "a view of a part is cleared": lambda y, i: y[i][:2].zero_(),
    "a row of a part is changed": lambda y, i: y[i][0].add_(1),
    "a transposed part is scaled": lambda y, i: y[i].t().mul_(2),
    "a part of a part": lambda y, i: y[i][i].mul_(2),
    "two positions at once": lambda y, i: y[i, i].mul_(2),
    "along another dimension": lambda y, i: y[:, i].relu_(),
    "a slice": lambda y, i: y[:, i : i + 2].mul_(3),
    "a selected part": lambda y, i: y.select(0, i).add_(1),
    "a function of torch selects": lambda y, i: torch.select(y, -1, i).add_(1),
    "a narrowed part": lambda y, i: y.narrow(1, i, 2).mul_(2),
    "a narrowed part from the end": lambda y, i: y.narrow(1, i - 5, 2).mul_(2),
    "an assignment to a part": lambda y, i: y[i].__setitem__((slice(None), 0), 5.0),
    "an assignment to two positions": lambda y, i: y.__setitem__((i, i), 5.0),
    "an assignment to a position and rows": lambda y, i: y.__setitem__((i, [0, 2]), 5.0),
    "an assignment to an array and a position": lambda y, i: y.__setitem__((ARRAY, i), 5.0),
    "an assignment to a position and a mask": lambda y, i: y.__setitem__((i, y[0] > 0), 5.0),
    "through data": lambda y, i: y[i].data.mul_(2),
    "through a detached view": lambda y, i: y[i][:2].detach().mul_(2),
    "an argument of a function": lambda y, i: torch.mul(y.detach()[0], 2, out=y.detach()[i]),
    "an activation": lambda y, i: nn.functional.relu(y[i], inplace=True),
    "one after the other": lambda y, i: (y[i].mul_(2), y[0].add_(1), y[i].sub_(3)),
    "two names of one part": lambda y, i: both_written(y[i], y[i]),
    "a part is read after the whole was written": lambda y, i: whole_written(y, y[i]),
    "a part is not read before it is written": lambda y, i: whole_and_part_written(y, y[i]),
}


def both_written(one: torch.Tensor, two: torch.Tensor) -> None:
    one.mul_(2)
    two.add_(one)


def whole_written(whole: torch.Tensor, part: torch.Tensor) -> None:
    whole.mul_(2)
    with torch.no_grad():
        part.sum()
    whole.add_(part.mean())


def whole_and_part_written(whole: torch.Tensor, part: torch.Tensor) -> None:
    whole.mul_(2)
    part.add_(1)


FUNCTIONS = {
    "a part": lambda m, x: m.linear(x)[largest(x)],
    "a row of a part": lambda m, x: m.linear(x)[largest(x), 1],
    "a slice of a part": lambda m, x: m.linear(x)[largest(x), 1:3],
    "along another dimension": lambda m, x: m.linear(x)[:, largest(x)],
    "along the last dimension": lambda m, x: m.linear(x)[..., largest(x)],
    "a slice after the position": a_slice_after_the_position,
    "from the end": lambda m, x: m.linear(x)[-largest(x) - 1],
    "two positions": lambda m, x: m.linear(x)[largest(x), largest(x)],
    "a new dimension": lambda m, x: m.linear(x)[largest(x), None],
    "a position before a list": lambda m, x: m.linear(x)[largest(x), [0, 2]],
    "a position after a tensor": lambda m, x: m.linear(x)[torch.tensor([2, 0]), largest(x)],
    "a position after an array": lambda m, x: m.linear(x)[np.array([2, 0]), largest(x)],
    "a position between tensors": lambda m, x: m.linear(x)[x.argmin(0), largest(x), x.argmin(0)],
    "a position after all others": lambda m, x: m.linear(x)[
        x[:, 0].argmin(0)[None], ..., largest(x)
    ],
    "an integer of 32 bits": lambda m, x: m.linear(x)[largest(x).int()],
    "a row is written": write_a_row,
    "an element is written": write_an_element,
    "something is added to a row": add_to_a_row,
    "a number is written to a part": clear_a_part,
}


def same(result: torch.Tensor, expected: torch.Tensor, call: str) -> None:
    torch.testing.assert_close(
        result, expected, msg=lambda differences: f"{call} of the tensor\n{differences}"
    )


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_each_call_uses_its_own_position(
    function: Callable[[Queue, torch.Tensor], torch.Tensor],
) -> None:
    model = Queue(function).eval()
    eager_model = copy.deepcopy(model)
    wrapped = poptorch.inferenceModel(model, options())
    for call in range(ROWS + 1):
        x = torch.randn(3, 5, 4)
        same(wrapped(x), eager_model(x).detach(), f"call {call} at position {largest(x)}")


def test_gradients_go_to_the_position_of_each_micro_batch() -> None:
    class Selecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)[largest(x)]
            return nn.functional.mse_loss(y, torch.ones_like(y))

    model = Selecting()
    eager_model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(eager_model.parameters(), lr=0.1)
    chosen = options()
    chosen.Training.gradientAccumulation(2)
    training = poptorch.trainingModel(model, chosen, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        x = torch.randn(6, 5, 4)
        training(x)
        optimizer.zero_grad()
        for part in x.split(3):
            (eager_model(part) / 2).backward()
        optimizer.step()

    torch.testing.assert_close(model.state_dict(), eager_model.state_dict())


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_to_a_part_is_one_to_the_tensor(write: Write) -> None:
    def written(model: Queue, x: torch.Tensor) -> torch.Tensor:
        y = model.linear(x) * 1
        write(y, largest(x))
        return y

    model = Queue(written).eval()
    eager_model = copy.deepcopy(model)
    wrapped = poptorch.inferenceModel(model, options())
    for call in range(4):
        x = torch.randn(3, 5, 4)
        same(wrapped(x), eager_model(x).detach(), f"call {call} at position {largest(x)}")


@pytest.mark.slow
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_gradients_follow_writes_to_parts(write: Write) -> None:
    def loss(model: Having, x: torch.Tensor) -> torch.Tensor:
        y = model.linear(x) * 1
        write(y, largest(x))
        return nn.functional.mse_loss(y, torch.ones_like(y))

    trains_alike(Having(loss, linear=nn.Linear(4, 4)), torch.randn(6, 5, 4), accumulation=2)


def test_a_part_in_recomputed_code_is_written() -> None:
    def scaled(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = layer(x) * 1
        y[largest(x)].mul_(2)
        y[largest(x)].mul_(3)
        return y

    def loss(model: Having, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(scaled, model.linear, x, use_reentrant=False)
        return nn.functional.mse_loss(y, torch.ones_like(y))

    trains_alike(Having(loss, linear=nn.Linear(4, 4)), torch.randn(3, 5, 4))


def test_a_part_of_a_tensor_of_inference_mode_is_written() -> None:
    def doubled(model: Queue, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            y = x * 1
            y[largest(x)].mul_(2)
        return y.clone()

    agrees(Queue(doubled), torch.randn(3, 5, 4))


def test_a_part_is_written_in_a_loop() -> None:
    def body(y: torch.Tensor) -> torch.Tensor:
        y = y * 1
        y[largest(y)].mul_(0.5)
        return y

    def loop(model: Queue, x: torch.Tensor) -> torch.Tensor:
        (y,) = poptorch.for_loop(3, body, [x])
        return y

    x = torch.randn(3, 5, 4)

    result = poptorch.inferenceModel(Queue(loop), options())(x)

    torch.testing.assert_close(result, body(body(body(x))))


def test_a_position_that_vmap_divides_gives_a_copy_as_in_torch() -> None:
    def clear(rows: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        rows = rows * 1
        rows[i].zero_()
        return rows

    def each(model: Queue, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(clear)(model.linear(x), x[:, 0].argmax(-1))

    agrees(Queue(each), torch.randn(3, 5, 4))


def test_a_row_that_an_augmented_assignment_changes_is_written_once() -> None:
    wrapped = poptorch.inferenceModel(Queue(add_to_a_row), options())
    wrapped(torch.randn(3, 5, 4))

    writes = graph_of(wrapped).find_nodes(
        op="call_function", target=torch.ops.aten.index_copy.default
    )

    assert len(writes) == 1


def test_one_operator_that_writes_to_a_tensor_and_a_part_is_refused() -> None:
    def both(model: Queue, x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        torch._foreach_mul_([y[largest(x)], y[0]], 2)
        return y

    with pytest.raises(poptorch.Error, match="One operator writes"):
        poptorch.inferenceModel(Queue(both), options())(torch.randn(3, 5, 4))


@pytest.mark.parametrize("accumulation", [2, 1])
def test_training_goes_through_an_assignment_at_rows_and_a_position(accumulation: int) -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            y, column = self.linear(x)[:, 0], at[0]
            put = torch.zeros(5, 4).index_put((rows, torch.tensor(1)), y, accumulate=True)
            placed = torch.zeros(5, 4)
            placed[rows, column] = y
            placed[column, rows % 4] += y
            return nn.functional.mse_loss(put + placed, torch.ones(5, 4))

    rows = torch.stack([torch.randperm(5)[:4] for _ in range(accumulation)]).flatten()
    at = torch.arange(accumulation)

    trains_alike(Placed(), normal(4 * accumulation, 3), rows, at, accumulation=accumulation)


def test_an_index_without_dimensions_selects_in_each_micro_batch() -> None:
    class Selecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            added = torch.zeros(5, 4).index_add(0, at[0], self.linear(x)[:1])
            selected = added.index_select(0, at[0])
            return nn.functional.mse_loss(selected, torch.ones(1, 4))

    trains_alike(Selecting(), normal(4, 3), torch.tensor([2, 0]), accumulation=2)


def test_a_number_that_an_operator_reads_is_named_with_its_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Queue(lambda m, x: torch.add(x, x, alpha=x.sum()))
    chosen = options().checkAgainstEager("off")

    poptorch.inferenceModel(model, chosen)(torch.ones(1, 1, 2))

    (message,) = (text for text in caplog.messages if "reads the number" in text)
    assert "test_positions.py" in message
    assert "2.0 for the first inputs" in message

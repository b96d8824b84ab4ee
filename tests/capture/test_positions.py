"""Positions that are in tensors, as indices."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import options

ROWS = 4


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


FUNCTIONS = {
    "a part": lambda m, x: m.linear(x)[largest(x)],
    "a row of a part": lambda m, x: m.linear(x)[largest(x), 1],
    "a slice of a part": lambda m, x: m.linear(x)[largest(x), 1:3],
    "along another dimension": lambda m, x: m.linear(x)[:, largest(x)],
    "along the last dimension": lambda m, x: m.linear(x)[..., largest(x)],
    "from the end": lambda m, x: m.linear(x)[-largest(x) - 1],
    "two positions": lambda m, x: m.linear(x)[largest(x), largest(x)],
    "a new dimension": lambda m, x: m.linear(x)[largest(x), None],
    "an integer of 32 bits": lambda m, x: m.linear(x)[largest(x).int()],
    "a row is written": write_a_row,
    "an element is written": write_an_element,
    "something is added to a row": add_to_a_row,
    "a number is written to a part": clear_a_part,
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_each_call_uses_its_own_position(
    function: Callable[[Queue, torch.Tensor], torch.Tensor],
) -> None:
    model = Queue(function).eval()
    twin = copy.deepcopy(model)
    wrapped = poptorch.inferenceModel(model, options())
    for _ in range(ROWS + 1):
        x = torch.randn(3, 5, 4)
        torch.testing.assert_close(wrapped(x), twin(x).detach())


def test_gradients_go_to_the_position_of_each_micro_batch() -> None:
    class Selecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)[largest(x)]
            return nn.functional.mse_loss(y, torch.ones_like(y))

    model = Selecting()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    chosen = options()
    chosen.Training.gradientAccumulation(2)
    training = poptorch.trainingModel(model, chosen, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        x = torch.randn(6, 5, 4)
        training(x)
        optimizer.zero_grad()
        for part in x.split(3):
            (twin(part) / 2).backward()
        optimizer.step()

    torch.testing.assert_close(model.state_dict(), twin.state_dict())


def test_a_position_together_with_another_tensor_as_an_index_is_refused() -> None:
    wrapped = poptorch.inferenceModel(Queue(lambda m, x: x[largest(x), [0, 2]]), options())

    with pytest.raises(poptorch.Error, match="position in a tensor together with a tensor"):
        wrapped(torch.randn(3, 5, 4))


def test_a_number_that_an_operator_reads_is_named_with_its_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Queue(lambda m, x: torch.add(x, x, alpha=x.sum()))
    chosen = options().checkAgainstEager("off")

    poptorch.inferenceModel(model, chosen)(torch.ones(1, 1, 2))

    (message,) = (text for text in caplog.messages if "reads the number" in text)
    assert "test_positions.py" in message
    assert "2.0 for the first inputs" in message

"""Functions and a model with nested loops and conditions."""

import torch

import poptorch
from helpers.wrapping import Having

SHIFT = torch.tensor([1.0, 2.0, 3.0])


def power_sums(x: torch.Tensor, step: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return x doubled and shifted five times with a count, and x, which the body leaves alone."""

    def body(value: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value.mul_(2)  # on a copy
        return value + step, count + 1

    return poptorch.for_loop(5, body, [x, torch.zeros(2, dtype=torch.int32)]), x


def nested_loops(model: Having, x: torch.Tensor) -> list[torch.Tensor]:
    """Parameters, buffers and constants of the surroundings are used without being listed."""
    other = x.flip(0)

    def inner(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return model.layer(a) * model.scale + SHIFT, b + other[0]

    def outer(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = poptorch.for_loop(2, inner, [a, b])
        return a, b.relu()

    return poptorch.for_loop(3, outer, [x, x[0]])


def looping_model() -> Having:
    """Return a model that runs ``nested_loops``."""
    return Having(nested_loops, layer=torch.nn.Linear(3, 3), scale=torch.tensor(0.5))


def conditions_within_conditions(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor
) -> list[torch.Tensor]:
    """Branches without inputs in branches, on tensors of every level of the surroundings."""
    z, positive = x * 2, y.sum() > 0

    def taken() -> list[torch.Tensor]:
        mine = z + weight

        def once() -> torch.Tensor:
            return poptorch.for_loop(2, lambda q: q * 2 + mine, [z])[0]

        return poptorch.cond(positive, once, [], lambda: mine * y - x, [])

    def other(a: torch.Tensor) -> list[torch.Tensor]:
        return poptorch.cond(a.sum() > -2, lambda: z, [], lambda b: z - b * y, [a])

    return poptorch.cond(x.sum() > 0, taken, [], other, [x])


class Conditions(torch.nn.Module):
    """Nested conditions that use a parameter, and one of several results."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([3.0, -1.0]))

    def forward(
        self, x: torch.Tensor, y: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        def then(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return a + b, a - b

        def otherwise(a: torch.Tensor) -> list[torch.Tensor]:
            return [a * 10, poptorch.for_loop(3, lambda v: v * 2, [a])[0]]

        flag = (x > y).any()
        nested = conditions_within_conditions(x, y, self.weight)
        return nested, poptorch.cond(flag, then, [x, x + 1], otherwise, [x])

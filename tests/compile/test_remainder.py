"""Micro-batches of two sizes as one graph."""

from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Having, normal, options, unchecked
from poptorch._ir.slots import Kind

X = normal(32, 4)


def mean_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    return poptorch.identity_loss((model.layer(x) * model.factors).mean(), reduction="mean")


def programs_of(executor: poptorch.PoplarExecutor) -> list[Any]:
    return [each.compiled.plan.program for each in executor._session.programs.all]


def trained(forward: Any, chosen: poptorch.Options, *rows: int) -> poptorch.PoplarExecutor:
    model = Having(forward, layer=nn.Linear(4, 4))
    model.__dict__["factors"] = torch.arange(4.0)  # in no buffer: a constant of the program
    training = poptorch.trainingModel(model, chosen, torch.optim.SGD(model.parameters(), lr=0.1))
    for each in rows:
        training(X[:each])
    return training


def test_the_program_of_a_remainder_is_a_single_step() -> None:
    training = trained(mean_of, options(accumulation=4), 32, 27)

    short, whole = programs_of(training)

    assert list(short.graphs) == ["step"]
    assert short.loops.micro_batches == 1
    assert whole.loops.micro_batches == 4


def test_micro_batches_of_both_sizes_share_constants() -> None:
    training = trained(mean_of, options(accumulation=4), 32, 27)

    counts = [
        len([slot for slot in program.state_slots().values() if slot.kind is Kind.CONSTANT])
        for program in programs_of(training)
    ]

    assert len({*counts}) == 1


@pytest.mark.parametrize("rows", [27, 3])
def test_results_that_depend_on_the_number_of_rows_are_refused(rows: int) -> None:
    def forward(model: Any, x: torch.Tensor) -> Any:
        loss = mean_of(model, x)
        return (loss, x * 2) if len(x) < 8 else loss

    training = trained(forward, options(accumulation=4), 32)

    with pytest.raises(
        poptorch.Error, match="a different number or shape of results for a shorter batch"
    ):
        training(X[:rows])
    training(X)


def test_replicas_that_exchange_tensors_cannot_share_a_short_batch() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        example = torch.zeros(2, *x.shape)
        (all_rows,) = poptorch.custom_op(
            [x], "ReplicatedAllGather", "ai.graphcore", 1, example_outputs=[example]
        )
        return mean_of(model, x), all_rows

    training = trained(forward, unchecked(replicas=2), 16)

    with pytest.raises(poptorch.Error, match="exchange tensors"):
        training(X[:11])

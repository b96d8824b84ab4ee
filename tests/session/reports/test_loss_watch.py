"""Training warns of the first loss that is not finite, and says in which update it was."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.wrapping import Having, options, training


def squared(model: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = model.linear(x)
    return out, F.mse_loss(out, torch.zeros_like(out))


def with_infinite_output(model: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an output that is too large for float32, and a loss that is not."""
    out = model.linear(x)
    return out.detach() * 1e38 * 1e38, poptorch.identity_loss(out, "mean")


def two_updates_per_call(
    mode: poptorch.OutputMode = poptorch.OutputMode.All,
) -> poptorch.PoplarExecutor:
    opts = options(iterations=2, accumulation=2).outputMode(mode)
    return training(Having(squared, linear=nn.Linear(4, 2)), opts)


def with_infinite_first_row() -> torch.Tensor:
    x = torch.randn(8, 4)
    x[0] = torch.inf
    return x


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.message for each in caplog.records if each.levelno >= logging.WARNING]


def test_finite_losses_cause_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    two_updates_per_call()(torch.randn(8, 4))

    assert warnings(caplog) == []


def test_the_warning_names_the_update_of_the_first_loss_that_is_not_finite(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = two_updates_per_call()
    executor(torch.randn(8, 4))

    executor(with_infinite_first_row())

    (warning,) = warnings(caplog)
    assert "The loss is nan for the first time, in update 3 of this run" in warning


def test_the_warning_names_the_last_update_of_a_call_that_returns_only_its_loss(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = two_updates_per_call(poptorch.OutputMode.Final)
    executor(torch.randn(8, 4))

    executor(with_infinite_first_row())

    (warning,) = warnings(caplog)
    assert "The loss is nan for the first time, in update 4 of this run" in warning


def test_a_second_call_with_such_a_loss_causes_no_further_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = two_updates_per_call()
    executor(with_infinite_first_row())

    executor(with_infinite_first_row())

    assert len(warnings(caplog)) == 1


def test_an_infinite_output_is_not_reported_as_an_infinite_loss(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = training(Having(with_infinite_output, linear=nn.Linear(4, 2)), options())

    output, loss = executor(torch.ones(4, 4))

    assert not output.isfinite().all()
    assert loss.isfinite()
    assert warnings(caplog) == []

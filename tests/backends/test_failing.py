"""Which exceptions of a program are explained, and which reach the user as they are."""

import torch
from torch import nn

from helpers.captures import capture
from poptorch._base.errors import Error, OperatorError
from poptorch._ir.graph import Graph
from poptorch.backends.failing import explained

SQUARE = torch.eye(3)


class Decomposing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.cholesky(x)


def graph() -> Graph:
    return capture(Decomposing(), SQUARE).graph


def users_exception() -> Exception:
    """Return an exception that code of the user raised, which this file is."""
    try:
        raise ValueError("too few samples")
    except ValueError as error:
        return error


def test_an_exception_that_the_users_code_raised_stays_as_it_is() -> None:
    error = users_exception()

    assert explained(error, graph(), [SQUARE]) is error


def test_an_error_of_the_library_stays_as_it_is() -> None:
    error = Error("Two processes have different weights", got="'layer'", fix="call broadcast")

    assert explained(error, graph(), [SQUARE]) is error


def test_an_error_of_torch_names_the_operator_that_fails_with_these_arguments() -> None:
    error = RuntimeError("a compiled program failed")

    better = explained(error, graph(), [-SQUARE])

    assert isinstance(better, OperatorError)
    assert "cholesky" in str(better)

"""What the graph of one micro-batch takes and returns."""

import torch
from torch import nn

from helpers.captures import capture


class Partly(nn.Module):
    """Uses one of two weights and one of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        return x * self.used


def test_a_weight_that_forward_does_not_use_is_no_input_of_the_graph() -> None:
    graph = capture(Partly(), torch.ones(2, 3), torch.ones(2)).graph

    weights = [slot.path for slot in graph.inputs if slot.is_state]
    assert weights == ["used"]


def test_an_input_that_forward_does_not_use_stays_an_input_of_the_graph() -> None:
    graph = capture(Partly(), torch.ones(2, 3), torch.ones(2)).graph

    inputs = [slot.shape for slot in graph.inputs if not slot.is_state]
    assert inputs == [(2, 3), (2,)]


def test_weights_that_nothing_writes_are_no_results_of_the_graph() -> None:
    graph = capture(Partly(), torch.ones(2, 3), torch.ones(2)).graph

    results = [slot.shape for slot in graph.outputs]
    assert results == [(2, 3)]

"""Bytes that are alive at once."""

from collections.abc import Callable
from typing import Any

import torch

import poptorch
from helpers.wrapping import Calling, options
from poptorch._cost.live_bytes import peak_bytes
from poptorch._cost.seconds import core_seconds
from poptorch._ir.graph import Graph

ROWS = torch.ones(4, 256)
KIB = 1024 * 4
"""Bytes of ``ROWS``."""


def graph_of(function: Callable[..., Any]) -> Graph:
    wrapper = poptorch.inferenceModel(Calling(function), options())
    wrapper.compile(ROWS)
    (graph,) = wrapper.plan().program.graphs.values()
    return graph


def test_a_chain_keeps_an_operand_and_its_result() -> None:
    assert peak_bytes(graph_of(lambda x: x.tanh().exp().sin().cos())) == 2 * KIB


def test_a_value_that_is_read_again_stays() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        first = x.tanh()
        return first.exp().sin() + first

    assert peak_bytes(graph_of(twice)) == 3 * KIB


def test_a_view_takes_neither_bytes_nor_time() -> None:
    def viewed(x: torch.Tensor) -> torch.Tensor:
        return x.tanh().view(256, 4).exp()

    graph = graph_of(viewed)
    (view,) = [node for node in graph.operators if "view" in node.name]

    assert peak_bytes(graph) == 2 * KIB
    assert core_seconds(view) == 0

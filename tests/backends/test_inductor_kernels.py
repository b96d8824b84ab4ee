"""Kernels that Python calls are compiled in one run, and each gets its own arguments."""

import pytest
import torch

from helpers.inductor_graphs import Tensors, check
from poptorch.backends.inductor import kernels


@torch.library.custom_op("poptorch_test_kernels::twice", mutates_args=())
def twice(x: torch.Tensor) -> list[torch.Tensor]:
    """A result that C++ cannot take from an operator."""
    return [x * 2]


twice.register_fake(lambda x: [torch.empty_like(x)])


def step(x: torch.Tensor, n: torch.Tensor) -> tuple[Tensors, Tensors]:
    between = twice(torch.tanh(x).softmax(1))[0]
    return [twice(between.sin() + n[:, None])[0].sum(0), (n * 3).relu()], [x + between]


@pytest.mark.slow
def test_one_run_for_all_kernels_of_a_graph(monkeypatch) -> None:
    loaded: list[int] = []
    load = kernels._load

    def counted(sources: list[str], first: int):
        loaded.append(len(sources))
        return load(sources, first)

    monkeypatch.setattr(kernels, "_load", counted)
    check(step, [torch.randn(5, 33), torch.arange(5)])
    assert len(loaded) == 1
    assert loaded[0] >= 3


@pytest.mark.parametrize("source", [
    'static int helper; extern "C" void kernel(float* a) {}',
    'extern "C" void other(float* a) {}',
])  # fmt: skip
def test_other_sources_are_left_to_torch(source: str) -> None:
    asked = kernels.together()(lambda *arguments: arguments, "self", ["float*"], source)
    assert asked == ("self", ["float*"], source)

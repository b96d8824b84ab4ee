"""Kernels that Python calls, because of a host function between them, are built in one library."""

from typing import Any

import pytest
import torch

from helpers.compiled_graphs import Tensors, check
from poptorch._cpu import headers, joint_kernels


@torch.library.custom_op("poptorch_test_kernels::twice", mutates_args=())
def twice(x: torch.Tensor) -> list[torch.Tensor]:
    """A result that C++ cannot take from an operator."""
    return [x * 2]


twice.register_fake(lambda x: [torch.empty_like(x)])


def step(x: torch.Tensor, n: torch.Tensor) -> tuple[Tensors, Tensors]:
    between = twice(torch.tanh(x).softmax(1))[0]
    return [twice(between.sin() + n[:, None])[0].sum(0), (n * 3).relu()], [x + between]


@pytest.mark.slow
def test_the_c_plus_plus_compiler_runs_once_for_all_kernels_of_a_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels_of_each_run: list[int] = []
    load = joint_kernels._load

    def counted(sources: list[str], first: int) -> Any:
        kernels_of_each_run.append(len(sources))
        return load(sources, first)

    monkeypatch.setattr(joint_kernels, "_load", counted)

    check(step, [torch.randn(5, 33), torch.arange(5)])

    assert headers._refused == []
    assert len(kernels_of_each_run) == 1
    assert kernels_of_each_run[0] >= 3


@pytest.mark.parametrize(
    "source",
    [
        'static int helper; extern "C" void kernel(float* a) {}',
        'extern "C" void other(float* a) {}',
    ],
)
def test_a_source_of_another_form_is_left_to_torch(source: str) -> None:
    asked = joint_kernels.together()(lambda *arguments: arguments, "self", ["float*"], source)
    assert asked == ("self", ["float*"], source)

"""Compiled code rounds where a program converts to half precision and back."""

import pytest
import torch
import torch.nn.functional as F

from helpers.compiled_graphs import Tensors, check, graph
from poptorch._cpu.half_roundings import rounds_to_half

HALVES = pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)


@pytest.mark.larger("test_a_compensated_sum_in_half_precision_is_that_of_eager_torch")
@HALVES
def test_what_rounding_removes_is_computed_by_compiled_code(half: torch.dtype) -> None:
    def removed(x: torch.Tensor) -> tuple[Tensors, Tensors]:
        return [x - x.to(half).float()], []

    check(removed, [torch.randn(64)])


@HALVES
def test_a_rounded_value_may_change_its_shape_before_it_is_used(half: torch.dtype) -> None:
    def transposed(x: torch.Tensor) -> tuple[Tensors, Tensors]:
        return [x.to(half).t().reshape(2, 6).float()], []

    module, _ = graph(transposed, [torch.randn(3, 4)])
    assert rounds_to_half(module.graph)


def test_a_product_in_half_precision_is_no_rounding_of_its_operands() -> None:
    def product(x: torch.Tensor, w: torch.Tensor) -> tuple[Tensors, Tensors]:
        return [(x.bfloat16() @ w.bfloat16()).float()], []

    module, _ = graph(product, [torch.randn(3, 4), torch.randn(4, 2)])
    assert not rounds_to_half(module.graph)


def compensated(
    total: torch.Tensor, lost: torch.Tensor, x: torch.Tensor
) -> tuple[Tensors, Tensors]:
    added = x - lost
    new = total + added
    return [new, (new - total) - added], []


@HALVES
def test_a_compensated_sum_in_half_precision_is_that_of_eager_torch(half: torch.dtype) -> None:
    check(compensated, [torch.randn(64).to(half) for _ in range(3)])


def test_a_difference_of_independent_values_needs_no_rounding() -> None:
    def rotated(x: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> tuple[Tensors, Tensors]:
        return [x * c - x.flip(0) * s], []

    module, _ = graph(rotated, [torch.randn(6).bfloat16() for _ in range(3)])
    assert not rounds_to_half(module.graph)


def test_a_product_of_a_product_in_half_precision_needs_no_rounding() -> None:
    def products(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> tuple[Tensors, Tensors]:
        return [(x @ v).t() @ w], []

    module, _ = graph(products, [torch.randn(4, 4).half() for _ in range(3)])
    assert not rounds_to_half(module.graph)


def test_a_product_of_attention_in_half_precision_needs_no_rounding() -> None:
    def projected(x: torch.Tensor, w: torch.Tensor) -> tuple[Tensors, Tensors]:
        seen = F.scaled_dot_product_attention(x, x, x)
        return [seen.transpose(1, 2).reshape(-1, 8) @ w], []

    module, _ = graph(projected, [torch.randn(2, 2, 4, 4).half(), torch.randn(8, 8).half()])
    assert not rounds_to_half(module.graph)


def test_a_float32_product_of_a_rounded_value_needs_the_rounding() -> None:
    def product(x: torch.Tensor, w: torch.Tensor) -> tuple[Tensors, Tensors]:
        return [x.half().float() @ w], []

    module, _ = graph(product, [torch.randn(4, 4), torch.randn(4, 4)])
    assert rounds_to_half(module.graph)


def test_a_product_in_half_precision_is_rounded_before_it_is_used_in_float32() -> None:
    def loss(x: torch.Tensor, w: torch.Tensor) -> tuple[Tensors, Tensors]:
        return [(x @ w).float().exp()], []

    module, _ = graph(loss, [torch.randn(4, 4).half(), torch.randn(4, 4).half()])
    assert rounds_to_half(module.graph)


def test_a_float32_product_that_is_also_read_without_rounding_is_rounded() -> None:
    def removed(x: torch.Tensor, w: torch.Tensor) -> tuple[Tensors, Tensors]:
        product = x.float() @ w.float()
        return [product.half().float() @ w.float(), product], []

    module, _ = graph(removed, [torch.randn(4, 4).half(), torch.randn(4, 4).half()])
    assert rounds_to_half(module.graph)

"""Products compute the same by every library and as loops, and the table says which is called."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from helpers.cases import few
from helpers.closeness import near
from helpers.compiled_graphs import Tensors, check
from poptorch._cpu import product_kernels, product_libraries
from poptorch._cpu.product_kernels import row_product, row_product_and, small_product

TRIED = product_libraries.ONEDNN, product_libraries.LOOPS
Sizes = tuple[int, int]


def row_and_weight() -> tuple[torch.Tensor, torch.Tensor]:
    """Return one row, and a weight whose columns are contiguous."""
    return torch.randn(1, 40), torch.randn(24, 40).t()


def test_a_row_times_contiguous_columns_is_computed_with_loops() -> None:
    row, weight = row_and_weight()
    assert row_product.applies(row, weight)
    torch.testing.assert_close(row_product(row, weight), row @ weight, **near(40))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_column_times_a_row_is_computed_with_loops(dtype: torch.dtype) -> None:
    column, row = torch.randn(24, 1, dtype=dtype), torch.randn(1, 40, dtype=dtype)
    assert small_product.applies(column, row)
    assert torch.equal(small_product(column, row), column @ row)


def test_a_column_times_a_row_in_half_is_rounded_by_a_library() -> None:
    column, row = torch.randn(24, 1).bfloat16(), torch.randn(1, 40).bfloat16()
    assert not small_product.applies(column, row)


def test_a_row_with_an_addend_is_computed_with_loops() -> None:
    row, weight = row_and_weight()
    bias = torch.randn(24)
    assert row_product_and.applies(bias, row, weight)
    found = row_product_and(bias, row, weight)
    torch.testing.assert_close(found, torch.addmm(bias, row, weight), **near(40))


def test_a_row_with_scaled_operands_is_left_to_a_library() -> None:
    row, weight = row_and_weight()
    assert not row_product_and.applies(torch.randn(24), row, weight, beta=0.5)


@pytest.mark.parametrize(
    "row, weight",
    [
        pytest.param(torch.randn(1, 40).double(), torch.randn(24, 40).t(), id="float64"),
        pytest.param(torch.randn(2, 40), torch.randn(24, 40).t(), id="two rows"),
        pytest.param(torch.randn(1, 40), torch.randn(40, 24), id="contiguous rows"),
        pytest.param(torch.randn(1, 8), torch.randn(24, 8).t(), id="short columns"),
    ],
)
def test_other_products_are_left_to_a_library(row: torch.Tensor, weight: torch.Tensor) -> None:
    assert not row_product.applies(row, weight)


def step(
    w: torch.Tensor, x: torch.Tensor, g: torch.Tensor, b: torch.Tensor
) -> tuple[Tensors, Tensors]:
    """All layouts of a linear layer's products, with a bias and without."""
    everything = [
        torch.addmm(b, x, w.t()),  # forward
        g @ w,  # the input's gradient
        torch.addmm(g, x, w.t()),  # what is added is a matrix
        torch.addmm(b, x, w.t(), alpha=2.0),
        (x.t() @ g).t(),
        x[:, 3:40] @ w.t()[3:40].relu(),
        x[:, :1].expand(-1, 64) @ w.t()[:64],  # overlaps in memory
        torch.addmm(b, x[:1].exp(), w.t()).relu(),  # loops
        x[:1].double() @ w.t().double(),
        torch.addmm(b, x[:1], w.t(), beta=0.5),
        x[:1, :8] @ w.t()[:8],
        torch.mm(x[0:0], w.t()),
    ]
    return everything, [w - 0.1 * (g.t() @ x)]


@pytest.fixture
def _nothing_kept() -> Iterator[None]:
    """Torch keeps compiled graphs, whichever library was chosen for them."""
    from torch._inductor import config

    with config.patch(fx_graph_cache=False):
        yield


def lowerings_of_torch() -> dict[Callable[..., Any], Callable[..., Any]]:
    from torch._inductor.lowering import lowerings

    return {op: how for op, how in lowerings.items() if "poptorch" not in str(op)}


@pytest.mark.slow
@pytest.mark.usefixtures("_nothing_kept")
@pytest.mark.parametrize("chosen", few([product_libraries.BLAS, *TRIED], *TRIED))
def test_every_library_computes_the_same_for_all_layouts(
    monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    asked, before = [], lowerings_of_torch()

    def choose(a: product_libraries.Matrix, b: product_libraries.Matrix) -> str | None:
        asked.append((a, b))
        layouts = product_libraries._layout_of(a), product_libraries._layout_of(b)
        return chosen if all(layouts) and all(a[0]) else None

    monkeypatch.setattr(product_kernels, "library_of", choose)

    check(step, [torch.randn(shape) for shape in [(96, 128), (64, 128), (64, 96), (96,)]])

    assert any(a[1][0] == 1 for a, _ in asked), "no first operand is column-major"
    assert any(b[1][0] == 1 for _, b in asked), "no second operand is column-major"
    assert lowerings_of_torch() == before


ROWS = ((512, 256), (256, 1))
COLUMNS = ((256, 1000), (1, 256))


def test_the_table_of_a_graph_decides_about_its_products() -> None:
    shape = product_libraries.shape_of(ROWS, COLUMNS)
    assert shape is not None
    with product_kernels.choosing({shape: "the table's"}):
        assert product_kernels.library_of(ROWS, COLUMNS) == "the table's"


def test_a_rule_decides_about_products_that_are_not_in_the_table() -> None:
    shape = product_libraries.shape_of(ROWS, COLUMNS)
    assert shape is not None
    assert product_kernels.library_of(ROWS, COLUMNS) == product_libraries.by_rule(shape)


def test_products_without_a_class_are_left_to_aten() -> None:
    assert product_kernels.library_of(((2, 1024), (1024, 1)), ((1024, 1024), (1, 1024))) is None

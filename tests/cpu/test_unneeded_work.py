"""What torch's compiler leaves out changes neither its results nor its code."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch import fx
from torch._inductor.fx_utils import FakeTensorUpdater
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

from helpers.compiled_graphs import Step, Tensors, graph
from poptorch._cpu import chains, compiler, unneeded_work
from poptorch._cpu.product_kernels import choose_library

D0, D1 = (sympy.Symbol(name, integer=True, nonnegative=True) for name in ("d0", "d1"))
INDICES = [D0, 3 * (D0 + D1) + 7, D0 * (D1 + 1), sympy.Integer(4), 4]


def refuse(*arguments: object) -> None:
    raise AssertionError(f"torch was asked: {arguments}")


@pytest.mark.parametrize("index", INDICES)
def test_an_index_is_simplified_as_torch_does(index: Any) -> None:
    sizes = SizeVarAllocator()

    simple = unneeded_work.simplifying_once()(SizeVarAllocator.simplify, sizes, index)

    assert simple == SizeVarAllocator.simplify(sizes, index)


def test_an_index_is_simplified_once() -> None:
    sizes, simplify = SizeVarAllocator(), unneeded_work.simplifying_once()
    first = simplify(SizeVarAllocator.simplify, sizes, D0 * (D1 + 1))

    again = simplify(refuse, sizes, D0 * (D1 + 1))

    assert again is first


def test_numbers_of_different_types_are_simplified_separately() -> None:
    sizes, simplify = SizeVarAllocator(), unneeded_work.simplifying_once()
    simplify(SizeVarAllocator.simplify, sizes, 1)

    assert simplify(SizeVarAllocator.simplify, sizes, 1.0).is_Float


def test_torch_simplifies_indices_again_if_sizes_were_replaced() -> None:
    sizes, simplify = SizeVarAllocator(), unneeded_work.simplifying_once()
    simplify(SizeVarAllocator.simplify, sizes, D0 + 1)
    sizes.replacements[D0] = sympy.Integer(5)

    assert simplify(SizeVarAllocator.simplify, sizes, D0 + 1) == 6


EMPTY_LOOPS: list[Mapping[str, Any]] = [
    {"tail_size": sympy.Integer(0)},
    {"tail_size": None, "inner_tail_size": sympy.Integer(0), "outer_tail_size": None},
    {"tail_size": None, "inner_tail_size": None, "outer_tail_size": sympy.Integer(0)},
]
OTHER_LOOPS: list[Mapping[str, Any]] = [{}, {"tail_size": None}, {"tail_size": sympy.Integer(3)}]


@pytest.mark.parametrize("sizes", EMPTY_LOOPS)
def test_nothing_is_written_into_a_loop_that_never_runs(sizes: Mapping[str, Any]) -> None:
    with V.set_kernel_handler(SimpleNamespace(**sizes)):
        assert unneeded_work.write_loops_that_run(refuse, None, ()) is None


@pytest.mark.parametrize("sizes", OTHER_LOOPS)
def test_torch_writes_all_other_loops(sizes: Mapping[str, Any]) -> None:
    with V.set_kernel_handler(SimpleNamespace(**sizes)):
        written = unneeded_work.write_loops_that_run(lambda *given: given, "node", ((D0,), ()))

    assert written == ("node", ((D0,), ()))


def with_products(shape: tuple[int, ...] = (4, 4)) -> tuple[fx.GraphModule, Any]:
    """Return a graph of a product and a square, and the mode of its values."""
    given = torch.ones(shape)
    traced = make_fx(lambda x: torch.square((x @ x) + 1), tracing_mode="fake")(given)
    (node,) = traced.graph.find_nodes(op="placeholder")
    return traced, node.meta["val"].fake_mode


def updated(change: Callable[[fx.Graph], None]) -> tuple[fx.GraphModule, int]:
    """Return a graph after a change, and how many values were computed again."""
    traced, mode = with_products()
    updater = FakeTensorUpdater(traced)
    change(traced.graph)
    with V.set_fake_mode(mode):
        count = unneeded_work.update_changed_values(FakeTensorUpdater.incremental_update, updater)
    return traced, count


def test_values_behind_a_product_are_known_if_only_its_library_was_chosen() -> None:
    _, count = updated(choose_library)

    assert count == 0


def test_values_behind_another_change_are_computed_again() -> None:
    def sum_up(traced: fx.Graph) -> None:
        choose_library(traced)
        (product,) = (node for node in traced.nodes if "product" in str(node.target))
        with traced.inserting_after(product):
            total = traced.call_function(torch.ops.aten.sum.dim_IntList, (product, [1]))
        product.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)

    traced, count = updated(sum_up)

    *_, last, _ = traced.graph.nodes
    assert count == 3  # the sum, and both nodes behind it
    assert last.meta["val"].shape == (4,)


def layers(x: torch.Tensor, weight: torch.Tensor) -> tuple[Tensors, Tensors]:
    """Compute products, a reduction, and loops with and without a shorter last vector."""
    hidden = torch.relu(x @ weight)
    return [hidden.softmax(1), (hidden[:, :5] * 2).sum(0)], [x + hidden.mean()]


def written(step: Step, examples: Tensors) -> list[chains.PieceSource]:
    """Return the C++ code of a graph, which is not compiled."""
    module, places = graph(step, examples)
    code: list[chains.PieceSource] = []
    compiler._compile(compiler._Source(module, examples), places, plain=False, written=code)
    return code


@pytest.mark.full("writes the code of a graph twice")
def test_the_code_is_the_same_as_without_these_replacements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    examples = [torch.randn(32, 32), torch.randn(32, 32)]

    ours = written(layers, examples)
    monkeypatch.setattr(unneeded_work, "replacements", dict)
    usual = written(layers, examples)

    assert "cpp_fused" in ours[0].kernels
    assert ours == usual

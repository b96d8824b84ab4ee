"""Graphs with symbolic sizes: their example sizes and conditions, and graphs of fixed sizes."""

from collections.abc import Callable

import pytest
import torch

from poptorch._capture import trace
from poptorch._ir import slots, symbolic
from poptorch._ir.graph import Graph


def captured(
    function: Callable[..., torch.Tensor], *given: slots.Slot
) -> tuple[Graph, symbolic.Conditions]:
    """Record a function; return its graph, with values for example sizes, and its conditions."""
    sizes = symbolic.sizes_of(given, [slot.shape for slot in given])
    symbols = symbolic.Symbols(sizes)
    module, _ = trace.trace(lambda flat: [function(*flat)], [symbols.tensor(s) for s in given])
    conditions = symbolic.settle(module, given, symbols)
    graph = Graph("g", module, given, (slots.batch_input(9, (), torch.float32),))
    return Graph(
        "g", module, symbolic.with_example_sizes(given, graph.placeholders), ()
    ), conditions


def batch(*shape: int, symbols: tuple[str, ...] = (), index: int = 0) -> slots.Slot:
    return slots.batch_input(index, shape, torch.float32, symbols)


def test_example_sizes_do_not_depend_on_the_size_at_hand() -> None:
    one, _ = captured(torch.exp, batch(4, 5, symbols=("", "s0")))
    two, _ = captured(torch.exp, batch(4, 19, symbols=("", "s0")))

    assert one.inputs == two.inputs


def test_example_sizes_differ_from_sizes_that_are_fixed() -> None:
    graph, _ = captured(lambda x: x * torch.ones(4, 67)[:, :1], batch(4, 5, symbols=("", "s0")))

    assert graph.inputs[0].shape[1] != 67


def test_example_sizes_satisfy_conditions() -> None:
    graph, conditions = captured(
        lambda x: x + torch.ones(30)[: x.shape[0]], batch(5, symbols=("s0",))
    )

    assert str(conditions) == "s0 <= 30"
    assert conditions.hold({"s0": graph.inputs[0].shape[0]})


def test_the_example_sizes_of_rows_and_lengths_are_few_numbers() -> None:
    """The compiler treats sums of more than 4096 in another way, which few batches need."""
    graph, _ = captured(torch.exp, batch(4, 5, symbols=("s0", "s1")))
    rows, length = graph.inputs[0].shape

    assert rows != length
    assert min(rows, length) > 16
    assert 2 * rows * length <= 4096


def test_conditions_decide_for_which_sizes_a_graph_may_be_used() -> None:
    _, conditions = captured(lambda x: x + torch.ones(30)[: x.shape[0]], batch(5, symbols=("s0",)))

    assert conditions.hold({"s0": 30})
    assert not conditions.hold({"s0": 31})
    assert not conditions.hold({"s0": 1})


def test_a_size_that_is_used_as_a_number_is_refused() -> None:
    with pytest.raises(symbolic.NotSymbolic, match="uses the size s0 as a number"):
        captured(lambda x: x * len(range(x.shape[0])), batch(5, symbols=("s0",)))


def test_a_size_that_is_the_same_for_all_example_sizes_is_refused() -> None:
    """There are eight singular values at every example size, but five for five columns."""
    with pytest.raises(symbolic.NotSymbolic, match="at which its sizes differ from each other"):
        captured(torch.linalg.svdvals, batch(8, 5, symbols=("", "s0")))


def test_sizes_that_disagree_have_no_value() -> None:
    given = [batch(5, symbols=("s0",)), batch(5, symbols=("s0",), index=1)]

    assert symbolic.sizes_of(given, [(6,), (6,)]) == {"s0": 6}
    assert symbolic.sizes_of(given, [(6,), (7,)]) is None


def test_graphs_are_compared_with_numbers_for_symbols() -> None:
    open_sizes, _ = captured(lambda x: x.view(x.shape[0] * 2, 2), batch(5, 4, symbols=("s0", "")))
    module, _ = trace.trace(
        lambda flat: [flat[0].view(12, 2)], [trace.fake_tensor(trace.fake_mode(), (6, 4), None)]
    )
    fixed = Graph("g", module, (batch(6, 4),), ())

    assert symbolic.first_difference(open_sizes, {"s0": 6}, fixed, {}) is None
    assert "view" in (symbolic.first_difference(open_sizes, {"s0": 7}, fixed, {}) or "")


def test_symbols_are_named_in_the_type_of_a_slot() -> None:
    assert batch(4, 67, symbols=("", "s0")).type_text == "float32[4, s0]"

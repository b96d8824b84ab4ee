"""Results that go where an operand was: the same bits, and nothing lost that is still read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from poptorch.backends.memory_reuse import reuse_memory

aten = torch.ops.aten
Function = Callable[..., Any]


def traced(function: Function, *arguments: torch.Tensor) -> fx.GraphModule:
    """Return the operators of a function, state written at the end, as backends get them."""
    module: fx.GraphModule = make_fx(function, tracing_mode="fake")(*arguments)
    return module


def same(function: Function, *arguments: torch.Tensor) -> list[str]:
    """Assert that results and arguments are the same to the last bit; return the operators."""
    expected, got = ([a.clone() for a in arguments] for _ in range(2))
    wanted = traced(function, *arguments)(*expected)
    module = reuse_memory(traced(function, *arguments))
    results = module(*got)
    for one, other in zip((*wanted, *expected), (*results, *got), strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)
    assert len({r.untyped_storage().data_ptr() for r in (*results, *got)}) == len(results) + len(
        got
    )
    return [str(n.target) for n in module.graph.nodes if n.op == "call_function"]


def adam(weight: Any, gradient: Any, first: Any, second: Any, share: Any) -> Any:
    total = gradient.sum()
    new_first = torch.addcmul(first, gradient - first, share)
    new_second = torch.addcmul(second, gradient * gradient - second, share)
    new_weight = torch.addcmul(weight, new_first / (new_second.sqrt() * share + 1e-8), -share)
    for state, new in ((weight, new_weight), (first, new_first), (second, new_second)):
        state.copy_(new)
    return (total,)


def test_an_update_writes_its_state_in_place() -> None:
    state = [torch.rand(7, 5) for _ in range(4)]
    operators = same(adam, *state, torch.tensor(0.1))
    assert "aten.copy_.default" not in operators
    assert operators.count("aten.addcmul_.default") == 3
    assert "aten.div.out" in operators  # over the root, its second operand
    fresh = [name for name in operators if "_." not in name and not name.endswith(".out")]
    assert [name.split(".")[1] for name in fresh] == ["sum", "sub", "neg"]  # one for a weight


def test_memory_is_not_held_while_a_product_needs_some() -> None:
    def apart(x: Any, w: Any) -> Any:
        return (torch.maximum(x - w, w), x @ w, (x * w).sum())

    def together(x: Any, w: Any) -> Any:
        return (torch.maximum(x - w, w), (x * w).sum())

    arguments = torch.rand(4, 4), torch.rand(4, 4)
    assert "aten.mul.Tensor" in same(apart, *arguments)
    assert "aten.mul.out" in same(together, *arguments)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 30), st.integers(0, 30)), max_size=16),
       st.sets(st.integers(0, 18), max_size=3))  # fmt: skip
def test_any_program_has_the_same_bits(steps: list[tuple[int, int, int]], kept: set[int]) -> None:
    def function(x: Any, w: Any, v: Any) -> Any:
        values = [x, w, v]
        for kind, one, other in steps:
            a, b = values[one % len(values)], values[other % len(values)]
            values.append((a * b, a - b, a.sqrt(), a.t(), a @ b, a + 1, a.abs())[kind])
        results = tuple(values[at % len(values)] * 1 for at in sorted(kept))
        v.copy_(values[-1] + 1)
        return results

    same(function, *(torch.rand(3, 3) for _ in range(3)))


def read_later(x: Any, w: Any) -> Any:
    hidden = x @ w
    active = hidden.relu()
    return (active + hidden, (active * 2).exp())


def view_read_later(x: Any, w: Any) -> Any:
    hidden = x @ w
    rows = hidden.t()
    return (hidden.relu() + 1, rows.sum(0) * 3)


def view_beside(x: Any, w: Any) -> Any:
    hidden = x @ w
    return (hidden - hidden.t(), x * 1)


def other_shape(x: Any, w: Any) -> Any:
    return ((x @ w).sum(0) + x, x.exp() > 1, (x.exp() > 1) + x)


def returned(x: Any, w: Any) -> Any:
    hidden = x @ w
    return (hidden, hidden.tanh(), hidden.view(-1).exp())


def old_state_read_last(x: Any, w: Any) -> Any:
    new = w * 0.5
    loss = (new * w).sum()
    w.copy_(new)
    return (loss, x + loss)


def swapped(x: Any, w: Any) -> Any:
    mixed, other = x + w, x * w
    x.copy_(other)
    w.copy_(mixed)
    return (mixed.sum(),)


def state_returned(x: Any, w: Any) -> Any:
    new = w + 1
    w.copy_(new)
    return (new.clone() * x,)


@pytest.mark.parametrize(
    "function",
    [read_later, view_read_later, view_beside, other_shape, old_state_read_last, swapped],
)
def test_nothing_is_written_over_that_is_still_read(function: Function) -> None:
    assert same(function, torch.rand(4, 4), torch.rand(4, 4))


def test_results_keep_their_own_memory() -> None:
    assert same(state_returned, torch.rand(4, 4), torch.rand(4, 4))
    x, w = torch.rand(4, 4), torch.rand(4, 4)
    results = reuse_memory(traced(returned, x, w))(x, w)
    assert torch.equal(results[0], x @ w)


def test_state_stays_when_a_later_operator_fails() -> None:
    def step(w: Any, index: Any) -> Any:
        new = w * 2
        picked = new.index_select(0, index)
        w.copy_(new)
        return (picked,)

    weight, index = torch.ones(3), torch.tensor([0])
    module = reuse_memory(traced(step, weight, index))
    with pytest.raises(IndexError):
        module(weight, torch.tensor([7]))
    assert weight.tolist() == [1, 1, 1]
    module(weight, index)
    assert weight.tolist() == [2, 2, 2]


def test_other_functions_may_keep_what_they_are_given() -> None:
    def keeps(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(-1)

    graph = fx.Graph()
    x = graph.placeholder("x")
    hidden = graph.call_function(aten.exp.default, (x,))
    kept = graph.call_function(keeps, (hidden,))
    changed = graph.call_function(aten.neg.default, (hidden,))
    graph.output((kept, changed))
    for node in (x, hidden, changed):
        node.meta["val"] = torch.empty(3)
    results = reuse_memory(fx.GraphModule({}, graph))(torch.zeros(3))
    assert [result.tolist() for result in results] == [[1, 1, 1], [-1, -1, -1]]


def test_expanded_tensors_are_not_written_over() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    doubled = graph.call_function(aten.mul.Tensor, (x, 2))
    one_more = graph.call_function(aten.add.Tensor, (doubled, 1))
    graph.output((one_more,))
    for node in (doubled, one_more):
        node.meta["val"] = torch.empty(1).expand(3)
    reuse_memory(fx.GraphModule({}, graph))
    assert one_more.target is aten.add.Tensor

"""Graphs that the interpreter runs with fewer calls: same bits, nothing lost by an error."""

import contextlib
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from helpers.wrapping import normal
from poptorch.backends import calls

aten = torch.ops.aten
STATE, GRADIENT, OTHER = (normal(4, 4, seed=seed) for seed in range(3))


def rewritten(function: Any, *arguments: torch.Tensor) -> Any:
    """Check that bits stay, of results and of what is written; return the new graph."""
    module = make_fx(function, tracing_mode="fake")(*arguments)
    wanted = [each.clone() for each in arguments]
    results = module(*wanted)
    calls.with_fewer_calls(module)
    got = [each.clone() for each in arguments]
    torch.testing.assert_close(module(*got), results, rtol=0, atol=0)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    return module.graph


def written(graph: Any) -> list[str]:
    """The names of values that are computed where others lie."""
    return [node.kwargs["out"].name for node in graph.nodes if "out" in node.kwargs]


def test_new_values_are_computed_where_they_are_kept() -> None:
    def momentum(weight: Any, velocity: Any, gradient: Any) -> Any:
        new = velocity * 0.9 + gradient
        weight.copy_(weight - new * 0.1)
        velocity.copy_(new)
        return ()

    graph = rewritten(momentum, STATE, OTHER, GRADIENT)
    assert not graph.find_nodes(op="call_function", target=aten.copy_.default)
    assert {"weight_1", "velocity_1"} <= set(written(graph))


@pytest.mark.parametrize("after", [
    lambda old, new: (old.sum(),),  # an old value that is read later
    lambda old, new: (old.t() * 2,),
    lambda old, new: (new,),  # what is returned would change with the next call
    lambda old, new: (new.t(),),
    lambda old, new: (torch.linalg.cholesky(new @ new.t() + torch.eye(4)),),  # it may fail
])  # fmt: skip
def test_what_is_read_or_may_fail_later_keeps_its_copy(after: Any) -> None:
    def step(state: Any, gradient: Any) -> Any:
        new = state + gradient
        results = after(state, new)
        state.copy_(new)
        return results

    graph = rewritten(step, STATE, GRADIENT)
    assert graph.find_nodes(op="call_function", target=aten.copy_.default)


def test_a_transposed_operand_keeps_the_copy() -> None:
    def step(state: Any) -> Any:
        state.copy_(state + state.t())
        return ()

    assert not written(rewritten(step, STATE))


def test_no_value_is_computed_where_a_state_lies() -> None:
    """A new state is an operand that nothing needs any longer, but for the next call."""

    def step(state: Any, gradient: Any, weight: Any) -> Any:
        new = state + gradient
        moved = weight - new.sqrt() * 0.1
        state.copy_(new)
        weight.copy_(moved)
        return ()

    assert written(rewritten(step, STATE.abs(), GRADIENT.abs(), OTHER)).count("state_1") == 1


def test_operands_that_nothing_needs_make_room() -> None:
    def function(x: Any, y: Any) -> Any:
        product = x @ y
        kept = product.relu()
        return ((kept + 1.0) * kept, product.t().t())

    assert written(rewritten(function, STATE, OTHER)) == ["add"]


def view_of_what_moved(x: Any, y: Any) -> Any:
    shifted = (x @ y) + 1.0
    turned = shifted.t()
    return (shifted * 2.0 + turned,)


def the_same_under_another_name(x: Any, y: Any) -> Any:
    product = x @ y
    return ((torch.conj_physical(product) + 1.0) * product,)


@pytest.mark.parametrize("function", [
    view_of_what_moved,
    the_same_under_another_name,
    lambda x, y: (x[0] * 2.0 + (x @ y)[:3].relu(),),  # of another shape
    lambda x, y: ((x @ y) > 0.0,),  # of another type
    lambda x, y: ((x @ y).t().exp() + 1.0 * x,),  # of another layout
    lambda x, y: (torch.div(x @ y, y, rounding_mode="floor"),),
])  # fmt: skip
def test_what_has_no_room_gets_its_own(function: Any) -> None:
    rewritten(function, STATE, OTHER)


def test_operators_of_several_forms_keep_theirs() -> None:
    """``clamp_min.out`` takes a number, ``clamp_min.Tensor_out`` a tensor."""

    def function(x: Any, y: Any) -> Any:
        least = y.sum()
        return (torch.clamp_min(x @ y, least), torch.clamp_min(x @ x, 0.5), torch.conj_physical(x))

    assert len(written(rewritten(function, STATE, OTHER))) == 2


def calls_of(operator: Any):
    """An operator's results for values of each kind, where it takes such."""
    for value in (normal(4, 4).abs(), torch.ones(4, 4, dtype=torch.int64), torch.ones(4, 4) > 0):
        kinds = {"Tensor": value, "number": 1, "int": 1, "float": 1.0, "Optional[number]": 1}
        needed = [a for a in operator._schema.arguments if not a.has_default_value()]
        with contextlib.suppress(RuntimeError, IndexError, NotImplementedError, TypeError):
            yield value, operator(*(kinds.get(str(a.type)) for a in needed))


def test_only_one_pointwise_operator_returns_its_operand() -> None:
    found, count = set(), 0
    for packet in (getattr(aten, name) for name in dir(aten)):
        for operator in (getattr(packet, o) for o in getattr(packet, "overloads", list)()):
            views = any(a.alias_info is not None for a in operator._schema.arguments)
            if torch.Tag.pointwise not in operator.tags or views:
                continue
            for value, result in calls_of(operator):
                count += 1
                if isinstance(result, torch.Tensor) and result.data_ptr() == value.data_ptr():
                    found.add(operator)
    assert count > 400
    assert found == {aten.conj_physical.default}

"""The codes of one graph: for which sizes each is used, and what is compiled for others."""

from collections.abc import Sequence

import pytest
import sympy
import torch

from poptorch._capture import trace
from poptorch._compile import ranges
from poptorch._compile.ranges import Ranges
from poptorch._ir import slots, symbolic
from poptorch._ir.conditions import Conditions, symbol
from poptorch._ir.graph import Graph

s0 = symbol("s0")


class Code:
    """Code that assumes on which side of some limits a size is, as that for which it is made."""

    def __init__(self, graph: Graph, *limits: int) -> None:
        self.made_for = graph.inputs[0].shape[0]
        sides = (s0 <= limit if self.made_for <= limit else s0 > limit for limit in limits)
        self.conditions = Conditions(tuple(sides))

    def __call__(self, arguments: Sequence[torch.Tensor]) -> int:
        return self.made_for


def captured() -> Graph:
    slot = slots.batch_input(0, (5,), torch.float32, ("s0",))
    symbols = symbolic.Symbols({"s0": 5})
    module, _ = trace.trace(lambda flat: [flat[0].exp()], [symbols.tensor(slot)])
    result = slots.result(0, torch.empty(5))
    return symbolic.settled(Graph("forward", module, (slot,), (result,)), symbols)[0]


def of(graph: Graph) -> Ranges:
    return Ranges(
        graph, lambda each: str(each.inputs[0].shape), lambda: lambda given: "interpreted"
    )


def compile_for(codes: Ranges, size: int, *limits: int) -> int:
    """Compile until a size is served; return the number of codes that were compiled."""
    compiled = 0
    while not codes.serve({"s0": size}):
        for each in codes.missing():
            each.code = Code(each.graph, *limits)
            compiled += 1
    return compiled


def run(codes: Ranges, size: int) -> object:
    return codes([torch.empty(size)])


def test_sizes_without_code_are_interpreted() -> None:
    assert run(of(captured()), 5) == "interpreted"


def test_code_without_conditions_serves_all_sizes() -> None:
    codes = of(captured())

    assert compile_for(codes, 5) == 1
    assert compile_for(codes, 5000) == 0
    assert run(codes, 5) == run(codes, 5000)


def test_sizes_that_code_excludes_get_code_for_sizes_like_them() -> None:
    codes = of(captured())
    compile_for(codes, 5, 100)

    assert compile_for(codes, 300, 100) == 1
    assert compile_for(codes, 400, 100) == 0
    assert run(codes, 300) > 100
    assert run(codes, 99) <= 100


def test_sizes_that_code_excludes_are_interpreted_until_theirs_is_compiled() -> None:
    codes = of(captured())
    compile_for(codes, 5, 100)
    codes.serve({"s0": 300})

    assert run(codes, 300) == "interpreted"


@pytest.mark.parametrize("order", [(5, 300, 3000), (3000, 300, 5), (300, 5, 3000)], ids=str)
def test_the_code_for_a_size_does_not_depend_on_which_came_first(order: tuple[int, ...]) -> None:
    codes, expected = of(captured()), of(captured())
    for size in order:
        compile_for(codes, size, 100, 1000)
    for size in (5, 300, 3000):
        compile_for(expected, size, 100, 1000)

    assert [run(codes, size) for size in order] == [run(expected, size) for size in order]


def test_a_graph_has_a_limited_number_of_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "MOST", 2)
    codes = of(captured())
    compile_for(codes, 300, 100, 1000)

    with pytest.raises(symbolic.NotSymbolic, match="more than 2 ranges"):
        codes.serve({"s0": 3000})


def test_sizes_for_which_no_other_can_stand_are_refused() -> None:
    codes = of(captured())
    compile_for(codes, 5)
    (first,) = codes.all()
    first.code.conditions = Conditions((sympy.Ne(s0, 10**6 + 1),))  # type: ignore[union-attr]

    with pytest.raises(symbolic.NotSymbolic, match="no example sizes were found"):
        codes.serve({"s0": 10**6 + 1})

"""State is updated as early as possible, and never before its old value was read."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from helpers.compiled_graphs import Step, Tensors, check, graph
from poptorch._cpu.in_place_writes import place_writes
from poptorch._cpu.lowering import fakes, lower

aten = torch.ops.aten


def reading(w: torch.Tensor, x: torch.Tensor, through_view: bool = True) -> tuple[Tensors, Tensors]:
    """The new value is there at once; the old one is read by the last product."""
    old = w.t() if through_view else w
    hidden = x @ x
    for _ in range(3):
        hidden = hidden @ x
    return [hidden @ old], [w * 2.0 + 1.0]


def lowered(step: Step, tensors: Tensors) -> fx.Graph:
    return lower(*graph(step, tensors), fakes(tensors)[1], {}, {}).graph


def placed(step: Step, tensors: Tensors) -> list[object]:
    """Return the targets of a graph in their order after writes were placed."""
    found = lowered(step, tensors)
    place_writes(found)
    return [node.target for node in found.nodes]


def matrices(count: int) -> Tensors:
    return [torch.randn(4, 4) * 0.3 for _ in range(count)]


@pytest.mark.parametrize("through_view", [False, True])
def test_a_write_follows_the_last_reader_of_the_old_value(through_view: bool) -> None:
    targets = placed(lambda w, x: reading(w, x, through_view), matrices(2))

    last = max(i for i, target in enumerate(targets) if target is aten.mm.default)
    assert targets.index(aten.copy_.default) > last


def test_a_weight_is_updated_before_the_gradient_of_the_next() -> None:
    targets = placed(lambda w, v, x: ([], [w - x @ w, v - x @ v]), matrices(3))

    heavy = [target for target in targets if target in (aten.mm.default, aten.copy_.default)]
    assert heavy == [aten.mm.default, aten.copy_.default] * 2


def test_what_needs_only_inputs_is_computed_where_it_is_first_used() -> None:
    """A decayed weight could be computed at once, but would take memory until its update."""

    def step(w: torch.Tensor, v: torch.Tensor, x: torch.Tensor) -> tuple[Tensors, Tensors]:
        gradients = x @ w, x @ v
        return [], [w * 0.9 - gradients[0], v * 0.9 - gradients[1]]

    targets = placed(step, matrices(3))

    chosen = (aten.mm.default, aten.mul.Tensor, aten.copy_.default)
    assert [target for target in targets if target in chosen] == [*chosen] * 2


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(lambda a: ([a + 1], [a * 2]), id="no product"),
        pytest.param(lambda a: ([a @ a], []), id="no write"),
        pytest.param(lambda a: ([], [a + 1]), id="no result"),
    ],
)
def test_graphs_without_products_or_writes_are_left_in_their_order(step: Step) -> None:
    before = [node.target for node in lowered(step, matrices(1)).nodes]
    assert placed(step, matrices(1)) == before


def test_writes_that_were_placed_stay_where_they_are() -> None:
    found = lowered(reading, matrices(2))
    place_writes(found)
    before = [node.target for node in found.nodes]

    place_writes(found)

    assert [node.target for node in found.nodes] == before


@pytest.mark.long
def test_compiled_code_reads_old_values_before_it_writes() -> None:
    check(reading, matrices(2))


OPERATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "product": lambda a, b: a @ b,
    "sum": lambda a, b: a + b,
    "difference": lambda a, b: a * 0.5 - b,
    "sine": lambda a, b: a.sin(),
    "copy": lambda a, b: a.clone(),
    "transposed": lambda a, b: a.t(),
    "one row": lambda a, b: a[1].expand(4, 4),
    "in another shape": lambda a, b: a.reshape(2, 8).reshape(4, 4),
}
VIEWS = {"transposed", "one row", "in another shape"}
STATES, INPUTS = 3, 4  # the first inputs are states that each step writes to
FROM_FIRST = st.integers(0, 3)  # values are taken from the first ones on, which are states,
FROM_LAST = st.integers(-4, -1)  # or from the last ones
VALUE = FROM_FIRST | FROM_LAST
OPERATIONS = st.lists(
    st.tuples(st.sampled_from([*OPERATORS]), VALUE, VALUE), min_size=3, max_size=12
)
NEW_STATES = st.lists(VALUE, min_size=STATES, max_size=STATES)


def step_of(operations: list[tuple[str, int, int]], new: list[int], returned: list[int]) -> Step:
    """Return a step that computes values from its inputs and from one another."""

    def step(*inputs: torch.Tensor) -> tuple[Tensors, Tensors]:
        values, roots = [*inputs], [*range(INPUTS)]  # of views, the number of the viewed input
        for name, one, other in operations:
            values.append(OPERATORS[name](values[one], values[other]))
            roots.append(roots[one] if name in VIEWS else len(roots))
        results = [values[at] * 2.0 for at in returned]  # which no write changes
        # As in eager PyTorch, a tensor cannot be written to with a view of itself.
        states = [
            values[at].clone() if roots[at] == place else values[at] for place, at in enumerate(new)
        ]
        return results, states

    return step


@pytest.mark.larger("test_compiled_code_reads_old_values_before_it_writes")
@settings(max_examples=30, derandomize=True, deadline=None)
@given(OPERATIONS, NEW_STATES, st.lists(VALUE, max_size=2))
def test_steps_compute_the_same_after_writes_were_placed(
    operations: list[tuple[str, int, int]], new: list[int], returned: list[int]
) -> None:
    torch.manual_seed(0)
    tensors = matrices(INPUTS)
    step = step_of(operations, new, returned)
    results, states = step(*tensors)
    found = lowered(step, tensors)

    place_writes(found)

    given = [each.clone() for each in tensors]
    got = fx.Interpreter(fx.GraphModule({}, found)).run(*given)
    expected = [*results, *states, *tensors[STATES:]]
    torch.testing.assert_close([*got, *given], expected, rtol=0.0, atol=0.0, equal_nan=True)

"""Graphs of operators: how they are joined, what they say of themselves, and their text."""

from collections.abc import Callable

import pytest
import torch
from torch import fx

from poptorch._compile.lower import lower
from poptorch._ir import slots
from poptorch._ir.graph import Graph, SlotFunction, compose
from poptorch._ir.slots import Kind
from poptorch._ir.verify import verify_graph

PARAM = slots.param("w", (3,), torch.float32)
GRADIENT = slots.gradient(PARAM)
BATCH = slots.batch_input(0, (3,), torch.float32)
OUTPUT = slots.result(0, torch.zeros(3))
Values = dict[str, torch.Tensor]


def forward() -> Graph:
    """Multiplies the weight by the batch; its gradient is twice the batch."""

    def function(t: Values) -> Values:
        return {OUTPUT.key: t[PARAM.key] * t[BATCH.key], GRADIENT.key: t[BATCH.key] * 2}

    return lower(SlotFunction("micro", function, (PARAM, BATCH), (OUTPUT, GRADIENT)))


def update() -> Graph:
    """Subtracts half of the gradient from the weight."""

    def function(t: Values) -> Values:
        return {PARAM.key: t[PARAM.key] - 0.5 * t[GRADIENT.key]}

    return lower(SlotFunction("update", function, (PARAM, GRADIENT), (PARAM,)))


@pytest.fixture
def step() -> Graph:
    """The forward pass and the update in one graph."""
    return compose("step", [forward(), update()])


def test_a_joined_graph_reads_the_values_that_none_of_its_parts_writes(step: Graph) -> None:
    assert step.inputs == (PARAM, BATCH)
    verify_graph(step)


def test_a_joined_graph_writes_results_and_state_but_no_gradients(step: Graph) -> None:
    assert [slot.key for slot in step.outputs] == [OUTPUT.key, PARAM.key]
    assert step.updates == {PARAM.key}


def test_a_joined_graph_writes_the_values_that_are_requested() -> None:
    step = compose("step", [forward(), update()], keep=[Kind.GRADIENT])

    assert GRADIENT.key in [slot.key for slot in step.outputs]


def test_a_part_reads_the_values_that_the_previous_one_writes(step: Graph) -> None:
    w = torch.tensor([1.0, 2.0, 3.0])
    x = torch.tensor([4.0, 5.0, 6.0])

    result = step({PARAM.key: w, BATCH.key: x})

    torch.testing.assert_close(result, {OUTPUT.key: w * x, PARAM.key: w - x})


@pytest.mark.parametrize(("function", "random"), [(torch.rand_like, True), (torch.relu, False)])
def test_a_graph_that_draws_random_numbers_is_marked_as_random(
    function: Callable[[torch.Tensor], torch.Tensor], random: bool
) -> None:
    piece = SlotFunction("p", lambda t: {OUTPUT.key: function(t[BATCH.key])}, (BATCH,), (OUTPUT,))

    assert lower(piece).random is random


def test_text_names_slots_and_operators() -> None:
    assert str(update()) == (
        "graph update\n"
        "  in  param.w: float32[3]\n"
        "  in  gradient.w: float32[3]\n"
        "  mul = mul.Tensor(gradient.w, 0.5)\n"
        "  sub = sub.Tensor(param.w, mul)\n"
        "  out param.w: float32[3] = sub"
    )


def test_inputs_whose_keys_differ_only_in_punctuation_are_different_inputs() -> None:
    """The graph returns its inputs in reverse order."""
    params = [slots.param(path, (), torch.float32) for path in ("a.b", "a_b", "a/b", "~a.b")]
    outputs = tuple(slots.result(i, torch.zeros(())) for i in range(len(params)))
    reversing = fx.Graph()
    placeholders = [reversing.placeholder(f"x{i}") for i in range(len(params))]
    reversing.output(tuple(reversed(placeholders)))
    part = Graph("part", fx.GraphModule({}, reversing), tuple(params), outputs)

    joined = compose("joined", [part])

    results = joined({slot.key: torch.tensor(float(i)) for i, slot in enumerate(params)})
    assert [float(value) for value in results.values()] == [3.0, 2.0, 1.0, 0.0]

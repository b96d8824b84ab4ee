"""Pieces of graphs, joined by the keys of their slots."""

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


def forward() -> Graph:
    def function(t):
        return {OUTPUT.key: t[PARAM.key] * t[BATCH.key], GRADIENT.key: t[BATCH.key] * 2}

    return lower(SlotFunction("micro", function, (PARAM, BATCH), (OUTPUT, GRADIENT)))


def update() -> Graph:
    def function(t):
        return {PARAM.key: t[PARAM.key] - 0.5 * t[GRADIENT.key]}

    return lower(SlotFunction("update", function, (PARAM, GRADIENT), (PARAM,)))


def test_what_one_part_writes_the_next_reads() -> None:
    step = compose("step", [forward(), update()])
    assert step.inputs == (PARAM, BATCH)
    assert [s.key for s in step.outputs] == [OUTPUT.key, PARAM.key]
    assert step.updates == {PARAM.key}
    verify_graph(step)
    w, x = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
    result = step({PARAM.key: w, BATCH.key: x})
    torch.testing.assert_close(result, {OUTPUT.key: w * x, PARAM.key: w - x})
    kept = compose("step", [forward(), update()], keep=[Kind.GRADIENT])
    assert GRADIENT.key in [s.key for s in kept.outputs]


@pytest.mark.parametrize(("function", "random"), [(torch.rand_like, True), (torch.relu, False)])
def test_random_graphs_say_so(function, random: bool) -> None:
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


def test_inputs_whose_keys_differ_in_punctuation_only_stay_apart() -> None:
    params = [slots.param(path, (), torch.float32) for path in ("a.b", "a_b", "a/b", "~a.b")]
    fxgraph = fx.Graph()
    fxgraph.output(tuple(reversed([fxgraph.placeholder(f"x{i}") for i in range(len(params))])))
    outputs = tuple(slots.result(i, torch.zeros(())) for i in range(len(params)))
    joined = compose("joined", [Graph("part", fx.GraphModule({}, fxgraph), (*params,), outputs)])
    values = {slot.key: torch.tensor(float(i)) for i, slot in enumerate(params)}
    assert [float(v) for v in joined(values).values()] == [3.0, 2.0, 1.0, 0.0]

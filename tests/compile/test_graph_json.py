"""Graphs as JSON: what comes back means the same, and nothing else can be named."""

import json
from dataclasses import replace

import pytest
import torch

import poptorch
from helpers.cases import few
from helpers.wrapping import options
from helpers.zoo import ZOO
from poptorch._base import json_codec
from poptorch._compile import helper
from poptorch._ir import graph_json, slots, verify
from poptorch._ir.plan import Plan
from poptorch.backends.reference import Reference


def read_back(plan: Plan) -> Plan:
    """Return the plan with its graphs as a compiler process reads them."""
    graphs = {name: helper.decoded(json.loads(json.dumps(graph_json.encode(graph))))
              for name, graph in plan.program.graphs.items()}  # fmt: skip
    return replace(plan, program=replace(plan.program, graphs=graphs))


@pytest.mark.parametrize("name", few(ZOO, "batchnorms", "dropout"))
def test_graphs_come_back(name: str) -> None:
    torch.manual_seed(0)
    model = ZOO[name].build()
    x, y = ZOO[name].inputs(4)
    opts = options().randomSeed(1)
    training = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))
    training.compile(x, y)
    plan = training.plan()
    again = read_back(plan)
    verify.verify_plan(again)
    assert str(again.program) == str(plan.program)  # where nodes run is not saved
    state = training._session.weights.store.state
    rng = state.rng.clone()
    before = {key: value.clone() for key, value in state.tensors.items()}
    batch = training._session.now.inputs.convert(((x, y), {}))[1]
    results = []
    for each in (plan, again):
        for key, value in before.items():
            state.write(key, value)
        state.rng = rng.clone()
        results.append(Reference().compile(each, lambda share: None).run(state, batch))
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)


def test_special_values() -> None:
    values = (
        float("inf"), -0.0, 1j, slice(1, None, 2), torch.float16, torch.device("cpu"),
        torch.preserve_format, torch.strided, [1, (2, None)], {"a": (True,)}, frozenset({"b"}),
        poptorch.OutputMode.EveryN,
    )  # fmt: skip
    classes = {"OutputMode": poptorch.OutputMode}
    data = json.loads(json.dumps(json_codec.encode(values)))
    assert json_codec.decode(data, classes=classes) == values
    with pytest.raises(TypeError, match="Linear has no JSON form"):
        json_codec.encode(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("data", [
    {"value": ["Popen", {}]}, {"value": ["Slot", {"nonsense": 1}]}, {"value": ["Kind", {}]},
    {"enum": ["Kind", "NEVER"]}, {"enum": ["Slot", "shape"]}, {"dtype": "load"},
    {"layout": "os"}, {"call": "os.system"},
    {"op": "call_function", "target": "os.system"},
    {"op": "call_function", "target": "aten.nothing.default"},
    {"op": "call_method", "target": "to"},
])  # fmt: skip
def test_values_and_operators_that_are_not_known_are_refused(data) -> None:
    with pytest.raises(json_codec.Unreadable):
        if "op" in data:
            nodes = {"nodes": [data], "name": "x", "inputs": [], "outputs": []}
            graph_json.decode({"graph": nodes})
        else:
            json_codec.decode(data, classes={"Slot": slots.Slot, "Kind": slots.Kind})

"""What a program is built by: graphs as JSON and back, and what processes compare."""

import json
import types
from dataclasses import replace

import pytest
import torch

import poptorch
from helpers.cases import few
from helpers.wrapping import Scaled, options, training
from helpers.zoo import ZOO
from poptorch._base import json_codec
from poptorch._compile import agreement, compiler_processes
from poptorch._ir import graph_json, slots, verify
from poptorch._ir.plan import Plan
from poptorch.backends.reference import Reference


@pytest.mark.parametrize("count, more", [(1, ""), (3, ""), (4, "and 1 more in process 2")])
def test_the_error_lists_differences_from_process_0(
    count: int, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {str(at): "a" for at in range(5)}
    there = {0: facts, 2: facts | {str(at): "b" for at in range(count)}}
    monkeypatch.setattr(agreement._job, "compare", lambda *_: there)
    with pytest.raises(poptorch.Error) as caught:
        agreement.check_written(facts)
    message = str(caught.value)
    assert message.count(": b in process 2, a in process 0") == min(count, 3)
    assert "0: b in process 2, a in process 0" in message
    assert [line.strip() for line in message.splitlines() if "more" in line] == [more] * bool(more)


@pytest.mark.parametrize(
    "data, message",
    [
        ([(0, None), (0, None)], None),
        ([(-1, None), (4, None)], None),
        ([(4, 1), (4, 1)], None),
        ([(4, 0), (4, None)], None),
        ([(0, None), (4, None)], "process 0: 0 calls; process 1: 4 calls"),
        ([(4, 0), (4, 1)], "process 0: seed 0; process 1: seed 1"),
        ([(4, None, 3), (4, None, 3)], None),
        ([(4, None, 3), (4, None, None)], None),
        ([(4, None, 3), (4, None, 2)], "process 0: 3 rows; process 1: 2 rows"),
    ],
)
def test_data_of_processes_is_of_one_length_and_one_order(
    data: list[tuple[int | None, ...]], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = types.SimpleNamespace(texts=lambda *_: [*map(json.dumps, data)])
    monkeypatch.setattr(agreement._job, "current", lambda: group)
    if message is None:
        return agreement._check_data()
    with pytest.raises(poptorch.Error, match=message):
        agreement._check_data()


@pytest.mark.parametrize("given", [1, 2])
def test_a_warning_names_a_number_of_replicas_that_differs_from_poprun(
    given: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("POPDIST_NUM_TOTAL_REPLICAS", "4")
    monkeypatch.setenv("POPDIST_NUM_LOCAL_REPLICAS", str(given))
    monkeypatch.setattr(agreement._job, "join", lambda *_: None)
    opts = options(replicas=2)
    opts.Distributed.configureProcessId(0, 2)
    with pytest.raises(AssertionError, match="before they have met"):
        training(Scaled(torch.tanh), opts).compile(torch.randn(4))
    assert ("poprun assigned 1 replicas to this process" in caplog.text) == (given == 1)


def read_back(plan: Plan) -> Plan:
    """Return the plan with its graphs as a compiler process reads them."""
    graphs = {
        name: compiler_processes.decoded(json.loads(json.dumps(graph_json.encode(graph))))
        for name, graph in plan.program.graphs.items()
    }
    return replace(plan, program=replace(plan.program, graphs=graphs))


@pytest.mark.parametrize("name", few(ZOO, "batchnorms", "dropout"))
def test_a_graph_that_is_written_and_read_is_equal(name: str) -> None:
    torch.manual_seed(0)
    model = ZOO[name].build()
    x, y = ZOO[name].inputs(4)
    opts = options().randomSeed(1)
    training = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))
    training.compile(x, y)
    plan = training.plan()
    restored = read_back(plan)
    verify.verify_program(restored.program)
    assert str(restored.program) == str(plan.program)  # where nodes run is not saved
    state = training._session.weights.store.state
    rng, before = state.rng.clone(), {key: value.clone() for key, value in state.tensors.items()}
    batch, results = training._session.now.inputs.convert(((x, y), {}))[1], []
    for each in (plan, restored):
        for key, value in before.items():
            state.write(key, value)
        state.rng = rng.clone()
        results.append(Reference().compile(each, lambda share: None).run(state, batch))
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)


def test_special_values_can_be_written_and_read() -> None:
    values = (
        float("inf"),
        -0.0,
        1j,
        slice(1, None, 2),
        torch.float16,
        torch.device("cpu"),
        torch.preserve_format,
        torch.strided,
        [1, (2, None)],
        {"a": (True,)},
        frozenset({"b"}),
        poptorch.OutputMode.EveryN,
    )
    classes = {"OutputMode": poptorch.OutputMode}
    data = json.loads(json.dumps(json_codec.encode(values)))
    assert json_codec.decode(data, classes=classes) == values
    with pytest.raises(TypeError, match="Linear has no JSON form"):
        json_codec.encode(torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    "data",
    [
        {"value": ["Popen", {}]},
        {"value": ["Slot", {"nonsense": 1}]},
        {"value": ["Kind", {}]},
        {"enum": ["Kind", "NEVER"]},
        {"enum": ["Slot", "shape"]},
        {"dtype": "load"},
        {"layout": "os"},
        {"call": "os.system"},
        {"op": "call_function", "target": "os.system"},
        {"op": "call_function", "target": "aten.nothing.default"},
        {"op": "call_method", "target": "to"},
    ],
)
def test_values_and_operators_that_are_not_known_are_refused(
    data: dict[str, list[dict[str, int] | str] | str],
) -> None:
    with pytest.raises(json_codec.Unreadable):
        if "op" in data:
            nodes = {"nodes": [data], "name": "x", "inputs": [], "outputs": []}
            graph_json.decode({"graph": nodes})
        else:
            json_codec.decode(data, classes={"Slot": slots.Slot, "Kind": slots.Kind})

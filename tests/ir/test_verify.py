"""The verifier: every rule of graphs, programs, specs and states has a test here."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from poptorch._compile.lower import lower
from poptorch._ir import program as ir
from poptorch._ir import slots, verify
from poptorch._ir.block_labels import Label, PlacedStage, StagePass, relabel
from poptorch._ir.bundle import Bundle
from poptorch._ir.graph import Graph, SlotFunction
from poptorch._ir.micro_batches import Loops
from poptorch._ir.plan import Layout
from poptorch._ir.program import Emit, Program, Run, Scatter, State
from poptorch._ir.spec import Output, Spec
from poptorch.enums import OutputMode

PARAM = slots.param("w", (3,), torch.float32)
BATCH = slots.batch_input(0, (3,), torch.float32)
OUTPUT = slots.result(0, torch.zeros(3))
EMIT = Emit((OUTPUT,), OutputMode.Final)
Values = dict[str, torch.Tensor]


def graph() -> Graph:
    """A sound graph, which multiplies the weight by the batch and adds one to the weight."""

    def function(t: Values) -> Values:
        return {OUTPUT.key: t[PARAM.key] * t[BATCH.key], PARAM.key: t[PARAM.key] + 1}

    return lower(SlotFunction("step", function, (PARAM, BATCH), (OUTPUT, PARAM)))


def program(*body: Any) -> Program:
    """A program of the graph above; a sound one, unless there is another body."""
    return Program(body or (Run("step"), EMIT), {"step": graph()}, Loops(), {})


def expect(rule: str) -> Any:
    """An error of this rule, with its sentence."""
    return pytest.raises(AssertionError, match=f"rule {rule} broken: .*{verify.RULES[rule][:20]}")


def test_every_rule_is_tested_here() -> None:
    source = Path(__file__).read_text()

    assert [rule for rule in verify.RULES if f'"{rule}"' not in source] == []


def test_a_sound_program_breaks_no_rule() -> None:
    assert verify.verify_program(program()) is None


def test_the_default_spec_breaks_no_rule() -> None:
    assert verify.verify_spec(Spec()) is None


def test_a_state_of_its_program_breaks_no_rule() -> None:
    assert verify.verify_state(State({PARAM.key: torch.zeros(3)}), program()) is None


def writing_in_place() -> Graph:
    """A graph with an operator that changes its input."""
    fxgraph = fx.Graph()
    x = fxgraph.placeholder("x")
    fxgraph.output((fxgraph.call_function(torch.ops.aten.add_.Tensor, (x, 1)),))
    return Graph("g", fx.GraphModule({}, fxgraph), (BATCH,), (OUTPUT,))


def narrowing() -> Graph:
    """A graph that writes a weight of float32 as float16."""
    piece = SlotFunction("p", lambda t: {PARAM.key: t[PARAM.key].half()}, (PARAM,), (PARAM,))
    narrow = dataclasses.replace(PARAM, dtype=torch.float16)
    return dataclasses.replace(lower(piece), outputs=(narrow,))


def with_inputs(*inputs: slots.Slot) -> Graph:
    return dataclasses.replace(graph(), inputs=inputs)


@pytest.mark.parametrize(
    "rule, broken",
    [
        pytest.param("G1", lambda: with_inputs(PARAM), id="an input less"),
        pytest.param(
            "G2",
            lambda: dataclasses.replace(graph(), outputs=(OUTPUT, OUTPUT)),
            id="an output twice",
        ),
        pytest.param("G3", writing_in_place, id="an operator in place"),
        pytest.param(
            "G4",
            lambda: with_inputs(PARAM, dataclasses.replace(BATCH, shape=(4,))),
            id="an input of another shape",
        ),
        pytest.param("G5", narrowing, id="a weight of another type"),
        pytest.param("G6", lambda: with_inputs(OUTPUT, BATCH), id="an output as an input"),
    ],
)
def test_a_broken_graph_is_found(rule: str, broken: Callable[[], Graph]) -> None:
    with expect(rule):
        verify.verify_graph(broken())


def test_an_operator_of_an_unknown_stage_is_found() -> None:
    labelled = graph()
    relabel(labelled.operators[0], Label(stage_pass=StagePass(2)))
    layout = Layout((PlacedStage(0, ("A",)),), depth=1, chips=1, reserved=1, graph=labelled)

    with expect("L1"):
        verify.verify_layout(layout)


@pytest.mark.parametrize(
    "rule, body",
    [
        ("P1", (Run("step"), EMIT, EMIT)),
        ("P2", (Run("other"), EMIT)),
        ("P3", (ir.Repeat(ir.Axis.ITERATIONS, 0, (Run("step"),)), EMIT)),
        ("P3", (Run("step"), ir.Reduce("accum", "median", 2), EMIT)),
        ("P3", (Run("step"), Scatter("median", 1, ((PARAM, PARAM),)), EMIT)),
        ("P5", (Run("step"), Emit((BATCH,), OutputMode.Final))),
        ("P6", (Run("step"), Scatter("sum", 2, ((PARAM, PARAM),)), EMIT)),
        ("P6", (Run("step"), ir.Gather(2, (ir.Shard(Bundle(PARAM, ()), PARAM),)), EMIT)),
    ],
    ids=[
        "emits twice",
        "an unknown graph",
        "a loop of none",
        "an unknown reduction",
        "an unknown reduction of shards",
        "emits an input",
        "scatters what is no bundle",
        "gathers what is no bundle",
    ],
)
def test_a_broken_program_is_found(rule: str, body: tuple[Any, ...]) -> None:
    with expect(rule):
        verify.verify_program(program(*body))


def test_a_program_reads_state_and_batches_only() -> None:
    gradient = slots.gradient(PARAM)
    piece = SlotFunction("step", lambda t: {OUTPUT.key: -t[gradient.key]}, (gradient,), (OUTPUT,))

    with expect("P4"):
        verify.verify_program(Program((Run("step"), EMIT), {"step": lower(piece)}, Loops(), {}))


@pytest.mark.parametrize(
    "rule, spec",
    [
        ("S1", Spec(loops=Loops(iterations=0))),
        ("S1", Spec(output=Output(OutputMode.Default))),
        ("S2", Spec(loops=Loops(replicas=3, input_group_size=2))),
        ("S2", Spec(loops=Loops(iterations=4), output=Output(OutputMode.EveryN, 3))),
    ],
    ids=[
        "no iteration",
        "no output mode",
        "a group that does not divide",
        "a period that does not divide",
    ],
)
def test_a_broken_spec_is_found(rule: str, spec: Spec) -> None:
    with expect(rule):
        verify.verify_spec(spec)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {PARAM.key: torch.zeros(4)},
        {PARAM.key: torch.zeros(3, dtype=torch.int32)},
    ],
    ids=["a weight is missing", "another shape", "another type"],
)
def test_a_state_of_another_program_is_found(tensors: Values) -> None:
    with expect("T1"):
        verify.verify_state(State(tensors), program())

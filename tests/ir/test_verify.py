"""Every rule of the verifier is broken once, and quoted."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import fx

from poptorch._compile.lower import lower
from poptorch._ir import program as ir
from poptorch._ir import slots, verify
from poptorch._ir.bundle import Bundle
from poptorch._ir.graph import Graph, SlotFunction
from poptorch._ir.loops import Loops
from poptorch._ir.program import Emit, Program, Run, Scatter, State
from poptorch._ir.spec import Output, Spec
from poptorch.enums import OutputMode

PARAM = slots.param("w", (3,), torch.float32)
BATCH = slots.batch_input(0, (3,), torch.float32)
OUTPUT = slots.result(0, torch.zeros(3))
EMIT = Emit((OUTPUT,), OutputMode.Final)


def graph() -> Graph:
    def function(t):
        return {OUTPUT.key: t[PARAM.key] * t[BATCH.key], PARAM.key: t[PARAM.key] + 1}

    return lower(SlotFunction("step", function, (PARAM, BATCH), (OUTPUT, PARAM)))


def program(*body) -> Program:
    return Program(body or (Run("step"), EMIT), {"step": graph()}, Loops(), {})


def expect(rule: str):
    return pytest.raises(AssertionError, match=f"rule {rule} broken: .*{verify.RULES[rule][:20]}")


def test_a_sound_program_passes() -> None:
    verify.verify_program(program())
    verify.verify_spec(Spec())
    verify.verify_state(State({PARAM.key: torch.zeros(3)}), program())


def test_every_rule_is_tested_here() -> None:
    text = Path(__file__).read_text()
    assert [rule for rule in verify.RULES if f'"{rule}"' not in text] == []


def writing() -> Graph:
    fxgraph = fx.Graph()
    x = fxgraph.placeholder("x")
    fxgraph.output((fxgraph.call_function(torch.ops.aten.add_.Tensor, (x, 1)),))
    return Graph("g", fx.GraphModule({}, fxgraph), (BATCH,), (OUTPUT,))


def narrowing() -> Graph:
    piece = SlotFunction("p", lambda t: {PARAM.key: t[PARAM.key].half()}, (PARAM,), (PARAM,))
    narrow = dataclasses.replace(PARAM, dtype=torch.float16)
    return dataclasses.replace(lower(piece), outputs=(narrow,))


@pytest.mark.parametrize("rule, broken", [
    ("G1", lambda: dataclasses.replace(graph(), inputs=(PARAM,))),
    ("G2", lambda: dataclasses.replace(graph(), outputs=(OUTPUT, OUTPUT))),
    ("G3", writing),
    ("G4", lambda: dataclasses.replace(
        graph(), inputs=(PARAM, dataclasses.replace(BATCH, shape=(4,))))),
    ("G5", narrowing),
])  # fmt: skip
def test_graph_rules(rule: str, broken) -> None:
    with expect(rule):
        verify.verify_graph(broken())


@pytest.mark.parametrize("rule, body", [
    ("P1", (Run("step"), EMIT, EMIT)), ("P2", (Run("other"), EMIT)),
    ("P3", (ir.Repeat(ir.Axis.ITERATIONS, 0, (Run("step"),)), EMIT)),
    ("P3", (Run("step"), ir.Reduce("accum", "median", 2), EMIT)),
    ("P3", (Run("step"), Scatter("median", 1, ((PARAM, PARAM),)), EMIT)),
    ("P5", (Run("step"), Emit((BATCH,), OutputMode.Final))),
    ("P6", (Run("step"), Scatter("sum", 2, ((PARAM, PARAM),)), EMIT)),
    ("P6", (Run("step"), ir.Gather(2, (ir.Shard(Bundle(PARAM, ()), PARAM),)), EMIT)),
])  # fmt: skip
def test_program_rules(rule: str, body) -> None:
    with expect(rule):
        verify.verify_program(program(*body))


def test_reads_are_state_or_batch() -> None:
    gradient = slots.gradient(PARAM)
    piece = SlotFunction("step", lambda t: {OUTPUT.key: -t[gradient.key]}, (gradient,), (OUTPUT,))
    with expect("P4"):
        verify.verify_program(Program((Run("step"), EMIT), {"step": lower(piece)}, Loops(), {}))


@pytest.mark.parametrize("rule, spec", [
    ("S1", Spec(loops=Loops(iterations=0))),
    ("S1", Spec(output=Output(OutputMode.Default))),
    ("S2", Spec(loops=Loops(replicas=3, input_group_size=2))),
    ("S2", Spec(loops=Loops(iterations=4), output=Output(OutputMode.EveryN, 3))),
])  # fmt: skip
def test_spec_rules(rule: str, spec: Spec) -> None:
    with expect(rule):
        verify.verify_spec(spec)


@pytest.mark.parametrize("tensor", [None, torch.zeros(4), torch.zeros(3, dtype=torch.int32)])
def test_state_matches_its_program(tensor) -> None:
    tensors = {} if tensor is None else {PARAM.key: tensor}
    with expect("T1"):
        verify.verify_state(State(tensors), program())

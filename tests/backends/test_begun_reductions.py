"""Gradients that are added up while others are computed: what waits, also when a call fails."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.staging import Captured, sgd
from helpers.wrapping import Having
from poptorch import _job
from poptorch._compile.build import training_program
from poptorch._ir.plan import Plan
from poptorch._ir.program import Reduce
from poptorch.backends.reference import Reference

SIZE = 300


def looks_up(model: nn.Module, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Let the backward pass look a result of the first layer up where ``at`` says."""
    first = model.layers[0](x)
    first.register_hook(lambda gradient: gradient * (1 + first.detach()[0, at]))
    return poptorch.identity_loss(model.layers[1:](first).square(), "mean")


class Group:
    """Two processes of which the other one has the same gradients."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def begin(self, tensors: Sequence[torch.Tensor], what: str) -> list[Any]:
        self.log.append("begin")
        return list(tensors)

    def all_reduce(self, tensors: Sequence[torch.Tensor], what: str, begun: Sequence[Any]) -> None:
        self.log.append(f"wait for {len(begun)} and {len(tensors)}")

    def finish(self, begun: Sequence[Any], what: str) -> None:
        self.log.append(f"finish {len(begun)}")


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    own = Group()
    monkeypatch.setattr(_job, "current", lambda: own)
    return own


def program(x: torch.Tensor, at: torch.Tensor) -> tuple[Captured, Plan]:
    torch.manual_seed(1)
    model = Having(looks_up, layers=nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(4))))
    captured = Captured(model, (x, at), sgd)
    options = poptorch.Options()
    options.Distributed.configureProcessId(0, 2)
    plan = captured.plan(options)
    spec = replace(plan.spec, target=replace(plan.spec.target, hosts=2))
    made = training_program(captured.micro.graph, spec, captured.optim, None, early=True)
    assert [node.waits for node in made.walk() if isinstance(node, Reduce)] == [False, True]
    return captured, replace(plan, program=made, spec=spec)


def test_what_was_begun_has_ended_when_a_call_fails(group: Group) -> None:
    x, at = torch.ones(2, SIZE), torch.tensor([3])
    captured, plan = program(x, at)
    state = captured.state(plan)
    for bucket in plan.program.buckets:
        state.tensors[bucket.slot.key] = torch.zeros(bucket.slot.shape)
    weights = {key: value.clone() for key, value in state.tensors.items() if "param" in key}
    executable = Reference().compile(plan, lambda _: None)
    with pytest.raises(IndexError):
        executable.run(state, [x, torch.tensor([SIZE])])  # which only the second graph looks up
    assert group.log == ["begin", "finish 1"]
    for key, weight in weights.items():
        assert torch.equal(state.tensors[key], weight), key

    group.log.clear()
    executable.run(state, [x, at])
    assert group.log == ["begin", "wait for 1 and 1"]
    assert not torch.equal(state.tensors["param.layers.0.weight"], weights["param.layers.0.weight"])

"""What the driver of compiled parts does: it puts back what a run has written, reduces early."""

import resource
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.staging import Captured, sgd
from helpers.wrapping import Having, Scaled, options, training
from poptorch import _job
from poptorch._compile.build import training_program
from poptorch._ir.plan import Plan
from poptorch._ir.program import Reduce, State
from poptorch.backends.driver import LoopExecutable, program_report
from poptorch.backends.protocol import Compiled, Failure
from poptorch.backends.reference import Reference
from poptorch.backends.staged import StagedExecutable

X, Y = torch.ones(8, 4), torch.zeros(8, 3)


@pytest.fixture
def limited(limit: int) -> Iterator[Any]:
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (1 << 46, hard))
    yield
    resource.setrlimit(limit, (soft, hard))


def tearing(run: Compiled, at: int, runs: list[int]) -> Compiled:
    """Let the run of some number fail when it has written, as code that writes in place may."""

    def function(arguments: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        results = run(arguments)
        runs.append(1)
        if len(runs) == at:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return results

    return function


def copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in tensors.items()}


def in_place(wrapper: poptorch.PoplarExecutor, at: int) -> LoopExecutable:
    plan, runs = wrapper.plan(), list[int]()
    parts = {
        name: tearing(Reference().interpreted(graph), at, runs)
        for name, graph in plan.program.graphs.items()
    }
    return LoopExecutable(plan, parts, program_report("toy", plan.program, 0.0), in_place=True)


def fails(executable: LoopExecutable, state: State, *batch: torch.Tensor) -> None:
    """Run a call that must fail and leave the state as it was."""
    before = copies(state.tensors)
    with pytest.raises((RuntimeError, IndexError)):
        executable.run(state, batch)
    assert all(torch.equal(state.tensors[key], before[key]) for key in before)
    assert state.copies


@pytest.mark.slow
@pytest.mark.parametrize("lanes, limit", [(0, resource.RLIMIT_AS), (1, resource.RLIMIT_DATA)])
def test_values_that_a_run_has_written_are_restored(lanes: int, limited: None) -> None:
    """The second of two updates fails while it is written."""
    layers = {"layer": nn.Linear(4, 3), "norm": nn.BatchNorm1d(3)}
    model = Having(lambda m, x, y: nn.functional.mse_loss(m.norm(m.layer(x)), y), **layers)
    opts = options(iterations=2, accumulation=2).lanes(lanes)
    wrapper = poptorch.trainingModel(model, opts, poptorch.optim.Adam(model.parameters(), lr=0.1))
    wrapper.compile(X, Y)
    state = wrapper._session.weights.store.state
    before = copies(state.tensors)
    runs = {1: 2, 2: 6}[len(wrapper.plan().program.graphs)]  # of a call: micro-batches and updates
    last = in_place(wrapper, at=runs)
    kept, states = last._rollback._keep, []
    last._rollback._keep = lambda state: states.append(copies(state.tensors)) or kept(state)
    with pytest.raises(RuntimeError, match="can't allocate") as caught:
        last.run(state, [X, Y])
    assert any("1 of the 2 updates" in note for note in caught.value.__notes__)
    assert all(torch.equal(state.tensors[key], states[1][key]) for key in before)
    assert not all(torch.equal(states[1][key], before[key]) for key in before)


def test_a_failure_is_that_of_the_latest_call_of_a_program_that_changes_nothing() -> None:
    wrapper = poptorch.inferenceModel(nn.Linear(4, 3), options())
    wrapper.compile(X)
    state, executable = wrapper._session.weights.store.state, in_place(wrapper, at=1)

    with pytest.raises(RuntimeError, match="can't allocate") as caught:
        executable.run(state, [X])
    failed = executable.failure
    executable.run(state, [X])

    assert failed == Failure("forward", undone=True, exchanged=False)
    assert any("as before this call" in note for note in caught.value.__notes__)
    assert executable.failure is None


def test_a_generator_of_the_models_is_put_back() -> None:
    own = torch.Generator().manual_seed(3)
    model = Scaled(lambda x: x * torch.rand(4, generator=own))
    wrapper = training(model, options(accumulation=2))
    wrapper.compile(X)
    state, before = wrapper._session.weights.store.state, own.get_state()

    with pytest.raises(RuntimeError, match="can't allocate"):
        in_place(wrapper, at=2).run(state, [X])

    assert torch.equal(own.get_state(), before)


def test_a_staged_call_that_fails_puts_back_a_generator_of_the_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = torch.Generator().manual_seed(3)
    model = Scaled(lambda x: x * torch.rand(4, generator=own))
    wrapper = training(model, options("staged", accumulation=2))
    wrapper.compile(X)
    flush, before = StagedExecutable._flush, own.get_state()

    def fail_at_the_end(*arguments: Any) -> None:
        flush(*arguments)
        assert not torch.equal(own.get_state(), before)
        raise RuntimeError("a chip is lost")

    monkeypatch.setattr(StagedExecutable, "_flush", fail_at_the_end)
    with pytest.raises(RuntimeError, match="a chip is lost"):
        wrapper(X)

    assert torch.equal(own.get_state(), before)


def looking_up(model: Having, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Look up rows by a part of a longer buffer of positions, as transformers do."""
    places = model.positions[:, :3]
    kinds = torch.gather(model.first.expand(8, -1), 1, places.expand(8, -1))
    return nn.functional.mse_loss((model.rows(places) + model.kinds(kinds)).sum(1) + x[:, :3], y)


def test_indices_in_buffers_are_checked_when_the_buffers_change() -> None:
    model = Having(looking_up, rows=nn.Embedding(4, 3), kinds=nn.Embedding(2, 3))
    model.register_buffer("positions", torch.arange(4).expand(1, -1), persistent=False)
    model.register_buffer("first", torch.zeros(1, 4, dtype=torch.int64), persistent=False)
    wrapper = training(model)
    wrapper.compile(X, Y)
    state, undisturbed = wrapper._session.weights.store.state, in_place(wrapper, at=0)
    undisturbed.run(state, [X, Y])
    assert not state.copies
    state.tensors["buffer.positions"][0, 3] = 9  # nobody takes it, but who knows
    for at, key in ((0, "buffer.positions"), (1, "buffer.first")):
        state.tensors[key][0, 1] = 2 + at
        fails(in_place(wrapper, at=1), state, X, Y)
    second = State(copies(state.tensors))
    undisturbed.run(second, [X, Y])  # its buffers are new, and bad
    assert second.copies


class Shifted(nn.Module):
    """Shifts labels and starts decoders from labels, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.layer = nn.Embedding(4, 3), nn.Linear(3, 4)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        before = labels.new_zeros(labels.shape)
        before[:, 1:] = labels[:, :-1].clone()
        before[:, 0] = 1
        before.masked_fill_(before == -100, 0)
        expected = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
        out = self.layer(self.rows(tokens) + self.rows(before))
        return nn.functional.cross_entropy(out.view(-1, 4), expected)


def test_shifted_labels_are_checked_in_each_call() -> None:
    """The first label of a row is the start of the decoder only, its last label is wanted only."""
    wrapper = training(Shifted())
    tokens, labels = torch.randint(4, (2, 5)), torch.randint(4, (2, 5))
    labels[0, 3] = -100
    wrapper.compile(tokens, labels)
    state, executable = wrapper._session.weights.store.state, in_place(wrapper, at=0)
    for _ in range(2):
        executable.run(state, [tokens, labels])
    assert not state.copies
    for at, bad in ((0, 4), (4, -1)):
        wrong = labels.clone()
        wrong[1, at] = bad
        fails(executable, state, tokens, wrong)
    executable.run(state, [tokens, labels])
    assert not state.copies
    # Where it is looked up first it is named, in the interpreter.
    wrapper(tokens, labels)
    labels[1, 2] = 7
    with pytest.raises(poptorch.Error, match="Index out of range") as caught:
        wrapper(tokens, labels)
    assert 'input "labels"[1, 2] is 7; embedding takes 0 to 3, or -100' in str(caught.value)
    assert isinstance(caught.value.__cause__, IndexError)
    assert any("before this call" in note for note in caught.value.__notes__)


SIZE = 600


def looks_up(model: nn.Module, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Let the backward pass look a result of the first layer up where ``at`` says."""
    first = model.layers[0](x)
    first.register_hook(lambda gradient: gradient * (1 + first.detach()[0, at]))
    return poptorch.identity_loss(model.layers[1:](first).square(), "mean")


class Group:
    """Two processes with the same gradients."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def begin(self, tensors: list[torch.Tensor], what: str) -> list[torch.Tensor]:
        self.log.append("begin")
        return list(tensors)

    def all_reduce(self, tensors: list[torch.Tensor], what: str, begun: list[torch.Tensor]) -> None:
        self.log.append(f"wait for {len(begun)} and {len(tensors)}")

    def finish(self, begun: list[torch.Tensor], what: str) -> None:
        self.log.append(f"finish {len(begun)}")


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    own = Group()
    monkeypatch.setattr(_job, "current", lambda: own)
    return own


def program(x: torch.Tensor, at: torch.Tensor) -> tuple[Captured, Plan]:
    torch.manual_seed(1)
    model = Having(looks_up, layers=nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(4))))
    captured, options = Captured(model, (x, at), sgd), poptorch.Options()
    options.Distributed.configureProcessId(0, 2)
    plan = captured.plan(options)
    spec = replace(plan.spec, target=replace(plan.spec.target, link=(1e-6, 1e9)))
    made = training_program(captured.micro.graph, spec, captured.optim, None, early=True)
    assert [node.waits for node in made.walk() if isinstance(node, Reduce)] == [False, True]
    return captured, replace(plan, program=made, spec=spec)


def test_no_work_is_pending_after_a_failed_call(group: Group) -> None:
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

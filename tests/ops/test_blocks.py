"""Block annotations: what they mark while a model is captured; elsewhere they are inert."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers import programs
from helpers.captures import capture, labels
from poptorch._ir.blocks import OUTSIDE, Visit, label_of

X = torch.randn(3, 4)


class Layers(nn.Module):
    """Three layers, to be annotated from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, y=None):
        out = self.third(self.second(self.first(x).relu()).relu())
        return out if y is None else (out, F.mse_loss(out, y))


class Calling(nn.Module):
    """A module whose forward is a function; no parameters."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def blocks_of(function, *inputs: torch.Tensor) -> list[tuple[str, str | None]]:
    """Return (operator, block id) of the forward pass."""
    return [(name, block) for name, block, _ in labels(capture(Calling(function), *inputs))]


def visits_of(function) -> list[tuple[str | None, int | None]]:
    """Return (id, device) of the blocks that a forward enters, the implicit first left out."""
    return [(v.block, v.ipu) for v in capture(Calling(function), X).visits[1:]]


@pytest.mark.spec("parallel", 3)
def test_block_covers_its_scope_and_what_precedes_is_in_none() -> None:
    def forward(x):
        x = x + 1
        with poptorch.Block("A", ipu_id=1):
            x = x * 2
        with poptorch.Block("B", ipu_id=2):
            return x.relu()

    assert blocks_of(forward, X) == [("add", None), ("mul", "A"), ("relu", "B")]
    micro = capture(Calling(forward), X)
    assert micro.visits[0] == Visit()
    assert [(v.block, v.ipu) for v in micro.visits[1:]] == [("A", 1), ("B", 2)]
    assert "test_blocks.py" in micro.visits[1].line
    assert 'poptorch.Block("A", ipu_id=1)' in micro.visits[1].line


@pytest.mark.spec("parallel", 1, 2, 41)
def test_leaving_a_scope_clears_the_active_block_even_inside_another() -> None:
    @poptorch.BlockFunction("C", ipu_id=3)
    def function(x, *, by):
        return x / by

    def forward(x):
        with poptorch.Block("A"):
            with poptorch.Block("B"):
                x = x * 2
            x = x.relu()
        x = function(x, by=2)
        return x + 1

    micro = capture(Calling(forward), X)
    nodes = [n for n in micro.graph.module.graph.nodes if n.op == "call_function"]
    assert [label_of(n).visit for n in nodes] == [2, OUTSIDE, 3, OUTSIDE]
    assert [(v.block, v.ipu) for v in micro.visits[1:]] == [("A", None), ("B", None), ("C", 3)]


@pytest.mark.spec("parallel", 1)
def test_start_lasts_until_the_next_block() -> None:
    def forward(x):
        poptorch.Block.start("A", ipu_id=1)
        x = x * 2
        x = x + 1
        with poptorch.Block("B"):
            return x.relu()

    assert blocks_of(forward, X) == [("mul", "A"), ("add", "A"), ("relu", "B")]


@pytest.mark.spec("parallel", 42)
def test_automatic_ids_restart_only_when_asked() -> None:
    def forward(x):
        poptorch.Block.useAutoId()
        with poptorch.Block(ipu_id=0):
            x = x * 2
        with poptorch.Block("named"):
            x = x + 1
        with poptorch.Block(ipu_id=1):
            return x.relu()

    for _ in range(2):
        assert visits_of(forward) == [("0", 0), ("named", None), ("1", 1)]

    def continuing(x):
        with poptorch.Block():
            return x * 2

    assert [visits_of(continuing)[0][0] for _ in range(2)] == ["2", "3"]
    poptorch.Block.useAutoId()  # outside a capture: nothing
    assert visits_of(continuing)[0][0] == "4"


@pytest.mark.spec("parallel", 15)
@pytest.mark.spec("programs", 9)
def test_ids_are_evaluated_at_run_time() -> None:
    def forward(x):
        for layer in range(3):
            with poptorch.Block(f"layer{layer}", ipu_id=layer):
                x = x * 2
        return x

    assert visits_of(forward) == [(f"layer{i}", i) for i in range(3)]


@pytest.mark.spec("parallel", 44)
def test_begin_block_lasts_until_the_next_and_the_backward_follows() -> None:
    model = Layers()
    second = model.second
    assert poptorch.BeginBlock(model.second, "B", 1) is second
    poptorch.BeginBlock(model.third, user_id="C", ipu_id=2)
    found = labels(capture(model, X, X, training=True))
    forward = [(name, block) for name, block, backward in found if not backward]
    assert forward == [
        ("t", None), ("addmm", None), ("relu", None),
        ("t", "B"), ("addmm", "B"), ("relu", "B"),
        ("t", "C"), ("addmm", "C"), ("mse_loss", "C"),
    ]  # fmt: skip
    backward = [(name, block) for name, block, is_backward in found if is_backward]
    assert backward[0] == ("ones_like", None)  # the seed of the gradients, not the user's
    assert [block for _, block in backward[1:]] == sorted(
        (block for _, block in backward[1:]), key=lambda b: b or "A", reverse=True
    )
    assert ("mse_loss_backward", "C") in backward
    assert ("threshold_backward", "B") in backward
    assert ("threshold_backward", None) in backward


@pytest.mark.spec("ops", 19)
@pytest.mark.spec("parallel", 6, 48)
@pytest.mark.spec("programs", 8)
def test_annotating_twice_is_refused_until_removed() -> None:
    model = Layers()
    poptorch.BeginBlock(model.second, ipu_id=1)
    with pytest.raises(poptorch.Error, match="module has already been assigned to a block"):
        poptorch.BeginBlock(model.second, ipu_id=1)
    seen = []
    model.second.register_forward_pre_hook(lambda *_: seen.append(1))
    before = labels(capture(model, X))
    poptorch.removeBlocks(model)
    assert all(block is None for _, block, _ in labels(capture(model, X)))
    assert len(seen) == 2  # the user's own hook stays
    poptorch.BeginBlock(model.second, "again", ipu_id=1)
    after = labels(capture(model, X))
    assert [b is not None for _, b, _ in after] == [b is not None for _, b, _ in before]
    with pytest.raises(AssertionError):
        poptorch.removeBlocks("model")


def test_only_modules_and_callables_can_be_annotated() -> None:
    with pytest.raises(poptorch.Error, match=r"module is not an instance of torch\.nn\.Module"):
        poptorch.BeginBlock(3)


def scaled(x):
    return x * 3


@pytest.mark.spec("ops", 20)
def test_other_callables_are_wrapped(tmp_path: Path) -> None:
    wrapped = poptorch.BeginBlock(scaled, "S", 2)
    assert wrapped(2) == 6
    assert isinstance(wrapped, poptorch.LegacyBeginBlockFn)
    assert (wrapped._user_id, wrapped._ipu_id) == ("S", 2)
    torch.save(wrapped, tmp_path / "wrapped.pt")
    loaded = torch.load(tmp_path / "wrapped.pt", weights_only=False)
    assert blocks_of(lambda x: loaded(x) + 1, X) == [("mul", "S"), ("add", "S")]


@pytest.mark.spec("ops", 32)
@pytest.mark.spec("parallel", 45, 50)
def test_hooks_run_in_their_order_and_nesting_does_not_matter() -> None:
    model = Layers()
    model.second.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,))
    poptorch.BeginBlock(model.second, "B")
    model.second.register_forward_pre_hook(lambda _, inputs: (inputs[0] - 1,))
    found = [(name, block) for name, block, _ in labels(capture(model, X))]
    assert found[2:6] == [("relu", None), ("mul", None), ("sub", "B"), ("t", "B")]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Layers()

        def forward(self, x):
            return self.inner(x) + 1

    outer = Outer()
    poptorch.BeginBlock(outer.inner.third, "last")
    assert labels(capture(outer, X))[-1] == ("add", "last", False)


@pytest.mark.spec("ops", 19)
@pytest.mark.spec("parallel", 7)
def test_begin_block_changes_nothing_else() -> None:
    model = Layers()
    keys, cls = list(model.state_dict()), type(model.second)
    second = model.second
    assert poptorch.BeginBlock(second, ipu_id=1) is second is model.second
    assert list(model.state_dict()) == keys
    assert type(model.second) is cls
    model.second.register_buffer("extra", torch.zeros(1))
    model.second.more = nn.Linear(2, 2)
    assert "second.more.weight" in model.state_dict()


@pytest.mark.spec("parallel", 8)
def test_annotations_survive_copies_and_pickles() -> None:
    model = Layers()
    poptorch.BeginBlock(model.second, "B", ipu_id=1)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (
        copy.copy(model),
        copy.deepcopy(model),
        torch.load(file, weights_only=False),
    ):
        visits = capture(other, X).visits
        assert [(v.block, v.ipu) for v in visits[1:]] == [("B", 1)]


@pytest.mark.slow
@pytest.mark.spec("parallel", 8)
def test_annotations_are_seen_in_another_process(tmp_path: Path) -> None:
    layer = poptorch.BeginBlock(nn.Sequential(nn.Linear(2, 2)), "B", ipu_id=1)
    torch.save(layer, tmp_path / "layer.pt")
    code = (
        "import torch, poptorch, sys\n"
        "print(poptorch.module_repr(torch.load(sys.argv[1], weights_only=False)))"
    )
    run = programs.run("-c", code, tmp_path / "layer.pt")
    assert run.stdout.startswith("BeginBlock(user_id=B, ipu_id=1) Sequential(")


@pytest.mark.spec("parallel", 5)
def test_on_the_host_annotations_do_nothing() -> None:
    def forward(x):
        with poptorch.Block("nowhere", ipu_id=99):
            x = x * 2
        poptorch.Block.useAutoId()
        poptorch.Block.start()
        return x + 1  # after a scope, in no block

    expected = X * 2 + 1
    assert torch.equal(Calling(forward)(X), expected)
    model = Layers()
    plain = model(X)
    poptorch.BeginBlock(model.first, "unknown")
    assert torch.equal(model(X), plain)
    assert "user_id=unknown" in poptorch.module_repr(model)


@pytest.mark.spec("parallel", 43)
def test_after_a_failed_capture_nothing_is_active() -> None:
    def failing(x):
        poptorch.Block.start("A", ipu_id=1)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        capture(Calling(failing), X)
    assert torch.fx.traceback.get_current_meta().get("custom") is None
    assert blocks_of(lambda x: x + 1, X) == [("add", None)]
    assert poptorch.isRunningOnIpu() is False


@pytest.mark.spec("parallel", 46)
def test_the_class_of_release_1_0() -> None:
    def forward(x):
        with poptorch.IPU(1):
            x = x * 2
        return x + 1

    model = Calling(forward)
    assert visits_of(forward)[0][1] == 1
    assert len({block for _, block in blocks_of(forward, X)}) == 1  # the add stays on the device
    layers = Layers()
    assert poptorch.IPU(2, layers.third) is layers.third
    assert capture(layers, X).visits[1].ipu == 2
    assert torch.equal(model(X), X * 2 + 1)


def test_repr_shows_annotations(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU()))
    plain = repr(model)
    poptorch.BeginBlock(model[0], "encoder", ipu_id=1)
    poptorch.BeginBlock(model[1])
    expected = plain.replace(
        "(0): Linear", "(0): BeginBlock(user_id=encoder, ipu_id=1) Linear"
    ).replace("(1): Sequential", "(1): BeginBlock(user_id=None, ipu_id=None) Sequential")
    assert poptorch.module_repr(model) == expected
    poptorch.print(model)
    assert capsys.readouterr().out == expected + "\n"
    assert repr(model) == plain


def test_an_automatic_id_of_begin_block_is_remembered() -> None:
    layer = nn.Linear(4, 4)
    poptorch.BeginBlock(layer, ipu_id=1)
    first, second = (capture(layer, X).visits[1].block for _ in range(2))
    assert first == second
    assert f"user_id={first}," in poptorch.module_repr(layer)


def test_the_users_own_function_is_differentiated_where_it_ran() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 5

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            x = (x * self.weight).exp()
            with poptorch.Block("D"):
                x = Double.apply(x)
            with poptorch.Block("E"):
                return poptorch.identity_loss(x.tanh(), "mean")

    found = labels(capture(Model(), X, training=True))
    assert next(block for name, block, backward in found if name == "mul" and backward) == "D"
    assert ("tanh_backward", "E", True) in found


def test_a_block_that_begins_inside_a_name_scope_lasts_beyond_it() -> None:
    def forward(x):
        with poptorch.NameScope("scope"):
            poptorch.Block.start("A")
            x = x * 2
        return x + 1

    assert blocks_of(forward, X) == [("mul", "A"), ("add", "A")]


def test_a_block_lasts_over_a_loop() -> None:
    def forward(x):
        with poptorch.Block("A"):
            (x,) = poptorch.for_loop(3, lambda value: [value * 2], [x])
            x = x.relu()
        with poptorch.Block("B"):
            return x + 1

    found = blocks_of(forward, X)
    assert [block for name, block in found if name == "relu"] == ["A"]
    assert found[-1] == ("add", "B")
    assert {block for _, block in found[:-1]} == {"A"}

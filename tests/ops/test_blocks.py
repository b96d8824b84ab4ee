"""Block annotations: what they mark while a model is captured; elsewhere they are inert."""

import copy
import pickle

import pytest
import torch
from torch import nn

import poptorch
from helpers.captures import capture, labels
from helpers.wrapping import Calling, Graded, Having, saved
from poptorch._ir.blocks import OUTSIDE, label_of

X = torch.randn(3, 4)
OF_LOOPS = ("while_loop", "getitem", "zeros", "clone")


def layers() -> Graded:
    first, second, third = (nn.Linear(4, 4) for _ in range(3))
    return Graded(both=True, first=first, one=nn.ReLU(), second=second, two=nn.ReLU(), third=third)


def places(module) -> list[tuple[str, str | None, int | None]]:
    """Return (operator, block, device) of the forward pass of a module or function."""
    micro = capture(module if isinstance(module, nn.Module) else Calling(module), X)
    nodes = [node for node in micro.graph.module.graph.nodes if node.op == "call_function"]
    visits = {n: (v.block, v.ipu) for n, v in enumerate(micro.visits)}
    visits[OUTSIDE] = "outside", None
    return [(n.target.__name__.split(".")[0], *visits[label_of(n).visit]) for n in nodes]


def visits_of(module) -> list[tuple[str | None, int | None]]:
    """Return (id, device) of the blocks that a forward enters, the implicit first left out."""
    module = module if isinstance(module, nn.Module) else Calling(module)
    return [(v.block, v.ipu) for v in capture(module, X).visits[1:]]


def scopes(x):
    x = x + 1
    with poptorch.Block("A", ipu_id=1):
        x = x * 2
    with poptorch.Block("B", ipu_id=2):
        return x.relu()


@poptorch.BlockFunction("C", ipu_id=3)
def divided(x, *, by):
    return x / by


def nested(x):
    with poptorch.Block("A"):
        with poptorch.Block("B"):
            x = x * 2
        x = x.relu()
    return divided(x, by=2) + 1


def started(x):
    poptorch.Block.start("A", ipu_id=1)
    x = x * 2 + 1
    with poptorch.Block("B"):
        return x.relu()


def counted(x):
    for layer in range(3):
        with poptorch.Block(f"layer{layer}", ipu_id=layer):
            x = x * 2
    return x


def looped(x):
    with poptorch.Block("A"):
        (x,) = poptorch.for_loop(3, lambda value: [value * 2], [x])
        x = x.relu()
    with poptorch.Block("B"):
        return x + 1


def named(x):
    with poptorch.NameScope("scope"):
        poptorch.Block.start("A")
        x = x * 2
    return x + 1


def released(x):
    """By the class of release 1.0."""
    poptorch.Block.useAutoId()
    with poptorch.IPU(1):
        x = x * 2
    return x + 1


@pytest.mark.spec("parallel", 1, 2, 3, 15, 41, 46)
@pytest.mark.spec("programs", 9)
@pytest.mark.parametrize("forward, expected", [
    (scopes, [("add", None, None), ("mul", "A", 1), ("relu", "B", 2)]),
    # Leaving a scope clears the active block, even inside another.
    (nested, [("mul", "B", None), ("relu", "outside", None), ("div", "C", 3),
              ("add", "outside", None)]),
    (started, [("mul", "A", 1), ("add", "A", 1), ("relu", "B", None)]),
    (counted, [("mul", f"layer{i}", i) for i in range(3)]),
    (looped, [("relu", "A", None), ("add", "B", None)]),
    (named, [("mul", "A", None), ("add", "A", None)]),
    (released, [("mul", "0", 1), ("add", "0", 1)]),  # which stays on the device
])  # fmt: skip
def test_a_block_covers_its_scope_or_lasts_until_the_next(forward, expected) -> None:
    assert [place for place in places(forward) if place[0] not in OF_LOOPS] == expected
    assert "test_blocks.py" in capture(Calling(forward), X).visits[1].line


@pytest.mark.spec("parallel", 42)
def test_automatic_ids_restart_only_when_asked() -> None:
    def forward(x, restart=True):
        if restart:
            poptorch.Block.useAutoId()
        with poptorch.Block(ipu_id=0):
            x = x * 2
        with poptorch.Block("named"):
            x = x + 1
        with poptorch.Block(ipu_id=1):
            return x.relu()

    for _ in range(2):
        assert visits_of(forward) == [("0", 0), ("named", None), ("1", 1)]
    poptorch.Block.useAutoId()  # outside a capture: nothing
    ids = [block for block, _ in visits_of(lambda x: forward(x, restart=False))]
    assert ids == ["2", "named", "3"]


@pytest.mark.spec("parallel", 44)
def test_begin_block_lasts_until_the_next_and_the_backward_follows() -> None:
    model = layers()
    assert poptorch.BeginBlock(model.second, "B", 1) is model.second
    poptorch.BeginBlock(model.third, user_id="C", ipu_id=2)
    found = labels(capture(model, X, X, training=True))
    forward = [block for _, block, backward in found if not backward]
    assert forward == [None] * 3 + ["B"] * 3 + ["C"] * 3
    first, *backward = [(name, block) for name, block, is_backward in found if is_backward]
    assert first == ("ones_like", None)  # the seed of the gradients, not the user's
    blocks = [block for _, block in backward]
    assert blocks == sorted(blocks, key=["C", "B", None].index)
    wanted = ("mse_loss_backward", "C"), ("threshold_backward", "B"), ("threshold_backward", None)
    assert set(wanted) < set(backward)


@pytest.mark.spec("ops", 19)
@pytest.mark.spec("parallel", 6, 7, 48)
@pytest.mark.spec("programs", 8)
def test_annotating_twice_is_refused_until_removed_and_changes_nothing_else() -> None:
    model = layers()
    second, keys, cls = model.second, list(model.state_dict()), type(model.second)
    assert poptorch.BeginBlock(second, ipu_id=1) is second is model.second
    assert list(model.state_dict()) == keys
    assert type(second) is cls
    with pytest.raises(poptorch.Error, match="module has already been assigned to a block"):
        poptorch.BeginBlock(second, ipu_id=1)
    seen = []
    second.register_forward_pre_hook(lambda *_: seen.append(1))
    poptorch.removeBlocks(model)
    assert all(block is None for _, block, _ in places(model))
    assert len(seen) == 1  # the user's own hook stays
    poptorch.BeginBlock(second, "again", ipu_id=1)
    assert places(model)[-1][1:] == ("again", 1)


def scaled(x):
    return x * 3


@pytest.mark.spec("ops", 20)
def test_other_callables_are_wrapped() -> None:
    wrapped = poptorch.BeginBlock(scaled, "S", 2)
    assert wrapped(2) == 6
    assert isinstance(wrapped, poptorch.LegacyBeginBlockFn)
    loaded = pickle.loads(pickle.dumps(wrapped))
    assert places(lambda x: loaded(x) + 1) == [("mul", "S", 2), ("add", "S", 2)]


@pytest.mark.spec("ops", 32)
@pytest.mark.spec("parallel", 45, 50)
def test_hooks_run_in_their_order_and_nesting_does_not_matter() -> None:
    model = layers()
    model.second.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,))
    poptorch.BeginBlock(model.second, "B")
    model.second.register_forward_pre_hook(lambda _, inputs: (inputs[0] - 1,))
    found = [(name, block) for name, block, _ in places(model)]
    assert found[2:6] == [("relu", None), ("mul", None), ("sub", "B"), ("t", "B")]
    inner = layers()
    poptorch.BeginBlock(inner.third, "last")
    assert places(lambda x: inner(x) + 1)[-1] == ("add", "last", None)


@pytest.mark.spec("parallel", 8)
def test_annotations_are_shown_and_survive_copies_and_pickles(capsys) -> None:
    model = layers()
    poptorch.BeginBlock(model.second, "B", ipu_id=1)
    for other in (copy.copy(model), copy.deepcopy(model), saved(model, weights_only=False)):
        assert visits_of(other) == [("B", 1)]
        assert "BeginBlock(user_id=B, ipu_id=1) Linear(" in poptorch.module_repr(other)
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    plain = repr(model)
    poptorch.BeginBlock(model[0], "encoder", ipu_id=1)
    expected = plain.replace(" Linear", " BeginBlock(user_id=encoder, ipu_id=1) Linear")
    assert poptorch.module_repr(model) == expected
    poptorch.print(model)
    assert capsys.readouterr().out == expected + "\n"
    assert repr(model) == plain
    layer = poptorch.BeginBlock(nn.Linear(4, 4), ipu_id=1)
    assert "user_id=None," in poptorch.module_repr(layer)
    ((first, _),) = {visits_of(layer)[0] for _ in range(2)}
    assert f"user_id={first}," in poptorch.module_repr(layer)  # it is remembered


@pytest.mark.spec("parallel", 5, 43)
def test_on_the_host_and_after_a_failed_capture_nothing_is_active() -> None:
    poptorch.Block.useAutoId()
    poptorch.Block.start()
    with poptorch.Block("nowhere", ipu_id=99):
        assert torch.equal(X * 2, X + X)
    model = layers()
    plain = model(X)
    poptorch.BeginBlock(model.first, "unknown")
    assert torch.equal(model(X), plain)

    def failing(x):
        poptorch.Block.start("A", ipu_id=1)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        capture(Calling(failing), X)
    assert places(lambda x: x + 1) == [("add", None, None)]


def test_the_users_own_function_is_differentiated_where_it_ran() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 5

    def forward(model, x):
        x = (x * model.weight).exp()
        with poptorch.Block("D"):
            x = Double.apply(x)
        with poptorch.Block("E"):
            return poptorch.identity_loss(x.tanh(), "mean")

    model = Having(forward, weight=nn.Parameter(torch.ones(4)))
    found = labels(capture(model, X, training=True))
    assert next(block for name, block, backward in found if name == "mul" and backward) == "D"
    assert ("tanh_backward", "E", True) in found

"""Block annotations: what they mark while a model is captured; elsewhere they are inert."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.captures import capture, labels
from helpers.wrapping import Calling, Graded, Having, saved
from poptorch._ir.block_labels import OUTSIDE, label_of

X = torch.randn(3, 4)
OF_LOOPS = ("while_loop", "getitem", "zeros", "clone")
Forward = Callable[..., Any]
Place = tuple[str, str | None, int | None]
"""An operator, its block and its device."""


def layers() -> Graded:
    """The layers first, one, second, two, third; with targets also their error."""
    return Graded(
        both=True,
        first=nn.Linear(4, 4),
        one=nn.ReLU(),
        second=nn.Linear(4, 4),
        two=nn.ReLU(),
        third=nn.Linear(4, 4),
    )


@pytest.fixture
def model() -> Graded:
    return layers()


def places(module: nn.Module | Forward) -> list[Place]:
    """The operators of the forward pass of a module or function, with their places."""
    micro = capture(module if isinstance(module, nn.Module) else Calling(module), X)
    nodes = [node for node in micro.graph.module.graph.nodes if node.op == "call_function"]
    visits = {number: (visit.block, visit.ipu) for number, visit in enumerate(micro.visits)}
    visits[OUTSIDE] = ("outside", None)
    return [(n.target.__name__.split(".")[0], *visits[label_of(n).visit]) for n in nodes]


def visits_of(module: nn.Module | Forward) -> list[tuple[str | None, int | None]]:
    """(id, device) of the blocks that a forward enters, the implicit first left out."""
    module = module if isinstance(module, nn.Module) else Calling(module)
    return [(visit.block, visit.ipu) for visit in capture(module, X).visits[1:]]


# What a block covers.


def in_scopes(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    with poptorch.Block("A", ipu_id=1):
        x = x * 2
    with poptorch.Block("B", ipu_id=2):
        return x.relu()


@poptorch.BlockFunction("C", ipu_id=3)
def divided(x: torch.Tensor, *, by: int) -> torch.Tensor:
    return x / by


def in_nested_scopes(x: torch.Tensor) -> torch.Tensor:
    with poptorch.Block("A"):
        with poptorch.Block("B"):
            x = x * 2
        x = x.relu()
    return divided(x, by=2) + 1


def after_start(x: torch.Tensor) -> torch.Tensor:
    poptorch.Block.start("A", ipu_id=1)
    x = x * 2 + 1
    with poptorch.Block("B"):
        return x.relu()


def in_a_python_loop(x: torch.Tensor) -> torch.Tensor:
    for layer in range(3):
        with poptorch.Block(f"layer{layer}", ipu_id=layer):
            x = x * 2
    return x


def around_a_loop(x: torch.Tensor) -> torch.Tensor:
    with poptorch.Block("A"):
        (x,) = poptorch.for_loop(3, lambda value: [value * 2], [x])
        x = x.relu()
    with poptorch.Block("B"):
        return x + 1


def in_a_name_scope(x: torch.Tensor) -> torch.Tensor:
    with poptorch.NameScope("scope"):
        poptorch.Block.start("A")
        x = x * 2
    return x + 1


def of_release_1_0(x: torch.Tensor) -> torch.Tensor:
    poptorch.Block.useAutoId()
    with poptorch.IPU(1):
        x = x * 2
    return x + 1


COVERED: list[tuple[Forward, list[Place]]] = [
    (in_scopes, [("add", None, None), ("mul", "A", 1), ("relu", "B", 2)]),
    # Leaving a scope clears the active block, even inside another.
    (
        in_nested_scopes,
        [("mul", "B", None), ("relu", "outside", None), ("div", "C", 3), ("add", "outside", None)],
    ),
    (after_start, [("mul", "A", 1), ("add", "A", 1), ("relu", "B", None)]),
    (in_a_python_loop, [("mul", f"layer{i}", i) for i in range(3)]),
    (around_a_loop, [("relu", "A", None), ("add", "B", None)]),
    (in_a_name_scope, [("mul", "A", None), ("add", "A", None)]),
    # This class stays on the device behind its scope.
    (of_release_1_0, [("mul", "0", 1), ("add", "0", 1)]),
]
each_form = pytest.mark.parametrize("forward, expected", COVERED)


@pytest.mark.spec("parallel", 1, 2, 3, 15, 41, 46)
@pytest.mark.spec("programs", 9)
@each_form
def test_a_block_covers_its_scope_or_lasts_until_the_next(
    forward: Forward, expected: list[Place]
) -> None:
    assert [place for place in places(forward) if place[0] not in OF_LOOPS] == expected


@each_form
def test_a_block_knows_the_users_line(forward: Forward, expected: list[Place]) -> None:
    assert "test_blocks.py" in capture(Calling(forward), X).visits[1].line


# Automatic ids.


def with_automatic_ids(x: torch.Tensor) -> torch.Tensor:
    with poptorch.Block(ipu_id=0):
        x = x * 2
    with poptorch.Block("named"):
        x = x + 1
    with poptorch.Block(ipu_id=1):
        return x.relu()


def with_restarted_ids(x: torch.Tensor) -> torch.Tensor:
    poptorch.Block.useAutoId()
    return with_automatic_ids(x)


@pytest.mark.spec("parallel", 42)
def test_automatic_ids_restart_when_asked() -> None:
    expected = [("0", 0), ("named", None), ("1", 1)]

    assert visits_of(with_restarted_ids) == expected
    assert visits_of(with_restarted_ids) == expected


@pytest.mark.spec("parallel", 42)
def test_automatic_ids_continue_unless_they_are_reset() -> None:
    visits_of(with_restarted_ids)

    assert visits_of(with_automatic_ids) == [("2", 0), ("named", None), ("3", 1)]


@pytest.mark.spec("parallel", 42)
def test_automatic_ids_do_not_restart_outside_of_a_capture() -> None:
    visits_of(with_restarted_ids)

    poptorch.Block.useAutoId()

    assert visits_of(with_automatic_ids) == [("2", 0), ("named", None), ("3", 1)]


# Blocks on layers.


@pytest.fixture
def three_blocks(model: Graded) -> Graded:
    """The layers, with the block B from the second and the block C from the third one on."""
    poptorch.BeginBlock(model.second, "B", 1)
    poptorch.BeginBlock(model.third, user_id="C", ipu_id=2)
    return model


@pytest.mark.spec("parallel", 44)
def test_a_block_on_a_layer_lasts_until_the_next(three_blocks: Graded) -> None:
    found = labels(capture(three_blocks, X, X, training=True))

    forward = [block for _, block, backward in found if not backward]

    assert forward == [None] * 3 + ["B"] * 3 + ["C"] * 3


@pytest.mark.spec("parallel", 44)
def test_the_backward_pass_goes_through_blocks_in_reverse(three_blocks: Graded) -> None:
    found = labels(capture(three_blocks, X, X, training=True))

    seed, *backward = [(name, block) for name, block, is_backward in found if is_backward]

    assert seed == ("ones_like", None)  # of the gradients, not the user's
    blocks = [block for _, block in backward]
    assert blocks == sorted(blocks, key=["C", "B", None].index)
    assert ("mse_loss_backward", "C") in backward
    assert ("threshold_backward", "B") in backward
    assert ("threshold_backward", None) in backward


@pytest.mark.spec("ops", 19)
def test_annotating_a_layer_returns_it_and_changes_neither_class_nor_state(
    model: Graded,
) -> None:
    second = model.second
    keys = list(model.state_dict())

    returned = poptorch.BeginBlock(second, ipu_id=1)

    assert returned is second
    assert model.second is second
    assert type(second) is nn.Linear
    assert list(model.state_dict()) == keys


@pytest.mark.spec("parallel", 6)
def test_annotating_a_layer_twice_is_refused(model: Graded) -> None:
    poptorch.BeginBlock(model.second, ipu_id=1)

    with pytest.raises(poptorch.Error, match="module has already been assigned to a block"):
        poptorch.BeginBlock(model.second, ipu_id=1)


@pytest.mark.spec("parallel", 7)
@pytest.mark.spec("programs", 8)
def test_blocks_can_be_removed(model: Graded) -> None:
    poptorch.BeginBlock(model.second, ipu_id=1)

    poptorch.removeBlocks(model)

    assert {block for _, block, _ in places(model)} == {None}


@pytest.mark.spec("parallel", 48)
def test_removing_blocks_leaves_hooks_of_the_user(model: Graded) -> None:
    seen: list[int] = []
    poptorch.BeginBlock(model.second, ipu_id=1)
    model.second.register_forward_pre_hook(lambda *_: seen.append(1))

    poptorch.removeBlocks(model)

    places(model)
    assert len(seen) == 1


@pytest.mark.spec("parallel", 7)
def test_a_layer_can_be_annotated_again_when_its_block_is_removed(model: Graded) -> None:
    poptorch.BeginBlock(model.second, ipu_id=1)
    poptorch.removeBlocks(model)

    poptorch.BeginBlock(model.second, "again", ipu_id=1)

    _, block, device = places(model)[-1]
    assert block == "again"
    assert device == 1


def tripled(x: Any) -> Any:
    return x * 3


@pytest.mark.spec("ops", 20)
def test_a_wrapped_function_computes_the_same_as_before() -> None:
    wrapped = poptorch.BeginBlock(tripled, "S", 2)

    assert isinstance(wrapped, poptorch.LegacyBeginBlockFn)
    assert wrapped(2) == 6


@pytest.mark.spec("ops", 20)
def test_a_wrapped_function_begins_its_block_also_when_it_was_pickled() -> None:
    loaded = pickle.loads(pickle.dumps(poptorch.BeginBlock(tripled, "S", 2)))

    assert places(lambda x: loaded(x) + 1) == [("mul", "S", 2), ("add", "S", 2)]


@pytest.mark.spec("ops", 32)
@pytest.mark.spec("parallel", 45)
def test_a_block_begins_between_the_hooks_before_and_after_its_annotation(
    model: Graded,
) -> None:
    model.second.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,))
    poptorch.BeginBlock(model.second, "B")
    model.second.register_forward_pre_hook(lambda _, inputs: (inputs[0] - 1,))

    found = [(name, block) for name, block, _ in places(model)]

    assert found[2:6] == [("relu", None), ("mul", None), ("sub", "B"), ("t", "B")]


@pytest.mark.spec("parallel", 50)
def test_a_block_in_a_nested_layer_lasts_behind_that_layer(model: Graded) -> None:
    poptorch.BeginBlock(model.third, "last")

    assert places(lambda x: model(x) + 1)[-1] == ("add", "last", None)


# Copies and texts.


@pytest.mark.spec("parallel", 8)
@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda model: saved(model, weights_only=False)],
    ids=["copy", "deepcopy", "saved"],
)
def test_annotations_survive_copies_and_pickles(
    model: Graded, copied: Callable[[nn.Module], nn.Module]
) -> None:
    poptorch.BeginBlock(model.second, "B", ipu_id=1)

    other = copied(model)

    assert visits_of(other) == [("B", 1)]
    assert "BeginBlock(user_id=B, ipu_id=1) Linear(" in poptorch.module_repr(other)


@pytest.mark.spec("parallel", 8)
def test_annotations_are_shown_by_module_repr_and_print_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    plain = repr(model)
    annotated = plain.replace(" Linear", " BeginBlock(user_id=encoder, ipu_id=1) Linear")

    poptorch.BeginBlock(model[0], "encoder", ipu_id=1)
    poptorch.print(model)

    assert poptorch.module_repr(model) == annotated
    assert capsys.readouterr().out == annotated + "\n"
    assert repr(model) == plain


@pytest.mark.spec("parallel", 8)
def test_a_block_without_an_id_gets_one_when_it_is_first_used_and_keeps_it() -> None:
    layer = poptorch.BeginBlock(nn.Linear(4, 4), ipu_id=1)
    assert "user_id=None," in poptorch.module_repr(layer)

    ((first, _),) = visits_of(layer)
    ((second, _),) = visits_of(layer)

    assert second == first
    assert f"user_id={first}," in poptorch.module_repr(layer)


# Outside of captures.


@pytest.mark.spec("parallel", 5, 43)
def test_blocks_are_inert_on_the_host() -> None:
    poptorch.Block.useAutoId()
    poptorch.Block.start()

    with poptorch.Block("nowhere", ipu_id=99):
        doubled = X * 2

    assert torch.equal(doubled, X + X)


@pytest.mark.spec("parallel", 5)
def test_an_annotated_layer_computes_the_same_on_the_host(model: Graded) -> None:
    plain = model(X)

    poptorch.BeginBlock(model.first, "unknown")

    assert torch.equal(model(X), plain)


@pytest.mark.spec("parallel", 43)
def test_no_block_is_active_after_a_failed_capture() -> None:
    def failing(x: torch.Tensor) -> torch.Tensor:
        poptorch.Block.start("A", ipu_id=1)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        capture(Calling(failing), X)

    assert places(lambda x: x + 1) == [("add", None, None)]


class Double(torch.autograd.Function):
    """Doubles; its gradient is five times what comes in."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 5


def test_the_users_own_function_is_differentiated_in_the_block_where_it_ran() -> None:
    def forward(model: Having, x: torch.Tensor) -> torch.Tensor:
        x = (x * model.weight).exp()
        with poptorch.Block("D"):
            x = Double.apply(x)
        with poptorch.Block("E"):
            return poptorch.identity_loss(x.tanh(), "mean")

    model = Having(forward, weight=nn.Parameter(torch.ones(4)))

    found = labels(capture(model, X, training=True))

    backward = [(name, block) for name, block, is_backward in found if is_backward]
    assert ("tanh_backward", "E") in backward
    assert next(block for name, block in backward if name == "mul") == "D"

"""Anchored tensors: names, values, output modes, and norms of gradients."""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import (
    Graded,
    options,
)
from poptorch import OutputMode


def net() -> nn.Module:
    """Return a model of two layers and its mean squared error."""
    return Graded(both=True, body=nn.Sequential(nn.Linear(3, 4), nn.ReLU()), head=nn.Linear(4, 2))


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets for ``net``."""
    return torch.randn(rows, 3), torch.randn(rows, 2)


# By the name of the anchor: what is anchored.
ANCHORS = {
    "x": "input",
    "loss": "loss",
    "weight": "head.weight",
    "grad": "Gradient___head.weight",
    "new": "UpdatedVar___head.weight",
    "hidden": "body/1/ReLU",
    "module": "body.0",
}


class Anchored(NamedTuple):
    """A model with anchors after a step, and the values that eager PyTorch has."""

    training: poptorch.PoplarExecutor
    out: torch.Tensor
    expected: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def anchored() -> Iterator[Anchored]:
    """Return a model with anchors after a step."""
    torch.manual_seed(0)
    model = net()
    eager, opts = copy.deepcopy(model), options()
    for short, long in ANCHORS.items():
        opts.anchorTensor(short, long)
    training = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = batch(2)
    out, loss = training(x, y)
    eager(x, y)[1].backward()
    weight = eager.head.weight.detach()
    expected = {
        "x": x,
        "loss": loss,
        "weight": weight,
        "grad": eager.head.weight.grad,
        "new": weight - 0.1 * eager.head.weight.grad,
        "hidden": eager.body(x).detach(),
        "module": eager.body[0](x).detach(),
    }
    yield Anchored(training, out, expected)
    training.destroy()


@pytest.mark.parametrize("anchor", ANCHORS)
def test_an_anchored_tensor_has_the_value_of_eager_pytorch(anchored: Anchored, anchor: str) -> None:
    torch.testing.assert_close(
        anchored.training.getAnchoredTensor(anchor), anchored.expected[anchor]
    )


def test_anchors_do_not_change_the_results_of_a_call(anchored: Anchored) -> None:
    assert anchored.out.shape == (2, 2)


def test_an_anchor_that_nobody_set_is_refused(anchored: Anchored) -> None:
    with pytest.raises(AssertionError, match="No tensor with name other"):
        anchored.training.getAnchoredTensor("other")


def test_names_that_can_be_anchored_are_listed(anchored: Anchored) -> None:
    """Modules can be anchored, too, and are no tensors."""
    others = {"input/1", "head/Linear", "scaledLearningRate0___specific___head.weight"}

    names = {*anchored.training.getTensorNames()}

    assert {*ANCHORS.values()} - {"body.0"} | others <= names


def test_names_have_no_scope_if_it_is_switched_off() -> None:
    plain = poptorch.inferenceModel(net(), options().disableModuleNamescope())

    plain.compile(*batch(2))

    assert "Linear" in plain.getTensorNames()
    assert "head/Linear" not in plain.getTensorNames()


def test_before_the_first_call_no_anchored_value_exists() -> None:
    training = poptorch.trainingModel(net(), options())

    with pytest.raises(AssertionError, match="No tensor with name"):
        training.getAnchoredTensor("x")


def test_before_compilation_no_names_exist() -> None:
    training = poptorch.trainingModel(net(), options())

    with pytest.raises(AssertionError, match="once the model is compiled"):
        training.getTensorNames()


class Modes(NamedTuple):
    """A model with anchors of all output modes after a call, and its input."""

    training: poptorch.PoplarExecutor
    model: nn.Module
    x: torch.Tensor


@pytest.fixture(scope="module")
def modes() -> Iterator[Modes]:
    """Return a model with anchors of all modes, after four iterations of two replicas."""
    torch.manual_seed(0)
    opts = options(iterations=4, accumulation=2, replicas=2)
    opts.anchorTensor("final", "input")
    opts.anchorTensor("all", "input", output_mode=OutputMode.All)
    opts.anchorTensor("second", "input", output_mode=OutputMode.EveryN, output_return_period=2)
    opts.anchorTensor("sum", "input", output_mode=OutputMode.Sum)
    opts.anchorTensor("new", "UpdatedVar___head.bias", output_mode=OutputMode.All)
    model = net()
    training = poptorch.trainingModel(model, opts)
    x, y = batch(16)
    training(x, y)
    yield Modes(training, model, x)
    training.destroy()


def test_an_anchor_of_all_values_has_them_in_order(modes: Modes) -> None:
    assert torch.equal(modes.training.getAnchoredTensor("all"), modes.x)


def test_an_anchor_has_the_mode_of_the_outputs_by_default(modes: Modes) -> None:
    """That of training is the final value of each replica."""
    assert torch.equal(modes.training.getAnchoredTensor("final"), modes.x[-2:])


def test_an_anchor_of_every_second_value_has_those_of_every_second_iteration(modes: Modes) -> None:
    expected = torch.cat([modes.x[4:8], modes.x[12:16]])

    assert torch.equal(modes.training.getAnchoredTensor("second"), expected)


def test_an_anchor_of_sums_has_one_for_each_replica(modes: Modes) -> None:
    expected = torch.stack([modes.x[0::2].sum(0), modes.x[1::2].sum(0)])

    torch.testing.assert_close(modes.training.getAnchoredTensor("sum"), expected)


def test_an_anchored_weight_has_a_value_for_each_update(modes: Modes) -> None:
    """There are four updates of a bias of two numbers."""
    updated = modes.training.getAnchoredTensor("new")

    assert updated.shape == (8,)
    assert torch.equal(updated[-2:], modes.model.head.bias.detach())


def test_the_norm_of_the_gradients_is_that_before_clipping() -> None:
    model = net()
    eager, opts = copy.deepcopy(model), options(accumulation=4)
    opts.anchorTensor("norm", "GradientNorm")
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, max_grad_norm=0.01)
    training = poptorch.trainingModel(model, opts, optimizer)
    native = torch.optim.SGD(eager.parameters(), lr=0.1)
    x, y = batch(8)
    for _ in range(2):
        training(x, y)

        native.zero_grad()
        eager(x, y)[1].backward()
        norm = nn.utils.clip_grad_norm_(eager.parameters(), 0.01)
        native.step()
        torch.testing.assert_close(training.getAnchoredTensor("norm"), norm)


def test_the_norm_of_the_gradients_costs_no_lanes() -> None:
    opts = options(accumulation=4)
    opts.anchorTensor("norm", "GradientNorm")
    training = poptorch.trainingModel(net(), opts)

    training.compile(*batch(8))

    assert training.plan().program.lanes is not None


def test_an_unknown_anchor_is_refused_with_the_nearest_name() -> None:
    opts = options()
    opts.anchorTensor("anchor", "Gradient___heads.weight")

    with pytest.raises(
        poptorch.Error, match=r"(?s)No tensor.*did you mean Gradient___head.weight or "
    ):
        poptorch.trainingModel(net(), opts)(*batch(2))


class Deep(nn.Module):
    """Has enough small weights for a bundle, which is updated as one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


MEASURED = {
    "no loss scaling": lambda w: poptorch.optim.SGD(w, lr=0.1),
    "infinity": lambda w: poptorch.optim.SGD(w, lr=0.1, max_grad_norm=math.inf),
    "loss scaling": lambda w: poptorch.optim.AdamW(w, lr=0.01, loss_scaling=128.0),
    "clipping": lambda w: poptorch.optim.SGD(w, lr=0.1, max_grad_norm=1e-3),
    "LAMB": lambda w: poptorch.optim.LAMB(w, lr=0.01),
    "a traced step": lambda w: torch.optim.Adagrad(w, lr=0.01),
}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", MEASURED.values(), ids=MEASURED)
@pytest.mark.parametrize("replicas", [1, 2])
def test_accumulated_gradients_and_their_norm_are_those_of_eager_pytorch(
    optimizer: Callable[[Any], torch.optim.Optimizer], replicas: int
) -> None:
    model = Deep()
    eager, opts = copy.deepcopy(model), options(accumulation=4, replicas=replicas)
    opts.anchorTensor("norm", "GradientNorm")
    opts.anchorTensor("bias", "AccumulatedGradient___layers.3.bias")
    training = poptorch.trainingModel(model, opts, optimizer(model.parameters()))
    x, y = torch.randn(16, 4), torch.randn(16, 4)
    eager(x, y).backward()

    training(x, y)

    norm = nn.utils.get_total_norm([each.grad for each in eager.parameters()])
    torch.testing.assert_close(training.getAnchoredTensor("norm"), norm)
    torch.testing.assert_close(training.getAnchoredTensor("bias"), eager.layers[3].bias.grad)
    assert {"GradientNorm", "AccumulatedGradient___layers.3.bias"} <= {*training.getTensorNames()}


@pytest.mark.larger("test_accumulated_gradients_and_their_norm_are_those_of_eager_pytorch")
@pytest.mark.parametrize("anchor", ["GradientNorm", "AccumulatedGradient___layers.3.bias"])
def test_an_anchor_leaves_the_update_as_it_is(anchor: str) -> None:
    """The updates of SGD are in proportion to the gradients, unlike those of Adam."""
    usual, anchored = Deep(), Deep()
    anchored.load_state_dict(usual.state_dict())
    with_anchor = options(accumulation=4)
    with_anchor.anchorTensor("anchor", anchor)
    x, y = torch.randn(16, 4), torch.randn(16, 4)

    for model, opts in ((usual, options(accumulation=4)), (anchored, with_anchor)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        poptorch.trainingModel(model, opts, optimizer)(x, y)

    torch.testing.assert_close(anchored.state_dict(), usual.state_dict())

"""Rows of docs/differences.md, each executed: a test names its row by the row's first cell."""
# ruff: noqa: E501 (cells of the page)

from __future__ import annotations

import copy
import functools
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import popdist
import poptorch
from helpers.source_tree import ROOT
from helpers.wrapping import PAUSE
from poptorch.options.files import ConfigFileError

PAGE = ROOT / "docs" / "differences.md"
FIRST_CELLS = {
    line.split(" | ")[0].removeprefix("| ")
    for line in PAGE.read_text().splitlines()
    if line.startswith("| ")
}
X, Y = torch.randn(8, 4), torch.randint(3, (8,))
Test = Callable[..., None]


def row(first_cell: str) -> Callable[[Test], Test]:
    """Let a test fail when the page has no row that begins with this cell."""

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def checked(*args: Any, **kwargs: Any) -> None:
            assert first_cell in FIRST_CELLS, f"no row of {PAGE.name} begins so: {first_cell}"
            test(*args, **kwargs)

        checked.row = first_cell  # type: ignore[attr-defined]
        return checked

    return decorate


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_BACKEND", "reference")


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("WARNING", "poptorch::python")
    return caplog


def unchanged(loss: torch.Tensor) -> torch.Tensor:
    return loss


class Net(nn.Module):
    def __init__(self, after: Callable[[torch.Tensor], torch.Tensor] = unchanged) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.after = after

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        out = self.linear(x)
        return out if y is None else (out, self.after(nn.functional.cross_entropy(out, y)))


class Calls(nn.Module):
    """A module of one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def infer(function: Callable[..., Any], *args: Any) -> Any:
    module = function if isinstance(function, nn.Module) else Calls(function)
    return poptorch.inferenceModel(module)(*args)


def train(make: Callable[..., torch.optim.Optimizer], calls: int = 2) -> tuple[Net, Net]:
    """Return a net that the library has trained, and one as it was before."""
    net = Net()
    start = copy.deepcopy(net)
    wrapped = poptorch.trainingModel(net, optimizer=make(net.parameters()))
    for _ in range(calls):
        wrapped(X, Y)
    return net, start


def eager(start: Net, optimizer: torch.optim.Optimizer, calls: int = 2) -> Net:
    for _ in range(calls):
        optimizer.zero_grad()
        start(X, Y)[1].backward()
        optimizer.step()
    return start


def same(left: Net, right: Net) -> bool:
    return torch.allclose(left.linear.weight, right.linear.weight, atol=1e-6)


# No devices, no SDK


@row("enables `faulthandler` and replaces `sys.excepthook` at import")
def test_importing_leaves_the_hook_alone() -> None:
    assert sys.excepthook is sys.__excepthook__


@row("saved models are pickles: loading one runs whatever it says")
def test_a_file_is_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    model = poptorch.inferenceModel(net)
    model(X)
    model.save(str(tmp_path / "a"))
    assert torch.equal(poptorch.load(str(tmp_path / "a"))(X), net(X))
    monkeypatch.setenv("POPTORCH_KEY_FILE", str(tmp_path / "of another user"))
    with pytest.raises(poptorch.Error, match="trusted=True"):
        poptorch.load(str(tmp_path / "a"))
    loaded = poptorch.load(str(tmp_path / "a"), model=Net())
    assert torch.equal(loaded(X), net(X))


@row("`save` fails for a model that cannot be pickled")
def test_saving_what_cannot_be_pickled(tmp_path: Path, warned: pytest.LogCaptureFixture) -> None:
    net = Net(after=lambda loss: loss)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(net)
    model = poptorch.inferenceModel(net)
    model(X)
    model.save(str(tmp_path / "a"))
    assert "needs model=" in warned.text


@row("hyper-parameters are uploaded while detached at the next attach, errors included")
def test_what_cannot_change_is_refused_at_once() -> None:
    net = Net()
    model = poptorch.trainingModel(net, optimizer=poptorch.optim.SGD(net.parameters(), lr=0.1))
    model(X, Y)
    model.detachFromDevice()
    with pytest.raises(poptorch.Error):
        model.setOptimizer(poptorch.optim.Adam(net.parameters(), lr=0.1))


@row("random numbers of the device")
def test_random_numbers_follow_the_seed() -> None:
    def draw(options: poptorch.Options) -> torch.Tensor:
        return poptorch.inferenceModel(Calls(lambda x: x + torch.rand(4)), options)(X)

    first = draw(poptorch.Options().randomSeed(3))
    assert torch.equal(first, draw(poptorch.Options().randomSeed(3)))
    assert not torch.equal(draw(poptorch.Options()), draw(poptorch.Options()))


# Where torch is followed


@row("SGD with dampening: the first step was dampened too")
def test_dampening() -> None:
    net, start = train(
        lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, loss_scaling=1.0)
    )
    by_torch = torch.optim.SGD(start.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    assert same(net, eager(start, by_torch))


@row("a dampening without momentum scaled every gradient")
def test_dampening_alone() -> None:
    net, start = train(lambda p: poptorch.optim.SGD(p, lr=0.1, dampening=0.5))
    assert same(net, eager(start, torch.optim.SGD(start.parameters(), lr=0.05)))
    net, start = train(lambda p: torch.optim.SGD(p, lr=0.1, dampening=0.5))
    assert same(net, eager(start, torch.optim.SGD(start.parameters(), lr=0.1)))


@row("`maximize=True` was accepted and ignored")
def test_maximize() -> None:
    net, start = train(lambda p: poptorch.optim.SGD(p, lr=0.1, maximize=True))
    assert same(net, eager(start, torch.optim.SGD(start.parameters(), lr=0.1, maximize=True)))


@row("lists of `betas` failed an assertion")
def test_betas_in_a_list() -> None:
    net, start = train(lambda p: poptorch.optim.Adam(p, lr=0.1, betas=[0.5, 0.6]))
    assert same(net, eager(start, torch.optim.Adam(start.parameters(), lr=0.1, betas=(0.5, 0.6))))


@row("a floating-point exception made the model unusable")
def test_a_floating_point_exception_changes_nothing() -> None:
    net = Net()
    options = poptorch.Options()
    options.Precision.enableFloatingPointExceptions(True)
    model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.1))
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(poptorch.Error):
        model(X / 0, Y)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    model(X, Y)
    assert not torch.equal(before["linear.weight"], net.linear.weight)


@row("`int64` inside `forward` was `int32`")
def test_integers() -> None:
    assert infer(lambda x: x + 1, Y).dtype == torch.int32
    assert infer(lambda x: (x * 2**40) // 2**40, Y).equal(Y.int())
    with pytest.raises(poptorch.Error, match="32 bits"):
        infer(lambda x: (x + 1) * 2**40, Y)


@row("bfloat16 inputs were refused")
def test_bfloat16() -> None:
    assert infer(lambda x: x * 2, X.bfloat16()).dtype == torch.bfloat16
    assert infer(Net().bfloat16(), X.bfloat16()).dtype == torch.bfloat16


@row('`state_dict()["state"]` of torch\'s optimizers stayed empty')
def test_state_of_torch_optimizers() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = poptorch.trainingModel(net, optimizer=optimizer)
    model(X, Y)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    assert saved[1]["state"][0]["momentum_buffer"].abs().sum() > 0
    first = model(X, Y)[1], model(X, Y)[1]
    net.load_state_dict(saved[0])
    model.copyWeightsToDevice()
    optimizer.load_state_dict(saved[1])
    assert (model(X, Y)[1], model(X, Y)[1]) == first


@row(
    "`train()` and `eval()` counted at the first call only, and never for the module that is"
    " wrapped itself"
)
def test_modes() -> None:
    net = nn.Dropout(0.9)
    model = poptorch.inferenceModel(net)
    net.train()
    dropped = model(torch.ones(99))
    net.eval()
    assert (dropped == 0).any()
    assert torch.equal(model(torch.ones(99)), torch.ones(99))


@row("`model.weight = tensor` on a module that is wrapped for training was ignored")
def test_assigning() -> None:
    net = Net()
    net.register_buffer("b", torch.zeros(1))
    net.after = lambda loss: poptorch.identity_loss(loss + net.b, reduction="sum")
    model = poptorch.trainingModel(net, optimizer=poptorch.optim.SGD(net.parameters(), lr=0.0))
    before = model(X, Y)[1]
    net.b = torch.full((1,), 7.0)
    model.copyWeightsToDevice()
    torch.testing.assert_close(model(X, Y)[1], before + 7)


@row("GELU was approximated whatever the argument said")
def test_gelu() -> None:
    for kind in ("none", "tanh"):
        gelu = nn.GELU(approximate=kind)
        assert torch.equal(infer(gelu, X), gelu(X))


@row("`AdamW(bias_correction=False)` still corrected")
def test_bias_correction() -> None:
    net, start = train(
        lambda p: poptorch.optim.AdamW(p, lr=1.0, bias_correction=False, weight_decay=0.0), 1
    )
    step = net.linear.weight - start.linear.weight
    expected = 0.1 / 0.001**0.5  # of the sign of the gradient: both averages as they are
    assert torch.allclose(step.abs(), torch.full((3, 4), expected), rtol=1e-2)


@row("`for_loop` outside a wrapper ran its body once; `custom_op` and the CTC decoder gave zeros")
def test_a_loop_outside() -> None:
    assert poptorch.for_loop(3, lambda x: x * 2, [torch.ones(1)])[0] == 8


@row("a value computed from a loss and returned without it changed nothing in training")
def test_a_changed_loss() -> None:
    net = Net(after=lambda loss: loss * 2)
    start = copy.deepcopy(net)
    model = poptorch.trainingModel(net, optimizer=poptorch.optim.SGD(net.parameters(), lr=0.1))
    model(X, Y)
    assert same(net, eager(start, torch.optim.SGD(start.parameters(), lr=0.1), calls=1))
    net = Net(after=lambda loss: torch.stack([loss * 2, loss * 3]))
    model = poptorch.trainingModel(net, optimizer=poptorch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(poptorch.Error, match="identity_loss"):
        model(X, Y)


@row("an argument of unknown type was a constant, its tensors included")
def test_containers_and_others() -> None:
    @dataclass
    class Pair:
        a: torch.Tensor
        b: torch.Tensor

    class Other:
        def __init__(self) -> None:
            self.a = X

    model = poptorch.inferenceModel(Calls(lambda pair: pair.a + pair.b))
    assert torch.equal(model(Pair(X, X)), 2 * X)
    assert torch.equal(model(Pair(X, 2 * X)), 3 * X)
    with pytest.raises(poptorch.Error, match="registerCustomArgParser"):
        infer(lambda other: other.a, Other())


@row("`identity_loss` outside a wrapper could not be differentiated")
def test_identity_loss_outside() -> None:
    x = X.clone().requires_grad_()
    poptorch.identity_loss(x * 3, reduction="sum").backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(X, 3))


@row("the `backward` of an `autograd.Function` and hooks on gradients were ignored")
def test_hooks_change_gradients() -> None:
    net = Net()
    net.linear.weight.register_hook(lambda gradient: gradient * 0)
    before = copy.deepcopy(net)
    model = poptorch.trainingModel(net, optimizer=poptorch.optim.SGD(net.parameters(), lr=0.1))
    model(X, Y)
    assert torch.equal(net.linear.weight, before.linear.weight)
    assert not torch.equal(net.linear.bias, before.linear.bias)
    other = Net()
    other.linear.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    model = poptorch.trainingModel(other, optimizer=poptorch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(poptorch.Error):
        model(X, Y)


@row("a Python branch on values was an error")
def test_a_branch_on_values(warned: pytest.LogCaptureFixture) -> None:
    model = poptorch.inferenceModel(Calls(lambda x: x + 1 if x.sum() > 0 else x - 1))
    assert torch.equal(model(torch.ones(2)), torch.full((2,), 2.0))
    assert "branches on the values" in warned.text
    assert "test_differences.py" in warned.text
    assert torch.equal(model(-torch.ones(2)), torch.zeros(2))
    for number in (float, torch.Tensor.item):
        with pytest.raises(poptorch.Error, match="value is needed"):
            infer(lambda x, number=number: x + 1 if number(x.sum()) > 0 else x, X)


@row("in-place changes of slices with a step were an error")
def test_slices_with_a_step() -> None:
    def change(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[::2] = 0
        return x

    assert torch.equal(infer(change, X), change(X))


@row("batch norms with `momentum=None` could not be compiled")
def test_batch_norm_without_momentum() -> None:
    norm = nn.BatchNorm1d(4, momentum=None)
    plain = copy.deepcopy(norm)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(norm(x), reduction="sum")

    module = Calls(loss)
    module.norm = norm
    optimizer = poptorch.optim.SGD(norm.parameters(), lr=0.0)
    model = poptorch.trainingModel(module, optimizer=optimizer)
    for x in (X, 2 * X):
        model(x)
        plain(x)
    torch.testing.assert_close(norm.running_mean, plain.running_mean)


@row("`Options.loadFromFile` executed the file as Python")
def test_a_file_of_options_is_data(tmp_path: Path) -> None:
    path = tmp_path / "options"
    path.write_text("deviceIterations(3)\n")
    options = poptorch.Options()
    options.loadFromFile(str(path))
    assert options.device_iterations == 3
    path.write_text("deviceIterations(__import__('os').getpid())\n")
    with pytest.raises(ConfigFileError, match="calls of named setters"):
        options.loadFromFile(str(path))


@row("`anchorTensor` could still be called on frozen options")
def test_anchors_after_freezing() -> None:
    options = poptorch.Options()
    poptorch.inferenceModel(Net(), options)(X)
    with pytest.raises(poptorch.Error):
        options.anchorTensor("a", "linear")


@row("`popdist.getDeviceId()` returned an id")
def test_no_device_id() -> None:
    assert popdist.getDeviceId() is None


@row("options of the hardware did something")
def test_options_without_effect() -> None:
    options = poptorch.Options().syncPattern(poptorch.SyncPattern.SinglePipeline)
    assert options.withoutEffect() == ["syncPattern"]


@row("a velocity was always held multiplied by the loss scale")
def test_velocity_and_loss_scale() -> None:
    net = Net()
    start = copy.deepcopy(net)
    optimizer = poptorch.optim.SGD(
        net.parameters(), lr=0.1, momentum=0.9, loss_scaling=2.0, use_combined_accum=False
    )
    model = poptorch.trainingModel(net, optimizer=optimizer)
    model(X, Y)
    optimizer.loss_scaling = 64.0
    model.setOptimizer(optimizer)
    model(X, Y)
    assert same(net, eager(start, torch.optim.SGD(start.parameters(), lr=0.1, momentum=0.9)))


@row("half products could accumulate in half (`setPartialsType`)")
def test_half_products() -> None:
    options = poptorch.Options()
    options.Precision.setPartialsType(torch.half)
    a, b = torch.randn(4, 512).half(), torch.randn(512, 4).half()
    product = poptorch.inferenceModel(Calls(torch.matmul), options)(a, b)
    assert torch.equal(product, (a.float() @ b.float()).half())
    assert options.withoutEffect() == []  # estimates follow it


@row("stochastic rounding covered every half result")
def test_stochastic_rounding() -> None:
    options = poptorch.Options().randomSeed(1)
    options.Precision.enableStochasticRounding(True)
    model = poptorch.inferenceModel(Calls(lambda x, y: (x.half(), y + y / 4096)), options)
    cast, added = model(torch.full((1000,), 1.0003), torch.ones(1000).half())
    assert len(cast.unique()) == 2
    assert len(added.unique()) == 1


@row("`poptorch.autocast` was removed in 3.x")
def test_autocast() -> None:
    class Casts(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with poptorch.autocast():
                return super().forward(x)

    assert infer(Casts(4, 3), X).dtype == torch.half


@row("plug-in operators of domain `ai.graphcore` needed their compiled library")
def test_plug_ins_by_name() -> None:
    def distances(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        example = [torch.zeros(8, 8)]
        return poptorch.custom_op([a, b], "L2Distance", "ai.graphcore", 1, example)[0]

    torch.testing.assert_close(infer(distances, X, X + 1), torch.cdist(X, X + 1))


@row("six losses of torch, `HuberLoss` and `MultiMarginLoss` among them, were not found")
def test_other_losses() -> None:
    for loss in (nn.HuberLoss(), nn.MultiMarginLoss()):
        linear = nn.Linear(4, 4)
        before = linear.weight.detach().clone()
        module = Calls(lambda x, y, linear=linear, loss=loss: loss(linear(x), y))
        module.linear = linear
        optimizer = poptorch.optim.SGD(linear.parameters(), lr=0.1)
        poptorch.trainingModel(module, optimizer=optimizer)(X, X if "Huber" in str(loss) else Y)
        assert not torch.equal(linear.weight, before)


# Loading data


class Squares(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index * index), f"text {index}"


@row(
    'a text such as "no" counted as a true `shuffle` or `drop_last`; arguments of another mode did'
    " nothing, nor did a stream that is shorter than one combined batch"
)
def test_texts_are_no_flags() -> None:
    with pytest.raises(poptorch.Error):
        poptorch.DataLoader(poptorch.Options(), Squares(), shuffle="no")  # type: ignore[arg-type]


@row("lists and tuples of texts came from the last of the joined micro-batches")
def test_texts_are_joined() -> None:
    options = poptorch.Options().deviceIterations(2)
    _, texts = next(iter(poptorch.DataLoader(options, Squares(), batch_size=2)))
    assert list(texts) == [f"text {index}" for index in range(4)]


@row("`len` counted the micro-batches of a batch sampler")
def test_len_counts_elements() -> None:
    data = Squares()
    sampler = torch.utils.data.BatchSampler(range(8), 2, drop_last=True)
    loader = poptorch.DataLoader(
        poptorch.Options().deviceIterations(2), data, batch_sampler=sampler
    )
    assert len(loader) == len(list(loader)) == 2


# Where PopTorch is followed


@row("mixed types in a layer are an error")
def test_mixed_layers() -> None:
    with pytest.raises(RuntimeError):
        Net()(X.half())
    assert infer(Net(), X.half()).dtype == torch.half


@row("mixed half and float operands become float, or are refused")
def test_mixed_operands() -> None:
    def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b

    assert infer(add, X, X.half()).dtype == torch.half
    assert infer(lambda a, b: a > b, X, torch.full((8, 4), 0.1).half()).equal(
        torch.full((8, 4), 0.1).half() < X
    )
    options = poptorch.Options()
    options.Precision.halfFloatCasting(poptorch.HalfFloatCastingBehavior.HalfUpcastToFloat)
    model = poptorch.inferenceModel(Calls(add), options)
    assert model(X, X.half()).dtype == torch.float32


@row("recurrent layers want inputs and weights of one type")
def test_mixed_recurrent_layers() -> None:
    assert infer(nn.GRU(4, 3), X[:1].half())[0].dtype == torch.half


@row(
    "hooks of an optimizer run at each step, hooks that are put on parameters or layers later"
    " count from then on"
)
def test_late_hooks(warned: pytest.LogCaptureFixture) -> None:
    net = Net()
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1)
    ran: list[Any] = []
    optimizer.register_step_pre_hook(lambda *args: ran.append(args))
    model = poptorch.trainingModel(net, optimizer=optimizer)
    model(X, Y)
    net.linear.register_forward_hook(lambda *args: ran.append(args))
    time.sleep(PAUSE)
    model(X, Y)
    assert not ran
    assert "Hooks of the optimizer do not run" in warned.text
    assert "1 hooks on layers" in warned.text


@row("labels are `int64`")
def test_narrow_labels() -> None:
    model = poptorch.inferenceModel(Net())
    assert torch.equal(model(X, Y.int())[1], Net.forward(model.model, X, Y)[1])


@row("64-bit results stay 64-bit")
def test_narrow_results() -> None:
    assert infer(lambda x: x, X.double()).dtype == torch.float32


@row("gradients of several backward calls add up")
def test_gradients_are_averaged() -> None:
    net = Net()
    start = copy.deepcopy(net)
    options = poptorch.Options()
    options.Training.gradientAccumulation(2)
    poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.1))(X, Y)
    assert same(net, eager(start, torch.optim.SGD(start.parameters(), lr=0.1), 1))


@row("`DataLoader(drop_last=False)`")
def test_the_short_last_batch_is_dropped() -> None:
    loader = poptorch.DataLoader(poptorch.Options(), Squares(), batch_size=4)
    assert [len(numbers) for numbers, _ in loader] == [4, 4]


@row("a loss is a number")
def test_a_loss_per_result() -> None:
    net = Net()
    options = poptorch.Options().deviceIterations(2).outputMode(poptorch.OutputMode.All)
    model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.1))
    assert model(X, Y)[1].shape == (2,)


@row("Python in `forward` runs at every call")
def test_python_runs_once() -> None:
    calls: list[int] = []

    def count(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x + len(calls)

    model = poptorch.inferenceModel(Calls(count))
    first = model(X)
    assert torch.equal(model(X), first)


@row(
    "a layer that is replaced or parametrized, another `forward` put on one (on the"
    " wrapped module itself it counts when that is wrapped again), another number format"
    " (`half()`), a changed `requires_grad` or block counts from the next call on"
)
def test_a_replaced_layer(warned: pytest.LogCaptureFixture) -> None:
    net = Net()
    model = poptorch.inferenceModel(net)
    before = model(X)
    net.linear = nn.Linear(4, 3)
    time.sleep(PAUSE)
    assert torch.equal(model(X), before)
    assert "Net.linear" in warned.text
    model.destroy()
    torch.testing.assert_close(model(X), net(X))


@row("a tensor that `forward` stores in an attribute can be read")
def test_stored_tensors_hold_no_values() -> None:
    class Stores(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
            self.hidden = self.linear(x)
            return self.hidden

    net = Stores()
    model = poptorch.inferenceModel(net)
    model(X)
    with pytest.raises(Exception):  # noqa: B017
        net.hidden.tolist()


@row("Adam counts the steps of each weight")
def test_weights_that_are_unfrozen_are_said(warned: pytest.LogCaptureFixture) -> None:
    net = Net()
    net.linear.bias.requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters())
    model = poptorch.trainingModel(net, optimizer=optimizer)
    model(X, Y)
    model.destroy()
    net.linear.bias.requires_grad_(True)
    assert not warned.records
    model(X, Y)
    assert "fewer steps than the others (linear.bias: 0 instead of 1)" in warned.text
    assert {float(state["step"]) for state in optimizer.state_dict()["state"].values()} == {2}
    warned.clear()
    model.destroy()
    optimizer = torch.optim.Adam(net.parameters())
    model.setOptimizer(optimizer)
    model(X, Y)
    assert not warned.records
    assert {float(state["step"]) for state in optimizer.state_dict()["state"].values()} == {1}


@row("gradients can be read, and clipped, between two steps")
def test_gradients_stay_in_the_program(warned: pytest.LogCaptureFixture) -> None:
    net = Net()
    model = poptorch.trainingModel(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    model(X, Y)
    assert nn.utils.clip_grad_norm_(net.parameters(), 1.0) == 0
    assert "clip_grad_norm_ finds no gradients" in warned.text
    assert all(parameter.grad is None for parameter in net.parameters())


@row("changing a hyper-parameter takes effect")
def test_hyper_parameters_wait(warned: pytest.LogCaptureFixture) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = poptorch.trainingModel(net, optimizer=optimizer)
    model(X, Y)
    before = net.linear.weight.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    model(X, Y)
    assert "lr of the optimizer's group 0 was 0.1 and is 0.0" in warned.text
    after = net.linear.weight.detach().clone()
    assert not torch.equal(before, after)
    model.setOptimizer(optimizer)
    model(X, Y)
    assert torch.equal(net.linear.weight, after)


@row("a slice beyond the end is shorter")
def test_windows_go_round() -> None:
    window = poptorch.dynamic_slice(torch.arange(5), 0, torch.tensor(3), 3, 1)
    assert window.tolist() == [3, 4, 0]
    assert infer(
        lambda x, i: poptorch.dynamic_slice(x, 0, i, 3, 1), torch.arange(5), torch.tensor(3)
    ).tolist() == [3, 4, 0]


@row("exceptions are torch's")
def test_exceptions_keep_their_type() -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        infer(fail, X)


# More


@row(
    "`print(executor.plan())` shows what runs the program, and the loops and graphs that a"
    " call runs"
)
def test_plans_are_printed() -> None:
    model = poptorch.inferenceModel(Net())
    model(X)
    assert "reference" in str(model.plan())
    assert "run " in str(model.plan())


@row("`options.programs(n)` keeps a model compiled for n kinds of inputs, over the same weights")
def test_programs() -> None:
    net = Net()
    model = poptorch.inferenceModel(net, poptorch.Options().programs(2))
    for x in (X, X[:3], X):
        assert torch.equal(model(x), net(x))


@row(
    "`poptorch doctor` and `executor.explain` list everything that cannot be captured, with its"
    " line; the error about one construct names those on other lines"
)
def test_one_error_names_all() -> None:
    def several(x: torch.Tensor) -> Any:
        numbers = x.nonzero()
        values = x.unique()
        return numbers, values

    with pytest.raises(poptorch.Error, match=r"(?s)nonzero.*1 more construct.*_unique2"):
        infer(several, X)
    assert "2 of 2 findings" in str(poptorch.inferenceModel(Calls(several)).explain(X))


@row(
    "micro-batches and replicas of a call run side by side where that is faster; `Options.lanes`"
    " and `laneMemory` set how many"
)
def test_lanes() -> None:
    options = poptorch.Options().deviceIterations(4).lanes(2)
    model = poptorch.inferenceModel(Net(), options)
    model(X)
    assert "2 lanes" in str(model.plan().program)


@row(
    "`poptorch.estimate` says what memory and time a wrapped model would take on IPUs, [within a"
    " factor](guide/ipu_costs.md)"
)
def test_estimates() -> None:
    estimate = poptorch.estimate(poptorch.inferenceModel(Net()), X, system="bow:1")
    assert estimate.fits
    assert estimate.seconds > 0


# Rows that are shown by tests of their own parts, by their first cells.
ELSEWHERE = {
    "`binary_cross_entropy` refuses probabilities outside 0 to 1": (
        "backends/test_whole.py::test_compiled_probabilities_outside_0_to_1_are_not_refused"
    ),
    "needs IPUs, or the SDK's simulator": "test_wheel.py::test_the_readme_trains_where_nothing_else_is_installed",
    "compiles before the first result": "compile/test_tiers.py::test_a_takeover_keeps_weights_moments_statistics_and_random_numbers_and_is_said",
    "a missing toolchain is an error": "conformance/test_backends.py::test_without_a_compiler_the_reference_backend_runs",
    "a loaded executable runs as it was saved": "session/test_files.py::test_other_settings_than_the_file_has_are_named",
    "the arguments of a saved model are pickled": "session/test_files.py::test_arguments_of_plain_types",
    "an executable is found by an undocumented key, and the cache grows for ever": "compile/test_cache.py::test_misses_say_what_differs",
    "loading recorded the first batch in the file": "session/test_files.py::test_files_hold_no_values_of_the_arguments",
    "`identity_loss` of a torch loss or of another `identity_loss` was not supported": "capture/test_losses.py::test_inner_losses_keep_their_reduction_and_may_be_returned",
    "an unused layer in a block, or `BeginBlock` on a later layer written before one on an earlier layer, was an error": "examples/test_documented_placement.py::test_the_order_of_writing_and_unused_layers_do_not_matter",
    "many operators were missing or limited": "sweep/test_sweep.py::test_operators_compute_what_eager_torch_does",
    "replicated tensor sharding also divided weights, over the replicas of a process too": "job/test_training.py::test_processes_keep_parts_of_the_optimizers_state",
    "profile reports held what the hardware had measured, in a format of their own": "session/test_reporting.py::test_the_report_has_the_estimate_and_what_was_measured",
    "`cycleCount()` was read from the hardware": "session/test_reporting.py::test_cycles_are_those_of_the_estimate",
    "processes of a job trained whatever each had": "job/test_faults.py::test_processes_that_differ_stop_with_an_error_that_says_in_what",
    "jobs went through MPI, Horovod or the fabric": "cli/test_poprun.py::test_replicas_are_those_of_all_instances",
    "graph layers that add or remove edges, and pooling of the best nodes, were refused": "geometric/test_models.py::test_pooling_of_the_best_nodes_has_an_upper_bound",
    "batches of graphs dropped texts, trimmed seeds, let padding edges point behind the last node": "geometric/test_collate.py::test_trimming_nodes_keeps_one_of_each_sample",
    "the guide of 2.x names `INFO` as the default level of the log": "test_runtime.py::test_levels",
    "`sourceLocationExcludes` replaced three default entries": "options/test_settings.py::test_excluded_files_are_not_the_users",
    "an error in the data set ended the loading process": "test_dataloader_faults.py::test_a_later_error_arrives_in_its_place_and_the_loader_can_be_used_again",
    "Ctrl-C reached the loading process too": "test_dataloader_exit.py::test_a_program_that_survives_ctrl_c_goes_on_loading_and_fails_with_its_own_error",
    "the last asynchronous element had the size of the others": "test_accessor.py::test_what_follows_the_first_element",
    "two loops over one asynchronous loader took turns": "test_dataloader.py::test_a_newer_iterator_over_one_loading_process_ends_the_older_one",
    "a subclass's `__iter__` ran in the loading process and again outside": "test_dataloader.py::test_subclasses_with_mix_ins",
    "the loading process polled at a fixed interval": "data/test_consumer.py::test_pauses_get_longer_until_a_message_ends_them",
    "errors have four parts: what, the values, your own source line, a remedy": "session/test_errors.py::test_a_batch_that_does_not_divide",
    "the first call returns before optimised code is there; a background compilation takes over between two calls; `options.backend(\"optimise\")` compiles first": "compile/test_tiers.py::test_a_takeover_keeps_weights_moments_statistics_and_random_numbers_and_is_said",
    "[`transformers.Trainer`](guide/transformers.md) and [Lightning](guide/lightning.md) train through compiled steps, with integrations that are part of the package": "integrations/test_transformers.py::test_losses_are_those_of_the_plain_trainer",
    "weights and buffers that are changed take part in the next step": "session/test_guards.py::test_weights_that_wait_to_be_copied_are_said_once",
    "training models that have modules in common, as a GAN's two, trained a copy each, until weights were copied by hand": "session/test_common_weights.py::test_a_gan_trains_as_in_plain_torch",
    "a count of 0 was accepted by `deviceIterations`, `replicationFactor`, `gradientAccumulation`": "options/test_container.py::test_a_mistake_is_refused_where_it_is_made_with_what_to_write",
    "`print(executor)` printed the model's layers": "test_notebook.py::test_an_executor_shows_model_kind_and_what_runs_it",
    "`repr(options)` had every setting": "options/test_rules.py::test_repr_compares_configurations",
    "a backend is chosen by option or `POPTORCH_BACKEND`, and others can be added": "conformance/test_backends.py::test_the_environment_chooses_a_backend_unless_an_option_does",
}  # fmt: skip
# The suite was run by hand on the releases that CONTRIBUTING.md names.
BY_HAND = {"one exact torch version"}
HEADS = {"PopTorch", "torch", "here"}


def test_every_row_is_shown_by_a_test() -> None:
    here = {getattr(test, "row", None) for test in globals().values()}
    rows = FIRST_CELLS - HEADS
    assert rows == (here - {None}) | ELSEWHERE.keys() | BY_HAND
    for place in ELSEWHERE.values():
        path, name = place.split("::")
        assert f"def {name}(" in (ROOT / "tests" / path).read_text(), place


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        out, _ = self.attention(x, x, x, need_weights=False)
        return out, nn.functional.mse_loss(out, y)


@row("Adam moves the bias of an attention's keys")
def test_noise_moves_the_bias_of_keys() -> None:
    x, y = torch.randn(4, 6, 8), torch.randn(4, 6, 8)
    trained = Attention()
    native = copy.deepcopy(trained)
    wrapped = poptorch.trainingModel(trained, optimizer=torch.optim.Adam(trained.parameters()))
    optimizer = torch.optim.Adam(native.parameters())
    for _ in range(5):
        wrapped(x, y)
        optimizer.zero_grad()
        native(x, y)[1].backward()
        optimizer.step()
    biases = trained.attention.in_proj_bias, native.attention.in_proj_bias
    keys, wanted = (bias.detach()[8:16] for bias in biases)
    noise = biases[1].grad
    assert noise is not None
    assert noise[8:16].abs().max() < 1e-6 * noise.abs().max()
    assert keys.abs().max() > 1e-4
    assert (keys - wanted).abs().max() > 1e-4
    with torch.no_grad():
        keys.copy_(wanted)
    for (name, got), want in zip(trained.named_parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0, msg=name)
    before = native(x, y)[0]
    with torch.no_grad():
        wanted += 1
    torch.testing.assert_close(native(x, y)[0], before)

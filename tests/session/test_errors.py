"""Mistakes of users: each error teaches, and nothing is lost."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

import poptorch
from helpers import programs
from helpers.wrapping import Calling, options


class Net(nn.Module):
    """Does what its ``mode`` says; the mode is shared, so that a mistake can be mended."""

    mode = "right"

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("total", torch.zeros(2))

    def forward(self, x, y=None, flag=1):
        out = self.layer(x) * flag
        if self.mode == "raises":
            raise ValueError("a mistake of mine")
        if self.mode == "shapes":
            out = out @ out
        if self.mode == "item":
            out = out * out.sum().item()
        if self.mode == "reassigns":
            self.total = self.total + 1
        if self.mode == "no loss":
            return out
        if self.mode == "two losses":
            return nn.functional.mse_loss(out, y), nn.functional.l1_loss(out, y)
        return out, nn.functional.mse_loss(out, y)


@pytest.fixture
def inputs():
    return torch.randn(4, 4), torch.randn(4, 2)


def wrapped(model: nn.Module, iterations: int = 1, backend: str = "reference"):
    return poptorch.trainingModel(model, options(backend, iterations=iterations))


def text_of(error: BaseException) -> str:
    """The message without what depends on where this file's lines stand."""
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    return re.sub(r"test_errors.py:\d+, .*", "test_errors.py:LINE", text)


EXPLAINED = """\
{said}
While poptorch captured forward of {name}
  Got:    {got}
  Where:  test_errors.py:LINE
  Fix:    call the module on one micro-batch without poptorch to see the same failure"""
OF_NET = {"name": "Net", "got": "x float32[4, 4], y float32[4, 2]"}
PRODUCT = "a and b must have same reduction dim, but got [4, 2] X [4, 2]."
IN_FORWARD = {
    "raises": EXPLAINED.format(said="a mistake of mine", **OF_NET),
    "shapes": EXPLAINED.format(said=PRODUCT, **OF_NET),
    "reassigns": """\
'poptorch_py_error': Buffer 'total' is reassigned within the model
  Got:    forward of Net binds another value to self.total
  Where:  test_errors.py:LINE
  Fix:    change its value in place: self.total.copy_(new_value)""",
    "no loss": """\
'poptorch_py_error': Couldn't find a loss in graph
  Got:    Net.forward called no torch loss and no identity_loss
  Where:  test_errors.py:LINE
  Fix:    compute the loss in forward with a torch.nn loss and return it
  Fix:    mark a loss of your own: poptorch.identity_loss(loss, reduction='mean')""",
    "two losses": """\
'poptorch_py_error': Multiple independent losses found in graph
  Got:    mse_loss at test_errors.py:LINE
          l1_loss at test_errors.py:LINE
  Where:  test_errors.py:LINE
  Fix:    return their sum, or another single number that is made of all of them
  Fix:    combine them and mark the result: \
poptorch.identity_loss(loss1 + loss2, reduction='sum')""",
}


@pytest.mark.spec("executor", 28, 37)
@pytest.mark.parametrize("mode", IN_FORWARD)
def test_a_mistake_in_forward(mode: str, inputs, monkeypatch) -> None:
    model = Net()
    before = copy.deepcopy(model.state_dict())
    training = wrapped(model)
    monkeypatch.setattr(Net, "mode", mode)
    with pytest.raises((poptorch.Error, ValueError, RuntimeError)) as caught:
        training(*inputs)
    assert text_of(caught.value) == IN_FORWARD[mode]
    assert not training.isCompiled()
    monkeypatch.setattr(Net, "mode", "right")
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    model(*inputs)  # the host model works
    _, loss = training(*inputs)  # and so does the wrapper
    assert loss.dim() == 0


def test_a_layer_of_torch_alone_is_explained_with_the_line_of_the_call() -> None:
    with pytest.raises(RuntimeError) as caught:
        poptorch.inferenceModel(nn.Linear(8, 3), options())(torch.zeros(4, 9))
    with pytest.raises(RuntimeError) as meta:
        nn.Linear(8, 3, device="meta")(torch.zeros(4, 9, device="meta"))
    told = EXPLAINED.format(said=meta.value, name="Linear", got="input float32[4, 9]")
    assert text_of(caught.value) == told


class RefusalError(Exception):
    """An exception of the user's own, with a text that its class makes."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code

    def __str__(self) -> str:
        return f"refused with {self.code}"


class Backward(torch.autograd.Function):
    """Fails where gradients flow."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RefusalError(8)


def refuse(x):
    raise RefusalError(7)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("function", "code"), [(refuse, 7), (Backward.apply, 8)])
def test_exceptions_of_a_model_stay_the_users_own(function, code: int, accumulation: int) -> None:
    layer = nn.Linear(4, 2)
    model = Calling(lambda x: poptorch.identity_loss(function(layer(x)), "sum"))
    model.layer = layer
    with pytest.raises(RefusalError) as caught:
        poptorch.trainingModel(model, options(accumulation=accumulation))(torch.randn(4, 4))
    assert type(caught.value) is RefusalError
    assert str(caught.value) == f"refused with {code}"
    assert caught.value.code == code
    if code == 7:
        (note,) = caught.value.__notes__
        assert "test_errors.py" in note
        assert "raise RefusalError(7)" in note


FAILING = {
    "the user's own": ("raise ValueError('mine')", "ValueError: mine"),
    "ours": ("return x * x.sum().item()", "'poptorch_py_error': A tensor's value is needed"),
}


@pytest.mark.slow
@pytest.mark.spec("runtime", 35)
@pytest.mark.parametrize("name, full", [("the user's own", True), ("ours", False)])
def test_a_traceback_ends_in_the_users_line(name: str, full: bool, tmp_path) -> None:
    """Of a program that nobody catches it in; a variable brings the frames between back."""
    line, last = FAILING[name]
    script = tmp_path / "train.py"
    script.write_text(
        "import poptorch, torch\n"
        "class Net(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        f"        {line}\n"
        "poptorch.inferenceModel(Net())(torch.ones(4, 2))\n"
    )
    more = {"POPTORCH_FULL_TRACEBACK": "1"} if full else {}
    done = programs.run(script, environment=programs.with_ours(**more))
    assert done.returncode == 1
    assert last in done.stderr
    assert "[critical]" not in done.stderr
    frames = re.findall(r'  File "(.*)", line (\d+)', done.stderr)
    if full:
        assert len(frames) > 15
    else:
        assert {file for file, _ in frames} == {str(script)}
        assert frames[-1][1] == "4"


@pytest.mark.spec("executor", 15)
def test_a_batch_that_does_not_divide(inputs) -> None:
    training = wrapped(Net(), iterations=3)
    with pytest.raises(AssertionError) as caught:
        training(*inputs)
    assert isinstance(caught.value, poptorch.Error)
    assert text_of(caught.value) == (
        "'poptorch_py_error': Invalid batch dimension: the batch does not divide into "
        "micro-batches\n"
        '  Got:    input "x" has 4 rows; one call needs a multiple of 3\n'
        "          = 3 device iterations x 1 replicas x 1 accumulation steps\n"
        "  Where:  test_errors.py:LINE\n"
        "  Fix:    pass a multiple of 3 rows, or let poptorch.DataLoader(options, ...) "
        "cut the batches"
    )
    _, loss = training(torch.randn(6, 4), torch.randn(6, 2))
    assert torch.isfinite(loss)


WRONG = [
    (lambda t, x, y: t(x, y, 1, 2), "Too many arguments provided"),
    (lambda t, x, y: t(x, y, z=1), "'z' is not a valid parameter"),
    (lambda t, x, y: t(x, y, x=x), "'x' was passed more than once"),
    (lambda t, x, y: t(y=y), "Mandatory parameter 'x' missing"),
    (lambda t, x, y: t(x[:2], y[:2]), r"Shape mismatch for x\n.*expected \(4, 4\) but got \(2, 4"),
    (lambda t, x, y: t(x.double(), y), "Data type mismatch for x"),
    (lambda t, x, y: t([x], y), "Type mismatch for x"),
    (lambda t, x, y: t(x), "Type mismatch for y"),
    (lambda t, x, y: t(x, y, flag=2), r"Value mismatch for flag\n.*expected 1 but got 2"),
]


@pytest.mark.spec("executor", 15, 18, 19, 20, 67)
@pytest.mark.parametrize(("call", "text"), WRONG)
def test_other_inputs_on_a_later_call(call, text, inputs) -> None:
    training = wrapped(Net())
    training(*inputs)
    with pytest.raises(poptorch.Error, match=text):
        call(training, *inputs)
    training(*inputs)
    training.destroy()
    if "Shape" in text or "Data type" in text:
        call(training, *inputs)  # compiles for the new inputs
    elif "mismatch" not in text:  # nor do they fit the signature the first time
        with pytest.raises(poptorch.Error, match=text):
            call(training, *inputs)


MISUSES = [
    (lambda: poptorch.trainingModel(3), TypeError, "Expected a torch.nn.Module or a callable"),
    (lambda: poptorch.trainingModel(Net(), {"a": 1}), poptorch.Error, "Invalid type: 'options'"),
    (lambda: wrapped(wrapped(Net())), RuntimeError, "already been wrapped"),
]


@pytest.mark.parametrize(("wrap", "error", "text"), MISUSES)
def test_wrong_use_of_the_wrappers(wrap, error, text) -> None:
    with pytest.raises(error, match=text) as caught:
        wrap()
    assert isinstance(caught.value, poptorch.Error)


def test_an_unknown_backend_is_named(inputs, monkeypatch) -> None:
    monkeypatch.setenv("POPTORCH_BACKEND", "fastest")
    model = Net()
    parts = r"Unknown backend\n.*'fastest'\n.*test_errors.py.*\n.*inductor, optimise, reference"
    with pytest.raises(poptorch.Error, match=parts):
        wrapped(model, backend="auto")(*inputs)
    model(*inputs)


@pytest.mark.spec("executor", 21, 35)
def test_defaults_count_as_passed_values_and_compile_twice_warns(inputs, caplog) -> None:
    training = wrapped(Net())
    training(*inputs)
    training(*inputs, flag=1)
    training(x=inputs[0], y=inputs[1])
    training.compile(*inputs)
    assert "Call to compile() ignored" in caplog.text


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_an_operator_that_fails_is_named_with_the_line(backend: str) -> None:
    def forward(x):
        return torch.linalg.cholesky(x * 2)

    model = poptorch.inferenceModel(Calling(forward), options(backend))
    model(torch.eye(3))
    with pytest.raises(RuntimeError, match="not positive-definite") as native:
        forward(-torch.eye(3))
    with pytest.raises(poptorch.Error, match="operator of the program failed") as caught:
        model(-torch.eye(3))
    assert str(native.value) in str(caught.value)
    assert "test_errors.py:" in str(caught.value)
    if backend == "reference":
        assert "return torch.linalg.cholesky(x * 2)" in str(caught.value)
    assert isinstance(caught.value, RuntimeError)
    torch.testing.assert_close(model(torch.eye(3)), forward(torch.eye(3)))


def test_what_the_users_code_raises_while_a_program_runs_stays_his():
    def fails_below_zero(x):
        if bool((x < 0).any()):
            raise RuntimeError("no negatives")
        return x

    on_host = poptorch.CPU(fails_below_zero, "Fails")
    model = poptorch.inferenceModel(on_host, options())
    model(torch.ones(2))
    with pytest.raises(RuntimeError, match=r"^no negatives") as caught:
        model(-torch.ones(2))
    assert not isinstance(caught.value, poptorch.Error)

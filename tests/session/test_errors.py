"""Mistakes of users: each error teaches, with its line, and nothing is lost; old keywords."""

import copy
import functools
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import poptorch
from helpers import programs
from helpers.wrapping import Graded, Having, Scaled, infer, normal, options, training
from poptorch._base import source
from poptorch._base.errors import visible


class Net(nn.Module):
    """Does what its ``mode`` says; the mode is shared, so that a mistake can be mended."""

    mode = "right"

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(
        self, x: torch.Tensor, y: torch.Tensor | None = None, flag: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.layer(x) * flag
        if self.mode == "raises":
            raise ValueError("a mistake of mine")
        if self.mode == "shapes":
            out = out @ out
        if self.mode == "no loss":
            return out
        return out, nn.functional.mse_loss(out, y)


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 4), torch.randn(4, 2)


HERE = r"test_errors\.py:\d+, "
IN_FORWARD = {  # the message, and the line of the user that it names
    "raises": ("a mistake of mine", "raise ValueError"),
    "shapes": ("same reduction dim, but got .4, 2. X .4, 2.", "out @ out"),
    "no loss": ("find a loss in graph.*Net.forward.*identity_loss", "def forward"),
}


def text_of(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


@pytest.mark.spec("executor", 28, 37)
@pytest.mark.parametrize("mode", IN_FORWARD)
def test_a_mistake_in_forward_is_reported_with_its_line(
    mode: str, inputs: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    before, training = copy.deepcopy(model.state_dict()), poptorch.trainingModel(model, options())
    monkeypatch.setattr(Net, "mode", mode)
    with pytest.raises((poptorch.Error, ValueError, RuntimeError)) as caught:
        training(*inputs)
    message, line = IN_FORWARD[mode]
    assert re.search(f"(?s){message}", text_of(caught.value))
    assert re.search(f"  Where:  {HERE}.*{re.escape(line)}.*\n  Fix:    ", text_of(caught.value))
    given = "captured forward of Net\n  Got:    x float32[4, 4], y float32[4, 2]"
    assert mode == "no loss" or given in text_of(caught.value)
    assert not training.isCompiled()
    monkeypatch.setattr(Net, "mode", "right")
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    expected = model(*inputs)[1]  # the host model works
    torch.testing.assert_close(training(*inputs)[1], expected.detach())  # and the wrapper


def test_a_layer_of_torch_alone_is_explained_with_the_line_of_the_call() -> None:
    with pytest.raises(RuntimeError, match="reduction dim") as caught:
        poptorch.inferenceModel(nn.Linear(8, 3), options())(torch.zeros(4, 9))  # that line
    assert re.search(rf"input float32\[4, 9\]\n  Where:  {HERE}.*that line", text_of(caught.value))


class RefusalError(Exception):
    """An exception of the user's own, with a text that its class makes."""

    def __str__(self) -> str:
        return f"refused with {self.args[0]}"


class Refuse(torch.autograd.Function):
    """Fails, where gradients flow or before."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, code: int) -> Any:
        if code == 7:
            raise RefusalError(7)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        raise RefusalError(8)


@pytest.mark.parametrize(("code", "accumulation"), [(7, 2), (8, 1), (8, 2)])
def test_exceptions_of_a_model_stay_the_users_own(code: int, accumulation: int) -> None:
    model = Scaled(lambda x: Refuse.apply(x, code))
    with pytest.raises(RefusalError) as caught:
        poptorch.trainingModel(model, options(accumulation=accumulation))(torch.randn(4, 4))
    assert type(caught.value) is RefusalError
    assert not any(re.search("src/poptorch|/torch/", str(one.path)) for one in caught.traceback)
    assert str(caught.value) == f"refused with {code}"
    assert caught.value.args == (code,)
    if code == 7:
        assert re.search(f"{HERE}raise RefusalError\\(7\\)", text_of(caught.value))


@pytest.mark.slow
@pytest.mark.spec("runtime", 35)
def test_a_traceback_ends_in_the_users_line(tmp_path: Path) -> None:
    """The exception is not caught. An environment variable shows the hidden frames."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, poptorch, sys, torch\n"
        "def forward(x):\n"
        "    return x * x.sum().item()\n"
        "model = poptorch.inferenceModel(forward, poptorch.Options().backend('reference'))\n"
        "os.environ['POPTORCH_FULL_TRACEBACK'] = '1'\n"
        "try: model(torch.ones(4, 2))\n"
        "except Exception: sys.excepthook(*sys.exc_info())\n"
        "del os.environ['POPTORCH_FULL_TRACEBACK']\n"
        "print('----', file=sys.stderr)\n"
        "model(torch.ones(4, 2))\n"
    )
    done = programs.run(script)
    assert done.returncode == 1
    full, short = (re.findall(r'File "(.*)", line', text) for text in done.stderr.split("----"))
    assert len(full) > 15
    assert set(short) == {str(script)}
    assert "'poptorch_py_error': A tensor's value is needed" in done.stderr
    assert "[critical]" not in done.stderr


def test_an_error_of_torch_in_the_backward_pass_is_an_error_of_the_model() -> None:
    with pytest.raises(poptorch.Error, match=r"of Scaled raised RuntimeError\n.*inplace op"):
        training(Scaled(lambda x: x.exp().add_(1)), options())(X)


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


@pytest.mark.spec("executor", 15, 18, 19, 20, 21, 35, 67)
def test_other_inputs_on_a_later_call(
    inputs: tuple[torch.Tensor, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    training = poptorch.trainingModel(Net(), options().programs(1))
    training(*inputs)
    for call, text in WRONG:
        with pytest.raises(poptorch.Error, match=text):
            call(training, *inputs)
    training(x=inputs[0], y=inputs[1], flag=1)  # defaults count as passed values
    training.compile(*inputs)
    assert "Call to compile() ignored" in caplog.text
    for call, text in WRONG:
        training.destroy()
        if "Shape" in text or "Data type" in text:
            call(training, *inputs)  # compiles for the new inputs
        elif "mismatch" not in text:  # nor do they fit the signature the first time
            with pytest.raises(poptorch.Error, match=text):
                call(training, *inputs)


def test_an_unknown_backend_is_named(
    inputs: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POPTORCH_BACKEND", "fastest")
    parts = r"Unknown backend\n.*'fastest'\n.*test_errors.py.*\n.*onnxruntime, optimise, reference"
    with pytest.raises(poptorch.Error, match=parts):
        poptorch.trainingModel(Net(), options("auto"))(*inputs)


@pytest.mark.parametrize("count", [0, 2])
def test_an_operator_that_fails_is_named_with_the_line(count: int) -> None:
    def factor(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.cholesky(x * 2).contiguous()

    def forward(x: torch.Tensor) -> torch.Tensor | None:
        return poptorch.for_loop(count, factor, [x])[0] if count else factor(x)

    model = poptorch.inferenceModel(forward, options())
    model(torch.eye(3))
    with pytest.raises(RuntimeError, match="not positive-definite") as native:
        forward(-torch.eye(3))
    with pytest.raises(poptorch.Error, match="operator of the program failed") as caught:
        model(-torch.eye(3))
    line, operator = "return poptorch.for_loop(count, factor, [x])[0]", "_linalg_check_errors"
    for part in (str(native.value), "test_errors.py:", line, operator):
        assert part in str(caught.value)
    assert isinstance(caught.value, RuntimeError)
    torch.testing.assert_close(model(torch.eye(3)), forward(torch.eye(3)))


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (torch.linalg.cholesky, "not positive-definite"),
        (torch.linalg.inv, "singular"),
        (lambda matrix: torch.linalg.solve(matrix, torch.ones(3)), "singular"),
    ],
    ids=["cholesky", "inv", "solve"],
)
def test_the_reason_is_given_if_several_micro_batches_have_one_matrix_each(
    function: Callable[[torch.Tensor], torch.Tensor], text: str
) -> None:
    def loss(model: Having, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(function(x[0] * model.scale), reduction="mean")

    model = Having(loss, scale=nn.Parameter(torch.ones(())))
    opts = options(accumulation=2)
    executor = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(poptorch.Error, match=text):
        executor(torch.stack([torch.eye(3), torch.zeros(3, 3)]))


X, Y = normal(16, 4), torch.arange(16) % 3


def wrapped(
    dropout: float = 0.0, mode: poptorch.OutputMode = poptorch.OutputMode.Final, **counts: int
) -> tuple[Graded, poptorch.PoplarExecutor, torch.optim.SGD]:
    layers = {"layer": nn.Linear(4, 3), "dropout": nn.Dropout(dropout)}
    model = Graded(nn.functional.cross_entropy, both=True, **layers)
    opts = options(**counts).outputMode(mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, poptorch.trainingModel(model, opts, optimizer), optimizer


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    caplog.clear()
    return found


@pytest.mark.parametrize("compiles", [False, True])
def test_stepping_the_optimizer_by_hand_causes_one_warning(
    compiles: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiles:  # as torch.compile leaves it
        usual = torch.optim.SGD._init_group
        monkeypatch.setattr(torch.optim.SGD, "_init_group", torch.compiler.disable(usual))
    _, training, optimizer = wrapped()
    for _ in range(2):
        optimizer.zero_grad()
        training(X, Y)
        optimizer.step()
    (message,) = lines(caplog)
    assert "optimizer.step() has no effect" in message


def in_a_loop(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            return parameter.grad
    return None


def in_a_statement_of_several_lines(model: nn.Module) -> Any:
    return (
        model.layer.weight.shape,
        model.layer.weight.grad,
    )[1]


def in_a_generator(model: nn.Module) -> Any:
    return next(parameter.grad for parameter in model.parameters())


def held() -> Any:
    kept: list[torch.Tensor] = []
    return lambda model: kept[0].grad if kept else kept.append(model.layer.weight)


@pytest.mark.parametrize(
    "read, expected_values",
    [
        (lambda model: model.layer.weight.grad, None),
        (in_a_loop, None),
        (in_a_statement_of_several_lines, None),
        (in_a_generator, None),
        (held(), None),
        (lambda model: [parameter.grad for parameter in model.parameters()], [None, None]),
    ],
)
def test_reading_grad_of_a_wrapped_model_causes_one_warning(
    read: Callable[..., Any], expected_values: object, caplog: pytest.LogCaptureFixture
) -> None:
    model, training, _ = wrapped()
    read(model)
    for _ in range(3):
        training(X, Y)
        assert read(model) == expected_values
    (message,) = lines(caplog)
    assert "have no .grad" in message
    for parameter in model.parameters():
        assert parameter.requires_grad


def test_reading_weights_causes_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    model, training, optimizer = wrapped()
    for _ in range(2):
        optimizer.zero_grad()
        training(X, Y)
        for parameter in model.parameters():
            assert parameter.isfinite().all()
        torch.autograd.grad(model.layer.weight.sum(), model.layer.weight)
    training(X, Y)
    assert model.layer.weight.is_leaf, "what .grad needs"
    assert lines(caplog) == []


def test_batches_that_are_cut_unless_they_are_meant_to_be(caplog: pytest.LogCaptureFixture) -> None:
    _, training, _ = wrapped(iterations=2, accumulation=2)
    for x, y in DataLoader(TensorDataset(X, Y), batch_size=8):
        training(x, y)
    (message,) = lines(caplog)
    assert "batch_size=8 is divided into 4 micro-batches of 2" in message
    _, training, _ = wrapped(accumulation=2)
    training(X, Y)
    _, training, _ = wrapped(accumulation=2)
    opts = options()
    opts.Training.gradientAccumulation(2)
    for x, y in poptorch.DataLoader(opts, TensorDataset(X, Y), batch_size=4):
        training(x, y)
    _, training, _ = wrapped()
    for x, y in DataLoader(TensorDataset(X, Y), batch_size=8):
        training(x, y)
    assert lines(caplog) == []


@pytest.mark.parametrize("dropout, count", [(0.5, 1), (0.0, 0)])
def test_seeding_the_host_once_the_program_draws(
    dropout: float, count: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poptorch._session.host_changes.periodic_checks.CHECK_EVERY", 0.0)
    torch.manual_seed(1)
    _, training, _ = wrapped(dropout)
    for _ in range(2):
        training(X, Y)
    assert lines(caplog) == []
    for _ in range(2):
        torch.manual_seed(2)
        training(X, Y)
    warnings = lines(caplog)
    assert len(warnings) == count
    assert all("torch.manual_seed(2): assign [seed] to rng_state" in line for line in warnings)


def test_seeding_the_host_again_with_the_same_seed_is_noticed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poptorch._session.host_changes.periodic_checks.CHECK_EVERY", 0.0)
    torch.manual_seed(1)
    _, training, _ = wrapped(0.5)
    training(X, Y)
    assert lines(caplog) == []

    torch.manual_seed(1)
    training(X, Y)

    (message,) = lines(caplog)
    assert "torch.manual_seed(1): assign [seed] to rng_state" in message


def test_seeding_the_host_names_the_seed_that_the_options_set(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poptorch._session.host_changes.periodic_checks.CHECK_EVERY", 0.0)
    model = poptorch.inferenceModel(nn.Dropout(0.5).train(), options().randomSeed(5))
    model(X)

    torch.manual_seed(1)
    model(X)

    (message,) = lines(caplog)
    assert "draws from the seed of options.randomSeed(5)" in message
    assert "call options.randomSeed" not in message


def test_a_restored_seed_or_a_seed_option_of_another_model_causes_no_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poptorch._session.host_changes.periodic_checks.CHECK_EVERY", 0.0)
    torch.manual_seed(1)
    _, training, _ = wrapped(0.5)
    training(X, Y)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
    training(X, Y)
    poptorch.Options().randomSeed(7)
    training(X, Y)

    assert lines(caplog) == []


def test_a_program_that_is_dropped_for_another_one_causes_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = poptorch.inferenceModel(nn.Linear(4, 2), options().programs(2))
    for shape in ((1, 4), (2, 4), (1, 4), (2, 4)):
        model(normal(*shape))
    assert lines(caplog) == []
    for shape in ((2, 3, 4), (1, 4), (2, 4)):
        model(normal(*shape))
    (message,) = lines(caplog)
    assert "All 2 programs of Options.programs(2) are in use" in message
    assert "input float32[1, 4]" in message
    assert "options.programs(3)" in message
    assert "poptorch.PadToSizes" in message


def test_a_warning_about_a_dropped_program_says_why_each_size_needs_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = poptorch.inferenceModel(
        Having(lambda m, x: m.linear(x) * len(range(x.shape[0])), linear=nn.Linear(4, 2)),
        options().programs(2),
    )
    for rows in (2, 3, 4):
        model(normal(rows, 4))

    (message,) = lines(caplog)
    assert "Each size needs its own program" in message
    assert "uses the size s0 as a number" in message


def test_an_error_of_the_library_names_the_line_that_led_to_it() -> None:
    where = r"Where:  test_errors\.py:\d+, poptorch\.Options\(\)\.set\(nonsense=1\)"
    with pytest.raises(poptorch.Error, match=where):
        poptorch.Options().set(nonsense=1)


def test_control_characters_in_messages_are_escaped() -> None:
    text = "a\x1b[2J\x9b1m\r\x08\u202eb\u2066\x7f\ud800"
    assert visible(text) == r"a\x1b[2J\x9b1m\r\x08\u202eb\u2066\x7f\ud800"
    assert visible("tab\tand line\nand ä€😀") == "tab\tand line\nand ä€😀"


@functools.cache
@functools.cache
def decorated(x: torch.Tensor) -> Any:
    return x


def test_a_decorated_function_has_the_line_of_its_def() -> None:
    line = source.definition_line(decorated) or ""
    assert line.startswith("test_errors.py:")
    assert line.endswith("def decorated(x: torch.Tensor) -> Any:")
    assert source.definition_line(len) is None


def test_a_long_line_is_cut_where_it_still_says_something(tmp_path: Path) -> None:
    words, calls = "value = " + "a + " * 40 + "b", "x = f(" + "a," * 60 + "b)"
    path = tmp_path / "train.py"
    path.write_text(f"{words}\n{calls}\nx  =  1\n")
    first, second, third = (source.describe(str(path), line) for line in (1, 2, 3))
    assert first.startswith("train.py:1, value = a + a")
    assert first.endswith("+ a + ...")
    assert second[:24] == "train.py:2, x = f(a,a,a,"
    assert second[-4:] == " ..."
    assert max(len(first), len(second)) <= len("train.py:1, ") + 100
    assert third == "train.py:3, x = 1"


def test_keywords_of_other_releases_have_the_meaning_of_the_current_ones(
    capfd: pytest.CaptureFixture[str],
) -> None:
    x, weight = torch.tensor([1.0, 3.0]), torch.nn.Parameter(torch.ones(2))
    assert poptorch.identity_loss(loss=x, reduction="sum") == 4
    opts = options().enablePipelining(enable_pipelining=False).profile(profile=False)
    assert isinstance(opts._execution_strategy, poptorch.ShardedExecution)
    opts.Precision.autocastEnabled(autocast_enabled=False)
    opts.Precision.autocastPolicy(autocast_policy=poptorch.autocasting.Policy())
    assert not opts.Precision.autocast_enabled
    half = poptorch.optim.AdamW([weight], accumType=torch.half, biasCorrection=False)
    assert half.accum_type == torch.half
    assert half.bias_correction is False
    mode = poptorch.OverlapMode.NoOverlap

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = poptorch.set_overlap_for_input(input_tensor=x, mode=mode)
        x = poptorch.ipu_print_tensor(tensor_to_print=x, optional_title="it")
        return poptorch.set_overlap_for_output(output_tensor=x * 1, mode=mode)

    assert torch.equal(infer(forward, x), x)
    assert capfd.readouterr().err.endswith("it: (1.0000, 3.0000)\n")
    with pytest.raises(TypeError, match=r"identity_loss\(\) got 'x' twice"):
        poptorch.identity_loss(x=x, loss=x)


@pytest.mark.parametrize("device", ["ipu", torch.device("xla")])
def test_moving_a_wrapped_model_to_a_missing_device_is_refused_with_a_remedy(
    device: str | torch.device,
) -> None:
    executor = poptorch.inferenceModel(nn.Linear(3, 2).eval(), options())
    with pytest.raises(poptorch.Error, match="remove this call") as caught:
        executor.to(device)
    assert str(device) in str(caught.value)
    assert executor(torch.ones(1, 3)).shape == (1, 2)


def test_a_numpy_array_for_a_tensor_names_the_conversion() -> None:
    executor = poptorch.inferenceModel(nn.Linear(3, 2).eval(), options())
    with pytest.raises(TypeError, match=r"pass torch\.from_numpy\(x\)"):
        executor(np.zeros((1, 3), dtype=np.float32))


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), x[:, :3])


def test_lazy_layers_that_have_not_run_are_refused_in_training() -> None:
    with pytest.raises(
        poptorch.Error, match=r"(?s)layers.0.weight.*call the module once"
    ) as raised:
        poptorch.trainingModel(Lazy(), options())
    assert "layers.1.running_mean" in str(raised.value)


def test_lazy_layers_that_have_not_run_are_refused_in_inference() -> None:
    wrapped = poptorch.inferenceModel(Lazy(), options())

    with pytest.raises(poptorch.Error, match=r"(?s)layers.0.weight.*call the module once"):
        wrapped(torch.randn(4, 5))


def test_lazy_layers_that_ran_before_the_first_call_are_compiled() -> None:
    model, x = Lazy().eval(), torch.randn(4, 5)
    wrapped = poptorch.inferenceModel(model, options())

    expected = model(x)

    torch.testing.assert_close(wrapped(x), expected.detach())

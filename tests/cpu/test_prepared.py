"""Compiled inference computes what depends on weights alone once, and anew when they change."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
import poptorch.testing
from helpers.closeness import FUNCTION, near
from helpers.memory import weights_of_inference
from helpers.wrapping import Having, normal, options, training
from poptorch._cpu import Inductor, compiler, convolutions, libraries, packing
from poptorch.backends import onnx_runtime

pytestmark = pytest.mark.slow
SUM = 5 * 9 * 8 + FUNCTION  # of the longest sums one after another


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Take one for products with small weights, too, whichever this processor likes."""
    name = getattr(request, "param", libraries.ONEDNN)
    monkeypatch.setattr(packing, "_SMALLEST_WEIGHT", 0)
    monkeypatch.setattr(libraries, "chosen", lambda work, measures: dict.fromkeys(work, name))
    monkeypatch.setattr(convolutions, "SMALLEST", 0)
    return name


class Mixed(nn.Module):
    """Norms behind convolutions and a product, one before them; scales, sums, activations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.BatchNorm2d(3)
        self.convolutions = nn.ModuleList(nn.Conv2d(n, 8, 3, padding=1, bias=n > 3) for n in (3, 8))
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8, affine=False)])
        self.scale = nn.Parameter(torch.rand(8, 1, 1) + 0.5)
        self.linear, self.last = nn.Linear(8, 6), nn.BatchNorm1d(6)
        for norm in (self.first, *self.norms, self.last):
            norm.running_mean.uniform_(-0.5, 0.5)
            norm.running_var.uniform_(0.5, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inner = F.relu(self.norms[0](self.convolutions[0](self.first(x))))
        x = F.relu(self.norms[1](self.convolutions[1](inner) * self.scale) + inner)
        y = self.last(self.linear(x.mean((2, 3))))
        bare = F.conv2d(inner, self.convolutions[1].weight)
        return y, F.gelu(y @ torch.sigmoid(self.linear.weight)), torch.tanh(self.scale), bare


def same(executor: poptorch.PoplarExecutor, model: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(executor(x), expected, **near(SUM, size=4))


def compiled(model: nn.Module, backend: str = "inductor") -> poptorch.PoplarExecutor:
    return poptorch.inferenceModel(model, options(backend))


def change(executor: poptorch.PoplarExecutor, model: nn.Module, x: torch.Tensor) -> None:
    """Give an executor new weights in every way, and look at what it computes with them."""
    before = executor(x)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.25)
    torch.testing.assert_close(executor(x), before, rtol=0, atol=0)
    executor.copyWeightsToDevice()
    same(executor, model, x)
    executor.load_state_dict({k: v * 0.75 for k, v in model.state_dict().items()})
    same(executor, model, x)
    executor(x)[2].zero_()  # a result is the caller's
    same(executor, model, x)


@pytest.mark.parametrize(
    "library", ["", libraries.BLAS, libraries.TURNED, libraries.ONEDNN], indirect=True
)
def test_new_weights_are_prepared_however_they_come(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not library:  # what only saves time fails
        monkeypatch.setattr(compiler, "_compile_quickly", None)
    model, x = Mixed().eval(), normal(2, 3, 6, 5)
    executor = compiled(model)
    same(executor, model, x)
    when = "when weights change\n  run prepare(param.*, buffer.*) -> value.*\n"
    assert when in str(executor.plan())
    described = executor.plan().describe().partition("graph forward")[2]
    assert "norm" not in described
    assert described.count("packed_convolution.default(") == 2
    assert described.count("packed_product.default(") == 2 * (library == libraries.ONEDNN)
    assert described.count("in  value.clone_default") == (library == libraries.TURNED)
    change(executor, model, x)


def test_small_convolutions_read_weights_tap_by_tap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(convolutions, "SMALLEST", 1 << 20)
    model = nn.Sequential(nn.Conv2d(8, 9, 3, 2, 1), nn.BatchNorm2d(9), nn.Conv2d(9, 4, 2)).eval()
    executor = poptorch.inferenceModel(model, options("inductor").programs(2))
    x = normal(2, 8, 5, 6)
    same(executor, model, x)
    described = executor.plan().describe().partition("graph forward")[2]
    assert described.count("in  value.clone_default: float32[3, 3, 8, 9]") == 1
    assert not re.search("packed|batch_norm", described)
    same(executor, model, x[:1])  # another program, which reads the plain weights
    executor.load_state_dict({k: v * 0.75 for k, v in model.state_dict().items()})
    same(executor, model, x)


def test_onnx_runtime_evaluates_models(tmp_path: Path) -> None:
    model, x = Mixed().eval(), normal(2, 3, 6, 5)
    executor = compiled(model, "onnxruntime")
    same(executor, model, x)
    change(executor, model, x)
    assert "runs on the onnxruntime backend" in str(executor.plan())
    executor.save(tmp_path / "model.poptorch")
    same(poptorch.load(tmp_path / "model.poptorch"), model, x)
    for check in ("inference", "results are new"):
        poptorch.testing.CONFORMANCE[check]("onnxruntime")
    weight = nn.Parameter(normal(6, 4).t())  # which is copied; the constant comes after the input
    nothing, factors = torch.tensor([]), torch.tensor([1.0, 2, 3, 4, 5, 6])  # ONNX drops the first
    model = Having(lambda m, x: torch.cat([nothing, x @ m.weight * factors]), weight=weight)
    same(compiled(model, "onnxruntime"), model, normal(3, 4))


@pytest.mark.compiling_fails
def test_what_onnx_lacks_runs_on_the_reference_backend(caplog: pytest.LogCaptureFixture) -> None:
    same(compiled(Having(lambda m, x: torch.lgamma(x)), "onnxruntime"), torch.lgamma, normal(3))
    assert re.search(
        "reference backend: A part of this program cannot be expressed in ONNX.*\n.*lgamma",
        caplog.text,
    )


@pytest.mark.parametrize(
    "does, forward",
    [
        ("trains", lambda m, x: poptorch.identity_loss(m.last(x), "mean")),
        ("draws random numbers", lambda m, x: F.dropout(x, training=True)),
        ("changes buffer.last.running_mean, ", lambda m, x: m.last(x)),
    ],
)
def test_onnx_runtime_refuses_training(does: str, forward: Callable[..., Any]) -> None:
    wrap = training if does == "trains" else poptorch.inferenceModel
    executor = wrap(Having(forward, last=nn.BatchNorm1d(6)), options("onnxruntime"))
    with pytest.raises(poptorch.Error, match=f"can only run inference\n.*a program that {does}"):
        executor(normal(4, 6))


def test_onnx_runtime_is_an_extra(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(onnx_runtime, "_NEEDED", ("absent",))
    compiled(nn.Linear(3, 2), "onnxruntime")(normal(1, 3))
    assert "needs absent: pip install 'poptorch[onnxruntime]'" in caplog.text


def test_columns_of_a_weight_are_contiguous_for_one_row() -> None:
    model = Having(lambda self, x: torch.tanh(x @ self.weight + 1), weight=normal(40, 24))
    executor, x = compiled(model), normal(1, 40)
    for _ in range(2):
        same(executor, model, x)
        executor.load_state_dict({"weight": normal(40, 24)})
    described = executor.plan().describe().partition("graph forward")[2]
    assert "value.clone_default: float32[24, 40]" in described


@pytest.mark.parametrize("backend", ["inductor", "onnxruntime"])
def test_weights_that_another_wrapper_trains_are_prepared_again(backend: str) -> None:
    model, x = Mixed(), normal(2, 3, 6, 5)

    def loss(module: Having, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(sum(y.square().sum() for y in module.inner(x)), "sum")

    trained = Having(loss, inner=model)
    executor, inference = training(trained, lr=0.01), compiled(model.eval(), backend)
    for _ in range(2):
        inference(x)
        trained.train()
        executor(x)
        model.eval()
        executor.copyWeightsToHost()
        same(inference, model, x)


def test_statistics_that_one_mode_counts_are_prepared_for_the_other() -> None:
    x, results = normal(2, 3, 6, 5), {}
    for backend in ("reference", "inductor"):
        executor = poptorch.inferenceModel(Mixed().eval(), options(backend))
        first = executor(x)
        executor.train()
        executor(x)
        executor.eval()
        results[backend] = executor(x)
        assert not torch.equal(results[backend][0], first[0])
    torch.testing.assert_close(*results.values(), **near(SUM, size=4))


def test_values_that_are_random_or_read_elsewhere_are_not_folded() -> None:
    def forward(model: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        product = model.layer(x)
        return model.norm(product), product, F.dropout(model.layer.weight, 0.5, training=True)

    model = Having(forward, layer=nn.Linear(4, 64), norm=nn.BatchNorm1d(64)).eval()
    model.norm.running_var.fill_(3)
    executor, x = compiled(model), normal(3, 4)
    first, second = executor(x), executor(x)
    torch.testing.assert_close(first[:2], model(x)[:2], **near(4 + FUNCTION))
    assert not torch.equal(first[2], second[2])


def test_statistics_that_are_written_and_never_read_are_written() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64, momentum=1.0))
    executor, x = poptorch.inferenceModel(model, options("inductor", iterations=4)), normal(12, 4)
    executor(x)
    executor.copyWeightsToHost()
    assert "when weights change" in executor.plan().describe()
    mean = model[0](x[-3:]).mean(0)
    torch.testing.assert_close(model[1].running_mean, mean, **near(4 + FUNCTION))


def of(function: Callable[..., Any], call: str = "layer") -> Any:
    """A function of a product with 6 columns, or of 6 channels of 6 by 6."""
    return lambda m, x: function(m, m.layer(x) if call == "layer" else m.conv(x.view(3, 2, 6, 6)))


@pytest.mark.parametrize(
    "forward, left",
    [
        (of(lambda m, y: y * m.scale + m.shift), ""),
        (of(lambda m, y: m.shift + m.scale * y), ""),
        (of(lambda m, y: y * m.scale[:1]), "mul"),
        (of(lambda m, y: y * m.column), "mul"),
        (of(lambda m, y: y * 2.0), "mul"),
        (of(lambda m, y: y * y[0]), "mul"),
        (of(lambda m, y: (y * m.scale, y)), "mul"),
        (of(lambda m, y: y.double() * m.scale), "mul"),
        (of(lambda m, y: y + m.shift.half().float().double()), "add"),
        (of(lambda m, y: torch.add(y, m.shift, alpha=2)), "add"),
        (of(lambda m, y: y * m.cube[:, :1]), "mul"),
        (of(lambda m, y: y * m.scale[:, None, None], "conv"), ""),
        (of(lambda m, y: y * m.scale, "conv"), "mul"),
        (of(lambda m, y: y + m.shift[:, None], "conv"), "add"),
        (of(lambda m, y: m.norm(y), "conv"), ""),
        (of(lambda m, y: (m.norm(y), y), "conv"), "mul add"),
        (lambda m, x: (x.view(36, 6) @ m.cube[0]) * m.scale, ""),
        (lambda m, x: (x.view(36, 6) @ x.view(36, 6)[:6]) * m.scale, "mul"),
        (lambda m, x: m.norm(x.view(3, 2, 6, 6)[:, :1].expand(3, 6, 6, 6)), "mul add"),
    ],
)
def test_factors_and_offsets_of_channels_go_into_weights(
    forward: Callable[..., Any], left: str
) -> None:
    layers = {"layer": nn.Linear(6, 6), "conv": nn.Conv2d(2, 6, 1), "norm": nn.BatchNorm2d(6)}
    numbers = {
        "scale": normal(6),
        "shift": normal(6),
        "column": normal(36, 1),
        "cube": normal(1, 6, 6),
    }
    executor = poptorch.inferenceModel(Having(forward, **layers, **numbers).eval(), options())
    executor.compile(normal(36, 6))
    operators = Inductor().prepared(executor.plan()).program.graphs["forward"].operators
    names = [node.target.__name__.partition(".")[0] for node in operators]
    assert [name for name in names if name in ("mul", "add")] == left.split()


@pytest.mark.parametrize(
    "backend, rows, most",
    [
        ("reference", 8, 2),
        ("inductor", 8, 2),
        ("inductor", 1, 2),
        ("onnxruntime", 8, 3),
    ],
)
def test_a_process_has_weights_of_inference_twice(backend: str, rows: int, most: int) -> None:
    """The host's, and the device's plain, packed or turned; ONNX Runtime's besides."""
    assert weights_of_inference(backend, rows) < most + 0.1


def test_a_program_that_packs_nothing_reads_the_values_that_were_packed() -> None:
    def forward(model: Having, x: torch.Tensor) -> torch.Tensor:
        return model.layer(x) @ model.turned

    model = Having(forward, layer=nn.Linear(32, 48))
    model.turned = nn.Parameter(normal(48, 40))
    with torch.no_grad():
        model.layer.weight.view(-1)[:4] = torch.tensor([-0.0, 1e-45, -3e-39, 1.5])
    rows, row = normal(8, 32), normal(1, 32, seed=1)
    expected = [compiled(model)(each) for each in (rows, row)]
    executor = poptorch.inferenceModel(model, options("inductor").programs(2))
    for edited in (False, True, False):
        for each, wanted in zip((rows, row), expected, strict=True):
            assert torch.equal(executor(each), wanted)
        with torch.no_grad():
            model.layer.weight.mul_(0 if edited else 2)
        assert torch.equal(executor(rows), expected[0])
    executor.copyWeightsToDevice()
    same(executor, model, rows)
    executor.load_state_dict({k: v + 0.5 for k, v in model.state_dict().items()})
    same(executor, model, row)


def test_a_saved_program_prepares_what_it_loads(tmp_path: Path) -> None:
    model, x = Mixed().eval(), normal(2, 3, 6, 5)
    compiled(model).compileAndExport(tmp_path / "model.poptorch", x)
    same(poptorch.load(tmp_path / "model.poptorch"), model, x)

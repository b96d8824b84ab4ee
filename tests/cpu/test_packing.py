"""Weights of compiled inference are stored in the layout that is read fastest."""

import re

import pytest
import torch
from torch import nn

from helpers.folded import Mixed, check_new_weights, compiled, forward_graph, same
from helpers.memory import weights_of_inference
from helpers.wrapping import Having, normal
from poptorch._cpu import compiler, convolutions, packing, product_libraries
from poptorch._cpu.product_libraries import BLAS, ONEDNN, TURNED

pytestmark = pytest.mark.slow
LAYOUT_CHANGES = "value.clone_default"  # the name of a weight that was copied row by row


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """One library computes all products, those with small weights, too; no convolution is small."""
    name = getattr(request, "param", ONEDNN)
    monkeypatch.setattr(packing, "_SMALLEST_WEIGHT", 0)
    monkeypatch.setattr(
        product_libraries, "chosen", lambda work, measures: dict.fromkeys(work, name)
    )
    monkeypatch.setattr(convolutions, "SMALLEST", 0)
    return name


@pytest.mark.parametrize(
    "library, shortcuts",
    [(ONEDNN, True), (TURNED, True), (BLAS, True), ("", False)],
    indirect=["library"],
)
def test_weights_are_packed_for_the_library_and_packed_again_when_they_change(
    library: str, shortcuts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shortcuts:  # of the compiler, which does not know what is packed
        monkeypatch.setattr(compiler, "_compile_with_speedups", None)
    model, x = Mixed().eval(), normal(2, 3, 6, 5)
    executor = compiled(model)

    same(executor, model, x)

    described = forward_graph(executor)
    assert described.count("packed_convolution.default(") == 2
    assert described.count("packed_product.default(") == (2 if library == ONEDNN else 0)
    assert described.count(f"in  {LAYOUT_CHANGES}") == (1 if library == TURNED else 0)
    assert "norm" not in described
    check_new_weights(executor, model, x)


def small_convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, 9, 3, 2, 1), nn.BatchNorm2d(9), nn.Conv2d(9, 4, 2)).eval()


def test_small_convolutions_read_weights_tap_by_tap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(convolutions, "SMALLEST", 1 << 20)
    model, x = small_convolutions(), normal(2, 8, 5, 6)
    executor = compiled(model)

    same(executor, model, x)

    described = forward_graph(executor)
    assert described.count(f"in  {LAYOUT_CHANGES}: float32[3, 3, 8, 9]") == 1
    assert not re.search("packed|batch_norm", described)
    executor.load_state_dict({k: v * 0.75 for k, v in model.state_dict().items()})
    same(executor, model, x)


@pytest.mark.larger("test_small_convolutions_read_weights_tap_by_tap")
def test_a_second_program_reads_the_plain_weights_of_small_convolutions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(convolutions, "SMALLEST", 1 << 20)
    model, x = small_convolutions(), normal(2, 8, 5, 6)
    executor = compiled(model, programs=2)
    same(executor, model, x)

    same(executor, model, x[:1])

    executor.load_state_dict({k: v * 0.75 for k, v in model.state_dict().items()})
    same(executor, model, x)


@pytest.mark.larger("test_weights_are_packed_for_the_library_and_packed_again_when_they_change")
def test_columns_of_a_weight_are_contiguous_for_one_row() -> None:
    model = Having(lambda self, x: torch.tanh(x @ self.weight + 1), weight=normal(40, 24))
    executor, x = compiled(model), normal(1, 40)

    same(executor, model, x)
    executor.load_state_dict({"weight": normal(40, 24)})
    same(executor, model, x)

    assert f"{LAYOUT_CHANGES}: float32[24, 40]" in forward_graph(executor)


@pytest.mark.full("measures the memory of a process that has started for it")
@pytest.mark.parametrize(
    "backend, rows, most",
    [("reference", 8, 2), ("inductor", 8, 2), ("inductor", 1, 2), ("onnxruntime", 8, 3)],
)
def test_a_process_has_weights_of_inference_twice(backend: str, rows: int, most: int) -> None:
    """The host's, and the device's plain, packed or turned; ONNX Runtime's besides."""
    assert weights_of_inference(backend, rows) < most + 0.1


@pytest.mark.larger("test_weights_are_packed_for_the_library_and_packed_again_when_they_change")
def test_a_program_that_packs_nothing_reads_the_values_that_were_packed() -> None:
    def forward(model: Having, x: torch.Tensor) -> torch.Tensor:
        return model.layer(x) @ model.turned

    model = Having(forward, layer=nn.Linear(32, 48))
    model.turned = nn.Parameter(normal(48, 40))
    with torch.no_grad():
        model.layer.weight.view(-1)[:4] = torch.tensor([-0.0, 1e-45, -3e-39, 1.5])
    rows, row = normal(8, 32), normal(1, 32, seed=1)
    expected = [compiled(model)(each) for each in (rows, row)]
    executor = compiled(model, programs=2)

    for edited in (False, True, False):  # the host's weights, which the device does not follow
        for each, expected_values in zip((rows, row), expected, strict=True):
            assert torch.equal(executor(each), expected_values)
        with torch.no_grad():
            model.layer.weight.mul_(0 if edited else 2)
        assert torch.equal(executor(rows), expected[0])

    executor.copyWeightsToDevice()
    same(executor, model, rows)
    executor.load_state_dict({k: v + 0.5 for k, v in model.state_dict().items()})
    same(executor, model, row)

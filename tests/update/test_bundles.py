"""Models with many small weights, updated as flat bundles: nothing of it can be noticed."""

import copy
import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.closeness import near, relative
from helpers.wrapping import options
from poptorch._compile import bundled_weights

pytestmark = pytest.mark.slow


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(5) + 0.5), nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.bias


class Deep(nn.Module):
    """Layers, one pair of which share a weight; a matrix too large for a bundle, one just not."""

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        linear, scales = [nn.Linear(5, 5) for _ in range(3)], [Scale() for _ in range(6)]
        self.layers = nn.ModuleList(linear + scales)
        self.layers[0].weight = self.layers[2].weight
        self.wide, self.narrow = nn.Linear(5, 8192, bias=False), nn.Linear(8192, 4)
        self.to(dtype)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.narrow(self.wide(x) / 64).float(), y)


def groups(model: nn.Module) -> Any:
    """Two groups with rates of their own; one weight in none."""
    first, *rest = [p for p in model.parameters() if p.numel() <= 25][:-1]
    large = [p for p in model.parameters() if p.numel() > 25]
    return [{"params": [first, *large], "lr": 0.02}, {"params": rest, "lr": 0.01}]


MAKERS = {
    "SGD": lambda g: poptorch.optim.SGD(g, lr=0.1, momentum=0.9, weight_decay=0.01),
    "combined": lambda g: poptorch.optim.SGD(g, lr=0.1, momentum=0.9, use_combined_accum=True),
    "Adam": lambda g: poptorch.optim.Adam(g, lr=0.01, eps=1e-4, max_grad_norm=0.5),
    "AdamW": lambda g: poptorch.optim.AdamW(g, lr=0.01),
    "RMSprop": lambda g: poptorch.optim.RMSprop(g, lr=0.01, centered=True, momentum=0.5),
}


def run(
    name: str,
    dtype: Any = torch.float32,
    backend: str = "reference",
    stop: int = 3,
    bundled: bool = True,
    start: Any = None,
    lanes: int = 0,
    **counts: int,
) -> Any:
    torch.manual_seed(0)
    model = Deep(dtype)
    optimizer = MAKERS[name](groups(model))
    if start is not None:
        model.load_state_dict(start[0])
        optimizer.load_state_dict(start[1])
    opts = options(backend, **counts).lanes(lanes)
    if not bundled:
        opts.anchorTensor("g", "Gradient___layers.0.weight")  # looks at a single weight
    wrapped = poptorch.trainingModel(model, opts, optimizer)
    torch.manual_seed(1)
    x, y = torch.randn(8, 5).to(dtype), torch.arange(8) % 3
    return model, optimizer, wrapped, (x, y), torch.stack([wrapped(x, y) for _ in range(stop)])


def close(got: Any, expected_value: Any, steps: int = 1, size: float = 0.1) -> None:
    torch.testing.assert_close(got, expected_value, **near(8, steps, size=size))


@functools.cache
def whole() -> Any:
    """The losses of six calls."""
    return run("Adam", stop=6)[-1]


CASES = [
    ("Adam", {"accumulation": 4, "lanes": 1}, torch.float32),
    ("combined", {"accumulation": 2, "replicas": 2}, torch.float32),
    ("RMSprop", {}, torch.float16),
]


@pytest.mark.parametrize("name, counts, dtype", CASES)
def test_training_with_bundles_equals_training_without_them(
    name: str, counts: Any, dtype: Any
) -> None:
    model, optimizer, wrapped, _, losses = run(name, dtype, **counts)
    state = optimizer.state_dict()
    other, plain, executor, _, expected = run(name, dtype, bundled=False, **counts)
    assert not executor.plan().program.bundles
    check_layout(wrapped.plan().program.bundles, optimizer, model)
    close(losses, expected)
    close(model.state_dict(), other.state_dict())
    assert model.layers[0].weight is model.layers[2].weight
    for part in ("ipu_state", "ipu_param"):
        close(state[part], plain.state_dict()[part], steps=6, size=1e-3)


def check_layout(bundles: Any, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """A bundle for each group, its members at aligned places."""
    paths = {id(p): path for path, p in model.named_parameters()}
    for bundle, group in zip(bundles, optimizer.param_groups, strict=True):
        small = [paths[id(p)] for p in group["params"] if p.numel() <= bundled_weights.LARGEST]
        assert [member.slot.path for member in bundle.members] == small
        ends = [0, *(member.offset + member.slot.numel for member in bundle.members)]
        for member, end in zip(bundle.members, ends, strict=False):
            assert member.offset % 64 == 0
            assert 0 <= member.offset - end < 64


@pytest.mark.parametrize("saved_single", [True, False])
def test_states_are_loaded_into_and_from_bundles(saved_single: Any) -> None:
    model, optimizer, *_ = run("Adam", bundled=not saved_single)
    start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    *_, losses = run("Adam", bundled=saved_single, start=start)
    close(losses, whole()[3:])


@pytest.mark.spec("optimizers", 3)
def test_learning_rates_of_groups_change_separately_and_weights_can_be_uploaded() -> None:
    model, optimizer, wrapped, (x, y), _ = run("AdamW")
    optimizer.param_groups[1]["lr"] = 0.0
    wrapped.setOptimizer(optimizer)
    before = copy.deepcopy(model.state_dict())
    wrapped(x, y)
    moved = {id(p) for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {id(p) for p in optimizer.param_groups[0]["params"]}
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    wrapped.copyWeightsToDevice()
    assert float(wrapped(x, y)) == pytest.approx(float(torch.tensor(4.0).log()), rel=relative(8))


@pytest.mark.larger("test_training_with_bundles_equals_training_without_them")
def test_detaching_staging_saving_and_loading(tmp_path: Path) -> None:
    model, _, wrapped, (x, y), _ = run("Adam")
    wrapped.detachFromDevice()
    losses = [wrapped(x, y)]
    staged = wrapped.plan().staged  # single weights again
    keys = {slot.key for graph in staged.graphs.values() for slot in graph.inputs}
    assert {f"param.{path}" for path, _ in model.named_parameters()} <= keys
    assert not any("~" in key for key in keys)
    wrapped.save(str(tmp_path / "model.poptorch"))
    wrapped.destroy()
    loaded = poptorch.load(str(tmp_path / "model.poptorch"), trusted=True)
    close(torch.stack([*losses, loaded(x, y), loaded(x, y)]), whole()[3:])


@pytest.mark.larger("test_training_with_bundles_equals_training_without_them")
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code_reads_and_writes_bundles() -> None:
    _, optimizer, wrapped, _, losses = run("SGD", backend="inductor")
    assert wrapped.plan().program.bundles
    _, other, _, _, expected = run("SGD")
    close(losses, expected, steps=3, size=0.3)
    expected = other.state_dict()["ipu_state"]
    close(optimizer.state_dict()["ipu_state"], expected, steps=3, size=1.0)

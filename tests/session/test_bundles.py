"""Models with many small weights, updated as flat bundles: nothing of it can be noticed."""

import copy
import shutil

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import options
from poptorch._compile import weights
from poptorch.backends import reference

pytestmark = pytest.mark.slow


class Deep(nn.Module):
    """Seven layers, one pair of which share a weight; a matrix too large for a bundle."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(5))
        self.layers[1].weight = self.layers[3].weight
        self.wide, self.narrow = nn.Linear(5, 8192, bias=False), nn.Linear(8192, 3)
        self.to(dtype)

    def forward(self, x, y):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.narrow(self.wide(x) / 64).float(), y)


def groups(model):
    """Two groups with rates of their own; one weight in none."""
    first, *rest = [p for p in model.parameters() if p.numel() <= 25][:-1]
    large = [p for p in model.parameters() if p.numel() > 25]
    return [{"params": [first, *large], "lr": 0.02}, {"params": rest, "lr": 0.01}]


MAKERS = {
    "SGD": lambda g: poptorch.optim.SGD(g, lr=0.1, momentum=0.9, weight_decay=0.01),
    "combined": lambda g: poptorch.optim.SGD(g, lr=0.1, momentum=0.9, use_combined_accum=True),
    "Adam": lambda g: poptorch.optim.Adam(g, lr=0.01, max_grad_norm=0.5),
    "AdamW": lambda g: poptorch.optim.AdamW(g, lr=0.01),
    "RMSprop": lambda g: poptorch.optim.RMSprop(g, lr=0.01, centered=True, momentum=0.5),
    "LAMB": lambda g: poptorch.optim.LAMB(g, lr=0.01),
}


def run(name, dtype=torch.float32, backend="reference", stop=4, **counts):
    torch.manual_seed(0)
    model = Deep(dtype)
    optimizer = MAKERS[name](groups(model))
    wrapped = poptorch.trainingModel(model, options(backend, **counts), optimizer)
    x, y = torch.randn(8, 5).to(dtype), torch.arange(8) % 3
    losses = [wrapped(x, y) for _ in range(stop)]
    return model, optimizer, wrapped, (x, y), torch.stack(losses)


@pytest.fixture(autouse=True)
def _few_are_enough(monkeypatch):
    monkeypatch.setattr(weights, "FEWEST", 8)


def singly(monkeypatch):
    monkeypatch.setattr(weights, "FEWEST", 10**9)


LOOPS = ({}, {"accumulation": 4}, {"accumulation": 2, "replicas": 2})
CASES = [
    *((name, {}, torch.float32) for name in MAKERS),
    *((name, counts, torch.float32) for name in ("Adam", "combined") for counts in LOOPS[1:]),
    *((name, counts, torch.float16) for name, counts in zip(("SGD", "AdamW"), LOOPS, strict=False)),
]


@pytest.mark.parametrize("name, counts, dtype", CASES)
def test_everything_is_as_without_bundles(name, counts, dtype, monkeypatch):
    model, optimizer, wrapped, _, losses = run(name, dtype, **counts)
    used = wrapped._session.now.compiled.plan.program.bundles
    assert len(used) == (0 if name == "LAMB" else 2)
    state = optimizer.state_dict()
    singly(monkeypatch)
    other, plain, executor, _, wanted = run(name, dtype, **counts)
    assert not executor._session.now.compiled.plan.program.bundles
    torch.testing.assert_close(losses, wanted, rtol=1e-6, atol=1e-7)
    for (path, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7, msg=path)
    assert model.layers[1].weight is model.layers[3].weight
    expected = plain.state_dict()
    for part in ("ipu_state", "ipu_param"):
        assert state[part].keys() == expected[part].keys()
        for key, value in expected[part].items():
            assert state[part][key].shape == value.shape
            torch.testing.assert_close(state[part][key], value, rtol=1e-5, atol=1e-8)


def test_no_weight_of_a_bundle_is_large_for_the_kernel_of_adam():
    """Alone and in a bundle it would have other bits."""
    assert weights.LARGEST < reference.LARGE


@pytest.mark.parametrize("saved_single", [True, False])
def test_states_are_loaded_into_and_from_bundles(saved_single, monkeypatch):
    _, _, _, _, whole = run("Adam", stop=6)
    with monkeypatch.context() as patch:
        if saved_single:
            singly(patch)
        model, optimizer, *_ = run("Adam", stop=3)
        weights, state = copy.deepcopy(model.state_dict()), optimizer.state_dict()
        if not saved_single:
            singly(patch)
        torch.manual_seed(0)
        other = Deep()
        other.load_state_dict(weights)
        resumed = MAKERS["Adam"](groups(other))
        resumed.load_state_dict(state)
        wrapped = poptorch.trainingModel(other, options(), resumed)
        x, y = run("Adam", stop=1)[3]
        losses = torch.stack([wrapped(x, y) for _ in range(3)])
    torch.testing.assert_close(losses, whole[3:], rtol=1e-6, atol=1e-7)


@pytest.mark.spec("optimizers", 3)
def test_rates_of_groups_change_apart_and_weights_can_be_uploaded():
    model, optimizer, wrapped, (x, y), _ = run("AdamW")
    paths = {id(p): path for path, p in model.named_parameters()}
    still = {paths[id(p)] for p in optimizer.param_groups[1]["params"]}
    optimizer.param_groups[1]["lr"] = 0.0
    wrapped.setOptimizer(optimizer)
    before = copy.deepcopy(model.state_dict())
    wrapped(x, y)
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {paths[id(p)] for p in optimizer.param_groups[0]["params"]}
    assert still
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    wrapped.copyWeightsToDevice()
    assert float(wrapped(x, y)) == pytest.approx(float(torch.tensor(3.0).log()), rel=1e-6)


def test_detaching_saving_and_loading(tmp_path):
    _, _, _, _, whole = run("SGD", stop=6)
    _, _, wrapped, (x, y), _ = run("SGD", stop=3)
    wrapped.detachFromDevice()
    wrapped.attachToDevice()
    losses = [wrapped(x, y)]
    wrapped.save(str(tmp_path / "model.poptorch"))
    wrapped.destroy()
    loaded = poptorch.load(str(tmp_path / "model.poptorch"), trusted=True)
    losses += [loaded(x, y), loaded(x, y)]
    torch.testing.assert_close(torch.stack(losses), whole[3:], rtol=1e-6, atol=1e-7)


def test_stochastic_rounding_and_anchors_work_beside_them():
    torch.manual_seed(0)
    model = Deep(torch.float16)
    opts = options().randomSeed(1)
    opts.Precision.enableStochasticRounding(True)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1e-5)
    wrapped = poptorch.trainingModel(model, opts, optimizer)
    before = copy.deepcopy(model.state_dict())
    for _ in range(3):
        wrapped(torch.randn(8, 5).half(), torch.arange(8) % 3)
    assert wrapped._session.now.compiled.plan.program.bundles
    assert any(not torch.equal(v, before[k]) for k, v in model.state_dict().items())

    anchored = options()
    anchored.anchorTensor("g", "Gradient___layers.0.weight")
    model = Deep()
    wrapped = poptorch.trainingModel(model, anchored, MAKERS["SGD"](groups(model)))
    wrapped(torch.randn(8, 5), torch.arange(8) % 3)
    assert wrapped.getAnchoredTensor("g").shape == (5, 5)


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code_reads_and_writes_bundles():
    _, optimizer, wrapped, _, losses = run("Adam", backend="inductor")
    assert wrapped._session.now.compiled.plan.program.bundles
    _, reference, _, _, wanted = run("Adam")
    torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=1e-6)
    expected = reference.state_dict()["ipu_state"]
    for key, value in optimizer.state_dict()["ipu_state"].items():
        torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-6)


def test_the_plan_can_still_be_cut_into_stages():
    _, _, wrapped, _, _ = run("Adam", stop=1)
    staged = wrapped.plan().staged
    keys = {slot.key for graph in staged.graphs.values() for slot in graph.inputs}
    assert {f"param.{path}" for path, _ in wrapped.model.named_parameters()} <= keys
    assert not any("~" in key for key in keys)

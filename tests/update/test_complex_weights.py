"""Complex weights: every optimizer updates real and imaginary parts, as eager torch does."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.cases import few, slow_but
from helpers.closeness import near
from helpers.eager_loop import OPTIMIZERS
from helpers.wrapping import Having, normal, options, runs_compiled

STEPS, SIDE = 4, 6
WAYS: dict[str, dict[str, Any]] = {
    "one micro-batch": {},
    "lanes": {"accumulation": 4},
    "one after another": {"accumulation": 4, "lanes": 1},
    "replicas, running mean": {"replicas": 2, "accumulation": 2, "lanes": 1, "running": True},
    "replicas in lanes": {"replicas": 4},
}


def complex_normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.complex(normal(*shape, seed=seed), normal(*shape, seed=seed + 100))


def spectral(model: Having, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loss of a layer in the Fourier domain, as Fourier neural operators have them."""
    spectrum = torch.fft.rfft(model.layer(x)) * model.filter.conj()
    mixed = torch.fft.irfft(spectrum, n=SIDE).to(model.mix.dtype) @ model.mix
    return nn.functional.mse_loss(mixed.real + 0.5 * mixed.imag, y)


def operator(dtype: torch.dtype = torch.float32) -> Having:
    weight = nn.Parameter(complex_normal(SIDE // 2 + 1).to(dtype.to_complex()))
    mix = nn.Parameter(0.3 * complex_normal(SIDE, SIDE, seed=1).to(dtype.to_complex()))
    torch.manual_seed(0)
    layer = nn.Linear(SIDE, SIDE, dtype=dtype)
    return Having(spectral, filter=weight, mix=mix, layer=layer)


def batch(rows: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return tuple(normal(rows, SIDE, seed=2 * step + at).to(dtype) for at in range(2))


def options_of(way: dict[str, Any], backend: str = "reference") -> poptorch.Options:
    counts = {name: value for name, value in way.items() if name in ("accumulation", "replicas")}
    opts = options(backend, **counts).lanes(way.get("lanes", 0))
    opts.Precision.narrow64Bit(False)
    strategy = poptorch.MeanReductionStrategy.Running
    if way.get("running"):
        opts.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
    return opts


def train(model: nn.Module, optimizer: torch.optim.Optimizer, opts: poptorch.Options) -> Any:
    """Return the wrapped model after some calls."""
    wrapped = poptorch.trainingModel(model, opts, optimizer)
    parts = opts.replication_factor * opts.Training.gradient_accumulation
    for step in range(STEPS):
        wrapped(*batch(2 * parts, step, next(iter(model.layer.parameters())).dtype))
    wrapped.copyWeightsToHost()
    return wrapped


def train_eagerly(model: nn.Module, optimizer: torch.optim.Optimizer, parts: int = 1) -> None:
    for step in range(STEPS):
        for piece in zip(
            *(each.chunk(parts) for each in batch(2 * parts, step, model.layer.weight.dtype)),
            strict=True,
        ):
            (model(*piece) / parts).backward()
        for weight in model.parameters():  # torch's Adam refuses lazy conjugates
            weight.grad = None if weight.grad is None else weight.grad.resolve_conj()
        optimizer.step()
        optimizer.zero_grad()


def by_name(name: str, model: nn.Module, library: Any = torch.optim) -> torch.optim.Optimizer:
    kind, settings = OPTIMIZERS[name]
    made: torch.optim.Optimizer = getattr(library, kind)(model.parameters(), **settings)
    return made


ALL = [(name, way) for name in OPTIMIZERS for way in WAYS]
FEW = [(name, way) for name, way in ALL if way == "one micro-batch" or name in ("sgd", "adamw")]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", slow_but([torch.float32, torch.float64], torch.float32), ids=str)
@pytest.mark.parametrize("case", few(ALL, *FEW), ids=", ".join)
def test_weights_and_state_are_those_of_eager_torch(
    case: tuple[str, str], dtype: torch.dtype
) -> None:
    name, way = case
    model = operator(dtype)
    eager = copy.deepcopy(model)
    ours, theirs = by_name(name, model), by_name(name, eager)
    opts = options_of(WAYS[way])
    close = near(64, STEPS, dtype=dtype)

    train(model, ours, opts)
    train_eagerly(eager, theirs, opts.replication_factor * opts.Training.gradient_accumulation)

    torch.testing.assert_close(model.state_dict(), eager.state_dict(), **close)
    for at, entry in theirs.state_dict()["state"].items():
        there = {key: value for key, value in entry.items() if value is not None}
        here = ours.state_dict()["state"][at]
        torch.testing.assert_close({key: here[key] for key in there}, there, **close)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", slow_but(["NAdam", "RAdam", "Adagrad", "Adamax", "ASGD", "Rprop"], "NAdam", "Rprop")
)
def test_traced_optimizers_update_complex_weights(name: str) -> None:
    model = operator()
    eager = copy.deepcopy(model)
    ours, theirs = (getattr(torch.optim, name)(m.parameters(), lr=0.01) for m in (model, eager))
    close = near(64, STEPS)

    train(model, ours, options_of({}))
    train_eagerly(eager, theirs)

    torch.testing.assert_close(model.state_dict(), eager.state_dict(), **close)
    for at, entry in theirs.state_dict()["state"].items():
        here = ours.state_dict()["state"][at]
        numbers = {key: value for key, value in entry.items() if isinstance(value, torch.Tensor)}
        torch.testing.assert_close({key: here[key] for key in numbers}, numbers, **close)


def test_optimizers_of_poptorch_clip_by_the_norm_of_both_parts() -> None:
    model = operator()
    eager = copy.deepcopy(model)
    theirs = torch.optim.AdamW(eager.parameters(), lr=0.01, eps=0.01)
    theirs.register_step_pre_hook(
        lambda *_: nn.utils.clip_grad_norm_(eager.parameters(), 0.1) and None
    )

    train(
        model,
        poptorch.optim.AdamW(model.parameters(), 0.01, eps=0.01, max_grad_norm=0.1),
        options_of({}),
    )
    train_eagerly(eager, theirs)

    torch.testing.assert_close(model.state_dict(), eager.state_dict(), **near(64, STEPS))


class Product(nn.Module):
    """A complex matrix, or the same numbers as pairs."""

    def __init__(self, as_pairs: bool) -> None:
        super().__init__()
        weight = complex_normal(SIDE, SIDE)
        self.weight = nn.Parameter(torch.view_as_real(weight) if as_pairs else weight)
        self.layer = nn.Identity()
        self.layer.unused = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        pairs = not self.weight.is_complex()
        weight = torch.view_as_complex(self.weight) if pairs else self.weight
        product = x.to(weight.dtype) @ weight
        return nn.functional.mse_loss(product.real * product.imag, y)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, settings",
    [
        ("LAMB", {"lr": 0.01, "weight_decay": 0.1}),
        ("RMSprop", {"lr": 0.01, "use_tf_variant": True, "centered": True, "momentum": 0.5}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "use_combined_accum": True}),
        ("AdamW", {"lr": 0.01, "accum_type": torch.float16, "loss_scaling": 8.0}),
        ("SGD", {"lr": 0.01, "momentum": 0.9, "velocity_accum_type": torch.float16}),
    ],
)
def test_optimizers_that_torch_does_not_have_update_complex_numbers_as_pairs(
    name: str, settings: dict[str, float | torch.dtype]
) -> None:
    of_pairs, of_complex = Product(as_pairs=True), Product(as_pairs=False)
    exact = {k: v for k, v in settings.items() if not isinstance(v, torch.dtype)}
    way = options_of({"accumulation": 2, "lanes": 1})

    train(of_complex, getattr(poptorch.optim, name)(of_complex.parameters(), **settings), way)
    train(of_pairs, getattr(poptorch.optim, name)(of_pairs.parameters(), **exact), way)

    found = torch.view_as_real(of_complex.weight.detach())
    torch.testing.assert_close(found, of_pairs.weight.detach(), **near(64, STEPS))


def test_many_small_complex_weights_share_a_bundle() -> None:
    def layers(model: Having, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for weight in model.weights:
            x = 0.5 * torch.sin(x.to(weight.dtype) @ weight)
        return nn.functional.mse_loss(x.real + x.imag, y)

    weights = (0.3 * complex_normal(SIDE, SIDE, seed=at) for at in range(20))
    model = Having(layers, weights=nn.ParameterList(weights), layer=nn.Linear(1, 1))
    eager = copy.deepcopy(model)

    wrapped = train(model, by_name("adamw", model), options_of({}))
    train_eagerly(eager, by_name("adamw", eager))

    assert len(wrapped.plan().program.bundles) == 1
    torch.testing.assert_close(model.state_dict(), eager.state_dict(), **near(64, STEPS))


@pytest.mark.larger("test_weights_and_state_are_those_of_eager_torch")
def test_compiled_code_updates_complex_weights() -> None:
    model = operator()
    eager = copy.deepcopy(model)

    wrapped = train(model, by_name("adam", model), options_of({"accumulation": 2}, "inductor"))
    train_eagerly(eager, by_name("adam", eager), 2)

    assert runs_compiled(wrapped)
    torch.testing.assert_close(model.state_dict(), eager.state_dict(), **near(64, STEPS))


def test_state_moves_between_eager_torch_and_a_program() -> None:
    model = operator()
    ours = by_name("adam", model)
    train_eagerly(model, ours)
    eager = copy.deepcopy(model)
    theirs = by_name("adam", eager)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))

    train(model, ours, options_of({}))
    theirs.load_state_dict(copy.deepcopy(theirs.state_dict()))
    train_eagerly(eager, theirs)

    torch.testing.assert_close(model.state_dict(), eager.state_dict(), **near(64, 2 * STEPS))
    moments = ours.state_dict()["state"][0]
    assert moments["exp_avg"].dtype is torch.complex64
    expected = theirs.state_dict()["state"][0]["exp_avg"]
    torch.testing.assert_close(moments["exp_avg"], expected, **near(64, 2 * STEPS))


def test_a_saved_executable_keeps_imaginary_parts_of_its_state(tmp_path: Path) -> None:
    model = operator()
    ours = by_name("adam", model)
    train(model, ours, options_of({})).save(tmp_path / "saved.poptorch")
    expected = copy.deepcopy(ours.state_dict()["state"])
    loaded = operator()
    restored = by_name("adam", loaded)

    poptorch.load(tmp_path / "saved.poptorch", model=loaded, optimizer=restored)

    found = restored.state_dict()["state"]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)

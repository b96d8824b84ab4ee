"""Inputs of many sizes together with other features, each of them next to eager PyTorch."""

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.cases import slow_but_the_first
from helpers.closeness import near
from helpers.folded import pack_everything
from helpers.wrapping import compilations, normal, options, runs_compiled

LENGTHS = (5, 9, 12, 3, 7)
# Of a score in bfloat16: three in each layer, and one each in the norm, the mean and the head.
HALF = near(9, dtype=torch.bfloat16)
SHAPES = ((4, 9), (4, 5), (4, 12), (4, 3), (3, 9), (2, 4))
BACKENDS = "reference", "inductor"  # make test-full runs the second one
on_both = pytest.mark.parametrize("backend", slow_but_the_first(BACKENDS))


class Tagger(nn.Module):
    """Scores of each row, and with labels their loss."""

    def __init__(self, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        """Return the scores, or the scores and the loss."""
        values = self.embedding(x)
        for layer in self.layers:
            values = values + torch.tanh(layer(values))
        scores = self.head(self.norm(values).mean(1))
        return scores if y is None else (scores, nn.functional.cross_entropy(scores, y))


class Autocast(nn.Module):
    """Runs a model under autocast to bfloat16."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Return what the model returns."""
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(*inputs)


def batch(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels."""
    generator = torch.Generator().manual_seed(rows * 100 + length)
    tokens = torch.randint(0, 50, (rows, length), generator=generator)
    return tokens, torch.randint(0, 3, (rows,), generator=generator)


def in_eager(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(x)
    return result


def serves_all_sizes(executor: Any, backend: str) -> None:
    """Check that the program has symbols, and runs on this backend."""
    assert "for all sizes" in str(executor.plan())
    assert runs_compiled(executor) == (backend == "inductor")


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> list[torch.Tensor]:
    """Make an update in eager PyTorch; return the loss of each micro-batch."""
    optimizer.zero_grad()
    parts, losses = [*micro_batches], []
    for x, y in parts:
        _, loss = model(x, y)
        (loss / len(parts)).backward()
        losses.append(loss.detach())
    optimizer.step()
    return losses


# Saved programs.


def saved(folder: Path, make: Callable[[], Any], trains: bool) -> str:
    """Call a wrapped model at two lengths, and save it."""
    executor, path = make(), str(folder / "model.poptorch")
    for length in LENGTHS[:2]:
        executor(*batch(4, length)[: 1 + trains])
    executor.compileAndExport(path, *batch(4, 9)[: 1 + trains])
    executor.destroy()
    return path


@on_both
def test_a_loaded_model_is_called_at_many_sizes(backend: str, tmp_path: Path) -> None:
    model = Tagger().eval()

    def make() -> poptorch.PoplarExecutor:
        return poptorch.inferenceModel(copy.deepcopy(model), options(backend).programs(4))

    loaded = poptorch.load(saved(tmp_path, make, trains=False))

    with compilations() as compiled:
        for shape in SHAPES:
            x, _ = batch(*shape)
            torch.testing.assert_close(loaded(x), in_eager(model, x))
    assert len(compiled) <= 3  # the file's own size, all lengths, and all rows, too
    serves_all_sizes(loaded, backend)


@pytest.mark.larger("test_a_loaded_model_is_called_at_many_sizes")
@on_both
def test_a_program_from_a_file_trains_at_many_sizes(backend: str, tmp_path: Path) -> None:
    model = Tagger()
    eager = copy.deepcopy(model)

    def make(module: nn.Module) -> poptorch.PoplarExecutor:
        optimizer = momentum(module.parameters())
        return poptorch.trainingModel(module, options(backend).programs(4), optimizer)

    path = saved(tmp_path, lambda: make(copy.deepcopy(model)), trains=True)
    executor, plain = make(model), momentum(eager.parameters())
    executor.loadExecutable(path)

    for shape in SHAPES:
        _, loss = executor(*batch(*shape))
        (expected,) = update(eager, plain, [batch(*shape)])
        torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    serves_all_sizes(executor, backend)


# Weights.


@on_both
@pytest.mark.parametrize("make", [adamw, momentum])
def test_small_weights_are_updated_together_at_many_sizes(
    make: Callable[..., Any], backend: str
) -> None:
    model = Tagger(layers=6)
    eager = copy.deepcopy(model)
    optimizer, plain = make(model.parameters()), make(eager.parameters())
    executor = poptorch.trainingModel(model, options(backend).programs(4), optimizer)

    for length in LENGTHS:
        _, loss = executor(*batch(4, length))
        (expected,) = update(eager, plain, [batch(4, length)])
        torch.testing.assert_close(loss, expected)

    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    assert executor.plan().program.bundles
    serves_all_sizes(executor, backend)


# Number formats.


@pytest.mark.larger("test_calls_with_and_without_autocast_alternate_at_many_sizes")
@on_both
def test_bfloat16_at_many_sizes(backend: str) -> None:
    model = Tagger().to(torch.bfloat16).eval()
    opts = options(backend).programs(4).checkAgainstEager("error")
    executor = poptorch.inferenceModel(model, opts)

    for length in LENGTHS:
        x, _ = batch(4, length)
        torch.testing.assert_close(executor(x), in_eager(model, x), **HALF)

    serves_all_sizes(executor, backend)


@pytest.mark.larger("test_calls_with_and_without_autocast_alternate_at_many_sizes")
@on_both
def test_training_under_autocast_at_many_sizes(backend: str) -> None:
    model = Autocast(Tagger())
    eager = copy.deepcopy(model)
    optimizer, plain = momentum(model.parameters()), momentum(eager.parameters())
    opts = options(backend).programs(4).checkAgainstEager("error")
    executor = poptorch.trainingModel(model, opts, optimizer)

    for length in LENGTHS:
        _, loss = executor(*batch(4, length))
        (expected,) = update(eager, plain, [batch(4, length)])
        torch.testing.assert_close(loss, expected, **HALF)

    serves_all_sizes(executor, backend)


@on_both
def test_calls_with_and_without_autocast_alternate_at_many_sizes(backend: str) -> None:
    model = Tagger().eval()
    executor = poptorch.inferenceModel(model, options(backend).programs(4))

    with compilations() as compiled:
        for length in LENGTHS:
            x, _ = batch(4, length)
            with torch.autocast("cpu", torch.bfloat16):
                torch.testing.assert_close(executor(x), in_eager(model, x), **HALF)
            torch.testing.assert_close(executor(x), in_eager(model, x))

    assert len(compiled) == 4
    serves_all_sizes(executor, backend)


# Several micro-batches.

# By name of the mode, what is returned of values with a dimension for iterations, micro-batches of
# an accumulation, and replicas.
RETURNED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "All": lambda values: values,
    "Final": lambda values: values[-1, -1],
    "Sum": lambda values: values.sum((0, 1)),
    "EveryN": lambda values: values[1::2],
}


def in_mode(name: str, backend: str, **counts: int) -> poptorch.Options:
    mode = getattr(poptorch.OutputMode, name)
    return options(backend, **counts).programs(4).outputMode(mode, *[2] * (name == "EveryN"))


INFERENCE: dict[str, dict[str, int]] = {
    "iterations": {"iterations": 2},
    "replicas": {"replicas": 2},
    "both": {"iterations": 2, "replicas": 2},
}


def check_results(mode: str, name: str, backend: str) -> None:
    """Compare the results of inference with those of eager PyTorch for each micro-batch."""
    counts = {"iterations": 2 if mode == "EveryN" else 1, "replicas": 1} | INFERENCE[name]
    model, (iterations, replicas) = Tagger().eval(), counts.values()
    executor = poptorch.inferenceModel(model, in_mode(mode, backend, **counts))

    for length in LENGTHS:
        x, _ = batch(2 * iterations * replicas, length)
        values = in_eager(model, x).unflatten(0, (iterations, 1, replicas, 2))
        torch.testing.assert_close(executor(x), RETURNED[mode](values).reshape(-1, 3))

    serves_all_sizes(executor, backend)


@pytest.mark.parametrize("name", slow_but_the_first(INFERENCE))
@pytest.mark.parametrize("mode", slow_but_the_first(RETURNED))
def test_results_of_each_output_mode_at_many_sizes(mode: str, name: str) -> None:
    check_results(mode, name, "reference")


@pytest.mark.larger("test_results_of_each_output_mode_at_many_sizes")
@pytest.mark.parametrize(("mode", "name"), [("EveryN", "both"), ("Sum", "replicas")])
def test_compiled_results_of_output_modes_at_many_sizes(mode: str, name: str) -> None:
    check_results(mode, name, "inductor")


TRAINING: dict[str, dict[str, int]] = {
    "iterations": {"iterations": 2},
    "all": {"iterations": 2, "accumulation": 2, "replicas": 2},
    "accumulation": {"accumulation": 4},
    "accumulation, in chunks": {"accumulation": 4, "lanes": 2},
    "accumulation, one after another": {"accumulation": 2, "lanes": 1},
}


def check_losses(name: str, mode: str, backend: str) -> None:
    """Train, and compare losses and weights with those of eager PyTorch."""
    counts = {"iterations": 2 if mode == "EveryN" else 1} | TRAINING[name]
    lanes = counts.pop("lanes", 0)
    iterations, accumulation = counts["iterations"], counts.get("accumulation", 1)
    replicas, model = counts.get("replicas", 1), Tagger()
    eager = copy.deepcopy(model)
    optimizer, plain = momentum(model.parameters()), momentum(eager.parameters())
    opts = in_mode(mode, backend, **counts).lanes(lanes)
    executor = poptorch.trainingModel(model, opts, optimizer)

    for length in LENGTHS:
        x, y = batch(2 * iterations * accumulation * replicas, length)
        _, found = executor(x, y)
        losses = []
        for inputs in zip(x.chunk(iterations), y.chunk(iterations), strict=True):
            parts = zip(*(each.split(2) for each in inputs), strict=True)
            losses += update(eager, plain, parts)
        values = torch.stack(losses).unflatten(0, (iterations, accumulation, replicas))
        torch.testing.assert_close(found.reshape(-1), RETURNED[mode](values).reshape(-1))

    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    serves_all_sizes(executor, backend)


@pytest.mark.parametrize("mode", slow_but_the_first(RETURNED))
@pytest.mark.parametrize("name", slow_but_the_first(TRAINING))
def test_losses_of_each_output_mode_at_many_sizes(name: str, mode: str) -> None:
    check_losses(name, mode, "reference")


COMPILED = [
    ("all", "EveryN"),
    ("iterations", "All"),
    ("accumulation, in chunks", "Final"),
    ("accumulation, one after another", "Sum"),
]


@pytest.mark.larger("test_losses_of_each_output_mode_at_many_sizes")
@pytest.mark.parametrize(("name", "mode"), COMPILED)
def test_compiled_losses_of_output_modes_at_many_sizes(name: str, mode: str) -> None:
    check_losses(name, mode, "inductor")


# Weights that are prepared when they change.


class Image(nn.Module):
    """A convolution and a product, each with a norm that is folded into its weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.linear, self.last = nn.Linear(8, 6), nn.BatchNorm1d(6)
        for norm in (self.norm, self.last):
            norm.running_mean.uniform_(-0.5, 0.5)
            norm.running_var.uniform_(0.5, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return six numbers for each image."""
        values = nn.functional.relu(self.norm(self.convolution(x)))
        return nn.functional.relu(self.last(self.linear(values.mean((2, 3)))))


IMAGES = {
    "rows": ((1, 3, 8, 8), (4, 3, 8, 8), (6, 3, 8, 8), (2, 3, 8, 8), (9, 3, 8, 8)),
    "sides": ((2, 3, 8, 8), (2, 3, 6, 6), (2, 3, 12, 12), (2, 3, 5, 5), (2, 3, 7, 7)),
    "both": ((2, 3, 8, 8), (3, 3, 6, 7), (4, 3, 12, 5), (2, 3, 5, 9), (5, 3, 9, 6)),
}


@pytest.fixture
def _everything_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    pack_everything(monkeypatch)


@pytest.mark.full("compiled code alone prepares weights")
@pytest.mark.usefixtures("_everything_is_packed")
@pytest.mark.parametrize("shapes", IMAGES.values(), ids=IMAGES)
def test_weights_are_prepared_for_many_sizes(shapes: tuple[tuple[int, ...], ...]) -> None:
    model = Image().eval()
    executor = poptorch.inferenceModel(model, options("inductor").programs(4))

    for shape in shapes:
        x = normal(*shape)
        torch.testing.assert_close(executor(x), in_eager(model, x))
    with torch.no_grad():
        model.convolution.weight.mul_(2.0)
        model.linear.weight.mul_(0.5)
    executor.copyWeightsToDevice()
    for shape in shapes:
        x = normal(*shape)
        torch.testing.assert_close(executor(x), in_eager(model, x))

    plan = str(executor.plan())
    assert "when weights change" in plan
    assert "for all sizes" in plan


class Chosen(nn.Module):
    """Chooses from the values of all positions. Their gradient begins as zeros of this shape."""

    def __init__(self, choose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.choose = nn.Linear(8, 4), choose

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = self.choose(self.linear(x), x)
        return chosen, poptorch.identity_loss(chosen.square(), reduction="mean")


def at_last_positions(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return values[torch.arange(3), (x[..., 0] > 0).sum(1) - 1]


CHOOSING: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "the highest": lambda values, _: values.max(1)[0],
    "the upper half": lambda values, x: values.topk(x.shape[1] // 2, 1)[0].mean(1),
    "the last of each row": at_last_positions,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("choose", slow_but_the_first(CHOOSING))
def test_micro_batches_of_all_lengths_choose_among_positions(choose: str, backend: str) -> None:
    torch.manual_seed(0)
    model = Chosen(CHOOSING[choose])
    eager = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, eager))
    opts = options(backend, accumulation=2).programs(4)
    executor = poptorch.trainingModel(model, opts, ours)

    for length in (5, 9, 12, 7):
        x = normal(6, length, 8)
        executor(x)
        theirs.zero_grad()
        for rows in x.chunk(2):
            (eager(rows)[1] / 2).backward()
        theirs.step()

    assert executor._session.sizes.reasons == {}
    torch.testing.assert_close(model.state_dict(), eager.state_dict())

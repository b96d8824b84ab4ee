"""Exported files compute, bit by bit, what the interpreter does."""

import copy
import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import poptorch
import poptorch_ipu
from helpers import eager_loop, exported
from helpers.source_tree import ROOT
from helpers.wrapping import Graded, Having, options
from helpers.zoo import ZOO

ours, torchs = poptorch.optim, torch.optim

Batch = list[torch.Tensor] | tuple[torch.Tensor, ...]
Optimizer = Callable[[Any], torch.optim.Optimizer]


class Program(NamedTuple):
    """A model, its options, what makes its optimizer, if it is trained, and its batches."""

    model: nn.Module
    options: poptorch.Options
    optimizer: Optimizer | None
    batches: list[Batch]


@pytest.fixture(scope="module")
def process_without_poptorch() -> Iterator[ProcessPoolExecutor]:
    """Return a process that cannot import poptorch."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), exported.alone) as pool:
        yield pool


def small(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Two layers."""
    layers = {"first": nn.Linear(6, 5), "tanh": nn.Tanh(), "second": nn.Linear(5, 3)}
    return Graded(both=True, **layers).to(dtype)


def rows(count: int, calls: int = 10, dtype: torch.dtype = torch.float32) -> list[Batch]:
    """Batches of this many rows for the two layers."""

    def draw(size: int) -> torch.Tensor:
        return torch.randn(count, size).to(dtype)

    return [(draw(6), draw(3)) for _ in range(calls)]


OPTIMIZERS = {
    "SGD": lambda p: ours.SGD(p, 0.05),
    "momentum": lambda p: ours.SGD(p, 0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "combined": lambda p: ours.SGD(p, 0.05, momentum=0.9, use_combined_accum=True),
    "maximized": lambda p: torchs.SGD(p, 0.05, momentum=0.9, maximize=True),
    "Adam": lambda p: ours.Adam(p, 0.01, weight_decay=0.1),
    "AdamW": lambda p: ours.AdamW(p, 0.01, bias_correction=False),
    "clipped": lambda p: ours.AdamW(p, 0.01, max_grad_norm=0.1),
    "RMSprop": lambda p: ours.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "LAMB": lambda p: ours.LAMB(p, 0.01, weight_decay=0.01),
    "groups": lambda p: torchs.SGD([{"params": w, "lr": 0.1 / (at + 1)} for at, w in enumerate(p)]),
    "scaled": lambda p: ours.Adam(p, 0.01, loss_scaling=64.0),
    **{
        f"torch's {name}": lambda p, kind=kind, numbers=numbers: getattr(torchs, kind)(p, **numbers)
        for name, (kind, numbers) in eager_loop.OPTIMIZERS.items()
    },
}
LOOPS = {
    "one": options,
    "iterations": lambda: options(iterations=4),
    "accumulation": lambda: options(accumulation=4),
    "lanes": lambda: options(accumulation=2, replicas=2, iterations=2),
    "chunks": lambda: options(accumulation=4, iterations=2).lanes(2),
    "one by one": lambda: options(accumulation=2, iterations=2).lanes(1),
    "replicas": lambda: options(replicas=2, accumulation=2, iterations=2).lanes(1),
}


def with_optimizer(name: str, dtype: torch.dtype = torch.float32) -> Program:
    """The two layers with an optimizer."""
    opts = options(accumulation=2, iterations=2)
    return Program(small(dtype), opts, OPTIMIZERS[name], rows(16, dtype=dtype))


def with_results(loop: str, mode: str) -> Program:
    """The two layers with loops and an output mode."""
    period = 2 if mode == "EveryN" and "iter" in loop else 1
    opts = LOOPS[loop]().outputMode(poptorch.OutputMode[mode], period)
    return Program(small(), opts, OPTIMIZERS["SGD"], rows(32, 3))


def inference(lanes: int, mode: str) -> Program:
    """The two layers in inference."""
    opts = options(iterations=4, replicas=1 if lanes == 2 else 2).lanes(lanes)
    return Program(small(), opts.outputMode(poptorch.OutputMode[mode]), None, rows(32, 3))


def of_zoo(name: str, loop: str) -> Program:
    """Batch norm with its statistics, dropout, LSTM, embeddings, tied weights."""
    opts = LOOPS[loop]().randomSeed(7).broadcastBuffers(False)
    batches: list[Batch] = [ZOO[name].inputs(32) for _ in range(10)]
    return Program(ZOO[name].build(), opts, OPTIMIZERS["Adam"], batches)


def bert(layers: int, dropout: float) -> nn.Module:
    """A small BERT that classifies."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        vocab_size=512,
        intermediate_size=128,
        max_position_embeddings=24,
        num_labels=4,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    whole = transformers.BertForSequenceClassification(config)
    return Having(lambda m, ids, labels: m.bert(input_ids=ids, labels=labels).loss, bert=whole)


def bert_batch() -> Batch:
    return torch.randint(512, (16, 24)), torch.randint(4, (16,))


def drawing() -> nn.Module:
    """Layers that are written once, and draw."""
    kinds = nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1), nn.GELU()
    layers = (copy.deepcopy(kind) for _ in range(8) for kind in kinds)
    whole = nn.Sequential(*(nn.Sequential(*itertools.islice(layers, 10)) for _ in range(4)))
    return Having(lambda m, x, y: nn.functional.mse_loss(m.whole(x), y), whole=whole)


def classifier() -> nn.Module:
    """The model of the example for Fashion-MNIST."""
    return poptorch_ipu.ModelWithLoss(poptorch_ipu.ClassificationModel(), nn.NLLLoss())


def script(name: str) -> Any:
    """The script of an example, as a module."""
    return exported.loaded(ROOT / "examples" / name / "train.py")


class Example(NamedTuple):
    """A function that makes a model, the micro-batches, and a function that makes a batch."""

    make: Callable[[], nn.Module]
    accumulation: int
    batch: Callable[[], Batch]


EXAMPLES = {
    "fashion_mnist": Example(
        classifier, 1, lambda: (torch.randn(16, 1, 28, 28), torch.randint(10, (16,)))
    ),
    "bert2": Example(lambda: bert(2, dropout=0.0), 2, bert_batch),
    "bert12": Example(lambda: bert(12, dropout=0.1), 2, bert_batch),
    "pipeline": Example(
        lambda: script("pipeline").Net(70),
        8,
        lambda: (torch.randint(70, (32, 32)), torch.randint(70, (32,))),
    ),
    "series": Example(
        lambda: script("series").Forecast(), 4, lambda: (torch.randn(48, 24, 1), torch.randn(48))
    ),
    "drawing": Example(drawing, 2, lambda: (torch.randn(8, 16), torch.randn(8, 16))),
}


def example(name: str) -> Program:
    """The model of an example."""
    make, accumulation, batch = EXAMPLES[name]
    batches: list[Batch] = [[*batch()] for _ in range(10)]
    return Program(make(), options(accumulation=accumulation), OPTIMIZERS["torch's adamw"], batches)


# By name: what makes a program, and its arguments.
BITS: dict[str, tuple[Any, ...]] = {
    **{name: (with_optimizer, name) for name in OPTIMIZERS},
    **{f"{n}, {m}": (with_results, n, m) for n in LOOPS for m in ("Final", "All", "EveryN", "Sum")},
    **{f"{n} lanes, {m}": (inference, n, m) for n in (1, 2, 4) for m in ("Final", "All", "Sum")},
    **{f"{n}, {m}": (of_zoo, n, m) for n in ZOO for m in ("one", "lanes", "replicas", "chunks")},
    **{str(t): (with_optimizer, "scaled", t) for t in (torch.float16, torch.bfloat16)},
    **{n: (example, n) for n in EXAMPLES},
}


def wrapped(program: Program) -> poptorch.PoplarExecutor:
    """Wrap the model of a program."""
    if program.optimizer is None:
        return poptorch.inferenceModel(program.model, program.options)
    optimizer = program.optimizer(program.model.parameters())
    return poptorch.trainingModel(program.model, program.options, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("name", BITS)
def test_an_exported_file_computes_the_same_bits_without_poptorch(
    name: str, process_without_poptorch: ProcessPoolExecutor, tmp_path: Path
) -> None:
    """Results of all calls, and weights and buffers after them; ruff likes the file's style."""
    torch.manual_seed(0)
    make, *arguments = BITS[name]
    program: Program = make(*arguments)
    executor, file = wrapped(program), tmp_path / "step.py"
    executor.compile(*program.batches[0])

    executor.export(file)

    exported.check_style(file)
    torch.save(program.batches, file.with_suffix(".batches"))
    expected = [executor(*batch) for batch in program.batches]
    process_without_poptorch.submit(exported.run, file).result()
    results, state = torch.load(file.with_suffix(".out"))
    torch.testing.assert_close(results, expected, rtol=0, atol=0, equal_nan=True)
    trained = {k: v for k, v in executor.model.state_dict().items() if k in state}
    assert trained
    for key, value in trained.items():  # the module has the first replica's buffers
        state[key] = state[key] if state[key].shape == value.shape else state[key][0]
    torch.testing.assert_close({k: state[k] for k in trained}, trained, rtol=0, atol=0)
    assert len(file.read_text().splitlines()) < 500


@pytest.mark.slow
@pytest.mark.parametrize("layers", [3, 12])
def test_equal_layers_are_one_function_that_is_called_for_each(layers: int, tmp_path: Path) -> None:
    """Each of the two functions is defined once and called once for each layer."""
    torch.manual_seed(0)
    model = bert(layers, dropout=0.1)
    program = Program(
        model, options(accumulation=2), OPTIMIZERS["torch's adamw"], [[*bert_batch()]]
    )
    executor, file = wrapped(program), tmp_path / "step.py"
    executor.compile(*program.batches[0])

    executor.export(file)

    text = file.read_text()
    assert text.count("layer_forward(") == 1 + layers
    assert text.count("layer_backward(") == 1 + layers


class Gathered(nn.Module):
    """Reads elements at positions in two tensors."""

    def forward(self, x: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return x[rows, columns]


def test_names_that_a_library_adds_to_tensors_are_not_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``functorch.dim`` adds ``Tensor.index``, whose arguments are not those of the operator."""
    monkeypatch.setattr(torch.Tensor, "index", lambda *args: None, raising=False)
    batch = torch.randn(3, 4), torch.tensor([0, 2]), torch.tensor([3, 1])
    model = poptorch.inferenceModel(Gathered(), options("reference"))
    expected = model(*batch)
    file = tmp_path / "gathered.py"

    model.export(file)

    step = exported.loaded(file)
    state, _ = step.load(file.with_suffix(".safetensors"))
    torch.testing.assert_close(step.step(*state, *batch), expected, rtol=0, atol=0)

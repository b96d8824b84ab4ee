"""An exported step gives the bits of the interpreter, in a process that has no poptorch."""

import copy
import itertools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
import poptorch_ipu
from helpers import beside, exported
from helpers.source_tree import ROOT
from helpers.wrapping import Graded, Having, options
from helpers.zoo import ZOO

pytestmark = pytest.mark.slow
ours, torchs, Made = poptorch.optim, torch.optim, tuple[nn.Module, Any, Any, list[Any]]


@pytest.fixture(scope="module")
def elsewhere():
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), exported.alone) as pool:
        yield pool


def small(dtype: torch.dtype = torch.float32) -> nn.Module:
    layers = {"first": nn.Linear(6, 5), "tanh": nn.Tanh(), "second": nn.Linear(5, 3)}
    return Graded(both=True, **layers).to(dtype)


def rows(count: int, calls: int = 10, dtype: torch.dtype = torch.float32) -> list[Any]:
    draw = lambda size: torch.randn(count, size).to(dtype)  # noqa: E731
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
    **{f"torch's {name}": lambda p, kind=kind, numbers=numbers: getattr(torchs, kind)(p, **numbers)
       for name, (kind, numbers) in beside.OPTIMIZERS.items()},
}  # fmt: skip
LOOPS = {
    "one": options, "iterations": lambda: options(iterations=4),
    "accumulation": lambda: options(accumulation=4),
    "lanes": lambda: options(accumulation=2, replicas=2, iterations=2),
    "chunks": lambda: options(accumulation=4, iterations=2).lanes(2),
    "one by one": lambda: options(accumulation=2, iterations=2).lanes(1),
    "replicas": lambda: options(replicas=2, accumulation=2, iterations=2).lanes(1),
}  # fmt: skip


def optimizer(name: str, dtype: torch.dtype = torch.float32) -> Made:
    opts = options(accumulation=2, iterations=2)
    return small(dtype), opts, OPTIMIZERS[name], rows(16, dtype=dtype)


def results(loop: str, mode: str) -> Made:
    period = 2 if mode == "EveryN" and "iter" in loop else 1
    opts = LOOPS[loop]().outputMode(poptorch.OutputMode[mode], period)
    return small(), opts, OPTIMIZERS["SGD"], rows(32, 3)


def inference(lanes: int, mode: str) -> Made:
    opts = options(iterations=4, replicas=1 if lanes == 2 else 2).lanes(lanes)
    return small(), opts.outputMode(poptorch.OutputMode[mode]), None, rows(32, 3)


def model(name: str, loop: str) -> Made:
    """Batch norm with its statistics, dropout, LSTM, embeddings, tied weights."""
    opts = LOOPS[loop]().randomSeed(7).broadcastBuffers(False)
    return ZOO[name].build(), opts, OPTIMIZERS["Adam"], [ZOO[name].inputs(32) for _ in range(10)]


def bert(layers: int, dropout: float) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=64, num_hidden_layers=layers, num_attention_heads=4, vocab_size=512,
        intermediate_size=128, max_position_embeddings=24, num_labels=4,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    whole = transformers.BertForSequenceClassification(config)
    return Having(lambda m, ids, labels: m.bert(input_ids=ids, labels=labels).loss, bert=whole)


def drawing() -> nn.Module:
    """Layers that are written once, and draw."""
    kinds = nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1), nn.GELU()
    layers = (copy.deepcopy(kind) for _ in range(8) for kind in kinds)
    whole = nn.Sequential(*(nn.Sequential(*itertools.islice(layers, 10)) for _ in range(4)))
    return Having(lambda m, x, y: nn.functional.mse_loss(m.whole(x), y), whole=whole)


def script(name: str) -> Any:
    return exported.loaded(ROOT / "examples" / name / "train.py")


# By name: the model, its micro-batches, and what makes a batch.
EXAMPLES = {
    "fashion_mnist": (
        lambda: poptorch_ipu.ModelWithLoss(poptorch_ipu.ClassificationModel(), nn.NLLLoss()), 1,
        lambda: (torch.randn(16, 1, 28, 28), torch.randint(10, (16,)))),
    **{f"bert{n}": (lambda n=n, p=p: bert(n, p), 2,
                    lambda: (torch.randint(512, (16, 24)), torch.randint(4, (16,))))
       for n, p in ((2, 0.0), (12, 0.1))},
    "pipeline": (lambda: script("pipeline").Net(70), 8,
                 lambda: (torch.randint(70, (32, 32)), torch.randint(70, (32,)))),
    "series": (lambda: script("series").Forecast(), 4,
               lambda: (torch.randn(48, 24, 1), torch.randn(48))),
    "drawing": (drawing, 2, lambda: (torch.randn(8, 16), torch.randn(8, 16))),
}  # fmt: skip


def example(name: str) -> Made:
    make, accumulation, batch = EXAMPLES[name]
    batches = [[*batch()] for _ in range(10)]
    return make(), options(accumulation=accumulation), OPTIMIZERS["torch's adamw"], batches


CASES = {
    **{name: (optimizer, name) for name in OPTIMIZERS},
    **{f"{n}, {m}": (results, n, m) for n in LOOPS for m in ("Final", "All", "EveryN", "Sum")},
    **{f"{n} lanes, {m}": (inference, n, m) for n in (1, 2, 4) for m in ("Final", "All", "Sum")},
    **{f"{n}, {m}": (model, n, m) for n in ZOO for m in ("one", "lanes", "replicas", "chunks")},
    **{str(t): (optimizer, "scaled", t) for t in (torch.float16, torch.bfloat16)},
    **{n: (example, n) for n in EXAMPLES},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_results_and_weights(name: str, elsewhere: ProcessPoolExecutor, tmp_path) -> None:
    torch.manual_seed(0)
    make, *words = CASES[name]
    model, opts, optimizer, batches = make(*words)
    if optimizer is None:
        executor = poptorch.inferenceModel(model, opts)
    else:
        executor = poptorch.trainingModel(model, opts, optimizer(model.parameters()))
    file = tmp_path / "step.py"
    executor.compile(*batches[0])
    executor.export(file)
    exported.check_style(file)
    torch.save(batches, file.with_suffix(".batches"))
    expected = [executor(*batch) for batch in batches]
    elsewhere.submit(exported.run, file).result()
    results, state = torch.load(file.with_suffix(".out"))
    torch.testing.assert_close(results, expected, rtol=0, atol=0, equal_nan=True)
    trained = {k: v for k, v in executor.model.state_dict().items() if k in state}
    assert trained
    for key, value in trained.items():  # the module has the first replica's buffers
        state[key] = state[key] if state[key].shape == value.shape else state[key][0]
    torch.testing.assert_close({k: state[k] for k in trained}, trained, rtol=0, atol=0)
    text = file.read_text()
    assert len(text.splitlines()) < 500
    assert name != "bert12" or text.count("layer_forward(") == text.count("layer_backward(") == 13

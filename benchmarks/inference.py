"""Compare inference with eager PyTorch, frozen ``torch.compile``, ONNX Runtime and OpenVINO.

All contestants alternate in one process. Ratios are the time of the other one divided by ours. A
runtime takes part if it is installed: ``pip install onnx onnxscript onnxruntime openvino``. If
transformers is installed, one row is a step of a GPT-2 with a cache of keys and values.

Usage: python benchmarks/inference.py [ROW ...] [--small] [--threads N] [--seconds S] [--out FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import poptorch
from harness import alternate, medians
from workloads import Bert, ClassificationModel, Mlp, ResNet, tokens

Run = Callable[[], Any]
Inputs = tuple[torch.Tensor, ...]
LAYERS, HEADS, WIDTH, CACHED = 4, 4, 256, 64


class Scores(nn.Module):
    """A model of the main speed table without its loss."""

    def __init__(self, model: Bert | ResNet | Mlp) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        model = self.model
        if isinstance(model, Bert):
            return model.head(model.encoder(model.tokens(x) + model.positions))
        if isinstance(model, ResNet):
            return model.head(model.blocks(model.stem(x)).mean((2, 3)))
        return model.layers(x)


class Step(nn.Module):
    """Computes the scores of the next token of a GPT-2, with cached keys and values."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=1000,
            n_positions=128,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.model = GPT2LMHeadModel(config)

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Any:
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        for layer in range(LAYERS):
            cache.update(keys[layer], values[layer], layer)
        return self.model(input_ids=x, past_key_values=cache, use_cache=True).logits


def step(rows: int) -> Inputs:
    """Return a token for each row, and the cached keys and values."""
    shape = (LAYERS, rows, HEADS, CACHED, WIDTH // HEADS)
    return torch.randint(0, 1000, (rows, 1)), torch.randn(shape), torch.randn(shape)


MODELS: dict[str, tuple[str, Callable[[], nn.Module], Callable[[int], Inputs]]] = {
    "cnn": ("tutorial CNN", ClassificationModel, lambda rows: (torch.randn(rows, 1, 28, 28),)),
    "resnet": (
        "ResNet-18 shape", lambda: Scores(ResNet()), lambda rows: (torch.randn(rows, 3, 32, 32),)
    ),
    "bert": ("BERT", lambda: Scores(Bert()), lambda rows: tokens(rows)[:1]),
    "mlp": ("MLP 784-512-512-10", lambda: Scores(Mlp()), lambda rows: (torch.randn(rows, 784),)),
    "gpt2": ("GPT-2 step, 64 cached", Step, step),
}  # fmt: skip
ROWS = (
    "cnn-1", "cnn-64", "resnet-1", "resnet-8", "bert-1", "bert-8", "mlp-1", "mlp-64", "gpt2-1",
    "gpt2-8",
)  # fmt: skip
SMALL = ("cnn-1", "mlp-64")
# The first one is what users get, the others are fixed with options.backend.
BY_RUNTIME, COMPILED = "poptorch, onnxruntime", "poptorch, compiled"
# Threads spin within a call, or never. The load of the machine decides which is faster.
WAITING = {
    "ONNX Runtime": ("session.force_spinning_stop", "1"),
    "ONNX Runtime, no spinning": ("session.intra_op.allow_spinning", "0"),
}


def ours(model: nn.Module, inputs: Inputs, backend: str = "optimise") -> Run:
    """Return our contestant, compiled in advance."""
    options = poptorch.Options().backend(backend).showCompilationProgressBar(False)
    wrapped = poptorch.inferenceModel(model, options)
    wrapped(*inputs)
    return lambda: wrapped(*inputs)


def fastest(model: nn.Module, inputs: Inputs) -> Run:
    """Return our contestant after it has chosen between compiled code and ONNX Runtime."""
    options = poptorch.Options().showCompilationProgressBar(False)
    wrapped = poptorch.inferenceModel(model, options)
    wrapped.compile(*inputs)
    while not getattr(wrapped._executable, "decided", True):
        wrapped(*inputs)
    return lambda: wrapped(*inputs)


def eager(model: nn.Module, inputs: Inputs) -> Run:
    """Return a call of the unchanged model."""

    def run() -> Any:
        with torch.inference_mode():
            return model(*inputs)

    return run


def frozen(model: nn.Module, inputs: Inputs) -> Run:
    """Compile the model with torch, with the weights as constants."""
    import torch._inductor.config as settings

    with settings.patch(freezing=True), torch.no_grad():
        compiled = torch.compile(model)
        compiled(*inputs)

    def run() -> Any:
        with torch.no_grad():
            return compiled(*inputs)

    return run


def onnxruntime(path: Path, inputs: Inputs, threads: int, setting: tuple[str, str]) -> Run:
    """Use threads that sleep between calls, because spinning threads slow down the others."""
    import onnxruntime as runtime

    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry(*setting)
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    given = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
    return lambda: session.run(None, given)[0]


def openvino(path: Path, inputs: Inputs, threads: int) -> Run:
    """Compute in float32, like all others."""
    import openvino as runtime

    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    request = runtime.Core().compile_model(str(path), "CPU", settings).create_infer_request()
    given = [x.numpy() for x in inputs]
    return lambda: request.infer(given)[0]


def contestants(row: str, threads: int, folder: Path) -> dict[str, Run]:
    """Create the contestants, and check that they compute the same values."""
    name, rows = row.rsplit("-", 1)
    _, make, data = MODELS[name]
    torch.manual_seed(0)
    model, inputs = make().eval(), data(int(rows))
    runs = {"eager": eager(model, inputs), "torch.compile": frozen(model, inputs)}
    reference: dict[str, Callable[[Path, Inputs, int], Run]] = {}
    if importlib.util.find_spec("onnxruntime"):
        reference = {title: partial(onnxruntime, setting=each) for title, each in WAITING.items()}
    if importlib.util.find_spec("openvino"):
        reference["OpenVINO"] = openvino
    if reference:
        path = folder / "model.onnx"
        torch.onnx.export(model, inputs, str(path), dynamo=True, verbose=False)
        runs |= {title: each(path, inputs, threads) for title, each in reference.items()}
    if "ONNX Runtime" in runs:
        runs[BY_RUNTIME] = ours(model, inputs, "onnxruntime")
        runs[COMPILED] = ours(model, inputs)
    runs["poptorch"] = fastest(model, inputs)
    expected = runs["eager"]()
    for run in runs.values():
        torch.testing.assert_close(torch.as_tensor(run()), expected, rtol=1e-3, atol=1e-4)
    return runs


def measure(runs: dict[str, Run], seconds: float) -> dict[str, float]:
    """Return the median seconds of each contestant."""
    end = time.perf_counter() + min(1.0, seconds)
    while time.perf_counter() < end:  # until it knows how many threads it needs
        runs["poptorch"]()
    once = medians(alternate(runs, 5))
    rounds = max(11, min(1000, int(seconds / sum(once.values()))))
    return medians(alternate(runs, rounds))


def document(rows: dict[str, dict[str, float]]) -> str:
    """Return the table as a section of the results."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    others = [name for name in names if name != "poptorch"]
    head = ["model, rows", *names, *(f"vs {name}" for name in others)]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row, seconds in rows.items():
        name, count = row.rsplit("-", 1)
        cells = [f"{MODELS[name][0]}, {count}"]
        cells += [f"{seconds[each] * 1e3:.2f}" if each in seconds else "" for each in names]
        ratios = {each: seconds[each] / seconds["poptorch"] for each in others if each in seconds}
        texts = {each: f"{r:.2f}" if r >= 1 else f"**{r:.2f}**" for each, r in ratios.items()}
        cells += [texts.get(each, "") for each in others]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print a line for each row, and then the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--small", action="store_true", help="measure two rows, each for a second")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="number of threads (default: all cores)"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds for each row")
    parser.add_argument("--out", type=Path, help="JSON file to which the medians are added, by row")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    rows = chosen.rows or (SMALL if chosen.small else ROWS)
    if importlib.util.find_spec("transformers") is None:
        rows = [row for row in rows if not row.startswith("gpt2")]
    found = json.loads(chosen.out.read_text()) if chosen.out and chosen.out.exists() else {}
    for row in rows:
        with tempfile.TemporaryDirectory() as folder:
            runs = contestants(row, chosen.threads, Path(folder))
            found[row] = measure(runs, 1.0 if chosen.small else chosen.seconds)
        own = found[row]["poptorch"]
        shown = (f"{name} {each / own:.2f}" for name, each in found[row].items() if each != own)
        print(f"{row:9s} {own * 1e3:8.3f} ms   {'  '.join(shown)}", flush=True)
        if chosen.out:
            chosen.out.write_text(json.dumps(found, indent=1))
    fastest_others = (
        min(seconds for name, seconds in row.items() if not name.startswith("poptorch"))
        for row in found.values()
    )
    ratios = [
        other / row["poptorch"] for other, row in zip(fastest_others, found.values(), strict=True)
    ]
    print(f"\n{document(found)}\nfastest other / ours: median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()

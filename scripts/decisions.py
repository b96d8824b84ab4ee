"""Write what the programs of small models consist of into tests/decisions.txt, as text and digests.

Usage: python scripts/decisions.py

The file shows decisions that usually do not change any number: which micro-batches run side by
side, what is recomputed, and what is fused, packed or moved. After a change that is meant to change
a decision, the difference of the file shows which other decisions changed.
"""

from __future__ import annotations

import hashlib
import math
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import fx, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))

import poptorch  # noqa: E402
from helpers.staging import Captured  # noqa: E402
from helpers.wrapping import Having, options  # noqa: E402
from helpers.zoo import ROWS, ZOO  # noqa: E402
from poptorch._base import private  # noqa: E402
from poptorch._compile import sharded_weights  # noqa: E402
from poptorch._compile.build import training_program  # noqa: E402
from poptorch._cpu import Inductor, compiler, in_place_writes, lowering, product_libraries  # noqa: E402
from poptorch._ir.block_labels import label_of  # noqa: E402
from poptorch._ir.indices import preconditions  # noqa: E402
from poptorch._ir.operators import name_of  # noqa: E402
from poptorch._ops.written_out import written_out  # noqa: E402
from poptorch.backends.fewer_calls import with_fewer_calls  # noqa: E402
from poptorch.backends.prepare import prepare, without_writes  # noqa: E402

PAGE = ROOT / "tests" / "decisions.txt"
HEAD = f"torch {torch.__version__.partition('+')[0]}; written by scripts/decisions.py"
optim = poptorch.optim
Case = Callable[[], Any]  # to a plan
Change = Callable[[poptorch.Options], Any]


def _described(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return str([*map(_described, value)])
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    strides = "" if value.is_mkldnn else value.stride()
    return f"{value.dtype} {tuple(value.shape)} {strides}"


def _graph(title: str, module: fx.GraphModule, labels: bool = False) -> Iterator[str]:
    """Count the operators. The digest covers their order, their inputs and their layouts."""
    numbers = {node: f"%{at}" for at, node in enumerate(module.graph.nodes)}
    text, names = [], Counter[str]()
    for node in module.graph.nodes:
        name = name_of(node) if node.op == "call_function" else node.op
        label = label_of(node)
        seen = (label.visit, label.backward, label.recomputed, label.path) if labels else ()
        arguments = fx.map_arg((node.args, node.kwargs), numbers.__getitem__)
        text.append(f"{name} {arguments} {_described(node.meta.get('val'))} {seen}")
        if node.op == "call_function":
            names[name.rpartition(".")[2]] += 1
    digest = hashlib.sha256("\n".join(text).encode()).hexdigest()[:8]
    yield f"  {title}: {digest}"
    counts = ", ".join(f"{times}~{name}" for name, times in names.most_common())
    for line in textwrap.wrap(counts, 96):
        yield f"    {line.replace('~', ' ')}"
    for name, part in module.named_children():
        if isinstance(part, fx.GraphModule):  # the body of a loop
            yield from _graph(f"{title}.{name}", part, labels)


def lines_of(plan: Any) -> Iterator[str]:
    yield from (f"  {line}".rstrip() for line in str(plan.program).splitlines())
    for name, ranges in preconditions(plan.program.graphs, checked=True).items():
        if ranges != ():
            yield f"  {name} may fail when it has begun: its state is copied before"
    ready = Inductor().prepared(plan).program
    for name, graph in plan.program.graphs.items():
        yield from _graph(name, graph.module, labels=True)
        yield from _graph(f"{name}, interpreted", with_fewer_calls(prepare(graph)))
    if ready.prepare is not None:
        yield from _graph("prepare", ready.prepare.module)
    for name, graph in ready.graphs.items():
        module, places = without_writes(written_out(graph))
        _, inputs = lowering.fakes(graph.examples())
        rules = compiler.rules(module.graph)
        made = lowering.lower(module, places, inputs, rules, private.select_decomp_table())
        in_place_writes.place_writes(made.graph)
        yield from _graph(f"{name}, compiled", made)


def _trained(model: nn.Module, opts: poptorch.Options, make: Any, *inputs: torch.Tensor) -> Any:
    wrapper = poptorch.trainingModel(model, opts, make(model.parameters()))
    wrapper.compile(*inputs)
    return wrapper.plan()


def _inferred(model: nn.Module, opts: poptorch.Options, *inputs: torch.Tensor) -> Any:
    wrapper = poptorch.inferenceModel(model.eval(), opts)
    wrapper.compile(*inputs)
    return wrapper.plan()


def _nothing(opts: poptorch.Options) -> None:
    pass


def _zoo(name: str, make: Any, change: Change = _nothing, **counts: int) -> Case:
    def plan() -> Any:
        opts = options(**counts).randomSeed(1)
        change(opts)
        rows = ROWS * math.prod(counts.values())
        return _trained(ZOO[name].build(), opts, make, *ZOO[name].inputs(rows))

    return plan


def _zoo_inference(name: str, **counts: int) -> Case:
    rows = ROWS * math.prod(counts.values())
    return lambda: _inferred(ZOO[name].build(), options(**counts), *ZOO[name].inputs(rows))


def _running(opts: poptorch.Options) -> None:
    strategy = poptorch.MeanReductionStrategy.Running
    opts.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)


class Deep(nn.Module):
    """Layers with parts that are not recomputed. The last layers are in their own block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at, layer in enumerate(self.layers):
            if at == 2:
                poptorch.Block.start("second", ipu_id=1)
            x = F.layer_norm(F.dropout(layer(x).tanh().exp(), 0.2), (8,)).sigmoid()
            if at % 2 == 0:
                x = poptorch.recomputationCheckpoint(x)
        return poptorch.identity_loss(x.square(), "mean")


def _recomputed() -> Any:
    opts = options(accumulation=2).randomSeed(1)
    opts.setExecutionStrategy(poptorch.ShardedExecution())
    opts._Popart.set("autoRecomputation", 3)
    return _trained(Deep(), opts, lambda p: optim.SGD(p, lr=0.1), torch.randn(8, 8))


class Images(nn.Module):
    """Convolutions with few, with many and with several channels, pooling and normalisation."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, stride=2), nn.Conv2d(6, wide, 3, padding=1)
        self.third, self.norm = nn.Conv2d(wide, wide, 3, groups=2), nn.GroupNorm(2, wide)
        self.batch, self.head = nn.BatchNorm2d(6), nn.Linear(wide, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        x = self.second(F.max_pool2d(self.batch(self.first(x)).relu(), 2))
        x = self.head(self.third(self.norm(x).relu()).mean((2, 3)))
        return x if y is None else (x, F.cross_entropy(x, y))


def _images(wide: int, rows: int) -> Case:
    x, y = torch.randn(rows, 3, 33, 33), torch.zeros(rows, dtype=torch.int64)
    return lambda: _trained(
        Images(wide), options(), lambda p: optim.SGD(p, lr=0.1, momentum=0.9), x, y
    )


def _read_images() -> Any:
    return _inferred(Images(64), options(), torch.randn(16, 3, 65, 65))


def _products(rows: int) -> Case:
    """Packed and plain weights, with activations, sums and other readers."""

    def forward(m: Having, x: torch.Tensor) -> Any:
        y = F.gelu(m.wide(x)).view(rows, 2, -1).flatten(1)
        return m.small(y) * 2 + m.scale, F.relu(m.turned(y)), m.scale.exp().sum(), y @ m.plain

    layers = {
        "wide": nn.Linear(128, 1024),
        "small": nn.Linear(1024, 64),
        "turned": nn.Linear(1024, 128, False),
    }
    parts = {"scale": torch.rand(64), "plain": torch.rand(1024, 128)}
    return lambda: _inferred(Having(forward, **layers, **parts), options(), torch.randn(rows, 128))


def _half() -> Any:
    def forward(m: Having, x: torch.Tensor) -> torch.Tensor:
        y = m.norm(m.conv(x)).relu().flatten(1) * 2
        y += m.norm.running_mean.sum()
        y = F.dropout(m.layer(y), 0.2) @ m.single
        return poptorch.identity_loss(y.float().square().mean(), "none")

    opts = options(accumulation=2, replicas=2).randomSeed(1)
    opts.Precision.enableStochasticRounding(True)
    opts.Training.setAutomaticLossScaling(True)
    layers = {"conv": nn.Conv1d(2, 3, 3), "norm": nn.BatchNorm1d(3), "layer": nn.Linear(12, 4)}
    model = Having(forward, **layers).half()
    model.single = nn.Parameter(torch.rand(4, 4))
    return _trained(
        model, opts, lambda p: optim.Adam(p, lr=0.1, loss_scaling=8.0), torch.rand(8, 2, 6).half()
    )


def _layers(algorithm: Any) -> Case:
    """Enough small weights for bundles, of two kinds. One of the weights is used twice."""

    def forward(m: Having, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            x = layer(x).tanh()
        return poptorch.identity_loss(m.last(x.double()).square(), "sum")

    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(9))
    layers[3].weight = layers[0].weight

    def plan() -> Any:
        opts = options(accumulation=4, iterations=2).lanes(2)
        opts.Precision.narrow64Bit(False)
        return _trained(
            Having(forward, layers=layers, last=nn.Linear(8, 2).double()),
            opts,
            algorithm,
            torch.randn(64, 8),
        )

    return plan


GIGABIT = (1e-5, 1.25e8)


def _shared(link: tuple[float, float] | None, change: Change, make: Any) -> Case:
    """Return the graphs of one process of two, without the other process."""

    def plan() -> Any:
        layers = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))
        model = Having(
            lambda m, x: poptorch.identity_loss(m.layers(x).square(), "mean"), layers=layers
        )
        captured = Captured(model, (torch.ones(2000, 300),), lambda m: make(m.parameters()))
        opts = poptorch.Options()
        opts.Distributed.configureProcessId(0, 2)
        change(opts)
        plain = captured.plan(opts)
        spec = replace(plain.spec, target=replace(plain.spec.target, link=link))
        graph, optimizer = captured.micro.graph, captured.optim
        assert optimizer is not None
        optimizer, shards = sharded_weights.sharded(graph, spec, optimizer, False)
        bundles = tuple(each.whole for each in shards)
        program = training_program(graph, spec, optimizer, None, bundles, shards, early=True)
        return replace(plain, program=program, spec=spec)

    return plan


def _in_parts(opts: poptorch.Options) -> None:
    settings = poptorch.TensorLocationSettings().useReplicatedTensorSharding(True)
    opts.TensorLocations.setOptimizerLocation(settings)


SGD, MOMENTUM, ADAM, CLIPPED, LAMB = (
    lambda p: optim.SGD(p, lr=0.1),
    lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: optim.Adam(p, lr=0.1),
    lambda p: optim.Adam(p, lr=0.1, max_grad_norm=1.0),
    lambda p: optim.LAMB(p, lr=0.1, weight_decay=0.1),
)
CASES: dict[str, Case] = {
    "linear, momentum": _zoo("linear", MOMENTUM, accumulation=32),
    "batch norm, combined": _zoo(
        "conv_batchnorm",
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, use_combined_accum=True, weight_decay=0.1),
        replicas=2,
        accumulation=2,
    ),
    "batch norms, running": _zoo("batchnorms", ADAM, _running, accumulation=3, iterations=2),
    "embedding, clipped": _zoo("embedding", CLIPPED, lambda o: o.lanes(1), accumulation=4),
    "lstm, LAMB": _zoo("lstm", LAMB, replicas=2),
    "transformer, AdamW": _zoo("transformer", lambda p: optim.AdamW(p, lr=0.1), accumulation=2),
    "tied, RMSprop": _zoo("tied", lambda p: optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True)),
    "counter, torch's SGD": _zoo("counter", lambda p: torch.optim.SGD(p, lr=0.1), accumulation=2),
    "dropout, torch's Adam": _zoo("dropout", lambda p: torch.optim.Adam(p, lr=0.1), accumulation=8),
    **{
        f"{name}, inference": _zoo_inference(name, iterations=2, replicas=2)
        for name in ("conv_batchnorm", "lstm", "transformer", "dropout")
    },
    "recomputed": _recomputed,
    "half": _half,
    "images": _images(6, 8),
    "images in blocks": _images(16, 16),
    "images read": _read_images,
    **{f"products of {rows}": _products(rows) for rows in (1, 2, 128)},
    "many layers, Adam": _layers(ADAM),
    "many layers, SGD": _layers(lambda p: torch.optim.SGD(p, lr=0.1)),
    "processes": _shared(None, _nothing, SGD),
    "hosts": _shared(GIGABIT, _nothing, SGD),
    "parts, LAMB": _shared(None, _in_parts, LAMB),
    "parts, clipped": _shared(GIGABIT, _in_parts, CLIPPED),
}


def text(name: str) -> str:
    torch.manual_seed(0)
    with mock.patch.object(product_libraries, "chosen", _unmeasured):
        return "\n".join([name, *lines_of(CASES[name]())])


def _unmeasured(
    work: Counter[product_libraries.Shape], measures: bool
) -> dict[product_libraries.Shape, str]:
    """Make the same decisions on every processor."""
    return {shape: product_libraries.by_rule(shape) for shape in work}


if __name__ == "__main__":
    PAGE.write_text("\n\n".join([HEAD, *map(text, CASES)]) + "\n")

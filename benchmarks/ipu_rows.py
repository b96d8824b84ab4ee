"""Published results against their estimates, and the fit of the cost model's constants to them.

    python benchmarks/ipu_rows.py         # estimates of the rows, with their residuals
    python benchmarks/ipu_rows.py --fit   # fits the four constants; residuals before and after

A row is built with PopTorch's interface as its configuration says and priced by
``poptorch.estimate``, weights and batches on the meta device. Sources: Graphcore's page of
performance results (PR) and its examples repository (EX).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import poptorch
from ipu_models import Answers, Mnist, Pretraining, ResNet50, TutorialCnn, on_chips
from poptorch import Estimate, _compile
from poptorch._ipu_model.constants import DEFAULT, Constants
from poptorch._ipu_model.pricing import device_seconds, price
from poptorch._systems import parse

FITTED = ("exchange_efficiency", "step", "call_seconds", "python_seconds")
"""What is fitted; ``Mark.FITTED`` in the table of constants."""
ON_CHIPS = FITTED[:2]
"""Those of them that the chips' time depends on."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One published result.

    Attributes:
        title: what it is.
        system: it was measured on.
        published: items per second.
        source: where that stands.
        make: returns the wrapped model and a batch.
        python: whether PopTorch's own work on the host is part of it.
    """

    title: str
    system: str
    published: float
    source: str
    make: Callable[[], tuple[Any, tuple[torch.Tensor, ...]]]
    python: bool = True


def _half(opts: poptorch.Options) -> poptorch.Options:
    opts.Precision.setPartialsType(torch.half)
    return opts


def _ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64, device="meta")


def _off_chip_sharded() -> poptorch.TensorLocationSettings:
    settings = poptorch.TensorLocationSettings()
    return settings.useOnChipStorage(False).useReplicatedTensorSharding(True)


def bert_pretraining() -> tuple[Any, tuple[torch.Tensor, ...]]:
    """BERT-Large, phase 1: packed sequences of 128, layers [3, 7, 7, 7], head beside embeddings."""
    micro, accumulation, replicas = 8, 1752, 4
    with torch.device("meta"):
        model = Pretraining(24, 1024).half().train()
    on_chips(model.bert, [3, 7, 7, 7])
    poptorch.BeginBlock(model.head, "head", ipu_id=0)
    opts = _half(poptorch.Options())
    opts.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement))
    opts.Training.gradientAccumulation(accumulation)
    opts.replicationFactor(replicas)
    opts.TensorLocations.setOptimizerLocation(_off_chip_sharded())
    optimizer = poptorch.optim.LAMB(
        model.parameters(), lr=1e-3, accum_type=torch.float16,
        first_order_momentum_accum_type=torch.float16,
    )  # fmt: skip
    rows = micro * accumulation * replicas
    batch = (
        _ints(rows, 128), _ints(rows, 128), _ints(rows, 128), _ints(rows, 23), _ints(rows, 23),
        _ints(rows),
    )  # fmt: skip
    return poptorch.trainingModel(model, opts, optimizer), batch


def bert_squad() -> tuple[Any, tuple[torch.Tensor, ...]]:
    """BERT-Large that answers questions: sequences of 384, eight chips, two replicas."""
    micro, accumulation, replicas, iterations = 4, 32, 2, 2
    with torch.device("meta"):
        model = Answers(24, 1024).half().train()
    on_chips(model.bert, [2, 3, 3, 3, 3, 3, 3, 4])
    opts = _half(poptorch.Options())
    opts.Training.gradientAccumulation(accumulation)
    opts.replicationFactor(replicas).deviceIterations(iterations)
    sharded = poptorch.TensorLocationSettings().useReplicatedTensorSharding(True)
    opts.TensorLocations.setOptimizerLocation(sharded)
    optimizer = poptorch.optim.AdamW(
        model.parameters(), lr=1e-3, accum_type=torch.float16,
        first_order_momentum_accum_type=torch.float16,
    )  # fmt: skip
    rows = micro * accumulation * replicas * iterations
    batch = (_ints(rows, 384), _ints(rows, 384), _ints(rows, 384), _ints(rows), _ints(rows))
    return poptorch.trainingModel(model, opts, optimizer), batch


def resnet50() -> tuple[Any, tuple[torch.Tensor, ...]]:
    """ResNet-50: sixteen replicas of one chip, activations computed again, images of 8 bits."""
    micro, accumulation, replicas = 18, 57, 16
    with torch.device("meta"):
        model = ResNet50().half().train()
    opts = _half(poptorch.Options())
    opts.Training.gradientAccumulation(accumulation)
    opts.replicationFactor(replicas).setAvailableMemoryProportion({"IPU0": 0.16})
    opts._Popart.set("autoRecomputation", 1)
    optimizer = poptorch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, accum_type=torch.float16,
        velocity_accum_type=torch.float16,
    )  # fmt: skip
    rows = micro * accumulation * replicas
    images = torch.empty(rows, 3, 224, 224, dtype=torch.uint8, device="meta")
    return poptorch.trainingModel(model, opts, optimizer), (images, _ints(rows))


def small_cnn() -> tuple[Any, tuple[torch.Tensor, ...]]:
    """The tutorial's CNN on images of 128 x 128, synthetic data, 50 iterations a call."""
    with torch.device("meta"):
        model = TutorialCnn(128).train()
    opts = poptorch.Options().deviceIterations(50).enableSyntheticData(True)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.empty(16 * 50, 1, 128, 128, device="meta")
    return poptorch.trainingModel(model, opts, optimizer), (images, _ints(16 * 50))


def fashion() -> tuple[Any, tuple[torch.Tensor, ...]]:
    """The tutorial's CNN on FashionMNIST: a call per update."""
    with torch.device("meta"):
        model = TutorialCnn(28).train()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.empty(16, 1, 28, 28, device="meta")
    return poptorch.trainingModel(model, poptorch.Options(), optimizer), (images, _ints(16))


def mnist() -> tuple[Any, tuple[torch.Tensor, ...]]:
    """A test of the MNIST tutorial's CNN in PopXL, whose session has no Python around a call."""
    with torch.device("meta"):
        model = Mnist().eval()
    return poptorch.inferenceModel(model), (torch.empty(80, 1, 28, 28, device="meta"),)


ROWS = (
    Row("BERT-Large SL128, Bow Pod16", "bow:16", 5600 / 1.17, "PR, EX nlp/bert", bert_pretraining),
    Row("BERT-Large SQuAD SL384, Bow Pod16", "bow:16", 1009, "PR, EX nlp/bert", bert_squad),
    Row("ResNet-50, Bow Pod16", "bow:16", 37061, "PR, EX vision/cnns", resnet50),
    Row("small CNN 128x128, synthetic", "mk2:1", 47000, "EX efficient_data_loading", small_cnn),
    Row("FashionMNIST CNN, a call per batch", "mk2:4", 16 * 370, "tutorial's log", fashion),
    Row("MNIST test, PopXL session", "mk2:1", 99971, "EX popxl 5", mnist, python=False),
)


class Priced:
    """A row that was captured once, priced for any constants."""

    def __init__(self, row: Row) -> None:
        self.row = row
        executor, batch = row.make()
        spec = executor._session._settings()
        captured = executor._session.captures(batch, {}).capture(spec)
        self._subject = _compile.subject(captured, spec, parse(row.system))
        self._seconds: dict[tuple[float, ...], float] = {}
        executor.destroy()

    def estimate(self, constants: Constants = DEFAULT) -> Estimate:
        """Return the estimate."""
        values = dataclasses.asdict(constants)
        if not self.row.python:
            values["python_seconds"] = 0.0
        return price(self._subject.with_constants(**values), self.row.system, guesses=False)

    def residual(self, constants: Constants) -> float:
        """Return the logarithm of estimated over published."""
        on_chips = tuple(getattr(constants, name) for name in ON_CHIPS)
        if on_chips not in self._seconds:
            changed = self._subject.with_constants(**dict(zip(ON_CHIPS, on_chips, strict=True)))
            self._seconds[on_chips] = device_seconds(changed)
        host = constants.call_seconds + (constants.python_seconds if self.row.python else 0.0)
        seconds = self._seconds[on_chips] + host
        return math.log(self._subject.rows / seconds / self.row.published)


def error(rows: Sequence[Priced], constants: Constants) -> float:
    """Return the sum of the squares of the residuals."""
    return sum(row.residual(constants) ** 2 for row in rows)


def fit(rows: Sequence[Priced], start: Constants = DEFAULT) -> Constants:
    """Return the constants that are off least: each in turn by smaller and smaller factors."""
    best, factor = start, 1.5
    while factor > 1.01:
        tried = [
            dataclasses.replace(best, **{name: getattr(best, name) * by})
            for name in FITTED
            for by in (factor, 1 / factor)
        ]
        possible = [each for each in tried if each.exchange_efficiency <= 1]
        better = min(possible, key=lambda each: error(rows, each))
        if error(rows, better) < error(rows, best) - 1e-9:
            best = better
        else:
            factor = math.sqrt(factor)
    return best


def show(title: str, rows: Sequence[Priced], constants: Constants) -> None:
    """Print constants and residuals."""
    print(f"{title}: " + ", ".join(f"{name} {getattr(constants, name):.4g}" for name in FITTED))
    ratios = [math.exp(row.residual(constants)) for row in rows]
    for row, ratio in zip(rows, ratios, strict=True):
        print(f"    {ratio:5.2f} times  {row.row.title}")
    worst = max(max(ratio, 1 / ratio) for ratio in ratios)
    print(f"    at most {worst:.2f} times off; sum of squares {error(rows, constants):.4f}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--fit", action="store_true", help="fit the constants")
    parser.add_argument("--only", default="", help="rows whose title has this")
    parser.add_argument("--short", action="store_true", help="residuals only")
    chosen = parser.parse_args()
    rows = [Priced(row) for row in ROWS if chosen.only in row.title]
    show("as they are", rows, DEFAULT)
    constants = fit(rows) if chosen.fit else DEFAULT
    if chosen.fit:
        show("fitted", rows, constants)
    for row in [] if chosen.short else rows:
        print(row.row.title)
        print("\n".join(f"    {line}" for line in str(row.estimate(constants)).splitlines()))
    print(f"{time.process_time():.0f} s of processor time")


if __name__ == "__main__":
    main()

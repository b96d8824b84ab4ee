"""Published results against their estimates, and the fit of the cost model's constants to them.

    python benchmarks/ipu_rows.py         # estimates of the rows, with their residuals
    python benchmarks/ipu_rows.py --fit   # fits the four constants first, and prints them

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
from poptorch import _compile, _session
from poptorch._machine.constants import DEFAULT, Constants
from poptorch._machine.estimate import Estimate
from poptorch._machine.priced import Subject
from poptorch._machine.pricing import price, rate
from poptorch._machine.systems import parse

FITTED = ("exchange_efficiency", "step", "call_seconds", "python_seconds")
"""What is fitted; ``Mark.FITTED`` in the table of constants."""


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
        self._captured, self._spec = _session.capture_for_estimate(executor._session, batch, {})
        self._subject = _compile.subject(self._captured, self._spec, parse(row.system))
        executor.destroy()

    def estimate(self, constants: Constants = DEFAULT) -> Estimate:
        """Return the estimate."""
        return price(self._with(constants), self.row.system, guesses=False)

    def residual(self, constants: Constants) -> float:
        """Return the logarithm of estimated over published."""
        return math.log(rate(self._with(constants)) / self.row.published)

    def _with(self, constants: Constants) -> Subject:
        values = dataclasses.asdict(constants)
        if not self.row.python:
            values["python_seconds"] = 0.0
        return self._subject.with_constants(**values)


def error(rows: Sequence[Priced], constants: Constants) -> float:
    """Return the mean square of the logarithms of estimated over published."""
    return sum(row.residual(constants) ** 2 for row in rows) / len(rows)


def fit(rows: Sequence[Priced]) -> Constants:
    """Return the constants that are off least: each in turn by smaller and smaller steps."""
    constants, step = DEFAULT, 1.25
    best = error(rows, constants)
    while step > 1.02:
        better = False
        for name in FITTED:
            for factor in (step, 1 / step):
                value = getattr(constants, name) * factor
                if name.endswith("efficiency") and value > 1:
                    continue
                tried = dataclasses.replace(constants, **{name: value})
                off = error(rows, tried)
                if off < best - 1e-9:
                    constants, best, better = tried, off, True
        if not better:
            step = math.sqrt(step)
    return constants


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--fit", action="store_true", help="fit the constants first")
    parser.add_argument("--only", default="", help="rows whose title has this")
    chosen = parser.parse_args()
    rows = []
    for row in ROWS:
        if chosen.only in row.title:
            start = time.process_time()
            rows.append(Priced(row))
            print(f"captured {row.title}: {time.process_time() - start:.0f} s of processor time")
    constants = fit(rows) if chosen.fit else DEFAULT
    for name in FITTED:
        print(f"{name} = {getattr(constants, name):.4g}")
    for row in rows:
        result = row.estimate(constants)
        ratio = result.items_per_second / row.row.published
        print(
            f"{row.row.title}: {result.items_per_second:,.0f} against {row.row.published:,.0f} "
            f"items/s, {ratio:.2f} times"
        )
        print("\n".join(f"    {line}" for line in str(result).splitlines()))


if __name__ == "__main__":
    main()

"""Compare published results with their estimates, and fit the constants of the cost model.

    python benchmarks/ipu_rows.py           # the estimates, with their residuals
    python benchmarks/ipu_rows.py --fit     # fit the four constants; residuals before and after
    python benchmarks/ipu_rows.py --bands   # each row with constants fitted to the other rows
    python benchmarks/ipu_rows.py --memory  # verdicts on programs that fitted and that did not

A row is built with PopTorch's interface as its configuration says, and ``poptorch.estimate`` prices
it. Weights and batches are on the meta device. Sources: Graphcore's page of performance results
(PR) and its examples repository (EX).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import poptorch
from ipu_models import Answers, Gpt2, Mnist, Pretraining, ResNet50, TutorialCnn, on_chips
from poptorch import Estimate
from poptorch._ipu_model import estimating
from poptorch._ipu_model.constants import DEFAULT, Constants
from poptorch._ipu_model.pricing import price
from poptorch._ipu_model.simulate import simulate
from poptorch._ipu_systems import parse
from poptorch._session import questions

FITTED = ("exchange_efficiency", "step", "call_seconds", "python_seconds")
"""What is fitted; ``Mark.FITTED`` in the table of constants."""
ON_CHIPS = FITTED[:2]
"""Those of them that the chips' time depends on."""
NEUTRAL = dataclasses.replace(
    DEFAULT, exchange_efficiency=0.8, step=1000, call_seconds=1e-3, python_seconds=1e-3
)
"""Where fits for error bands begin: round numbers that no row had a part in."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One published result, or a program that is known to fit or not to fit.

    Attributes:
        title: the name of the row.
        system: the system on which it was measured.
        published: items per second; 0 if only the verdict is known.
        source: where the result was published.
        make: returns the wrapped model and a batch.
        python: whether PopTorch's own work on the host is part of the result.
        ran: whether the program fitted.
    """

    title: str
    system: str
    published: float
    source: str
    make: Callable[[], tuple[Any, tuple[torch.Tensor, ...]]]
    python: bool = True
    ran: bool = True


def _half(opts: poptorch.Options) -> poptorch.Options:
    opts.Precision.setPartialsType(torch.half)
    return opts


def _ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64, device="meta")


def _off_chip_sharded() -> poptorch.TensorLocationSettings:
    settings = poptorch.TensorLocationSettings()
    return settings.useOnChipStorage(False).useReplicatedTensorSharding(True)


def bert_pretraining(
    length: int = 128, micro: int = 8, accumulation: int = 1752, places: int = 23,
    recomputation: int | None = None,
) -> tuple[Any, tuple[torch.Tensor, ...]]:  # fmt: skip
    """Return BERT-Large on packed sequences, layers [3, 7, 7, 7], the head with the embeddings."""
    replicas = 4
    with torch.device("meta"):
        model = Pretraining(24, 1024).half().train()
    on_chips(model.bert, [3, 7, 7, 7])
    poptorch.BeginBlock(model.head, "head", ipu_id=0)
    opts = _half(poptorch.Options())
    opts.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement))
    opts.Training.gradientAccumulation(accumulation)
    opts.replicationFactor(replicas)
    opts.TensorLocations.setOptimizerLocation(_off_chip_sharded())
    if recomputation is not None:
        opts._Popart.set("autoRecomputation", recomputation)
    optimizer = poptorch.optim.LAMB(
        model.parameters(), lr=1e-3, accum_type=torch.float16,
        first_order_momentum_accum_type=torch.float16,
    )  # fmt: skip
    rows = micro * accumulation * replicas
    batch = (*(3 * [_ints(rows, length)]), *(2 * [_ints(rows, places)]), _ints(rows))
    return poptorch.trainingModel(model, opts, optimizer), batch


def bert_squad() -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Return BERT-Large for question answering: sequences of 384, eight chips, two replicas."""
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


def resnet50(
    micro: int = 18, accumulation: int = 57, replicas: int = 16, recompute: bool = True
) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Return ResNet-50 with replicas of one chip, recomputed activations, and 8-bit images."""
    with torch.device("meta"):
        model = ResNet50().half().train()
    opts = _half(poptorch.Options())
    opts.Training.gradientAccumulation(accumulation)
    opts.replicationFactor(replicas).setAvailableMemoryProportion({"IPU0": 0.16})
    opts._Popart.set("autoRecomputation", int(recompute))
    optimizer = poptorch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, accum_type=torch.float16,
        velocity_accum_type=torch.float16,
    )  # fmt: skip
    rows = micro * accumulation * replicas
    images = torch.empty(rows, 3, 224, 224, dtype=torch.uint8, device="meta")
    return poptorch.trainingModel(model, opts, optimizer), (images, _ints(rows))


def gpt2() -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Return GPT-2 medium on four chips, with all of Adam's state on them."""
    with torch.device("meta"):
        model = Gpt2(24, 1024).half().train()
    on_chips(model, [6, 6, 6, 6])
    opts = _half(poptorch.Options())
    opts.Training.gradientAccumulation(64)
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=1e-4)
    return poptorch.trainingModel(model, opts, optimizer), (_ints(64, 1024), _ints(64, 1024))


def small_cnn(synthetic: bool = True) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Return the tutorial's CNN on images of 128 x 128, with 50 iterations per call."""
    with torch.device("meta"):
        model = TutorialCnn(128).train()
    opts = poptorch.Options().deviceIterations(50).enableSyntheticData(synthetic)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.empty(16 * 50, 1, 128, 128, device="meta")
    return poptorch.trainingModel(model, opts, optimizer), (images, _ints(16 * 50))


def fashion() -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Return the tutorial's CNN on FashionMNIST, with one update per call."""
    with torch.device("meta"):
        model = TutorialCnn(28).train()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.empty(16, 1, 28, 28, device="meta")
    return poptorch.trainingModel(model, poptorch.Options(), optimizer), (images, _ints(16))


def mnist() -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Return the test of the MNIST tutorial's CNN in PopXL, where no Python surrounds a call."""
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
LARGE = partial(bert_pretraining, 512, 2, 512, 76)
VERDICTS = (
    *ROWS,
    Row(
        "BERT-Large SL512, Bow Pod16", "bow:16", 0, "PR, EX nlp/bert",
        partial(LARGE, recomputation=3),
    ),
    Row(
        "BERT-Large SL512 without recomputation", "bow:16", 0, "EX nlp/bert",
        partial(LARGE, recomputation=0), ran=False,
    ),
    Row(
        "ResNet-50, micro-batch 16 on 304 MiB", "mk1:1", 0, "EX vision/cnns",
        partial(resnet50, 16, 1, 1, recompute=False), ran=False,
    ),
    Row("GPT-2 medium, all state on 4 chips", "bow:4", 0, "EX nlp/gpt2", gpt2, ran=False),
)  # fmt: skip
"""Programs that are known to fit or not to fit."""


class Priced:
    """A row that was captured once and can be priced with any constants."""

    def __init__(self, row: Row) -> None:
        self.row = row
        executor, batch = row.make()
        spec = executor._session.settings()
        captured = questions.captures(executor._session, (batch, {})).capture(spec)
        self._subject = estimating.subject(captured, spec, parse(row.system))
        self._seconds: dict[tuple[float, ...], float] = {}
        executor.destroy()

    def estimate(self, constants: Constants = DEFAULT) -> Estimate:
        """Return the estimate."""
        values = dataclasses.asdict(constants)
        if not self.row.python:
            values["python_seconds"] = 0.0
        return price(self._subject.with_constants(**values), self.row.system, guesses=False)

    def residual(self, constants: Constants) -> float:
        """Return the logarithm of the estimate divided by the published value."""
        on_chips = tuple(getattr(constants, name) for name in ON_CHIPS)
        if on_chips not in self._seconds:
            changed = self._subject.with_constants(**dict(zip(ON_CHIPS, on_chips, strict=True)))
            self._seconds[on_chips] = simulate(changed).cycles * changed.flushes / changed.clock
        host = constants.call_seconds + (constants.python_seconds if self.row.python else 0.0)
        seconds = self._seconds[on_chips] + host
        return math.log(self._subject.rows / seconds / self.row.published)


def error(rows: Sequence[Priced], constants: Constants) -> float:
    """Return the sum of the squared residuals."""
    return sum(row.residual(constants) ** 2 for row in rows)


def fit(
    rows: Sequence[Priced], start: Constants = DEFAULT, pull: float = 0.0, exact: float = 1.01
) -> Constants:
    """Return the constants with the smallest error. Each constant is varied alternately by smaller
    and smaller factors.

    ``pull`` keeps constants that the rows do not determine near their initial values.
    """

    def off(constants: Constants) -> float:
        moved = (math.log(getattr(constants, name) / getattr(start, name)) for name in FITTED)
        return error(rows, constants) + pull * sum(one * one for one in moved)

    best, factor = start, 1.5
    while factor > exact:
        tried = [
            dataclasses.replace(best, **{name: getattr(best, name) * by})
            for name in FITTED
            for by in (factor, 1 / factor)
        ]
        possible = [each for each in tried if each.exchange_efficiency <= 1]
        better = min(possible, key=off)
        if off(better) < off(best) - 1e-9:
            best = better
        else:
            factor = math.sqrt(factor)
    return best


def left_out(rows: Sequence[Priced]) -> dict[str, float]:
    """Print each row with constants that were fitted to the other rows. Return the worst ratio of
    each kind.
    """
    worst: dict[str, float] = {}
    for row in rows:
        constants = fit([other for other in rows if other is not row], NEUTRAL, 0.02, 1.05)
        ratio, kind = math.exp(row.residual(constants)), row.estimate(constants).kind
        worst[kind] = max(worst.get(kind, 1.0), ratio, 1 / ratio)
        print(f"    {ratio:5.2f} times  {row.row.title} ({kind})", flush=True)
    return worst


def memory(rows: Sequence[Row]) -> None:
    """Print the verdict on each program."""
    for row in rows:
        priced = Priced(row).estimate()
        ran = "ran" if row.ran else "did not fit"
        print(f"{row.title} ({ran}): {priced.verdict}: {priced.culprit}", flush=True)


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
    parser.add_argument("--bands", action="store_true", help="leave out one row at a time")
    parser.add_argument("--memory", action="store_true", help="print only verdicts")
    parser.add_argument("--only", default="", help="only rows whose title contains this text")
    parser.add_argument("--short", action="store_true", help="print only residuals")
    chosen = parser.parse_args()
    if chosen.memory:
        return memory([row for row in VERDICTS if chosen.only in row.title])
    rows = [Priced(row) for row in ROWS if chosen.only in row.title]
    show("as they are", rows, DEFAULT)
    constants = fit(rows) if chosen.fit else DEFAULT
    if chosen.fit:
        show("fitted", rows, constants)
    if chosen.bands:
        print("each row by constants that the others were fitted to:")
        print(", ".join(f"{kind} {factor:.2f}" for kind, factor in left_out(rows).items()))
    for row in [] if chosen.short else rows:
        print(row.row.title)
        print("\n".join(f"    {line}" for line in str(row.estimate(constants)).splitlines()))
    print(f"{time.process_time():.0f} s of processor time")


if __name__ == "__main__":
    main()

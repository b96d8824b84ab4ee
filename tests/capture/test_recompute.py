"""Recomputation: less memory, the same values."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers import captures
from helpers.cases import long
from helpers.closeness import near
from helpers.memory import peak_of_call
from helpers.wrapping import Having, graph_of, options, training, trains_alike

pytestmark = pytest.mark.slow
WIDTH, ROWS = 16, 512
X = torch.randn(ROWS, WIDTH)
counted: list[int] = []


def count(inputs: list[torch.Tensor], attributes: dict[str, Any]) -> list[torch.Tensor]:
    counted.append(1)
    return [inputs[0].sin()]


poptorch.register_custom_op("Sine", "recompute", 1, count, lambda i, o, g, a: [g[0] * i[0].cos()])


def counting(x: torch.Tensor) -> torch.Tensor:
    return poptorch.custom_op([x], "Sine", "recompute", 1, [x])[0]


class Deep(nn.Module):
    """A tower of layers with functions within and behind each, then a checkpoint if asked for."""

    def __init__(
        self,
        within: Callable[..., Any] = torch.tanh,
        behind: Callable[..., Any] = torch.tanh,
        checkpoints: bool = True,
        layers: int = 3,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.within, self.behind, self.checkpoints = within, behind, checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.behind(self.within(torch.tanh(layer(x))).exp().sigmoid() * 2 - 1)
            if self.checkpoints:
                x = poptorch.recomputationCheckpoint(x)
        return poptorch.identity_loss(x.square(), "mean")


def recomputing(kind: int, backend: str = "reference", **counts: int) -> poptorch.Options:
    opts = options(backend, **counts).randomSeed(1)
    opts._Popart.set("autoRecomputation", kind)
    return opts


def test_peak_memory_falls_with_checkpoints() -> None:
    """The result of a norm, which is made with its mean and its deviation, can be one."""

    def peak(checkpoints: bool, kind: int) -> int:
        model = Deep(behind=lambda x: F.layer_norm(x, (WIDTH,)), checkpoints=checkpoints, layers=4)
        return peak_of_call(training(model, recomputing(kind)), X)

    whole = peak(True, 0)
    assert whole == peak(False, 0)  # a checkpoint alone changes nothing
    assert peak(True, 3) < whole / 2


@pytest.mark.parametrize("backend, accumulation", [("reference", 4), long("inductor", 1)])
def test_values_stay_the_same(backend: str, accumulation: int) -> None:
    first = Deep(behind=lambda x: F.dropout(x, 0.3), layers=2)
    second = copy.deepcopy(first)
    plain = training(first, recomputing(0, accumulation=accumulation))
    recomputed = training(second, recomputing(1, backend, accumulation=accumulation))
    for _ in range(2):
        torch.testing.assert_close(plain(X), recomputed(X), **near(32, 2, size=0.1))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, **near(64, 2, size=0.1))


def one(behind: Any = lambda x: x) -> Having:
    """One operator in front of a checkpoint, which is computed again if it is not the last."""

    def forward(model: Having, x: torch.Tensor) -> Any:
        x = poptorch.recomputationCheckpoint(behind(counting(x * model.weight)))
        return poptorch.identity_loss(x.square(), "mean")

    return Having(forward, weight=nn.Parameter(torch.ones(WIDTH)))


@pytest.mark.parametrize(
    "model, backend, kind, times",
    [
        (lambda: Deep(counting), "reference", 0, 3),
        (lambda: Deep(counting), "reference", 3, 6),
        long(lambda: one(torch.cos), "inductor", 3, 2),
        (one, "reference", 3, 1),
    ],
)
def test_forward_work_is_done_again_by_compiled_code_too(
    model: Callable[..., Any], backend: str, kind: int, times: int
) -> None:
    executor = training(model(), recomputing(kind, backend))
    executor.compile(X)
    counted.clear()
    executor(X)
    assert len(counted) == times


def test_random_masks_and_prints_are_not_made_twice(capfd: pytest.CaptureFixture[str]) -> None:
    def noisy(model: Having, x: torch.Tensor) -> torch.Tensor:
        x = poptorch.ipu_print_tensor((x * model.weight).exp(), "x", False)
        return poptorch.identity_loss(F.dropout(x).sin().cos(), "sum")

    model = training(Having(noisy, weight=nn.Parameter(torch.ones(4))), recomputing(3))
    model(torch.ones(4))
    assert capfd.readouterr().err.count("x: ") == 1
    targets = [str(node.target) for node in graph_of(model, "step").nodes]
    assert sum("bernoulli" in target or "rand" in target for target in targets) == 1


class Staged(Deep):
    """The tower in blocks on two chips; the last block reads a result of the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        poptorch.Block.start("A", ipu_id=0)
        first = x = self.layers[0](x).tanh().exp()
        poptorch.Block.start("B", ipu_id=1)
        for layer in self.layers[1:3]:
            x = layer(x).tanh().exp()
        return poptorch.identity_loss((x * first.sigmoid()).sin(), "mean")


@pytest.mark.larger("test_values_stay_the_same")
def test_blocks_on_different_chips_compute_their_own_part_again() -> None:
    plain = training(Staged(), recomputing(0, "staged", accumulation=3))
    plain.compile(X[:510])
    opts = recomputing(3, "staged")
    recomputed = trains_alike(Staged(), X[:510], opts=opts, accumulation=3, steps=1)
    plans = plain.plan(), recomputed.plan()
    homes = captures.homes(plans[1].layout)
    assert homes["param.layers.0.weight"] == (0,)
    assert homes["param.layers.1.weight"] == (1,)
    # KiB that wait on each stage's chip for its backward pass, as plans print them.
    rows = [re.findall(r"  \d  +\d  +[AB] .* ([\d.]+) (B|KiB)\n", str(plan)) for plan in plans]
    kept, less = ([float(n) / {"B": 1024, "KiB": 1}[unit] for n, unit in row] for row in rows)
    assert less[0] < kept[0]
    assert less[1] < kept[1] / 2

"""``autoplace``: the annotated model runs as placed, and the table says why."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.pricing import Stack, fullest, meta, off_chip, priced
from helpers.wrapping import Having, options


class Net(nn.Module):
    """Six equal layers, a skip connection over all of them, and a loss."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))

    def forward(
        self, x: torch.Tensor, y: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        out = x
        for layer in self.layers:
            out = layer(out).tanh()
        out = out + x
        return out if y is None else (out, nn.functional.mse_loss(out, y))


def batch(size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 32), torch.randn(size, 32)


@pytest.mark.slow
def test_equal_layers_are_divided_evenly_and_placing_again_replaces_the_blocks() -> None:
    model = Net(layers=12)
    for chips in (3, 2):
        _, table = poptorch.autoplace(model, batch(), num_ipus=chips)
        assert sum(block.share for block in table) == pytest.approx(1)
        assert max(block.share for block in table) < 1.15 / chips
        assert str(table).count("\n") == chips + 1
        assert all(block.begins.startswith("layers.") for block in table[1:])
        annotated = [n for n, m in model.named_modules() if m._forward_pre_hooks]
        assert annotated == [block.begins for block in table]
    _, table = poptorch.autoplace(model.eval(), batch()[0], num_ipus=2)
    assert all(block.saved_bytes == 0 for block in table)
    assert not model.training
    poptorch.removeBlocks(model)
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.slow
def test_a_placed_model_trains_as_the_flat_one_and_as_the_table_says() -> None:
    flat = Net()
    model, table = poptorch.autoplace(copy.deepcopy(flat), batch(), num_ipus=2)
    x, y = batch(16)
    losses = []
    for each, backend in ((flat, "reference"), (model, "staged")):
        opts = options(accumulation=4).backend(backend)
        trainer = poptorch.trainingModel(each, opts, torch.optim.SGD(each.parameters(), lr=0.1))
        losses.append([trainer(x, y)[1] for _ in range(3)])
    torch.testing.assert_close(losses[1], losses[0])
    plan = trainer.plan()
    assert plan.layout.chips == 2
    sent = [t.value.bytes for t in plan.staged.transfers if str(t.source) == "0F"]
    assert sum(sent) == table[1].entering_bytes


def test_optimizer_state_counts_and_memory_is_a_limit() -> None:
    model = Net()
    parameters = sum(p.numel() * 4 for p in model.parameters())
    for optimizer, times in ((torch.optim.SGD, 2), (torch.optim.Adam, 4)):
        made = optimizer(model.parameters(), lr=0.1)
        _, table = poptorch.autoplace(model, batch(), num_ipus=2, optimizer=made)
        assert sum(block.weight_bytes for block in table) == times * parameters
    small = 5 * 32 * 33 * 4  # not even three of six layers with their gradients
    with pytest.raises(poptorch.Error, match=r"(?s)No placement on 2 IPUs fits.*use more IPUs"):
        poptorch.autoplace(Net(), batch(), num_ipus=2, memory_per_ipu=small)
    _, table = poptorch.autoplace(Net(), batch(), num_ipus=6, memory_per_ipu=small)
    assert all(block.weight_bytes + block.saved_bytes <= small for block in table)


def test_failures_leave_the_model_alone() -> None:
    model = Net()
    poptorch.BeginBlock(model.layers[2], ipu_id=0)
    kind = type(model)
    with pytest.raises(poptorch.Error, match="cannot be divided"):
        poptorch.autoplace(model, batch(), num_ipus=50)
    with pytest.raises(RuntimeError):
        poptorch.autoplace(model, (torch.randn(4, 3), torch.randn(4, 3)), num_ipus=2)
    for number in (0, -1, 1.5, "2"):
        with pytest.raises(ValueError, match="positive integer"):
            poptorch.autoplace(model, batch(), num_ipus=number)
    assert type(model) is kind
    assert [n for n, m in model.named_modules() if m._forward_pre_hooks] == ["layers.2"]
    assert torch.isfinite(model(*batch())[1])
    tied = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).eval()
    tied[2].weight = tied[0].weight  # so that all have to be on one chip
    with pytest.raises(poptorch.Error, match="cannot be divided into 2 parts"):
        poptorch.autoplace(tied, torch.randn(2, 8), num_ipus=2)


def lopsided() -> Having:
    """Fast layers with much memory before slow ones with little."""

    def forward(model: Having, x: torch.Tensor) -> torch.Tensor:
        for layer in model.wide:
            x = layer(x)
        for layer in model.slow:
            x = layer(x.repeat(16, 1))[: x.shape[0]]
        return x

    layers = [nn.Linear(5500, 5500, bias=False) for _ in range(12)]
    return Having(forward, wide=nn.ModuleList(layers[:10]), slow=nn.ModuleList(layers[10:]))


@pytest.mark.larger("test_optimizer_state_counts_and_memory_is_a_limit")
def test_autoplace_respects_the_estimated_memory_of_a_system() -> None:
    """The fastest division puts too many layers of 115 MiB on the first chip."""
    with torch.device("meta"):
        models = [lopsided().eval() for _ in range(2)]
    x, options = torch.empty(4 * 64, 5500), poptorch.Options().deviceIterations(4)
    options.setAvailableMemoryProportion({"IPU0": 0.1, "IPU1": 0.1})

    def estimate(model: nn.Module) -> Any:
        executor = poptorch.inferenceModel(model, options)
        priced = executor.estimate(x, system="bow:4")
        executor.destroy()
        return priced

    poptorch.autoplace(models[0], x, options, num_ipus=2, memory_per_ipu=1 << 40)
    assert not estimate(models[0]).fits
    poptorch.autoplace(models[1], x, options, num_ipus=2, system="bow:4")
    assert estimate(models[1]).fits
    poptorch.removeBlocks(models[0])
    for settings, message in (
        ({"num_ipus": 1, "system": "bow:4"}, "(?s)does not fit 1 IPUs.*weights"),
        ({"num_ipus": 2, "system": "bow:1"}, "1 replicas of 2 IPUs on bow:1"),
        ({"num_ipus": 2, "system": "bow:4", "memory_per_ipu": 1}, "memory_per_ipu and system"),
    ):
        with pytest.raises((poptorch.Error, ValueError), match=message):
            poptorch.autoplace(models[0], x[:64], **settings)


MIB = 1 << 20
WIDE = meta(16, 4096)


class Table(Stack):
    """A layer behind a table."""

    def __init__(self, rows: int) -> None:
        super().__init__(1, 256)
        self.table = torch.nn.Embedding(rows, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.table(x))


@pytest.mark.parametrize("make, batch, how, category, size, tensor, chip", [
    # 3 layers of 4096 x 4096 floats, 64 MiB each
    (lambda: Stack(3, 4096), WIDE, {}, "weights", 192 * MIB, "param.layers.0.weight", 0),
    (lambda: Table(1 << 17), meta(16, 4, dtype=torch.int64), {"optimizer": "Adam"},
     "optimizer state", 256 * MIB + 2 * 256 * 256 * 4, "optstate.first.table.weight", 0),
    # momentum, of halves in floats: twice the weights
    (lambda: Stack(4, 4096).half(), WIDE,
     {"optimizer": "SGD", "momentum": 0.9, "velocity_accum_type": torch.float32},
     "optimizer state", 256 * MIB, "optstate.velocity.layers.0.weight", 0),
    (lambda: Stack(3, 4096).half(), WIDE,
     {"optimizer": "AdamW", "options": off_chip("Optimizer"), "accum_type": torch.float32},
     "accumulators", 192 * MIB, "accum.layers.0.weight", 0),
    # the larger part is on the second chip
    (lambda: Stack(5, 4096, 2), meta(64, 4096), {},
     "weights", 192 * MIB, "param.layers.2.weight", 1),
    # 3 tanhs of 65536 x 512 floats wait for the backward pass, besides what it makes
    (lambda: Stack(3, 512), meta(4 * 65536, 512), {"optimizer": "SGD"},
     "activations", None, None, 0),
])  # fmt: skip
def test_an_estimate_names_the_largest_category_of_memory_its_tensor_and_chip(
    make: Callable[..., Any],
    batch: torch.Tensor,
    how: dict[str, Any],
    category: str,
    size: int | None,
    tensor: str | None,
    chip: int,
) -> None:
    culprit = priced(make, batch, steps=4, **how).culprit
    assert culprit.category == category
    assert culprit.chip == chip
    if size is None:
        assert culprit.bytes >= 3 * 65536 * 512 * 4
        assert "layer(x)" in culprit.line
    else:
        assert culprit.bytes == pytest.approx(size, rel=1e-3)
        assert culprit.tensor == tensor


@pytest.mark.slow
def test_more_chips_need_no_more_bytes_on_one_and_no_more_time() -> None:
    one, two = (
        priced(lambda c=cuts: Stack(4, 512, *c), meta(4096, 512), steps=4, optimizer="AdamW")
        for cuts in ([], [2])
    )
    assert fullest(two) <= fullest(one)
    assert two.cycles <= one.cycles
    weights = sum(chip.always["weights"] for chip in two.chips)
    assert weights == pytest.approx(one.chips[0].always["weights"], abs=64)

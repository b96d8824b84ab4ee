"""Lower precision never raises what it cannot raise, and what it can raise is named.

With half partials, a model of halves has no more bytes of weights, state, accumulators, buffers and
waiting activations than that of floats, and its products take no more cycles. It can need more for
temporaries, because another way to spread a product is fastest then; and for code, where loops
exist for both types. With float partials sums lie beside a result of halves, and a product of few
inner elements takes longer: the matrix unit multiplies 16 halves at a time or 8 floats.
"""

import dataclasses
import functools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import poptorch
from helpers.pricing import meta, priced
from poptorch import Estimate
from poptorch._ipu_model.constants import DEFAULT
from poptorch._ipu_model.products import Chip, spread
from poptorch._ipu_model.work import Product
from poptorch._systems import KINDS


def _chip(kind: str) -> Chip:
    return Chip(KINDS[kind], KINDS[kind].tiles, proportion=0.6)


sizes = st.integers(1, 4096)
products = st.builds(
    Product, sizes, sizes, sizes, st.just(4), st.just(False), st.integers(1, 64), st.booleans(),
)  # fmt: skip


@settings(max_examples=20, deadline=None, derandomize=True)
@given(products, st.sampled_from(sorted(KINDS)))
def test_products_of_halves_take_no_longer(product: Product, kind: str) -> None:
    def cycles(one: Product) -> float:
        best = spread(one, _chip(kind))
        assert best.bytes <= 0.6 * KINDS[kind].tile_bytes + 1e-6
        return best.cycles + best.steps * DEFAULT.step

    assert cycles(dataclasses.replace(product, itemsize=2, half=True)) <= cycles(product)


def test_halves_and_half_partials_each_halve_the_work_of_the_matrix_unit() -> None:
    """Multiplications per cycle and tile: 16, 32, 64. The first generation has no half partials."""

    def compute(kind: str, itemsize: int, half_partials: bool) -> float:
        return spread(Product(4096, 4096, 4096, itemsize, half_partials), _chip(kind)).compute

    assert compute("bow", 2, False) < 0.6 * compute("bow", 4, False)
    assert compute("bow", 2, True) < 0.6 * compute("bow", 2, False)
    assert compute("mk1", 2, True) > 0.9 * compute("mk1", 2, False)


class Tower(nn.Module):
    def __init__(self, layers: int, wide: int, between: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(wide, wide) for _ in range(layers))
        self.between = {
            "tanh": nn.Tanh(), "gelu": nn.GELU(), "softmax": nn.Softmax(-1),
            "norm": nn.LayerNorm(wide), "relu": nn.ReLU(),
        }[between]  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.between(layer(x))
        return poptorch.identity_loss(x, reduction="sum") if self.training else x


@functools.cache
def tower(dtype: torch.dtype, shape: tuple[int, int, str], rows: int, optimizer: str) -> Estimate:
    options = poptorch.Options()
    options.Precision.setPartialsType(dtype)
    batch = meta(4 * rows, shape[1], dtype=dtype)
    how = {"steps": 4, "optimizer": optimizer, "options": options, "system": "bow:1"}
    return priced(lambda: Tower(*shape).to(dtype), batch, **how)


towers = st.tuples(
    st.integers(1, 3), st.sampled_from([3, 16, 33, 300]),
    st.sampled_from(["tanh", "gelu", "softmax", "norm", "relu"]),
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=2, deadline=None, derandomize=True)
@given(towers, st.sampled_from([1, 8, 500]), st.sampled_from(["", "SGD", "AdamW", "LAMB"]))
@example((2, 300, "gelu"), 1, "AdamW")
@example((1, 33, "relu"), 500, "AdamW")
@example((2, 3, "softmax"), 500, "LAMB")
def test_models_of_halves_raise_nothing_else(shape, rows, optimizer) -> None:
    half, single = (tower(t, shape, rows, optimizer) for t in (torch.half, torch.float))
    for category, size in single.chips[0].always.items():
        if category not in ("code", "gaps and imbalance"):
            assert half.chips[0].always[category] <= size
    assert _lasting(half) <= _lasting(single) + single.chips[0].peak["temporary"]
    code = half.chips[0].always["code"] - single.chips[0].always["code"]
    assert code <= 1472 * DEFAULT.code_step * 4  # a conversion, and updates in both types
    assert half.cycles <= single.cycles


def test_halves_are_smaller_and_faster() -> None:
    half, single = (tower(t, (2, 2000, "tanh"), 1000, "SGD") for t in (torch.half, torch.float))
    assert half.chips[0].always["weights"] < 0.51 * single.chips[0].always["weights"]
    peaks = [dict(each.chips[0].peak) for each in (half, single)]
    for same in ("accumulators", "code"):  # of both types
        assert peaks[0].pop(same) == pytest.approx(peaks[1].pop(same), rel=0.01)
    assert sum(peaks[0].values()) < 0.6 * sum(peaks[1].values())
    assert half.cycles < 0.6 * single.cycles


def _lasting(estimate: Estimate) -> float:
    """Bytes at the fullest moment but for what may be more in half, and the share for gaps."""
    peak = estimate.chips[0].peak
    return sum(peak.values()) - sum(peak[k] for k in ("temporary", "code", "gaps and imbalance"))

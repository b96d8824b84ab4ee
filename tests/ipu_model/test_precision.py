"""Lower precision increases only the named quantities.

With half partials, a model in half precision needs no more bytes of weights, state, accumulators,
buffers and waiting activations than a model in float, and its products take no more cycles. It can
need more memory for temporaries, because another division of a product is fastest then, and for
code, because loops exist for both types. With float partials, sums exist next to a result in half
precision, and a product with few inner elements takes longer: the matrix unit multiplies 16 halves
or 8 floats at a time.
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
from poptorch._ipu_model.product_planner import ChipModel, spread
from poptorch._ipu_model.work import Product
from poptorch._ipu_systems import KINDS


def chip_of(kind: str) -> ChipModel:
    return ChipModel(KINDS[kind], KINDS[kind].tiles, proportion=0.6)


sizes = st.integers(1, 4096)
products = st.builds(
    Product,
    sizes,
    sizes,
    sizes,
    itemsize=st.just(4),
    half=st.just(False),
    groups=st.integers(1, 64),
    resident=st.booleans(),
)


def cycles_of(product: Product, kind: str) -> float:
    """How long a product takes on a chip, with the steps into which it is cut."""
    best = spread(product, chip_of(kind))
    assert best.bytes <= 0.6 * KINDS[kind].tile_bytes + 1e-6
    return best.cycles + best.steps * DEFAULT.step


@settings(max_examples=20, deadline=None, derandomize=True)
@given(products, st.sampled_from(sorted(KINDS)))
def test_products_of_halves_take_no_longer(product: Product, kind: str) -> None:
    of_halves = dataclasses.replace(product, itemsize=2, half=True)

    assert cycles_of(of_halves, kind) <= cycles_of(product, kind)


def work_of_matrix_unit(kind: str, itemsize: int, half_partials: bool) -> float:
    """Cycles of multiplying two matrices of 4096 x 4096."""
    return spread(Product(4096, 4096, 4096, itemsize, half_partials), chip_of(kind)).compute


def test_halves_halve_the_work_of_the_matrix_unit() -> None:
    """It multiplies 32 numbers per cycle and tile instead of 16."""
    floats = work_of_matrix_unit("bow", itemsize=4, half_partials=False)
    halves = work_of_matrix_unit("bow", itemsize=2, half_partials=False)

    assert halves < 0.6 * floats


def test_half_partials_halve_the_work_of_the_matrix_unit_again() -> None:
    """It multiplies 64 numbers per cycle and tile instead of 32."""
    float_partials = work_of_matrix_unit("bow", itemsize=2, half_partials=False)
    half_partials = work_of_matrix_unit("bow", itemsize=2, half_partials=True)

    assert half_partials < 0.6 * float_partials


def test_the_first_generation_has_no_half_partials() -> None:
    float_partials = work_of_matrix_unit("mk1", itemsize=2, half_partials=False)
    half_partials = work_of_matrix_unit("mk1", itemsize=2, half_partials=True)

    assert half_partials > 0.9 * float_partials


class Tower(nn.Module):
    """Linear layers of one width, each followed by what is between them; a loss in training."""

    def __init__(self, layers: int, wide: int, between: str) -> None:
        super().__init__()
        kinds = {
            "gelu": nn.GELU(),
            "norm": nn.LayerNorm(wide),
            "relu": nn.ReLU(),
            "softmax": nn.Softmax(-1),
            "tanh": nn.Tanh(),
        }
        self.layers = nn.ModuleList(nn.Linear(wide, wide) for _ in range(layers))
        self.between = kinds[between]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.between(layer(x))
        return poptorch.identity_loss(x, reduction="sum") if self.training else x


Shape = tuple[int, int, str]
"""Layers, their width, and what is between them."""


@functools.cache
def tower(dtype: torch.dtype, shape: Shape, rows: int, optimizer: str) -> Estimate:
    """The estimate of a tower of one type, with partials of that type, on four micro-batches."""
    options = poptorch.Options()
    options.Precision.setPartialsType(dtype)
    return priced(
        lambda: Tower(*shape).to(dtype),
        meta(4 * rows, shape[1], dtype=dtype),
        steps=4,
        optimizer=optimizer,
        options=options,
        system="bow:1",
    )


def lasting_bytes(estimate: Estimate) -> float:
    """Bytes at the fullest moment but for what may be more in half, and the share for gaps."""
    peak = estimate.chips[0].peak
    may_be_more = ("temporary", "code", "gaps and imbalance")
    return sum(size for category, size in peak.items() if category not in may_be_more)


towers = st.tuples(
    st.integers(1, 3),
    st.sampled_from([3, 16, 33, 300]),
    st.sampled_from(["tanh", "gelu", "softmax", "norm", "relu"]),
)


@pytest.mark.larger("test_weights_of_halves_take_half_the_bytes")
@settings(max_examples=2, deadline=None, derandomize=True)
@given(towers, st.sampled_from([1, 8, 500]), st.sampled_from(["", "SGD", "AdamW", "LAMB"]))
@example((2, 300, "gelu"), 1, "AdamW")
@example((1, 33, "relu"), 500, "AdamW")
@example((2, 3, "softmax"), 500, "LAMB")
def test_a_model_in_half_needs_more_memory_only_for_temporaries_and_code(
    shape: Shape, rows: int, optimizer: str
) -> None:
    half = tower(torch.half, shape, rows, optimizer)
    single = tower(torch.float, shape, rows, optimizer)

    halves, floats = half.chips[0].always, single.chips[0].always
    for category in halves.keys() - {"code", "gaps and imbalance"}:
        assert halves[category] <= floats[category], category
    assert lasting_bytes(half) <= lasting_bytes(single) + single.chips[0].peak["temporary"]
    conversion_and_updates_of_both_types = 4
    more_code = halves["code"] - floats["code"]
    assert more_code <= 1472 * DEFAULT.code_step * conversion_and_updates_of_both_types
    assert half.cycles <= single.cycles


@pytest.fixture(scope="module")
def half_tower() -> Estimate:
    """Two layers of 2000 halves, trained on 1000 rows."""
    return tower(torch.half, (2, 2000, "tanh"), 1000, "SGD")


@pytest.fixture(scope="module")
def single_tower() -> Estimate:
    """The same of floats."""
    return tower(torch.float, (2, 2000, "tanh"), 1000, "SGD")


def test_weights_of_halves_take_half_the_bytes(
    half_tower: Estimate, single_tower: Estimate
) -> None:
    halves = half_tower.chips[0].always["weights"]
    floats = single_tower.chips[0].always["weights"]

    assert halves < 0.51 * floats


@pytest.mark.parametrize("category", ["accumulators", "code"])
def test_accumulators_and_code_of_halves_take_as_many_bytes(
    half_tower: Estimate, single_tower: Estimate, category: str
) -> None:
    halves = half_tower.chips[0].peak[category]
    floats = single_tower.chips[0].peak[category]

    assert halves == pytest.approx(floats, rel=0.01)


def test_everything_else_of_halves_takes_about_half_the_bytes(
    half_tower: Estimate, single_tower: Estimate
) -> None:
    def bytes_of_everything_else(estimate: Estimate) -> float:
        peak = estimate.chips[0].peak
        return sum(peak.values()) - peak["accumulators"] - peak["code"]

    assert bytes_of_everything_else(half_tower) < 0.6 * bytes_of_everything_else(single_tower)


def test_halves_take_about_half_the_time(half_tower: Estimate, single_tower: Estimate) -> None:
    assert half_tower.cycles < 0.6 * single_tower.cycles


def test_the_norm_of_all_gradients_takes_time() -> None:
    """It reads the gradients of two weights before it updates either."""
    price = functools.partial(priced, lambda: Tower(1, 8, "tanh"), meta(4, 8), optimizer="AdamW")

    without = price()
    clipped = price(max_grad_norm=1.0)

    assert without.cycles < clipped.cycles
